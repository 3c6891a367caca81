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

from trainer.base.errors import UsageError
from trainer.features.generation.section import Generation
from trainer.parallel.microbatch import IGNORED_LABEL
from trainer.parallel.random import stream_keys

_REPLACED = frozenset(
    ("assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind",
     "compile_config", "continuous_batching_config", "disable_compile", "diversity_penalty", "do_sample", "dola_layers",
     "early_stopping", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty", "is_assistant",
     "length_penalty", "low_memory", "max_length", "max_matching_ngram_size", "max_new_tokens", "max_time",
     "min_length", "min_new_tokens", "min_p", "num_assistant_tokens", "num_assistant_tokens_schedule",
     "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states",
     "output_logits", "output_scores", "penalty_alpha", "prefill_chunk_size", "prompt_lookup_num_tokens",
     "return_dict_in_generate", "speculation_type", "target_lookbehind", "temperature", "top_h", "top_k", "top_p",
     "typical_p", "use_mtp")
)  # fmt: skip
"""Settings of transformers on the search, on lengths and on outputs, which those of a recipe replace."""
_OF_CACHES = frozenset(("cache_config", "cache_implementation", "max_cache_len", "use_cache"))
"""Settings that change the speed only; an export keeps them, and `generate` does not read them."""
_REFUSED = ("constraints", "force_words_ids", "token_healing")
"""Settings of the tokens that a text may have, which need more than the model's folder; the other ones stay."""
_FROM_CONFIG = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id")
"""Special tokens that the model's configuration holds too."""
_LEVELS = 1 << 53  # float64 holds integers up to this one
_TOKENS_DRAWN = 64
"""Tokens of each row for which random numbers are drawn at a time."""


def set_generation(
    model: nn.Module,
    settings: Generation | None,
    tokenizer: Any | None,
    end_tokens: Sequence[int],
    first_tokens: Mapping[str, int | None],
) -> None:
    """Set the generation configuration of a transformers model that generates texts; an export includes it.

    The model's configuration names the tokenizer's tokens too, except its padding token: some models number positions
    from that.

    Args:
        settings: the settings of the recipe, which replace those of a checkpoint; None: these stay.
        tokenizer: the tokenizer of the texts; None: rows are tokens, and the model's own tokens stay.
        end_tokens: the tokens at which a text ends, the tokenizer's first; none: those of the model.
        first_tokens: the tokens with which a text starts, by key; missing: those of the model.

    Raises:
        UsageError: a setting of the checkpoint cannot be obeyed.
    """
    described: Any = model
    found, configs = copy.deepcopy(described.generation_config), (described.config, described.config.get_text_config())
    if settings is not None:
        _require_obeyed(found)
        _replace_search(found, settings)
    # A configuration that transformers derived from `config.json` repeats that file, and is no choice of its author.
    is_written = found.eos_token_id is not None and not found._from_model_config
    _take_missing(found, configs[0])
    # A single token in a model's configuration is often the default of its class.
    # Read before the loops below replace the tokens.
    own_ends = _ids(found.eos_token_id) if is_written or isinstance(found.eos_token_id, list) else []
    if tokenizer is not None:
        _take_tokens(found, tokenizer, keeps_first=is_written)
    vars(found).update(first_tokens)
    if end_tokens:
        # A checkpoint may end texts in further ways, such as calls of tools.
        known = getattr(tokenizer, "added_tokens_decoder", {})
        _end_at(found, end_tokens, [token for token in own_ends if token in known])
    for config in configs:
        config.eos_token_id = end_tokens[0] if end_tokens else config.eos_token_id
        config.bos_token_id = found.bos_token_id
    # Else, `generate` would take settings from the model's configuration again.
    found._from_model_config = False
    described.generation_config = found
    # `generate` refuses stop strings without a tokenizer, and needs none otherwise.
    described.stops_by = tokenizer if found.stop_strings else None


def _take_missing(found: GenerationConfig, config: Any) -> None:
    for name in _FROM_CONFIG:
        if getattr(found, name) is None:
            setattr(found, name, getattr(config, name, None))


def _take_tokens(found: GenerationConfig, tokenizer: Any, keeps_first: bool) -> None:
    """Take the first token and the padding token of a tokenizer; `keeps_first`: the first stays if it has none."""
    if not keeps_first:
        found.bos_token_id = None
    for name in ("bos_token_id", "pad_token_id"):
        if (token := getattr(tokenizer, name, None)) is not None:
            setattr(found, name, token)


def _end_at(found: GenerationConfig, end_tokens: Sequence[int], others: Sequence[int]) -> None:
    """Let texts end at `end_tokens` and at the other tokens; a forced end is the first."""
    ends = dict.fromkeys([*end_tokens, *others])
    found.eos_token_id = end_tokens[0] if len(ends) == 1 else list(ends)
    if found.forced_eos_token_id is not None and ends.keys().isdisjoint(_ids(found.forced_eos_token_id)):
        found.forced_eos_token_id = end_tokens[0]


def _ids(tokens: int | Sequence[int] | None) -> list[int]:
    return [] if tokens is None else [tokens] if isinstance(tokens, int) else list(tokens)


def _require_obeyed(found: GenerationConfig) -> None:
    for name in _REFUSED:
        if getattr(found, name, None):
            raise UsageError(
                f"`{name}` in the `generation_config.json` of the model cannot be obeyed, since `generate` of"
                " transformers needs more than the model's folder for it; remove it from a copy of the folder"
            )


def _replace_search(found: GenerationConfig, settings: Generation) -> None:
    for name in _REPLACED & vars(found).keys():
        setattr(found, name, None)
    found.max_new_tokens = settings.max_new_tokens
    found.min_new_tokens = settings.min_new_tokens or None
    found.num_beams = settings.num_beams
    found.do_sample = settings.do_sample
    if settings.no_repeat_ngram_size is not None:
        found.no_repeat_ngram_size = settings.no_repeat_ngram_size
    if settings.num_beams > 1:
        found.length_penalty, found.early_stopping = settings.length_penalty, settings.early_stopping
    if settings.do_sample:
        found.temperature, found.top_k, found.top_p = settings.temperature, settings.top_k, settings.top_p


@torch.no_grad()
def generate(model: nn.Module, inputs: Mapping[str, Tensor], synced: bool, seed: int, rows: Tensor) -> Tensor:
    """Return the generated tokens between the prompt and the end token, then `IGNORED_LABEL`: `[batch, tokens]`.

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
        # Zeros come before ones, and a stable sort keeps the order of the tokens.
        order = mask.argsort(dim=1, stable=True)
        ids, mask = ids.gather(1, order), mask.gather(1, order)
        prompt = ids.shape[1]
    own = described.generation_config
    # A copy, because an export writes the settings of the model, with caches and sampling.
    settings = copy.deepcopy(own)
    for name in _OF_CACHES:
        setattr(settings, name, None)
    processors = LogitsProcessorList()
    if own.do_sample:  # transformers would draw all rows from one generator
        settings.update(do_sample=False, temperature=1.0, top_k=50, top_p=1.0)  # the defaults
        processors = LogitsProcessorList(_sampling(own, _Draw(seed, rows, prompt, ids.device)))
    described.generation_config = settings  # transformers takes what an argument leaves open from the model
    try:
        with _whole_logits(model):
            tokens: Tensor = described.generate(
                input_ids=ids,
                attention_mask=mask,
                synced_gpus=synced,
                generation_config=settings,
                logits_processor=processors,
                tokenizer=described.stops_by,
            )[:, prompt:]
    finally:
        described.generation_config = own
    # After its end token, a row is filled while others continue.
    ends = torch.isin(tokens, torch.tensor(_ids(own.eos_token_id), dtype=torch.long, device=tokens.device))
    return tokens.masked_fill(ends.cumsum(1) > 0, IGNORED_LABEL)


def _sampling(settings: GenerationConfig, draw: _Draw) -> Iterator[LogitsProcessor]:
    # In the order of transformers: temperature, then top-k, then top-p.
    yield TemperatureLogitsWarper(settings.temperature)
    if settings.top_k:
        yield TopKLogitsWarper(settings.top_k)
    if settings.top_p < 1:
        yield TopPLogitsWarper(settings.top_p)
    # Last, because a filtered token has a score of -inf, and so the probability 0.
    yield draw


class _Draw(LogitsProcessor):  # type: ignore[misc]
    """Draws the next token of each row by a number that depends on seed, row and place only.

    The scores `[batch, vocabulary]` become 0 for the drawn token and -inf for others, so a greedy search takes it.
    """

    def __init__(self, seed: int, rows: Tensor, prompt: int, device: torch.device) -> None:
        self._seed, self._rows, self._prompt, self._device = seed, rows.tolist(), prompt, device
        self._draws = torch.empty(0)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        # fp64, because fp32 sums over a large vocabulary would round small probabilities away.
        sums = scores.softmax(-1, dtype=torch.float64).cumsum(-1)
        start, place = divmod(input_ids.shape[1] - self._prompt, _TOKENS_DRAWN)
        if place == 0:  # many tokens at once, because the host waits for the device in each copy
            self._draws = self._drawn(start * _TOKENS_DRAWN)
        # By the last sum, which rounding may leave beside 1.
        drawn = self._draws[place] * sums[:, -1:]
        # The first token with a sum above the number; tokens of probability 0 are never chosen.
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
    from trainer.parallel.communication import gather_sequence
    from trainer.parallel.groups import group_size
    from trainer.parallel.tensor.linear import ColumnParallelLinear

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
