"""Sequence classification that learns a probability of each class, such as the soft labels of a language model."""
