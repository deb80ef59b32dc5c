"""How a step of `fit`, `evaluate` or `predict` is made, compiled and called."""
