"""Triton kernels of dropout with layout-invariant masks, and of their keys.

`fused_dropout.py` launches them, and describes the arguments. Every operation rounds as IEEE 754 and none is fused with
another, so the results are those of torch's operations in `trainer.parallel.dropout`.
"""

import triton
import triton.language as tl

from trainer.features.kernels.random_kernels import FIRST_STRIDE, GAMMA, SECOND_STRIDE, mix

# Numbers that change from batch to batch, and rows of larger tensors: no kernel is compiled again for them.
_VARYING = (
    "row_keys", "token_rows", "token_positions", "num_tokens", "first_size", "second_size", "first", "second",
    "first_word", "threshold",
)  # fmt: skip


@triton.jit(do_not_specialize=_VARYING)
def dropout_kernel(
    x, output, residual, row_keys, token_rows, token_positions, num_tokens, first_size, second_size, first, second,
    num_columns, first_word, threshold, kept_scale, START: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Drop elements of a row of features; a program has `WORDS` random words of four elements each."""
    row = tl.program_id(0)
    if token_rows is None:
        index = row // second_size
        key = tl.load(row_keys + index // first_size).to(tl.uint64)
        key += (index % first_size + first).to(tl.uint64) * FIRST_STRIDE
        key += (row % second_size + second).to(tl.uint64) * SECOND_STRIDE
    else:
        token = row + first
        exists = token < num_tokens
        key = tl.load(row_keys + tl.load(token_rows + token, mask=exists, other=0)).to(tl.uint64)
        key += tl.load(token_positions + token, mask=exists, other=0).to(tl.uint64) * FIRST_STRIDE
        key = tl.where(exists, key, 0)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    words = mix(key + (first_word + word).to(tl.uint64) * GAMMA)
    # A thread has all lanes of its words, so none is computed twice and none is exchanged.
    lane = tl.arange(0, 4)[None, :]
    bits = (words[:, None] >> (16 * lane).to(tl.uint64)).to(tl.uint16).to(tl.int16, bitcast=True)
    factor = tl.where(bits.to(tl.int32) >= threshold, kept_scale, 0.0)
    column = word[:, None] * 4 + lane - START
    exists = column < num_columns
    if START:
        exists &= column >= 0
    # In 64 bits, because activations may have more than 2**31 elements.
    start = row.to(tl.int64) * num_columns
    value = tl.load(x + start + column, mask=exists, other=0.0)
    if residual is None:
        value = value.to(output.dtype.element_ty)  # a gradient may have more digits
    # Rounded before the residual is added, as by two operations of torch.
    result = (value.to(tl.float32) * factor).to(value.dtype)
    if residual is not None:
        result = result.to(tl.float32) + tl.load(residual + start + column, mask=exists, other=0.0).to(tl.float32)
    tl.store(output + start + column, result.to(output.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["num_calls", "num_columns"])
def row_keys_kernel(keys, rows, output, num_calls, num_columns, SIZE: tl.constexpr):
    """Store the keys of rows for each call; a program has `SIZE` of them."""
    element = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    exists = element < num_calls * num_columns
    key = tl.load(keys + element // num_columns, mask=exists, other=0).to(tl.uint64)
    column = element % num_columns
    row = tl.load(rows + column, mask=exists & (column < num_columns - 1), other=0).to(tl.uint64)
    tl.store(output + element, mix(row * GAMMA + key).to(tl.int64), mask=exists)
