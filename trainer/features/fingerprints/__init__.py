"""Fingerprints of the first steps of a run: a few numbers of each tensor, equal under every layout."""
