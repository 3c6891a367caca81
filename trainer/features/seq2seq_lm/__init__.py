"""Sequence-to-sequence language modelling: target texts from source texts, such as summaries and translations."""
