"""Attention around a ring of context ranks, where they are more than the heads can be shared by."""
