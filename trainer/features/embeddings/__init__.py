"""Sentence embeddings: encoders and decoders of texts with similar vectors for similar texts."""
