"""The Triton kernel of rotary position embeddings, which reads and writes queries and keys once.

`fused_rotation.py` launches it, and describes the arguments. No product is fused with a sum.
"""

import triton
import triton.language as tl


@triton.jit
def _turn(
    x, output, batch, place, num_heads, x_batch, x_head, x_place, out_batch, out_head, out_place,
    first_cos, second_cos, first_sin, second_sin,
    HALF: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, INVERSE: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Turn the halves of some heads of a token."""
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    exists = (head < num_heads) & (column < HALF)
    source = x + batch * x_batch + place * x_place + head * x_head + column
    first = tl.load(source, mask=exists, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=exists, other=0.0).to(tl.float32)
    low, high = first * first_cos, second * second_cos
    if INVERSE:
        of_second, of_first = second * second_sin, -(first * first_sin)
    else:
        of_second, of_first = -(second * first_sin), first * second_sin
    if EACH:
        kind = output.dtype.element_ty
        low, high = low.to(kind).to(tl.float32), high.to(kind).to(tl.float32)
        of_second, of_first = of_second.to(kind).to(tl.float32), of_first.to(kind).to(tl.float32)
    target = output + batch * out_batch + place * out_place + head * out_head + column
    tl.store(target, (low + of_second).to(output.dtype.element_ty), mask=exists)
    tl.store(target + HALF, (high + of_first).to(output.dtype.element_ty), mask=exists)


# Lengths of rows vary: no kernel is compiled again for them.
@triton.jit(do_not_specialize=["length", "cos_batch", "sin_batch"])
def rotary_kernel(
    q, k, q_output, k_output, cos, sin, length, cos_batch, sin_batch, cos_place, sin_place,
    q_heads, q_batch, q_head, q_place, q_out_batch, q_out_head, q_out_place,
    k_heads, k_batch, k_head, k_place, k_out_batch, k_out_head, k_out_place,
    HALF: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, INVERSE: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Turn queries and keys of a token; a program has `HEADS` heads of each."""
    # In 64 bits, because a microbatch may have more than 2**31 elements.
    token = tl.program_id(0).to(tl.int64)
    batch, place = token // length, token % length
    column = tl.arange(0, WIDTH)[None, :]
    exists = column < HALF
    of_cos, of_sin = cos + batch * cos_batch + place * cos_place, sin + batch * sin_batch + place * sin_place
    first_cos = tl.load(of_cos + column, mask=exists, other=0.0).to(tl.float32)
    second_cos = tl.load(of_cos + HALF + column, mask=exists, other=0.0).to(tl.float32)
    first_sin = tl.load(of_sin + column, mask=exists, other=0.0).to(tl.float32)
    second_sin = tl.load(of_sin + HALF + column, mask=exists, other=0.0).to(tl.float32)
    _turn(
        q, q_output, batch, place, q_heads, q_batch, q_head, q_place, q_out_batch, q_out_head, q_out_place,
        first_cos, second_cos, first_sin, second_sin, HALF, WIDTH, HEADS, INVERSE, EACH,
    )  # fmt: skip
    _turn(
        k, k_output, batch, place, k_heads, k_batch, k_head, k_place, k_out_batch, k_out_head, k_out_place,
        first_cos, second_cos, first_sin, second_sin, HALF, WIDTH, HEADS, INVERSE, EACH,
    )  # fmt: skip
