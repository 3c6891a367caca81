"""Kinds of losses of embeddings."""

PAIR_LOSSES = ("cosine", "cosent", "angle")
"""The losses of two texts with a score."""

TEACHER_LOSSES = ("margin_mse", "kl_divergence")
"""The losses of a query and documents with the scores of a teacher."""
