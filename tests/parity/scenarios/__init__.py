"""What both sides do: each scenario is written once, for TensorFlow when it is recorded
and for this package when it is tested. What differs between the two is a `Side`.
"""
