"""Generation of texts by a transformers model, also with logits sharded over tensor ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from trainer.parallel.communication import gather_sequence, group_size
from trainer.parallel.linear import ColumnParallelLinear
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.recipe.schema import Generation

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id")
"""The special tokens, which belong to the model and not to the settings."""


def set_generation(model: nn.Module, settings: Generation, end_token: int | None) -> None:
    """Set the generation configuration of a transformers model, which an export includes.

    Args:
        model: the model.
        settings: the settings of the recipe, which replace those of a checkpoint.
        end_token: the end token of the tokenizer; None: that of the model.
    """
    described: Any = model
    old, config = described.generation_config, described.config
    named = {name: getattr(config, name, None) for name in _TOKENS}
    tokens = {name: named[name] if (own := getattr(old, name, None)) is None else own for name in _TOKENS}
    if end_token is not None:
        tokens["eos_token_id"] = end_token
    beams: dict[str, Any] = {}
    if settings.num_beams > 1:
        beams = {"length_penalty": settings.length_penalty, "early_stopping": settings.early_stopping}
    described.generation_config = GenerationConfig(
        max_new_tokens=settings.max_new_tokens,
        min_new_tokens=settings.min_new_tokens or None,
        num_beams=settings.num_beams,
        no_repeat_ngram_size=settings.no_repeat_ngram_size,
        do_sample=False,
        **beams,
        **tokens,
    )


@torch.no_grad()
def generate(model: nn.Module, inputs: Mapping[str, Tensor], synced: bool) -> Tensor:
    """Return the generated tokens after the prompt, up to the end token, then `IGNORED_LABEL`: `[batch, tokens]`.

    Args:
        model: a transformers model after `set_generation`, in evaluation mode.
        inputs: `input_ids` and `attention_mask`, each `[batch, sequence]`, padded on the right. Other inputs are not
            used.
        synced: whether each forward pass is a collective of all ranks, which must then run equally many.
    """
    described: Any = model
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    prompt = 1  # an encoder-decoder starts with one token
    if not described.config.is_encoder_decoder:
        # A decoder continues the last position, so the padding moves to the left.
        order = mask.argsort(dim=1, stable=True)
        ids, mask = ids.gather(1, order), mask.gather(1, order)
        prompt = ids.shape[1]
    with _whole_logits(model):
        tokens: Tensor = described.generate(input_ids=ids, attention_mask=mask, synced_gpus=synced)[:, prompt:]
    ends = tokens == described.generation_config.eos_token_id
    return tokens.masked_fill(ends.cumsum(1) - ends.long() > 0, IGNORED_LABEL)


@contextmanager
def _whole_logits(model: nn.Module) -> Iterator[None]:
    """Gather logits that are sharded over the vocabulary, so that each tensor rank chooses the same token."""

    def gather(head: nn.Module, args: Any, logits: Tensor) -> Tensor:
        assert isinstance(head, ColumnParallelLinear)
        padded = logits.shape[-1] * group_size(head.group)
        return gather_sequence(logits, head.group, -1, padded)[..., : head.whole_out_features]

    heads = [module for module in model.modules() if isinstance(module, ColumnParallelLinear) and module.pads]
    hooks = [head.register_forward_hook(gather) for head in heads]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
