"""Rerankers: cross-encoders that score a query with each of its documents."""
