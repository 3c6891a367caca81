"""Folders of token ids of `trainer encode`: the check that they fit a recipe."""
