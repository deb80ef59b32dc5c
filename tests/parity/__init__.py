"""Parity with TensorFlow: what `tf.distribute` really did, recorded, and the tests that
hold us to it.
"""
