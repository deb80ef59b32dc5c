"""One small file for each strategy: which devices, which mesh."""
