"""Sequence classification with any number of labels for each row."""
