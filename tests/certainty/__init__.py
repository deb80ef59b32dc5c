"""Replicas that drift apart, and memory that errs: found, named and repaired."""
