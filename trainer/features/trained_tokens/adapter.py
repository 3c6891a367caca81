"""The rows of an adapter, by the tokens of a recipe."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainer.base.errors import Problems, UsageError
from trainer.base.text import listed
from trainer.features.trained_tokens.rows import TrainedLogits, TrainedVectors
from trainer.features.trained_tokens.section import TokenKeys
from trainer.models.adapters import PartsAdder
from trainer.models.tokenizer import load_tokenizer
from trainer.models.vector_scale import scale_of
from trainer.parallel.tensor.trained_rows import TrainedRows, attach_rows
from trainer.recipe.schema import Adapter, Model


def _train_rows(model: Any, recipe: Model, adapter: Adapter, _: int) -> Collection[str]:
    """Attach trained rows to the input embedding, to the modules that share its weight, and to the output head.

    The rows are those of `tokens` and of the new tokens. Modules that are trained whole have the latter already.
    """
    tokens = cast(TokenKeys, adapter).trainable_tokens or ()
    if not tokens and recipe.new_tokens is None:
        return ()
    embedding = model.get_input_embeddings() if model.main_input_name == "input_ids" else None
    if not isinstance(embedding, nn.Embedding):
        raise UsageError(
            "`model.adapter.trainable_tokens` needs a model with an embedding of tokens, but"
            f" {type(model).__name__} has none; remove it"
        )
    ids = _token_ids(recipe, [*tokens, *(recipe.new_tokens or ())], embedding.num_embeddings)
    head = model.get_output_embeddings()
    tied: dict[nn.Parameter, nn.Parameter] = {}
    # A list, because the loop adds modules to the layers.
    for name, layer in list(model.named_modules()):
        weight: Any = getattr(layer, "weight", None)
        if layer is not head and weight is not embedding.weight:
            continue
        # A module that is trained whole learns the rows of new tokens anyway.
        if weight.requires_grad and not tokens:
            continue
        if weight.requires_grad:
            raise UsageError(
                f"`model.adapter.trainable_tokens` trains rows of frozen weights, but {name} is trained whole by"
                " `model.adapter.modules_to_save`; remove one of them"
            )
        rows = _attached_rows(name, layer, ids, torch.empty(len(ids), embedding.embedding_dim, device=weight.device))
        # Modules that share a weight share the trained rows too.
        rows.rows = tied.setdefault(weight, rows.rows)
    return ()


def _attached_rows(name: str, layer: nn.Module, ids: Sequence[int], begin: Tensor) -> TrainedRows:
    if isinstance(layer, nn.Embedding) and (scale := scale_of(layer)) is not None:
        padding = ids.index(layer.padding_idx) if layer.padding_idx in ids else None
        vectors = TrainedVectors(begin, ids, padding, scale)
        attach_rows(layer, vectors)
        return vectors
    # The exact type: a subclass may use its weight in another way.
    if type(layer) is nn.Linear:
        logits = TrainedLogits(begin, ids)
        attach_rows(layer, logits)
        return logits
    raise UsageError(
        f"`model.adapter.trainable_tokens` needs an embedding and a linear head, but {name} is a"
        f" {type(layer).__name__}; train it whole by `model.adapter.modules_to_save`"
    )


def _token_ids(recipe: Model, tokens: Sequence[str | int], num_embeddings: int) -> list[int]:
    texts = [token for token in tokens if isinstance(token, str)]
    known = load_tokenizer(recipe).get_vocab() if texts else {}
    problems = Problems()
    ids = set()
    for token in tokens:
        with problems.collect():
            if isinstance(token, str) and token not in known:
                near = get_close_matches(token, known, n=3, cutoff=0.5)
                use = f"use {listed([repr(one) for one in near], 3)}" if near else "add it to the tokenizer"
                raise UsageError(
                    "`model.adapter.trainable_tokens` must name tokens of the tokenizer, but it has no"
                    f" {token!r}; {use}"
                )
            number = known[token] if isinstance(token, str) else token
            if number >= num_embeddings:
                raise UsageError(
                    f"`model.adapter.trainable_tokens` must name tokens with a row in the embedding, which has"
                    f" {num_embeddings:,} rows, but {token!r} has the id {number}; name it in `model.new_tokens`"
                )
            ids.add(number)
    problems.raise_all()
    # Sorted, so that the order of names in the recipe does not change the parameter.
    return sorted(ids)


TRAINED_ROWS = PartsAdder(_train_rows)
