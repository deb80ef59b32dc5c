"""The topics of the TensorFlow record, one function each. Needs TensorFlow; the tests
do not import it.
"""
