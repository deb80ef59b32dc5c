"""What threads share: waiting for each other, and closing what was dropped. Knows
nothing else of the package.
"""
