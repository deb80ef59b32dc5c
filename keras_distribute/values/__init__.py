"""Values that differ per replica, and their reductions over the replicas."""
