"""Attention with layout-invariant dropout as one operation of torch, computed by Triton kernels.

The mask is that of `trainer.parallel.random`. It is drawn once, and kept as a bit for each query, key and head, if its
bits are few beside the other kept tensors. Else, forward and backward passes draw it from one key for each row, and
nothing of size queries x keys is kept. Beside the output, two numbers in fp32 are kept for each query and head.

This module imports Triton at the first call: see `trainer.parallel.kernel_support`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.features.kernels import attention_blocks, flops
from trainer.parallel import kernel_support
from trainer.parallel.launching import Launch, facts_of, launch, operation
from trainer.parallel.random import LANE_LEVELS, LANES, dropped_levels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
_ALIGNED = 16  # elements: Triton reads several at once
_SMALL_DIM = 32
_LISTED_KEYS = 256  # from which on it pays to list the visible tiles
_BITS_SHARE = 0.5
"""The most bytes of a mask that is kept, relative to those of queries, keys, values and output, which are kept too."""
_BITS_SIZE = 2  # the most bytes of an element; in fp32, products take longer, and one launch more may not pay


def _kernels() -> Any:
    from trainer.features.kernels import attention_kernels

    return attention_kernels


def visible_tiles(
    mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor, other_keys: bool = False
) -> tuple[Tensor, Tensor] | None:
    """Return the lists of the tiles that a boolean mask leaves visible, for `fused_attention`; None for all tiles.

    Args:
        mask: the mask `[1 or batch, 1 or heads, queries, keys]`, or None.
        query: the queries `[batch, heads, queries, head_dim]`.
        key: the keys `[batch, key_value_heads, keys, head_dim]`.
        value: the values `[batch, key_value_heads, keys, value_dim]`.
        other_keys: whether the queries see keys of other calls too. A query that sees no key of this call then needs no
            tile; otherwise it sees all keys alike, as in the eager function.
    """
    if mask is None or mask.dtype != torch.bool:
        return None
    if key.shape[2] < _LISTED_KEYS:
        return None
    # Layers share a mask, so its lists are made once and passed to each call.
    key_tiles, query_tiles = _list_tiles(mask, *attention_blocks.tile(), other_keys)
    return key_tiles, query_tiles


@operation("trainer::visible_tiles")
def _list_tiles(mask: Tensor, tile_queries: int, tile_keys: int, other_keys: bool) -> tuple[Tensor, Tensor]:
    key_tiles, query_tiles = _empty_lists(mask, tile_queries, tile_keys, other_keys)
    batch, heads, num_queries, num_keys = mask.shape
    rows, columns = key_tiles.shape[2], query_tiles.shape[2]
    kinds = mask.new_empty((batch, heads, rows, columns), dtype=torch.int32)
    strides, unit = _in_units(mask.stride())
    kernels = _kernels()
    kernels.key_tiles_kernel[(batch * heads * rows,)](
        mask, kinds, key_tiles, *strides, heads, num_queries, num_keys, rows, columns, tile_queries, tile_keys,
        int(other_keys), unit,
    )  # fmt: skip
    kernels.query_tiles_kernel[(batch * heads * columns,)](kinds, query_tiles, rows, columns)
    return key_tiles, query_tiles


@torch.library.register_fake("trainer::visible_tiles")  # type: ignore[untyped-decorator]
def _empty_lists(mask: Tensor, tile_queries: int, tile_keys: int, other_keys: bool) -> tuple[Tensor, Tensor]:
    batch, heads, num_queries, num_keys = mask.shape
    rows, columns = -(-num_queries // tile_queries), -(-num_keys // tile_keys)
    return (
        mask.new_empty((batch, heads, rows, 2 + columns), dtype=torch.int32),
        mask.new_empty((batch, heads, columns, 2 + rows), dtype=torch.int32),
    )


def keeps_bits(
    query: Tensor, key: Tensor, value: Tensor, probability: float, lengths: Sequence[int] | None = None,
    window: int | None = None,
) -> bool:  # fmt: skip
    """Return whether a call of `fused_attention` with gradients draws its mask once, and keeps it.

    With a window, most of the mask would never be read.
    """
    if window is not None or not dropped_levels(probability):
        return False
    _, heads, queries, dim = query.shape
    size = query.element_size()
    if size > _BITS_SIZE:
        return False
    kept = (dim + value.shape[-1]) * size * (heads * queries + key.shape[1] * key.shape[2])
    longest = key.shape[2] if lengths is None else max(lengths)
    return bool(heads * queries * longest / 8 <= _BITS_SHARE * kept)


@operation("trainer::draw_attention_mask")
def _draw(
    row_keys: Tensor,
    key_tiles: Tensor | None,
    sizes: Sequence[int],
    probability: float,
    is_causal: bool,
    offsets: Sequence[int],
    starts: Tensor | None = None,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """Draw the bits of the dropout mask of a call of `fused_attention`; `sizes` are its heads, queries and keys.

    Words of hidden keys, and queries after the last one, are not written.

    Returns:
        The words, int32 `[batch, heads, words, queries and more]`.
    """
    bits: Tensor = _empty_bits(row_keys, key_tiles, sizes, probability, is_causal, offsets, starts, lengths)
    if 0 in (*sizes, len(row_keys)):
        return bits
    rows = _Rows.of(starts, lengths, None)

    def plan() -> list[Launch]:
        kernels, strides = _kernels(), _Call.strides
        heads, queries, keys = sizes
        if rows.joined:
            queries = keys = rows.longest
        (tile_queries, tile_keys), count = attention_blocks.tile(), len(row_keys)
        num_blocks = -(-queries // tile_queries)
        numbers = (
            _threshold(probability), *strides(bits)[:3], *strides(key_tiles)[:3], heads, queries, keys, num_blocks,
            *offsets,
        )  # fmt: skip
        constants = {
            "BLOCK_M": tile_queries,
            "BLOCK_N": attention_blocks.KEYS_OF_WORD,
            "UNIT_M": tile_queries,
            "UNIT_N": tile_keys,
            "MASK": kernels.NO_MASK,
            "CAUSAL": is_causal,
            "TILES": key_tiles is not None,
            "JOINED": rows.joined > 0,
        }
        return [Launch(kernels.draw_kernel, (num_blocks * count * heads,), numbers, constants)]

    facts = (
        "draw",
        row_keys.device,
        len(row_keys),
        *sizes,
        probability,
        is_causal,
        *offsets,
        *rows,
        *facts_of(key_tiles),
    )
    launch(facts, [(bits, row_keys, key_tiles, starts)], plan)
    return bits


@torch.library.register_fake("trainer::draw_attention_mask")  # type: ignore[untyped-decorator]
def _empty_bits(
    row_keys: Tensor,
    key_tiles: Tensor | None,
    sizes: Sequence[int],
    probability: float,
    is_causal: bool,
    offsets: Sequence[int],
    starts: Tensor | None = None,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    heads, queries, keys = sizes
    batch, longest = len(row_keys), keys
    tile = attention_blocks.TILE
    # Kernels read whole tiles of queries and keys without a look at their ends.
    padded = _rounded(queries, tile)
    if lengths is not None:
        batch, longest, padded = 1, max(lengths, default=0), padded + tile
    words = _rounded(longest, tile) // attention_blocks.KEYS_OF_WORD
    return row_keys.new_empty((batch, heads, words, padded), dtype=torch.int32)


def _rounded(number: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is not below `number`."""
    return -(-number // unit) * unit


@operation("trainer::keyed_attention", kept=True)
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row_keys: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    key_tiles: Tensor | None,
    query_tiles: Tensor | None,
    scale: float,
    probability: float,
    is_causal: bool,
    offsets: Sequence[int],
    starts: Tensor | None = None,
    lengths: Sequence[int] | None = None,
    window: int | None = None,
    bits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the outputs of `fused_attention` without a graph; `bits` are those of `_draw`."""
    query, key, value = map(_with_rows, (query, key, value))
    output, sums = _empty_results(query, key, value)
    # CUDA refuses a grid without programs.
    if output.numel() == 0:
        return output, sums
    rows = _Rows.of(starts, lengths, window)

    def plan() -> list[Launch]:
        call = _Call(query, key, value, row_keys, mask, bias, scale, probability, is_causal, offsets, rows, bits)
        block = call.blocks.forward
        num_blocks = -(-call.queries // block.queries)
        numbers = (
            *call.factors, *call.strides_of(query, key, value, output.transpose(1, 2)), *call.strides(sums)[:3],
            *call.added_strides, *call.strides(bits)[:3], *call.strides(key_tiles)[:3],
            query.shape[1], call.group, call.queries, call.keys, num_blocks, *offsets,
        )  # fmt: skip
        # In one dimension: CUDA limits the others to 65,535 programs.
        grid = (num_blocks * call.rows * query.shape[1],)
        return [Launch(_kernels().forward_kernel, grid, numbers, call.options(block, key_tiles is not None))]

    # All that `plan` reads and Triton compiles for. Without one of them, another call would get this launch.
    facts = (
        "forward", query.device, scale, probability, is_causal, *offsets, *rows, _precision(query.dtype),
        *facts_of(query, key, value, mask, bias, key_tiles, bits),
    )  # fmt: skip
    added = (bits, mask if window is None else window, bias)
    launch(facts, [(query, key, value, output, sums, row_keys, *added, key_tiles, starts)], plan)
    return output, sums


@torch.library.register_fake("trainer::keyed_attention")  # type: ignore[untyped-decorator]
def _empty_results(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, queries = query.shape[:3]
    output = query.new_empty((batch, queries, heads, value.shape[-1]))
    return output, query.new_empty((2, batch, heads, queries), dtype=torch.float32)


@operation("trainer::keyed_attention_backward")
def backward_of(
    output_gradient: Tensor,
    output: Tensor,
    sums: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row_keys: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    key_tiles: Tensor | None,
    query_tiles: Tensor | None,
    scale: float,
    probability: float,
    is_causal: bool,
    offsets: Sequence[int],
    with_bias: bool,
    starts: Tensor | None = None,
    lengths: Sequence[int] | None = None,
    window: int | None = None,
    bits: Tensor | None = None,
    joint: bool = False,
) -> list[Tensor]:
    """Return the gradients of query, key and value, and that of the bias `with_bias`.

    If `joint`, the first three are one tensor, as `whole` of `fused_attention`.

    `output` and `sums` are the results of `fused_attention`, for these keys or for more keys, these among them. In the
    second case, the gradients are those of these keys. The other arguments are those of `fused_attention`.
    """
    query, key, value, output_gradient = map(_with_rows, (query, key, value, output_gradient))
    gradients: list[Tensor] = _empty_gradients(
        output_gradient, output, sums, query, key, value, row_keys, mask, bias, key_tiles, query_tiles, scale,
        probability, is_causal, offsets, with_bias, joint=joint,
    )  # fmt: skip
    if output.numel() == 0:
        return [gradient.zero_() for gradient in gradients]
    states = (query, key, value)
    query_gradient, key_gradient, value_gradient = _parts(gradients[0], states) if joint else gradients[:3]
    rows, deltas = _Rows.of(starts, lengths, window), sums.new_empty(sums.shape[1:])

    def plan() -> list[Launch]:
        call = _Call(query, key, value, row_keys, mask, bias, scale, probability, is_causal, offsets, rows, bits)
        by_head, gradient, strides = output.transpose(1, 2), output_gradient.transpose(1, 2), call.strides
        inputs, of_sums, sizes = call.strides_of(query, key, value), strides(sums)[:3], (call.queries, call.keys)
        heads, key_heads, kernels = query.shape[1], key.shape[1], _kernels()

        block = call.blocks.of_queries
        num_blocks = -(-call.queries // block.queries)
        numbers = (
            *call.factors, *inputs, *call.strides_of(by_head, gradient, query_gradient), *of_sums, *call.added_strides,
            *strides(bits)[:3], *strides(key_tiles)[:3], heads, call.group, *sizes, num_blocks, *offsets,
        )  # fmt: skip
        grid, options = (num_blocks * call.rows * heads,), call.options(block, key_tiles is not None)
        # The order counts: the first kernel writes `deltas`, and the others read them.
        launches = [Launch(kernels.query_gradient_kernel, grid, numbers, options)]

        block = call.blocks.of_keys
        num_blocks = -(-call.keys // block.keys)
        numbers = (
            *call.factors, *inputs, *call.strides_of(gradient, key_gradient, value_gradient), *of_sums,
            *call.added_strides, *strides(bits)[:3], *strides(query_tiles)[:3], key_heads, call.group, *sizes,
            num_blocks, *offsets,
        )  # fmt: skip
        grid, options = (num_blocks * call.rows * key_heads,), call.options(block, query_tiles is not None)
        launches.append(Launch(kernels.key_gradient_kernel, grid, numbers, options))

        if with_bias:
            assert bias is not None
            block = call.blocks.of_queries
            blocks = (-(-call.queries // block.queries), -(-call.keys // block.keys))
            options = call.options(block, False)
            # The kernel of the bias lists no tiles and joins no rows, and always has a bias.
            for name in ("UNIT_M", "UNIT_N", "BIAS", "TILES", "JOINED"):
                del options[name]
            numbers = (
                *call.factors, *inputs, strides(gradient), *strides(gradients[-1])[:3], *of_sums, *call.added_strides,
                *strides(bits)[:3], call.rows, heads, *bias.shape[:2], call.group, *sizes, *blocks, *offsets,
            )  # fmt: skip
            grid = (blocks[0] * blocks[1] * bias.shape[0] * bias.shape[1],)
            launches.append(Launch(kernels.bias_gradient_kernel, grid, numbers, options))
        return launches

    inputs, added = (query, key, value), (bits, mask if window is None else window, bias)
    shared = (sums, deltas, row_keys, *added)
    tensors: list[tuple[Any, ...]] = [
        (*inputs, output, output_gradient, query_gradient, *shared, key_tiles, starts),
        (*inputs, output_gradient, key_gradient, value_gradient, *shared, query_tiles, starts),
    ]
    if with_bias:
        tensors.append((*inputs, output_gradient, gradients[-1], *shared))
    facts = (
        "backward", query.device, scale, probability, is_causal, *offsets, *rows, _precision(query.dtype), with_bias,
        joint,
        *facts_of(*inputs, mask, bias, key_tiles, bits, output, output_gradient, sums),
    )  # fmt: skip
    launch(facts, tensors, plan)
    return gradients


@torch.library.register_fake("trainer::keyed_attention_backward")  # type: ignore[untyped-decorator]
def _empty_gradients(
    output_gradient: Tensor,
    output: Tensor,
    sums: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row_keys: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    key_tiles: Tensor | None,
    query_tiles: Tensor | None,
    scale: float,
    probability: float,
    is_causal: bool,
    offsets: Sequence[int],
    with_bias: bool,
    starts: Tensor | None = None,
    lengths: Sequence[int] | None = None,
    window: int | None = None,
    bits: Tensor | None = None,
    joint: bool = False,
) -> list[Tensor]:
    # As projections make them, `[batch, positions, heads, head_dim]`, so that their gradients need no copy.
    states = (query, key, value)
    if joint:
        gradients = [query.new_empty((query.shape[0], query.shape[2], sum(_features(states))))]
    else:
        gradients = [_empty_by_position(x) for x in states]
    if with_bias:
        assert bias is not None
        gradients.append(bias.new_empty(bias.shape))
    return gradients


def _features(states: Iterable[Tensor]) -> list[int]:
    """Return the features of each position of states `[batch, heads, positions, head_dim]`."""
    return [x.shape[1] * x.shape[3] for x in states]


def _parts(whole: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the views of `whole` `[batch, positions, features]` with the shapes of states that lie side by side."""
    return [
        part.view(*part.shape[:2], x.shape[1], x.shape[3]).transpose(1, 2)
        for part, x in zip(torch.split(whole, _features(like), -1), like, strict=True)
    ]


def _empty_by_position(like: Tensor) -> Tensor:
    batch, heads, positions, dim = like.shape
    return like.new_empty_strided((batch, heads, positions, dim), (positions * heads * dim, dim, heads * dim, 1))


class _KeyedAttention(torch.autograd.Function):
    """The operation with its gradient."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        *tensors, scale, probability, is_causal, offsets, starts, lengths, window, bits, whole = inputs
        output: tuple[Tensor, Tensor] = _attend(*inputs[:-1])
        ctx.save_for_backward(bits, starts, *output, *tensors)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # else torch makes zeros for the second output
        ctx.numbers = (scale, probability, is_causal, offsets)
        ctx.of_rows = (lengths, window)
        ctx.joint = whole is not None
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        with_bias = ctx.needs_input_grad[5]
        bits, starts, *tensors = ctx.saved_tensors
        found = backward_of(gradients[0], *tensors, *ctx.numbers, with_bias, starts, *ctx.of_rows, bits, ctx.joint)
        of_states, of_whole = ([None] * 3, found[0]) if ctx.joint else (found[:3], None)
        return *of_states, None, None, found[-1] if with_bias else None, *[None] * 10, of_whole


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row_keys: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    key_tiles: Tensor | None,
    query_tiles: Tensor | None,
    scale: float,
    probability: float,
    is_causal: bool,
    offsets: Sequence[int],
    starts: Tensor | None = None,
    lengths: Sequence[int] | None = None,
    window: int | None = None,
    whole: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute scaled dot-product attention with a keyed dropout mask.

    Rows of tokens may be joined without padding: tensors then have a batch of 1 and the positions of all rows, one row
    after the other, and each query sees the keys of its row. Such a call has no mask, no bias, and one index that is
    not 0 in `offsets`: that of the head.

    Args:
        query: the queries `[batch, heads, queries, head_dim]`, of a type in `DTYPES`.
        key: the keys `[batch, key_value_heads, keys, head_dim]`.
        value: the values `[batch, key_value_heads, keys, value_dim]`.
        row_keys: the keys of the rows for this call of the site, int64 `[batch]`.
        mask: a boolean mask (True: visible) or a mask that is added to the scores, `[1 or batch, 1 or heads, queries,
            keys]`; it has no gradient. Strides may be 0.
        bias: is added to the scores; `[1 or batch, 1 or heads, queries, keys]`; it may have a gradient.
        key_tiles: the first list of `visible_tiles`.
        query_tiles: the second one.
        scale: the factor of the products of queries and keys.
        probability: the share of the probabilities to drop, in [0, 1).
        is_causal: whether a query sees no key at a later position; it excludes `mask`.
        offsets: the indices of the first head, query and key of these tensors in those of one process. The key's is a
            multiple of 4.
        starts: the place of the first token of each row that is joined, and the number of all tokens, int32
            `[rows + 1]`; `row_keys` are then `[rows]`.
        lengths: the tokens of each row, as `starts` has them, or those of the longest row only: the kernels read no
            other number, but formulas of FLOPs do.
        window: the largest distance of a query and a key that it sees; it excludes `mask`.
        whole: queries, keys and values side by side, `[batch, positions, features]`, if they are views of it. Their
            gradient is then one tensor, too.

    Returns:
        The output `[batch, queries, heads, value_dim]`, and the maximum and the binary logarithm of the sum of each
        query's exponentials, fp32 `[2, batch, heads, queries]`.
    """
    size = value.shape[-1]
    states = (query, key, value)
    has_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in states)
    if whole is None or any(map(_missing_dims, states)):
        whole, (query, key, value) = None, map(_with_aligned_heads, states)
    else:
        query, key, value = _parts(whole.detach(), states)
    bits = None
    if has_gradient and keeps_bits(query, key, value, probability, lengths, window):
        sizes = [query.shape[1], query.shape[2], key.shape[2]]
        # An operation of its own: selective checkpointing keeps the output, and draws the mask again.
        bits = _draw(row_keys, key_tiles, sizes, probability, is_causal, offsets, starts, lengths)
    arguments = (
        query, key, value, row_keys, mask, bias, key_tiles, query_tiles, scale, probability, is_causal, offsets, starts,
        lengths, window, bits, whole,
    )  # fmt: skip
    output, sums = _KeyedAttention.apply(*arguments)  # type: ignore[no-untyped-call]
    # `_with_aligned_heads` may have padded the values.
    return output if output.shape[-1] == size else output[..., :size].contiguous(), sums


def _threshold(probability: float) -> int:
    """Return the lowest 16 bits that keep an element, as a signed number in the upper half of a word."""
    return (dropped_levels(probability) - LANE_LEVELS // 2) << 16


def _precision(dtype: torch.dtype) -> str:
    """Return the precision of products; those of fp32 have that of torch's own."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _with_rows(tensor: Tensor) -> Tensor:
    """Return `tensor` with neighbouring elements in its last dimension, as the kernels read it."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _with_aligned_heads(tensor: Tensor) -> Tensor:
    """Return `tensor` with zeros after each head, which change no sum, up to an aligned size.

    Kernels read heads of 72 dimensions element by element: those of bf16 would spill 808 bytes a thread on capability
    8.0, where those of 80 spill 48. Small heads spill as little as aligned ones.
    """
    missing = _missing_dims(tensor)
    return F.pad(tensor, (0, missing)) if missing else tensor


def _missing_dims(tensor: Tensor) -> int:
    return -tensor.shape[-1] % _ALIGNED if tensor.shape[-1] > _SMALL_DIM else 0


def _in_units(*strides: Sequence[int]) -> tuple[list[int], int]:
    """Return the strides of masks, those of keys last, and the unit of all but the latter.

    Kernels are compiled for aligned strides and for others, but not for each combination.
    """
    unit = 1 if any(stride % _ALIGNED for of_mask in strides for stride in of_mask[:-1]) else _ALIGNED
    return [
        number for of_mask in strides for number in (*(stride // unit for stride in of_mask[:-1]), of_mask[-1])
    ], unit


class _Rows(NamedTuple):
    """The rows that are joined in a call: their number, or 0; the tokens of the longest; the window of all rows."""

    joined: int
    longest: int
    window: int | None

    @classmethod
    def of(cls, starts: Tensor | None, lengths: Sequence[int] | None, window: int | None) -> _Rows:
        if starts is None or lengths is None:
            return cls(0, 0, window)
        return cls(len(starts) - 1, max(lengths), window)


class _Call:
    """The arguments that the kernels share."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        row_keys: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
        scale: float,
        probability: float,
        is_causal: bool,
        offsets: Sequence[int],
        rows: _Rows,
        bits: Tensor | None,
    ) -> None:
        window = rows.window
        self.rows, self.queries, self.keys = query.shape[0], query.shape[2], key.shape[2]
        if rows.joined:
            assert self.rows == 1, "rows are joined in a batch of 1"
            assert mask is bias is None, "flat rows have a window only"
            assert not any(offsets[1:]), "flat rows are whole"
            assert self.queries == self.keys, "each token has a row"
            # The grid is that of padded rows; programs beyond the end of a row return at once.
            self.rows, self.queries = rows.joined, rows.longest
            self.keys = self.queries
        assert query.dtype == key.dtype == value.dtype, "the kernels compute products of equal types"
        assert row_keys.shape == (self.rows,), "one key for each row"
        assert offsets[2] % LANES == 0, "a word of the dropout mask begins at the first key"
        assert mask is None or not (is_causal or window is not None), "a mask takes the place of others"
        self._dims = (query.shape[-1], value.shape[-1])
        has_floats = bias is not None or (mask is not None and mask.dtype != torch.bool)
        self.blocks = attention_blocks.blocks(query.device, query.dtype, max(self._dims), has_floats, rows.joined > 0)
        # The number of query heads that share the keys of one head.
        self.group = query.shape[1] // key.shape[1]
        levels = dropped_levels(probability)
        self.factors = (scale, _threshold(probability), LANE_LEVELS / (LANE_LEVELS - levels))
        self.added_strides, unit = _in_units(self.strides(mask), self.strides(bias))
        kernels = _kernels()
        kind = kernels.NO_MASK if window is None else kernels.WINDOW
        tile_queries, tile_keys = attention_blocks.tile()
        if mask is not None:
            kind = kernels.BOOLEAN if mask.dtype == torch.bool else kernels.ADDITIVE
        self._options = {
            "HEAD_DIM": self._dims[0],
            "VALUE_DIM": self._dims[1],
            "BLOCK_D": attention_blocks.padded(self._dims[0]),
            "BLOCK_V": attention_blocks.padded(self._dims[1]),
            "UNIT_M": tile_queries,
            "UNIT_N": tile_keys,
            "MASK": kind,
            "BIAS": bias is not None,
            "CAUSAL": is_causal,
            "DROPOUT": 0 if not levels else kernels.DRAWN if bits is None else kernels.STORED,
            "JOINED": rows.joined > 0,
            "UNIT": unit,
            "PRECISION": kernels.INTERPRETED if kernel_support.is_interpreted() else _precision(query.dtype),
        }

    def options(self, block: attention_blocks.Block, with_tiles: bool) -> dict[str, Any]:
        """Return the constants of a kernel."""
        return {
            **self._options,
            "BLOCK_M": block.queries,
            "BLOCK_N": block.keys,
            "TILES": with_tiles,
            **(
                {}
                if kernel_support.is_interpreted()
                else {"num_warps": block.warps, "num_stages": block.stages, "enable_fp_fusion": True}
            ),
        }

    def strides_of(self, *tensors: Tensor) -> list[tuple[int, ...]]:
        return [self.strides(tensor) for tensor in tensors]

    @staticmethod
    def strides(tensor: Tensor | None) -> tuple[int, ...]:
        """Return the strides of a tensor, with 0 for dimensions of size 1, which broadcast."""
        if tensor is None:
            return (0, 0, 0, 0)
        return tuple(stride if size > 1 else 0 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


flops.register(torch.ops.trainer.keyed_attention, lambda call: sum(flops.product_flops(call)))
flops.register(torch.ops.trainer.keyed_attention_backward, flops.backward_flops)
