"""Triton kernels of attention with layout-invariant dropout, forward and backward.

`trainer.features.kernels.fused_attention` launches the kernels, and describes the arguments.

The forward pass keeps a running maximum and sum of each query's row (Milakov & Gimelshein 2018, arXiv:1805.02867; Dao
et al. 2022, arXiv:2205.14135). The backward pass computes the probabilities again, tile by tile (Dao 2023,
arXiv:2307.08691). The dropout mask is that of `trainer.parallel.random`. A kernel of its own draws it once as bits that
all passes read; without them, each pass draws the mask of a tile from the keys of its rows.

No sum uses atomics, so the same call gives the same bits.
"""

import inspect

import triton
import triton.language as tl

from trainer.features.kernels.attention_blocks import KEYS_OF_WORD
from trainer.features.kernels.random_kernels import FIRST_STRIDE, GAMMA, SECOND_STRIDE, mix

NO_MASK, BOOLEAN, ADDITIVE, WINDOW = 0, 1, 2, 3
"""The kinds of a mask. A window has no tensor: the mask is the largest distance of a query and a key that it sees."""

DRAWN, STORED = 1, 2
"""The kinds of a dropout mask: each kernel draws it, or reads its bits; 0: there is none."""

INTERPRETED = "interpreted"
"""The precision of products in Triton's interpreter."""

_INTERPRETED = tl.constexpr(INTERPRETED)
_BOOLEAN, _ADDITIVE, _WINDOW = tl.constexpr(BOOLEAN), tl.constexpr(ADDITIVE), tl.constexpr(WINDOW)
_STORED, _WORD = tl.constexpr(STORED), tl.constexpr(KEYS_OF_WORD)
_LOWEST = tl.constexpr(-3.4028234663852886e38)  # of fp32: the score of a masked key, as in the eager function
_LOG2_E = tl.constexpr(1.4426950408889634)
# Numbers that change from batch to batch, and pointers into tables: no kernel is compiled again for them. Strides among
# them are no tuples, because Triton compiles again for the numbers in a tuple.
_VARYING = (
    "num_rows", "num_heads", "num_key_heads", "bias_rows", "bias_heads", "group", "num_queries", "num_keys",
    "num_blocks", "num_query_blocks", "num_key_blocks", "mask_heads", "query_tiles", "key_tiles",
    "head_offset", "query_offset", "key_offset", "threshold",
    "sums_part", "sums_row", "sums_head", "mask_row", "mask_head", "mask_query", "bias_row", "bias_head", "bias_query",
    "bias_gradient_row", "bias_gradient_head", "bias_gradient_query", "tiles_row", "tiles_head", "tiles_block",
    "row_keys", "starts",
)  # fmt: skip


def _compiled(function):
    """Return the kernel of a function that a host launches."""
    names = inspect.signature(function).parameters
    return triton.jit(function, do_not_specialize=[name for name in _VARYING if name in names])


@triton.jit
def _strides_of(row, head, query, key, UNIT: tl.constexpr):
    """Return the strides of a mask or bias; all but that of the keys are in units, so that reads stay aligned."""
    return (row.to(tl.int64) * UNIT, head.to(tl.int64) * UNIT, query.to(tl.int64) * UNIT, key)


@triton.jit
def _lanes(words):
    """Return the 16 bits of each of the four elements of words, as the upper halves of int32."""
    low, high = words.to(tl.uint32).to(tl.int32, bitcast=True), (words >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
    # A comparison of a lane reads it as the upper half of a word; the lower half cannot change it.
    return low << 16, low, high << 16, high


@triton.jit
def _keep_mask(
    streams, first_key, key_offset, threshold, bits_word, NUM_KEYS: tl.constexpr, DROPOUT: tl.constexpr
):  # fmt: skip
    """Return the mask of kept elements, `[queries, NUM_KEYS]`, from the `_streams` of the queries."""
    if DROPOUT == _STORED:
        key, places = tl.arange(0, NUM_KEYS), streams + first_key // _WORD * bits_word
        words = tl.load(places)[:, None]
        if NUM_KEYS < _WORD:
            words = words >> (first_key % _WORD)
        for index in tl.static_range(1, NUM_KEYS // _WORD):
            words = tl.where((key < index * _WORD)[None, :], words, tl.load(places + index * bits_word)[:, None])
        return (words & (1 << (key % _WORD))[None, :]) != 0
    else:
        # The products of `arange` are the same for every tile, and that of the first word is one for all elements.
        keys = streams + ((first_key + key_offset) // 4).to(tl.uint64) * GAMMA
        words = mix(keys[:, None] + (tl.arange(0, NUM_KEYS // 4).to(tl.uint64) * GAMMA)[None, :])
        first, second, third, fourth = _lanes(words)
        even = tl.join(first >= threshold, third >= threshold)
        odd = tl.join(second >= threshold, fourth >= threshold)
        return tl.reshape(tl.join(even, odd), (streams.shape[0], NUM_KEYS))


@triton.jit
def _product(left, right, total, PRECISION: tl.constexpr):
    """Return `total` plus the product of two tiles, summed in fp32."""
    if PRECISION == _INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)  # Triton's interpreter has no products of bf16
        return tl.dot(left, right, total, input_precision="ieee")
    else:
        return tl.dot(left, right, total, input_precision=PRECISION)


@triton.jit
def _stream_keys(row_keys, batch, head, query):
    """Return the keys of the streams that draw the masks of the queries of a head, uint64 of the shape of `query`."""
    key = tl.load(row_keys + batch).to(tl.uint64) + head.to(tl.uint64) * FIRST_STRIDE
    return key + query.to(tl.uint64) * SECOND_STRIDE


@triton.jit
def _streams(
    row_keys, bits, row, head, start, query, head_offset, query_offset, bits_row, bits_head, DROPOUT: tl.constexpr
):  # fmt: skip
    """Return the places of the first words of bits of queries, or the keys of the streams that draw their masks."""
    if DROPOUT == _STORED:
        return bits + row * bits_row + (row * 0 + head) * bits_head + start + query  # in 64 bits, as `row`
    elif DROPOUT:
        return _stream_keys(row_keys, row, head + head_offset, query + query_offset)
    else:
        return tl.zeros(query.shape, tl.uint64)


@triton.jit
def _joined_row(starts, row):
    """Return the place of the first token of a row that is joined with others, and its number of tokens."""
    start = tl.load(starts + row)
    return start.to(tl.int64), tl.load(starts + row + 1) - start


@triton.jit
def _load(pointers, row, column, num_rows, num_columns, CHECK_ROWS: tl.constexpr, CHECK_COLUMNS: tl.constexpr):
    """Load a tile; its checked elements outside of the tensor are 0."""
    if CHECK_ROWS and CHECK_COLUMNS:
        return tl.load(pointers, mask=(row < num_rows) & (column < num_columns), other=0.0)
    elif CHECK_ROWS:
        return tl.load(pointers, mask=row < num_rows, other=0.0)
    elif CHECK_COLUMNS:
        return tl.load(pointers, mask=column < num_columns, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _scores(
    products, scale, query, key, num_queries, num_keys, mask, mask_strides, bias, bias_strides,
    MASK: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Return the scores of a tile in fp32; `query` and `key` are indices that broadcast to its shape.

    Without `PARTIAL`, all keys of the tile exist and are visible.
    """
    scores = products * scale
    exists = (query < num_queries) & (key < num_keys)
    if BIAS:
        # Offsets have 64 bits: a tensor of queries x keys may have more than 2**31 elements.
        pointers = bias + query.to(tl.int64) * bias_strides[2] + key * bias_strides[3]
        scores += tl.load(pointers, mask=exists, other=0.0).to(tl.float32)
    if MASK == _ADDITIVE:
        pointers = mask + query.to(tl.int64) * mask_strides[2] + key * mask_strides[3]
        scores += tl.load(pointers, mask=exists, other=0.0).to(tl.float32)
    if PARTIAL:
        if MASK == _BOOLEAN:
            pointers = mask + query.to(tl.int64) * mask_strides[2] + key * mask_strides[3]
            scores = tl.where(tl.load(pointers, mask=exists, other=0) != 0, scores, _LOWEST)
        if MASK == _WINDOW:
            scores = tl.where((query - key <= mask) & (key - query <= mask), scores, _LOWEST)
        if CAUSAL:
            scores = tl.where(query >= key, scores, _LOWEST)
        # Hidden keys have the lowest number and absent ones -inf, so a row that sees no key sees the existing ones
        # alike.
        scores = tl.where(key < num_keys, scores, float("-inf"))
    return scores


@triton.jit
def _piece(tiles, index, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the first position of a piece of a listed tile."""
    return tl.load(tiles + 2 + index // (UNIT // BLOCK)) * UNIT + (index % (UNIT // BLOCK)) * BLOCK


@triton.jit
def _key_pieces(
    tiles, first_query, num_keys, mask,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNIT_N: tl.constexpr, CAUSAL: tl.constexpr, TILES: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """Return the number of pieces of keys that a tile of queries sees whole, the first partial one, and their end."""
    if TILES:
        whole, partial = tl.load(tiles), tl.load(tiles + 1)
        return whole * (UNIT_N // BLOCK_N), whole * (UNIT_N // BLOCK_N), (whole + partial) * (UNIT_N // BLOCK_N)
    else:
        whole, seen = num_keys // BLOCK_N, num_keys
        if CAUSAL:
            # The first query of the tile sees the fewest keys, and the last one the most.
            whole = tl.minimum(first_query + 1, num_keys) // BLOCK_N
            seen = tl.minimum(first_query + BLOCK_M, num_keys)
        if MASK == _BOOLEAN:
            # Without a list, each tile of a mask may be hidden in part.
            whole = num_keys * 0
        first = whole
        if MASK == _WINDOW:
            whole = num_keys * 0
            first = tl.maximum(first_query - mask, 0) // BLOCK_N
            seen = tl.minimum(first_query + BLOCK_M + mask, seen)
        return whole, first, tl.cdiv(seen, BLOCK_N)


@triton.jit
def _query_pieces(
    tiles, first_key, num_queries, num_keys, mask,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNIT_M: tl.constexpr, CAUSAL: tl.constexpr, TILES: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """Return the first partial piece of queries that see a tile of keys, the first whole one, and their end.

    From a list, the whole ones come first: their number, the number of all, and 0.
    """
    last = tl.cdiv(num_queries, BLOCK_M)
    if TILES:
        whole, partial = tl.load(tiles), tl.load(tiles + 1)
        return whole * (UNIT_M // BLOCK_M), (whole + partial) * (UNIT_M // BLOCK_M), last * 0
    else:
        first = last * 0
        whole = first
        if CAUSAL:
            first = first_key // BLOCK_M
            whole = tl.cdiv(first_key + BLOCK_N - 1, BLOCK_M)
        if MASK == _BOOLEAN:
            whole = last
        if MASK == _WINDOW:
            first = tl.maximum(first, tl.maximum(first_key - mask, 0) // BLOCK_M)
            last = tl.cdiv(tl.minimum(first_key + BLOCK_N + mask, num_queries), BLOCK_M)
            whole = last
        # A tile that ends beyond the last key is partial for all queries.
        whole = tl.where(first_key + BLOCK_N > num_keys, last, whole)
        return tl.minimum(first, last), tl.minimum(whole, last), last


@_compiled
def draw_kernel(
    bits, row_keys, tiles, starts, threshold, bits_row, bits_head, bits_word, tiles_row, tiles_head, tiles_block,
    num_heads, num_queries, num_keys, num_blocks, head_offset, query_offset, key_offset,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNIT_M: tl.constexpr, UNIT_N: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, TILES: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """Draw the dropout masks of a tile of queries as bits: of each word, the lowest one is that of the first key.

    Words of keys that no query of the tile sees are not written.
    """
    program = tl.program_id(0)
    block = num_blocks - 1 - program % num_blocks  # under a causal mask, the longest first
    head, row = (program // num_blocks) % num_heads, (program // num_blocks // num_heads).to(tl.int64)
    first_query = block * BLOCK_M
    start = row * 0
    if JOINED:
        start, num_queries = _joined_row(starts, row)
        num_keys = num_queries
    if first_query >= num_queries:
        return
    queries = first_query + tl.arange(0, BLOCK_M)
    exists = queries < num_queries
    streams = _stream_keys(row_keys, row, head + head_offset, queries + query_offset)
    bits += row * bits_row + head * bits_head + start
    if TILES:
        tiles += row * tiles_row + head * tiles_head + (first_query // UNIT_M) * tiles_block
    # A thread draws all random words of a word of bits, so none is exchanged: they lie along the first dimension.
    place = tl.arange(0, BLOCK_N // 4)[:, None]
    streams = streams[None, :] + place.to(tl.uint64) * GAMMA
    _, _, end = _key_pieces(tiles, first_query, num_keys, 0, BLOCK_M, BLOCK_N, UNIT_N, CAUSAL, TILES, MASK)
    for index in range(0, end):
        first_key = index * BLOCK_N
        if TILES:
            first_key = _piece(tiles, index, UNIT_N, BLOCK_N)
        first, second, third, fourth = _lanes(mix(streams + ((first_key + key_offset) // 4).to(tl.uint64) * GAMMA))
        kept = (first >= threshold).to(tl.int32) + ((second >= threshold).to(tl.int32) << 1)
        kept += ((third >= threshold).to(tl.int32) << 2) + ((fourth >= threshold).to(tl.int32) << 3)
        tl.store(bits + first_key // BLOCK_N * bits_word + queries, tl.sum(kept << (4 * place), 0), mask=exists)


@triton.jit
def _forward_piece(
    accumulated, largest, total, query, first_key, key, value, streams, scale, threshold, queries, num_queries,
    num_keys, key_stride, value_stride, mask, mask_strides, bias, bias_strides, key_offset, bits_word,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Add the keys from `first_key` on to the running output, maximum and sum of a tile of queries."""
    keys, dims, value_dims = first_key + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    columns = _load(
        key + keys[None, :] * key_stride + dims[:, None], dims[:, None], keys[None, :], HEAD_DIM, num_keys,
        HEAD_DIM != BLOCK_D, PARTIAL,
    )  # fmt: skip
    scores = _scores(
        _product(query, columns, None, PRECISION), scale, queries[:, None], keys[None, :], num_queries,
        num_keys, mask, mask_strides, bias, bias_strides, MASK, BIAS, CAUSAL, PARTIAL,
    )  # fmt: skip
    # The running maximum keeps every exponent at 0 or below, so no exponential overflows.
    larger = tl.maximum(largest, tl.max(scores, 1))
    base = larger
    if PARTIAL or BIAS or MASK == _ADDITIVE:
        base = tl.where(larger == float("-inf"), 0.0, larger)  # so far, no key that can be seen
    shares = tl.exp2((scores - base[:, None]) * _LOG2_E)
    decay = tl.exp2((largest - base) * _LOG2_E)
    # The sum precedes dropout: the softmax divides by all exponentials.
    total = total * decay + tl.sum(shares, 1)
    if DROPOUT:
        kept = _keep_mask(streams, first_key, key_offset, threshold, bits_word, BLOCK_N, DROPOUT)
        shares = tl.where(kept, shares, 0.0)
    values = _load(
        value + keys[:, None] * value_stride + value_dims[None, :], keys[:, None], value_dims[None, :], num_keys,
        VALUE_DIM, PARTIAL, VALUE_DIM != BLOCK_V,
    )  # fmt: skip
    accumulated = _product(shares.to(values.dtype), values, accumulated * decay[:, None], PRECISION)
    return accumulated, larger, total


@_compiled
def forward_kernel(
    query, key, value, output, sums, row_keys, bits, mask, bias, tiles, starts, scale, threshold, kept_scale,
    query_strides, key_strides, value_strides, output_strides,
    sums_part, sums_row, sums_head, mask_row, mask_head, mask_query, mask_key,
    bias_row, bias_head, bias_query, bias_key, bits_row, bits_head, bits_word, tiles_row, tiles_head, tiles_block,
    num_heads, group, num_queries, num_keys, num_blocks, head_offset, query_offset, key_offset,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNIT_M: tl.constexpr, UNIT_N: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, TILES: tl.constexpr,
    JOINED: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Compute the output of a tile of queries, and the maximum and the binary logarithm of the sum of each row."""
    mask_strides = _strides_of(mask_row, mask_head, mask_query, mask_key, UNIT)
    bias_strides = _strides_of(bias_row, bias_head, bias_query, bias_key, UNIT)
    program = tl.program_id(0)
    block = num_blocks - 1 - program % num_blocks  # under a causal mask, the longest first
    head, row = (program // num_blocks) % num_heads, (program // num_blocks // num_heads).to(tl.int64)
    first_query = block * BLOCK_M
    start = row * 0
    if JOINED:
        start, num_queries = _joined_row(starts, row)
        num_keys = num_queries
    # With joined rows, the grid is that of the longest row.
    if first_query >= num_queries:
        return
    queries, dims, value_dims = first_query + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    streams = _streams(
        row_keys, bits, row, head, start, queries, head_offset, query_offset, bits_row, bits_head, DROPOUT
    )  # fmt: skip
    query += row * query_strides[0] + head * query_strides[1] + start * query_strides[2]
    key += row * key_strides[0] + (head // group) * key_strides[1] + start * key_strides[2]
    value += row * value_strides[0] + (head // group) * value_strides[1] + start * value_strides[2]
    output += row * output_strides[0] + head * output_strides[1] + start * output_strides[2]
    sums += row * sums_row + head * sums_head + start
    if MASK and MASK != _WINDOW:
        mask += row * mask_strides[0] + head * mask_strides[1]
    if BIAS:
        bias += row * bias_strides[0] + head * bias_strides[1]
    if TILES:
        tiles += row * tiles_row + head * tiles_head + (first_query // UNIT_M) * tiles_block
    rows = _load(
        query + queries[:, None] * query_strides[2] + dims[None, :], queries[:, None], dims[None, :], num_queries,
        HEAD_DIM, True, HEAD_DIM != BLOCK_D,
    )  # fmt: skip
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    accumulated = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    whole, partial, end = _key_pieces(tiles, first_query, num_keys, mask, BLOCK_M, BLOCK_N, UNIT_N, CAUSAL, TILES, MASK)
    for index in range(0, whole):
        first_key = index * BLOCK_N
        if TILES:
            first_key = _piece(tiles, index, UNIT_N, BLOCK_N)
        accumulated, largest, total = _forward_piece(
            accumulated, largest, total, rows, first_key, key, value, streams, scale, threshold, queries, num_queries,
            num_keys, key_strides[2], value_strides[2], mask, mask_strides, bias, bias_strides, key_offset, bits_word,
            HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_N, MASK, BIAS, CAUSAL, DROPOUT, PRECISION, False,
        )  # fmt: skip
    for index in range(partial, end):
        first_key = index * BLOCK_N
        if TILES:
            first_key = _piece(tiles, index, UNIT_N, BLOCK_N)
        accumulated, largest, total = _forward_piece(
            accumulated, largest, total, rows, first_key, key, value, streams, scale, threshold, queries, num_queries,
            num_keys, key_strides[2], value_strides[2], mask, mask_strides, bias, bias_strides, key_offset, bits_word,
            HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_N, MASK, BIAS, CAUSAL, DROPOUT, PRECISION, True,
        )  # fmt: skip
    # The sum of the row and the scale of dropout are one factor of the output, and multiply no tile.
    accumulated = accumulated * (kept_scale / total)[:, None]
    exists = queries < num_queries
    tl.store(
        output + queries[:, None] * output_strides[2] + value_dims[None, :], accumulated.to(output.dtype.element_ty),
        mask=exists[:, None] & (value_dims[None, :] < VALUE_DIM),
    )  # fmt: skip
    # Their sum is the logarithm of the sum of exponentials. It cannot hold the second part of a row without a visible
    # key: its maximum is the lowest number, to which no logarithm adds anything.
    tl.store(sums + queries, largest, mask=exists)
    tl.store(sums + sums_part + queries, tl.log2(total), mask=exists)


@triton.jit
def _query_gradient_piece(
    gradient, query, output_gradient, largest, logarithm, delta, first_key, key, value, streams, scale, threshold,
    kept_scale, queries, num_queries, num_keys, key_stride, value_stride, mask, mask_strides, bias, bias_strides,
    key_offset, bits_word,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Add the part of the keys from `first_key` on to the gradient of a tile of queries."""
    keys, dims, value_dims = first_key + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    columns = _load(
        key + keys[None, :] * key_stride + dims[:, None], dims[:, None], keys[None, :], HEAD_DIM, num_keys,
        HEAD_DIM != BLOCK_D, PARTIAL,
    )  # fmt: skip
    scores = _scores(
        _product(query, columns, None, PRECISION), scale, queries[:, None], keys[None, :], num_queries,
        num_keys, mask, mask_strides, bias, bias_strides, MASK, BIAS, CAUSAL, PARTIAL,
    )  # fmt: skip
    # The exponential relative to the maximum, divided by the sum, given as its binary logarithm.
    probabilities = tl.exp2((scores - largest[:, None]) * _LOG2_E - logarithm[:, None])
    values = _load(
        value + keys[None, :] * value_stride + value_dims[:, None], value_dims[:, None], keys[None, :], VALUE_DIM,
        num_keys, VALUE_DIM != BLOCK_V, PARTIAL,
    )  # fmt: skip
    dropped = _product(output_gradient, values, None, PRECISION) * kept_scale
    if DROPOUT:
        kept = _keep_mask(streams, first_key, key_offset, threshold, bits_word, BLOCK_N, DROPOUT)
        dropped = tl.where(kept, dropped, 0.0)
    of_scores = probabilities * (dropped - delta[:, None])
    return _product(of_scores.to(columns.dtype), tl.trans(columns), gradient, PRECISION)


@_compiled
def query_gradient_kernel(
    query, key, value, output, output_gradient, query_gradient, sums, deltas, row_keys, bits, mask, bias, tiles, starts,
    scale, threshold, kept_scale,
    query_strides, key_strides, value_strides, output_strides, output_gradient_strides, query_gradient_strides,
    sums_part, sums_row, sums_head, mask_row, mask_head, mask_query, mask_key,
    bias_row, bias_head, bias_query, bias_key, bits_row, bits_head, bits_word, tiles_row, tiles_head, tiles_block,
    num_heads, group, num_queries, num_keys, num_blocks, head_offset, query_offset, key_offset,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNIT_M: tl.constexpr, UNIT_N: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, TILES: tl.constexpr,
    JOINED: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a tile of queries, and `deltas`: the sums of output times its gradient, `[queries]`."""
    mask_strides = _strides_of(mask_row, mask_head, mask_query, mask_key, UNIT)
    bias_strides = _strides_of(bias_row, bias_head, bias_query, bias_key, UNIT)
    program = tl.program_id(0)
    block = num_blocks - 1 - program % num_blocks
    head, row = (program // num_blocks) % num_heads, (program // num_blocks // num_heads).to(tl.int64)
    first_query = block * BLOCK_M
    start = row * 0
    if JOINED:
        start, num_queries = _joined_row(starts, row)
        num_keys = num_queries
    if first_query >= num_queries:
        return
    queries, dims, value_dims = first_query + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    streams = _streams(
        row_keys, bits, row, head, start, queries, head_offset, query_offset, bits_row, bits_head, DROPOUT
    )  # fmt: skip
    query += row * query_strides[0] + head * query_strides[1] + start * query_strides[2]
    key += row * key_strides[0] + (head // group) * key_strides[1] + start * key_strides[2]
    value += row * value_strides[0] + (head // group) * value_strides[1] + start * value_strides[2]
    output += row * output_strides[0] + head * output_strides[1] + start * output_strides[2]
    output_gradient += row * output_gradient_strides[0] + head * output_gradient_strides[1]
    output_gradient += start * output_gradient_strides[2]
    query_gradient += row * query_gradient_strides[0] + head * query_gradient_strides[1]
    query_gradient += start * query_gradient_strides[2]
    sums += row * sums_row + head * sums_head + start
    deltas += row * sums_row + head * sums_head + start
    if MASK and MASK != _WINDOW:
        mask += row * mask_strides[0] + head * mask_strides[1]
    if BIAS:
        bias += row * bias_strides[0] + head * bias_strides[1]
    if TILES:
        tiles += row * tiles_row + head * tiles_head + (first_query // UNIT_M) * tiles_block
    rows = _load(
        query + queries[:, None] * query_strides[2] + dims[None, :], queries[:, None], dims[None, :], num_queries,
        HEAD_DIM, True, HEAD_DIM != BLOCK_D,
    )  # fmt: skip
    of_output = _load(
        output_gradient + queries[:, None] * output_gradient_strides[2] + value_dims[None, :], queries[:, None],
        value_dims[None, :], num_queries, VALUE_DIM, True, VALUE_DIM != BLOCK_V,
    )  # fmt: skip
    outputs = _load(
        output + queries[:, None] * output_strides[2] + value_dims[None, :], queries[:, None], value_dims[None, :],
        num_queries, VALUE_DIM, True, VALUE_DIM != BLOCK_V,
    )  # fmt: skip
    exists = queries < num_queries
    # The mean of the probabilities' gradient, from the output, because no tile has a whole row.
    delta = tl.sum(outputs.to(tl.float32) * of_output.to(tl.float32), 1)
    tl.store(deltas + queries, delta, mask=exists)
    largest = tl.load(sums + queries, mask=exists, other=0.0)
    logarithm = tl.load(sums + sums_part + queries, mask=exists, other=0.0)
    gradient = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    whole, partial, end = _key_pieces(tiles, first_query, num_keys, mask, BLOCK_M, BLOCK_N, UNIT_N, CAUSAL, TILES, MASK)
    for index in range(0, whole):
        first_key = index * BLOCK_N
        if TILES:
            first_key = _piece(tiles, index, UNIT_N, BLOCK_N)
        gradient = _query_gradient_piece(
            gradient, rows, of_output, largest, logarithm, delta, first_key, key, value, streams, scale, threshold,
            kept_scale, queries, num_queries, num_keys, key_strides[2], value_strides[2], mask, mask_strides, bias,
            bias_strides, key_offset, bits_word,
            HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_N, MASK, BIAS, CAUSAL, DROPOUT, PRECISION, False,
        )  # fmt: skip
    for index in range(partial, end):
        first_key = index * BLOCK_N
        if TILES:
            first_key = _piece(tiles, index, UNIT_N, BLOCK_N)
        gradient = _query_gradient_piece(
            gradient, rows, of_output, largest, logarithm, delta, first_key, key, value, streams, scale, threshold,
            kept_scale, queries, num_queries, num_keys, key_strides[2], value_strides[2], mask, mask_strides, bias,
            bias_strides, key_offset, bits_word,
            HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_N, MASK, BIAS, CAUSAL, DROPOUT, PRECISION, True,
        )  # fmt: skip
    tl.store(
        query_gradient + queries[:, None] * query_gradient_strides[2] + dims[None, :],
        (gradient * scale).to(query_gradient.dtype.element_ty),
        mask=exists[:, None] & (dims[None, :] < HEAD_DIM),
    )


@triton.jit
def _key_gradient_piece(
    key_gradient, value_gradient, keys, rows, values, first_query, query, output_gradient, sums, deltas, row_keys,
    bits, row, head, start, scale, threshold, kept_scale, num_queries, num_keys, query_stride, output_gradient_stride,
    sums_stride, mask, mask_strides, bias, bias_strides, bits_row, bits_head, bits_word, first_key, head_offset,
    query_offset, key_offset,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Add the part of the queries from `first_query` on to the gradients of a tile of keys and values.

    Scores are transposed, `[keys, queries]`, so that the products read them as they are computed.
    """
    queries, dims, value_dims = first_query + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    exists = queries < num_queries
    columns = _load(
        query + queries[None, :] * query_stride + dims[:, None], dims[:, None], queries[None, :], HEAD_DIM,
        num_queries, HEAD_DIM != BLOCK_D, True,
    )  # fmt: skip
    largest = tl.load(sums + queries, mask=exists, other=0.0)
    logarithm = tl.load(sums + sums_stride + queries, mask=exists, other=0.0)
    scores = _scores(
        _product(rows, columns, None, PRECISION), scale, queries[None, :], keys[:, None], num_queries,
        num_keys, mask, mask_strides, bias, bias_strides, MASK, BIAS, CAUSAL, PARTIAL,
    )  # fmt: skip
    probabilities = tl.exp2((scores - largest[None, :]) * _LOG2_E - logarithm[None, :])
    of_output = _load(
        output_gradient + queries[:, None] * output_gradient_stride + value_dims[None, :], queries[:, None],
        value_dims[None, :], num_queries, VALUE_DIM, True, VALUE_DIM != BLOCK_V,
    )  # fmt: skip
    dropped = _product(values, tl.trans(of_output), None, PRECISION) * kept_scale
    shares = probabilities
    if DROPOUT:
        streams = _streams(
            row_keys, bits, row, head, start, queries, head_offset, query_offset, bits_row, bits_head, DROPOUT
        )  # fmt: skip
        # Found for each query, since a word serves neighbouring keys of one query.
        kept = tl.trans(_keep_mask(streams, first_key, key_offset, threshold, bits_word, BLOCK_N, DROPOUT))
        shares = tl.where(kept, probabilities, 0.0)
        dropped = tl.where(kept, dropped, 0.0)
    value_gradient = _product(shares.to(of_output.dtype), of_output, value_gradient, PRECISION)
    delta = tl.load(deltas + queries, mask=exists, other=0.0)
    of_scores = probabilities * (dropped - delta[None, :])
    key_gradient = _product(of_scores.to(columns.dtype), tl.trans(columns), key_gradient, PRECISION)
    return key_gradient, value_gradient


@_compiled
def key_gradient_kernel(
    query, key, value, output_gradient, key_gradient, value_gradient, sums, deltas, row_keys, bits, mask, bias, tiles,
    starts, scale, threshold, kept_scale,
    query_strides, key_strides, value_strides, output_gradient_strides, key_gradient_strides, value_gradient_strides,
    sums_part, sums_row, sums_head, mask_row, mask_head, mask_query, mask_key,
    bias_row, bias_head, bias_query, bias_key, bits_row, bits_head, bits_word, tiles_row, tiles_head, tiles_block,
    num_key_heads, group, num_queries, num_keys, num_blocks, head_offset, query_offset, key_offset,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNIT_M: tl.constexpr, UNIT_N: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, TILES: tl.constexpr,
    JOINED: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a tile of keys and values; the heads of their group are summed here."""
    mask_strides = _strides_of(mask_row, mask_head, mask_query, mask_key, UNIT)
    bias_strides = _strides_of(bias_row, bias_head, bias_query, bias_key, UNIT)
    program = tl.program_id(0)
    # Under a causal mask, the first keys are seen by the most queries, so this order too has the longest first.
    block = program % num_blocks
    key_head, row = (program // num_blocks) % num_key_heads, (program // num_blocks // num_key_heads).to(tl.int64)
    first_key = block * BLOCK_N
    start = row * 0
    if JOINED:
        start, num_queries = _joined_row(starts, row)
        num_keys = num_queries
    if first_key >= num_keys:
        return
    keys, dims, value_dims = first_key + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    key += row * key_strides[0] + key_head * key_strides[1] + start * key_strides[2]
    value += row * value_strides[0] + key_head * value_strides[1] + start * value_strides[2]
    rows = _load(
        key + keys[:, None] * key_strides[2] + dims[None, :], keys[:, None], dims[None, :], num_keys, HEAD_DIM, True,
        HEAD_DIM != BLOCK_D,
    )  # fmt: skip
    values = _load(
        value + keys[:, None] * value_strides[2] + value_dims[None, :], keys[:, None], value_dims[None, :], num_keys,
        VALUE_DIM, True, VALUE_DIM != BLOCK_V,
    )  # fmt: skip
    of_keys = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    of_values = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    # One program adds the heads of a group in their order, without atomics.
    for head in range(key_head * group, (key_head + 1) * group):
        queries = query + row * query_strides[0] + head * query_strides[1] + start * query_strides[2]
        of_output = output_gradient + row * output_gradient_strides[0] + head * output_gradient_strides[1]
        of_output += start * output_gradient_strides[2]
        place = row * sums_row + head * sums_head + start
        own_mask, own_bias, own_tiles = mask, bias, tiles
        if MASK and MASK != _WINDOW:
            own_mask = mask + row * mask_strides[0] + head * mask_strides[1]
        if BIAS:
            own_bias = bias + row * bias_strides[0] + head * bias_strides[1]
        if TILES:
            own_tiles = tiles + row * tiles_row + head * tiles_head
            own_tiles += (first_key // UNIT_N) * tiles_block
        low, middle, high = _query_pieces(
            own_tiles, first_key, num_queries, num_keys, mask, BLOCK_M, BLOCK_N, UNIT_M, CAUSAL, TILES, MASK
        )
        if TILES:
            # A list has the whole pieces first. Without one, the partial pieces of a causal mask come first.
            partial_first, partial_end, whole_first, whole_end = low, middle, high, low
        else:
            partial_first, partial_end, whole_first, whole_end = low, middle, middle, high
        for index in range(whole_first, whole_end):
            first_query = index * BLOCK_M
            if TILES:
                first_query = _piece(own_tiles, index, UNIT_M, BLOCK_M)
            of_keys, of_values = _key_gradient_piece(
                of_keys, of_values, keys, rows, values, first_query, queries, of_output, sums + place, deltas + place,
                row_keys, bits, row, head, start, scale, threshold, kept_scale, num_queries, num_keys,
                query_strides[2], output_gradient_strides[2], sums_part, own_mask, mask_strides, own_bias,
                bias_strides, bits_row, bits_head, bits_word, first_key, head_offset, query_offset, key_offset,
                HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N, MASK, BIAS, CAUSAL, DROPOUT, PRECISION, False,
            )  # fmt: skip
        for index in range(partial_first, partial_end):
            first_query = index * BLOCK_M
            if TILES:
                first_query = _piece(own_tiles, index, UNIT_M, BLOCK_M)
            of_keys, of_values = _key_gradient_piece(
                of_keys, of_values, keys, rows, values, first_query, queries, of_output, sums + place, deltas + place,
                row_keys, bits, row, head, start, scale, threshold, kept_scale, num_queries, num_keys,
                query_strides[2], output_gradient_strides[2], sums_part, own_mask, mask_strides, own_bias,
                bias_strides, bits_row, bits_head, bits_word, first_key, head_offset, query_offset, key_offset,
                HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N, MASK, BIAS, CAUSAL, DROPOUT, PRECISION, True,
            )  # fmt: skip
    exists = (keys < num_keys)[:, None]
    key_gradient += row * key_gradient_strides[0] + key_head * key_gradient_strides[1]
    key_gradient += start * key_gradient_strides[2]
    value_gradient += row * value_gradient_strides[0] + key_head * value_gradient_strides[1]
    value_gradient += start * value_gradient_strides[2]
    tl.store(
        key_gradient + keys[:, None] * key_gradient_strides[2] + dims[None, :],
        # The scores are products times `scale`, so it multiplies the sum of all pieces once.
        (of_keys * scale).to(key_gradient.dtype.element_ty),
        mask=exists & (dims[None, :] < HEAD_DIM),
    )
    tl.store(
        value_gradient + keys[:, None] * value_gradient_strides[2] + value_dims[None, :],
        (of_values * kept_scale).to(value_gradient.dtype.element_ty),
        mask=exists & (value_dims[None, :] < VALUE_DIM),
    )


@_compiled
def bias_gradient_kernel(
    query, key, value, output_gradient, bias_gradient, sums, deltas, row_keys, bits, mask, bias,
    scale, threshold, kept_scale,
    query_strides, key_strides, value_strides, output_gradient_strides, bias_gradient_row, bias_gradient_head,
    bias_gradient_query, sums_part, sums_row, sums_head,
    mask_row, mask_head, mask_query, mask_key, bias_row, bias_head, bias_query, bias_key,
    bits_row, bits_head, bits_word, num_rows, num_heads, bias_rows, bias_heads, group, num_queries, num_keys,
    num_query_blocks, num_key_blocks, head_offset, query_offset, key_offset,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the gradient of the bias; the rows and heads that share an element are summed here."""
    mask_strides = _strides_of(mask_row, mask_head, mask_query, mask_key, UNIT)
    bias_strides = _strides_of(bias_row, bias_head, bias_query, bias_key, UNIT)
    program = tl.program_id(0)
    first_key = (program % num_key_blocks) * BLOCK_N
    first_query = ((program // num_key_blocks) % num_query_blocks) * BLOCK_M
    own_head = (program // num_key_blocks // num_query_blocks) % bias_heads
    own_row = (program // num_key_blocks // num_query_blocks // bias_heads).to(tl.int64)
    queries, keys = first_query + tl.arange(0, BLOCK_M), first_key + tl.arange(0, BLOCK_N)
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    gradient = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # A bias has one row or all, and one head or all; these rows and heads have added the same tile.
    sharing = num_rows // bias_rows * (num_heads // bias_heads)
    if CAUSAL:
        sharing = tl.where(first_key >= first_query + BLOCK_M, 0, sharing)  # no query sees these keys
    for index in range(0, sharing):
        head = own_head + index % (num_heads // bias_heads)
        row = own_row + index // (num_heads // bias_heads)
        exists = queries < num_queries
        place = row * sums_row + head * sums_head + queries
        rows = _load(
            query + row * query_strides[0] + head * query_strides[1]
            + queries[:, None] * query_strides[2] + dims[None, :],
            queries[:, None], dims[None, :], num_queries, HEAD_DIM, True, HEAD_DIM != BLOCK_D,
        )  # fmt: skip
        columns = _load(
            key + row * key_strides[0] + (head // group) * key_strides[1]
            + keys[None, :] * key_strides[2] + dims[:, None],
            dims[:, None], keys[None, :], HEAD_DIM, num_keys, HEAD_DIM != BLOCK_D, True,
        )  # fmt: skip
        own_mask = mask
        if MASK and MASK != _WINDOW:
            own_mask = mask + row * mask_strides[0] + head * mask_strides[1]
        scores = _scores(
            _product(rows, columns, None, PRECISION), scale, queries[:, None], keys[None, :], num_queries,
            num_keys, own_mask, mask_strides, bias + row * bias_strides[0] + head * bias_strides[1], bias_strides,
            MASK, True, CAUSAL, True,
        )  # fmt: skip
        largest = tl.load(sums + place, mask=exists, other=0.0)
        logarithm = tl.load(sums + sums_part + place, mask=exists, other=0.0)
        probabilities = tl.exp2((scores - largest[:, None]) * _LOG2_E - logarithm[:, None])
        of_output = _load(
            output_gradient + row * output_gradient_strides[0] + head * output_gradient_strides[1]
            + queries[:, None] * output_gradient_strides[2] + value_dims[None, :],
            queries[:, None], value_dims[None, :], num_queries, VALUE_DIM, True, VALUE_DIM != BLOCK_V,
        )  # fmt: skip
        values = _load(
            value + row * value_strides[0] + (head // group) * value_strides[1]
            + keys[None, :] * value_strides[2] + value_dims[:, None],
            value_dims[:, None], keys[None, :], VALUE_DIM, num_keys, VALUE_DIM != BLOCK_V, True,
        )  # fmt: skip
        dropped = _product(of_output, values, None, PRECISION) * kept_scale
        if DROPOUT:
            streams = _streams(
                row_keys, bits, row, head, 0, queries, head_offset, query_offset, bits_row, bits_head, DROPOUT
            )  # fmt: skip
            kept = _keep_mask(streams, first_key, key_offset, threshold, bits_word, BLOCK_N, DROPOUT)
            dropped = tl.where(kept, dropped, 0.0)
        delta = tl.load(deltas + place, mask=exists, other=0.0)
        gradient += probabilities * (dropped - delta[:, None])
    tl.store(
        bias_gradient + own_row * bias_gradient_row + own_head * bias_gradient_head
        + queries[:, None].to(tl.int64) * bias_gradient_query + keys[None, :],
        gradient.to(bias_gradient.dtype.element_ty),
        mask=(queries < num_queries)[:, None] & (keys < num_keys)[None, :],
    )  # fmt: skip


@triton.jit
def _visible(mask, strides, query, key, num_queries, num_keys):
    """Return the part of a boolean mask at a tile, `[queries, keys]`; False outside of the mask."""
    exists = (query < num_queries)[:, None] & (key < num_keys)[None, :]
    pointers = mask + query.to(tl.int64)[:, None] * strides[2] + key[None, :] * strides[3]
    return tl.load(pointers, mask=exists, other=0).to(tl.int32) != 0


@_compiled
def key_tiles_kernel(
    mask, kinds, tiles, mask_row, mask_head, mask_query, mask_key, mask_heads, num_queries, num_keys, query_tiles,
    key_tiles, UNIT_M: tl.constexpr, UNIT_N: tl.constexpr, OTHER_KEYS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """List the tiles of keys that each tile of queries sees: those that it sees whole, then those that it sees in part.

    A query that sees no key sees all of them alike, as in the eager function; then no tile is left out, unless
    `OTHER_KEYS` is 1: the query sees keys of other calls. `kinds` gets 2 for a whole tile, 1 for a part and 0 for none,
    `[batch, heads, tiles of queries, tiles of keys]`.
    """
    mask_strides = _strides_of(mask_row, mask_head, mask_query, mask_key, UNIT)
    program = tl.program_id(0)
    tile, head = program % query_tiles, (program // query_tiles) % mask_heads
    row = (program // query_tiles // mask_heads).to(tl.int64)
    mask += row * mask_strides[0] + head * mask_strides[1]
    kinds += program.to(tl.int64) * key_tiles
    tiles += program.to(tl.int64) * (2 + key_tiles)
    query = tile * UNIT_M + tl.arange(0, UNIT_M)
    seen = tl.full((UNIT_M,), OTHER_KEYS, tl.int32)
    num_whole = tile * 0
    for index in range(0, key_tiles):
        key = index * UNIT_N + tl.arange(0, UNIT_N)
        number = tl.sum(_visible(mask, mask_strides, query, key, num_queries, num_keys).to(tl.int32), 1)
        seen += number
        num_whole += (tl.sum(number, 0) == UNIT_M * UNIT_N).to(tl.int32)
    is_blind = tl.sum(((seen == 0) & (query < num_queries)).to(tl.int32), 0) > 0
    # The list begins with the whole tiles, so the first pass has counted them.
    next_whole, next_part = tile * 0, num_whole
    for index in range(0, key_tiles):
        key = index * UNIT_N + tl.arange(0, UNIT_N)
        number = tl.sum(
            tl.sum(_visible(mask, mask_strides, query, key, num_queries, num_keys).to(tl.int32), 1), 0
        )  # fmt: skip
        is_whole = number == UNIT_M * UNIT_N
        kind = tl.where(is_whole, 2, ((number > 0) | is_blind).to(tl.int32))
        tl.store(kinds + index, kind)
        tl.store(tiles + 2 + tl.where(is_whole, next_whole, next_part), index, mask=kind > 0)
        next_whole += (kind == 2).to(tl.int32)
        next_part += (kind == 1).to(tl.int32)
    tl.store(tiles, num_whole)
    tl.store(tiles + 1, next_part - num_whole)


@_compiled
def query_tiles_kernel(kinds, tiles, query_tiles, key_tiles):
    """List the tiles of queries that see each tile of keys, from the kinds of `key_tiles_kernel`."""
    program = tl.program_id(0)
    tile, row = program % key_tiles, (program // key_tiles).to(tl.int64)
    kinds += row * query_tiles * key_tiles + tile
    tiles += program.to(tl.int64) * (2 + query_tiles)
    num_whole = tile * 0
    for index in range(0, query_tiles):
        num_whole += (tl.load(kinds + index * key_tiles) == 2).to(tl.int32)
    next_whole, next_part = tile * 0, num_whole
    for index in range(0, query_tiles):
        kind = tl.load(kinds + index * key_tiles)
        tl.store(tiles + 2 + tl.where(kind == 2, next_whole, next_part), index, mask=kind > 0)
        next_whole += (kind == 2).to(tl.int32)
        next_part += (kind == 1).to(tl.int32)
    tl.store(tiles, num_whole)
    tl.store(tiles + 1, next_part - num_whole)
