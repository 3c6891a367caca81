"""Pictures of runs: one HTML page of their curves, and a list of the runs under a folder."""

MISSING = "-"
"""The cell of a value that a run does not have."""
