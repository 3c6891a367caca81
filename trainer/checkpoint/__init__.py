"""Checkpoints: saving, verifying and finding them. Knows the `Engine` protocol only."""
