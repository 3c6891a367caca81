"""Architectures as data: one file for each family, one row each in `table.py`."""
