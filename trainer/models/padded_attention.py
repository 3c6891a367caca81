"""Attention without dropout in padded rows, by torch's variable-length attention.

A mask keeps FlashAttention off in torch's SDPA. Here, the tokens of a row, the padding before them and the padding
after them are rows of their own, so no mask is needed. Padding sees padding only, and nobody reads its output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from trainer.parallel import varlen


class PaddedRows:
    """The rows of a mask that hides padding, later keys, or distant keys.

    Args:
        tokens: whether a position has a token, `[batch, length]`; None: all have one.
        is_causal: whether a query sees no key at a later position.
        window: the largest distance of a query and a key that it sees; None: any.
    """

    def __init__(self, tokens: Tensor | None, is_causal: bool, window: int | None) -> None:
        self._tokens, self._is_causal, self._window = tokens, is_causal, window
        self._kept: Tensor | None = None

    def attention(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Return the output `[batch, length, heads, head_dim]`; see `keyed_attention`."""
        batch, _, length, _ = query.shape
        starts = self._starts(batch, length, query.device)
        query, key, value = (x.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        output = varlen.attention(query, key, value, starts, length, scale, self._is_causal, self._window)
        return output.view(batch, length, *output.shape[2:])

    def _starts(self, batch: int, length: int, device: torch.device) -> Tensor:
        """Return the starts of the parts of all rows, and the number of all positions, int32 `[parts + 1]`."""
        if self._kept is not None and not torch.compiler.is_compiling():
            return self._kept
        ends = torch.arange(1, batch + 1, device=device) * length
        if self._tokens is not None:
            tokens = self._tokens.int()
            number = tokens.sum(-1)
            begins = tokens[:, :1].sum() + (tokens.diff(dim=-1) > 0).sum()
            # Asked without a wait of the host.
            torch._assert_async(begins <= batch, "a row has padding between its tokens")
            first = ends - length + tokens.argmax(-1)
            ends = torch.stack([first, first + number, ends], -1).flatten()
        found = torch.nn.functional.pad(ends, (1, 0)).int()
        if not torch.compiler.is_compiling():
            self._kept = found  # the layers share the mask
        return found


def rows_of(tokens: Tensor | None, options: Mapping[str, Any]) -> PaddedRows | None:
    """Return the rows of a mask of transformers; None for other kinds of masks.

    Args:
        tokens: whether a position has a token, `[batch, length]`; None: all have one.
        options: the other arguments of `sdpa_mask`.
    """
    length = options["kv_length"]
    is_whole = options["q_length"] == length and not options.get("q_offset", 0) and not options.get("kv_offset", 0)
    kind = _KINDS.get(_code_of(options["mask_function"]))
    if kind is None or not is_whole or (tokens is not None and tokens.shape[-1] != length):
        return None
    is_causal, has_window = kind
    config = options.get("config")
    # A decoder's attention to an encoder of the same length has such a mask too, for queries that are no keys.
    if not is_causal and any(getattr(config, name, False) for name in ("is_encoder_decoder", "add_cross_attention")):
        return None
    # transformers counts the query too under a causal mask.
    window = options["local_size"] - is_causal if has_window else None
    return PaddedRows(tokens, is_causal, window)


def _code_of(function: Callable[..., Any]) -> tuple[Any, ...]:
    """Return the code of a mask function and of the functions that it joins."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    joined = [part for cell in cells for part in (cell if isinstance(cell, tuple) else (cell,)) if callable(part)]
    return (getattr(function, "__code__", function), *map(_code_of, joined))


_KINDS = {
    _code_of(bidirectional_mask_function): (False, False),
    _code_of(causal_mask_function): (True, False),
    _code_of(sliding_window_bidirectional_mask_function(1)): (False, True),
    _code_of(sliding_window_causal_mask_function(1)): (True, True),
}
