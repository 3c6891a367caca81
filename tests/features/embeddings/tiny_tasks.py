"""The rows of `TINY_TASKS` for embeddings."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from tests.helpers.training import NUM_ROWS, TINY_BERT, TinyTask, tiny_tuples
from trainer.data.collate import Padding
from trainer.data.split import EncodedSplit
from trainer.features.embeddings.embedding import EmbeddingTask
from trainer.features.embeddings.multi_vector import MultiVectorTask
from trainer.features.embeddings.names import DenseLayer
from trainer.recipe.schema import Recipe
from trainer.tasks.task import Task


def tiny_duplicates(num_rows: int = NUM_ROWS) -> EncodedSplit:
    """Return the rows of `tiny_tuples` with numbers of their texts, as if half of the texts stood in other rows too."""
    split, random = tiny_tuples(num_rows), np.random.default_rng(2)
    split.arrays["labels"] = random.integers(0, 75, (num_rows, 3))
    return split


@cache
def _dense_layers(hidden_size: int) -> tuple[DenseLayer, ...]:
    sizes, generator = ((hidden_size, 10), (10, 6)), torch.Generator().manual_seed(0)
    layers = []
    for number, (before, after) in enumerate(sizes):
        weights = {"linear.weight": torch.randn(after, before, generator=generator) / 4}
        weights |= {} if number else {"linear.bias": torch.randn(after, generator=generator)}
        file = Path(tempfile.mkdtemp()) / "model.safetensors"
        save_file(weights, file)
        activation = f"torch.nn.modules.activation.{'GELU' if number else 'Tanh'}"
        layers.append(DenseLayer(str(file), f"{number + 2}_Dense", before, after, not number, activation))
    return tuple(layers)


def with_dense_layers(task: Task, recipe: Recipe) -> Task:
    """Add two dense layers to an embedding with a learned temperature, as folders of sentence-transformers have."""
    assert isinstance(task, EmbeddingTask)
    return replace(task, dense=_dense_layers(recipe.model.config["hidden_size"])) if task.learns_temperature else task


def with_token_vectors(task: Task, recipe: Recipe) -> Task:
    """Add the linear layer and the number of tokens, which a preparation adds."""
    layer = DenseLayer("", "1_Dense", recipe.model.config["hidden_size"], 6, False, "torch.nn.modules.linear.Identity")
    assert isinstance(task, MultiVectorTask)
    return replace(task, dense=(layer,), tokens=18)


def tiny_taught(num_rows: int = NUM_ROWS) -> EncodedSplit:
    """Return the rows of `tiny_tuples` with a teacher's scores of the documents."""
    split = tiny_tuples(num_rows)
    split.arrays["labels"] = np.random.default_rng(2).normal(size=(num_rows, 2))
    return split


_JOINT = "each loss of this task depends on all rows"
TASKS = {
    "sparse_embedding": TinyTask(
        {
            "type": "sparse_embedding",
            "texts": ["a", "b", "c"],
            "temperature": 10,
            "query_flops": 0.05,
            "document_flops": 0.03,
            "flops_warmup": 3,
        },
        {"config": {**TINY_BERT, "initializer_range": 0.2}, "tokenizer": "none"},
        tiny_tuples,
        Padding(0),
        graphs_refusal=_JOINT,
    ),
    "multi_vector_embedding": TinyTask(
        {"type": "multi_vector_embedding", "texts": ["a", "b", "c"], "dimensions": 6, "temperature": 0.3},
        {"config": {**TINY_BERT, "initializer_range": 0.2}, "tokenizer": "none"},
        tiny_tuples,
        Padding(0),
        with_token_vectors,
        graphs_refusal=_JOINT,
    ),
    "multi_vector_taught": TinyTask(
        {
            "type": "multi_vector_embedding",
            "texts": ["a", "b", "c"],
            "dimensions": 6,
            "loss": "margin_mse",
            "temperature": 10,
            "score": "score",
        },
        {"config": {**TINY_BERT, "initializer_range": 0.2}, "tokenizer": "none"},
        tiny_taught,
        Padding(0),
        with_token_vectors,
    ),
    "embedding": TinyTask(
        {"type": "embedding", "texts": ["a", "b", "c"]},
        {"config": {**TINY_BERT, "initializer_range": 0.2}, "tokenizer": "none"},
        tiny_tuples,
        Padding(0),
        with_dense_layers,
        graphs_refusal=_JOINT,
    ),
    "embedding_duplicates": TinyTask(
        {
            "type": "embedding",
            "texts": ["a", "b", "c"],
            "mask_duplicates": True,
            "dimensions": [6, 5],
            "learn_temperature": True,
            "temperature": 0.5,
        },
        {"config": {**TINY_BERT, "initializer_range": 0.2}, "tokenizer": "none"},
        tiny_duplicates,
        Padding(0),
        with_dense_layers,
        graphs_refusal=_JOINT,
    ),
}
