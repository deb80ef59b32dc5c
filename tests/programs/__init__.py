"""Programs as users and libraries write them, run plain and on replicas.

One file a program, each in ordinary Keras: its `program()` builds, trains and evaluates
something small, and returns the models and numbers to compare. None of them knows that
it is tested, or how many devices there are.
"""
