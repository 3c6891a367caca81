"""Engines: one optimizer step from one global batch, for each strategy."""
