"""Noise on the embeddings of tokens in training (NEFTune)."""
