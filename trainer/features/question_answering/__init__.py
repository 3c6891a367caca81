"""Extractive question answering: answers as spans of a context, as in SQuAD."""
