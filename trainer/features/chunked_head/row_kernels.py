"""The Triton kernel of softmax, loss and gradient over a vocabulary; `fused_rows.py` launches it.

It computes in fp32. Logits in 16 bits are converted in registers, so no copy of them in fp32 is in memory.
"""

import triton
import triton.language as tl

_VARYING = ("num_rows", "start", "vocabulary")


@triton.jit(do_not_specialize=_VARYING)
def rows_kernel(
    logits, labels, statistics, gradients, num_rows, width, num_columns, start, vocabulary,
    IGNORED: tl.constexpr, FINDS: tl.constexpr, WRITES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the statistics of a row, or replace its logits by their gradient, or both; a program has one row."""
    row = tl.program_id(0)
    # In 64 bits, because logits may have more than 2**31 elements.
    place = logits + row.to(tl.int64) * width
    label = tl.load(labels + row)
    column = label - start
    is_labelled = label != IGNORED
    has_label = is_labelled & (column >= 0) & (column < num_columns)
    if FINDS:
        maximum = -3.4028234663852886e38  # the lowest number: -inf minus -inf is NaN
        total = 0.0
        for first in range(0, num_columns, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            is_other = (columns < num_columns) & (columns != column)  # no column is that of an ignored label
            value = tl.load(place + columns, mask=is_other, other=float("-inf")).to(tl.float32)
            larger = tl.maximum(maximum, tl.max(value, 0))
            total = total * tl.exp(maximum - larger) + tl.sum(tl.exp(value - larger), 0)
            maximum = larger
        at_label = tl.load(place + column, mask=has_label, other=0.0).to(tl.float32)
        # A label outside of the vocabulary has the loss NaN: a kernel cannot raise an error.
        at_label = tl.where(is_labelled & ((label < 0) | (label >= vocabulary)), float("nan"), at_label)
        tl.store(statistics + row, maximum)
        tl.store(statistics + num_rows + row, total)
        tl.store(statistics + 2 * num_rows + row, at_label)
    else:
        maximum = tl.load(statistics + row)
        total = tl.load(statistics + num_rows + row)
        at_label = tl.load(statistics + 2 * num_rows + row)
    if WRITES:
        wrong = 1.0 / (1.0 + tl.exp(at_label - maximum - tl.log(total)))
        if gradients is not None:
            wrong *= tl.load(gradients + row).to(tl.float32)
        wrong = tl.where(is_labelled, wrong, 0.0)
        share = tl.where(total == 0.0, 0.0, wrong / total)  # a vocabulary of one token has no other column
        for first in range(0, width, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            # Padded columns read as -inf, so their gradient is 0.
            value = tl.load(place + columns, mask=columns < num_columns, other=float("-inf")).to(tl.float32)
            slope = tl.where((columns == column) & has_label, -wrong, tl.exp(value - maximum) * share)
            tl.store(place + columns, slope.to(logits.dtype.element_ty), mask=columns < width)
