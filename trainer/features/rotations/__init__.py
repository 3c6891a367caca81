"""Rotary position embeddings in fewer operations."""
