"""Tensor parallelism: linear layers, embeddings and losses that are sharded over the tensor axis."""
