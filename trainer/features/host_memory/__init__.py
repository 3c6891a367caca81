"""Checkpoints in the memory of the hosts, from which a run resumes after a failure."""
