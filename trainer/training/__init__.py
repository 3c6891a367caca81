"""A run from its recipe to its results: preparation, assembly, loop and evaluation."""
