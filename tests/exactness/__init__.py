"""Exactness: training under a strategy equals training on one device."""
