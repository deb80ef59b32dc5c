"""Compatibility: Keras's own test suites pass under a strategy."""
