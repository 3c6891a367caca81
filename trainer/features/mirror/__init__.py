"""Copies of checkpoints and of the final model at another place."""
