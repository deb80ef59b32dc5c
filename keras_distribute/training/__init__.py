"""How `fit`, `evaluate` and `predict` run on a strategy, and gradients for custom
loops.
"""
