"""Local ranks of `trainer run` and scripts for clusters.

Imports no torch.
"""
