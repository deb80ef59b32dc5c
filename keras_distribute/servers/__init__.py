"""What runs in the tasks of a cluster with parameter servers; needs none of the user's
code.
"""
