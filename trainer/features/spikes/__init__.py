"""Losses that jump: the key `training.on_spike`."""
