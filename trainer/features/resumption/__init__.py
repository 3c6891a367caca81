"""Longer trainings of the same run, and checkpoints from before a key existed."""
