"""From any dataset to batches on the devices of a strategy: positions, splits, shards,
look-ahead.
"""
