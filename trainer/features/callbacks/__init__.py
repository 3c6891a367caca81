"""Callbacks of Python: objects that follow a run and make requests."""
