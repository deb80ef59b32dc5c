"""Every private name of Keras and JAX that the package touches, each with its reason
and when it can go.

Knows nothing of strategies: the rooms below hand in what to do (`install`), and get the
means to undo it.
"""
