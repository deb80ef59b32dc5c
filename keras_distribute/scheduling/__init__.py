"""Functions on their way to the workers of a cluster with parameter servers."""
