"""Generation of texts by a transformers model, also with logits sharded over tensor ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from trainer.parallel.communication import gather_sequence, group_size
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.parallel.random import stream_keys
from trainer.parallel.tensor.linear import ColumnParallelLinear
from trainer.recipe.schema import Generation

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id")
"""The special tokens, which belong to the model and not to the settings."""
_LEVELS = 1 << 53  # float64 holds integers up to this one
_TOKENS_DRAWN = 64
"""Tokens of each row for which random numbers are drawn at a time."""


def set_generation(
    model: nn.Module, settings: Generation, end_tokens: Sequence[int], first_tokens: Mapping[str, int | None]
) -> None:
    """Set the generation configuration of a transformers model, which an export includes.

    Args:
        settings: the settings of the recipe, which replace those of a checkpoint.
        end_tokens: the tokens at which a text ends; none: those of the model.
        first_tokens: the tokens with which a text starts, by key; missing: those of the model.
    """
    described: Any = model
    old, config = described.generation_config, described.config
    named = {name: getattr(config, name, None) for name in _TOKENS}
    tokens = {name: named[name] if (own := getattr(old, name, None)) is None else own for name in _TOKENS}
    tokens |= first_tokens
    if end_tokens:
        tokens["eos_token_id"] = end_tokens[0] if len(end_tokens) == 1 else list(end_tokens)
    search: dict[str, Any] = {}
    if settings.num_beams > 1:
        search = {"length_penalty": settings.length_penalty, "early_stopping": settings.early_stopping}
    if settings.do_sample:
        search = {"temperature": settings.temperature, "top_k": settings.top_k, "top_p": settings.top_p}
    described.generation_config = GenerationConfig(
        max_new_tokens=settings.max_new_tokens,
        min_new_tokens=settings.min_new_tokens or None,
        num_beams=settings.num_beams,
        no_repeat_ngram_size=settings.no_repeat_ngram_size,
        do_sample=settings.do_sample,
        **search,
        **tokens,
    )


@torch.no_grad()
def generate(model: nn.Module, inputs: Mapping[str, Tensor], synced: bool, seed: int, rows: Tensor) -> Tensor:
    """Return the generated tokens after the prompt, up to the end token, then `IGNORED_LABEL`: `[batch, tokens]`.

    Args:
        model: a transformers model after `set_generation`, in evaluation mode.
        inputs: `input_ids` and `attention_mask`, each `[batch, sequence]`, padded on the right. Other inputs are not
            used.
        synced: whether each forward pass is a collective of all ranks, which must then run equally many.
        rows: the index of each row `[batch]`, which keys its sampled tokens.
    """
    described: Any = model
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    prompt = 1  # an encoder-decoder starts with one token
    if not described.config.is_encoder_decoder:
        # A decoder continues the last position, so the padding moves to the left.
        order = mask.argsort(dim=1, stable=True)
        ids, mask = ids.gather(1, order), mask.gather(1, order)
        prompt = ids.shape[1]
    own = described.generation_config
    settings = copy.deepcopy(own)
    processors = LogitsProcessorList()
    if own.do_sample:  # transformers would draw all rows from one generator
        settings.update(do_sample=False, temperature=1.0, top_k=50, top_p=1.0)  # the defaults
        processors = LogitsProcessorList(_sampling(own, _Draw(seed, rows, prompt, ids.device)))
    with _whole_logits(model):
        tokens: Tensor = described.generate(
            input_ids=ids,
            attention_mask=mask,
            synced_gpus=synced,
            generation_config=settings,
            logits_processor=processors,
        )[:, prompt:]
    ends = torch.isin(tokens, torch.tensor(own.eos_token_id, device=tokens.device))
    return tokens.masked_fill(ends.cumsum(1) - ends.long() > 0, IGNORED_LABEL)


def _sampling(settings: GenerationConfig, draw: _Draw) -> Iterator[LogitsProcessor]:
    yield TemperatureLogitsWarper(settings.temperature)
    if settings.top_k:
        yield TopKLogitsWarper(settings.top_k)
    if settings.top_p < 1:
        yield TopPLogitsWarper(settings.top_p)
    yield draw


class _Draw(LogitsProcessor):  # type: ignore[misc]
    """Draws the next token of each row by a number that depends on seed, row and place only.

    The scores `[batch, vocabulary]` become 0 for the drawn token and -inf for others, so a greedy search takes it.
    """

    def __init__(self, seed: int, rows: Tensor, prompt: int, device: torch.device) -> None:
        self._seed, self._rows, self._prompt, self._device = seed, rows.tolist(), prompt, device
        self._draws = torch.empty(0)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        sums = scores.softmax(-1, dtype=torch.float64).cumsum(-1)
        start, place = divmod(input_ids.shape[1] - self._prompt, _TOKENS_DRAWN)
        if place == 0:  # many tokens at once, because the host waits for the device in each copy
            self._draws = self._drawn(start * _TOKENS_DRAWN)
        drawn = self._draws[place] * sums[:, -1:]
        chosen = torch.searchsorted(sums, drawn, right=True).clamp(max=scores.shape[-1] - 1)
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)

    def _drawn(self, start: int) -> Tensor:
        """Return the numbers of the tokens from `start`: `[_TOKENS_DRAWN, rows, 1]`."""
        places = product(range(start, start + _TOKENS_DRAWN), self._rows)
        keys = stream_keys(("generation", self._seed), [(row, place) for place, row in places])
        draws = torch.tensor([key % _LEVELS / _LEVELS for key in keys], dtype=torch.float64, device=self._device)
        return draws.view(_TOKENS_DRAWN, -1, 1)


@contextmanager
def _whole_logits(model: nn.Module) -> Iterator[None]:
    """Gather logits that are sharded over the vocabulary, so that each tensor rank chooses the same token."""
    heads = [module for module in model.modules() if isinstance(module, ColumnParallelLinear) and module.pads]
    if not heads:
        yield
        return
    (head,) = heads

    def gather(model: nn.Module, args: Any, output: Any) -> Any:
        # At the output, because a model may change the head's logits, by a bias for example.
        padded = output.logits.shape[-1] * group_size(head.group)
        output.logits = gather_sequence(output.logits, head.group, -1, padded)[..., : head.whole_out_features]
        return output

    hook = model.register_forward_hook(gather)
    try:
        yield
    finally:
        hook.remove()
