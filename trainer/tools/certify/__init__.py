"""Exported folders beside the trained model: `trainer export --verify`, and the end of a run."""
