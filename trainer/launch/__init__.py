"""Local ranks of `trainer run`.

Imports no torch.
"""
