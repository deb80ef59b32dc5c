"""The dry run: what a training step would take on hardware that need not be there."""
