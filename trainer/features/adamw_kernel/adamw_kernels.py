"""Triton kernels of AdamW over a list of tensors, which they find by their addresses.

`operations.py` launches the kernels, and describes the arguments. Every operation rounds as IEEE 754 and none is fused
with another: the results are those of torch's operations in the order of `torch.optim.adam._single_tensor_adam`.
"""

import triton
import triton.language as tl

WEIGHT, FIRST, SECOND, SIZE, ROW, STRIDE, PROGRAM, COLUMNS = (tl.constexpr(column) for column in range(8))
"""The columns of a table of tensors; see `operations.update`."""
GRADIENT, COPY, IS_ROUNDED, WORDS = (tl.constexpr(column) for column in range(4))
"""The columns of the words of a step; learning rates follow them."""
_STEP_BITS = tl.constexpr(24)  # fp32 counts to 2**24
_ALIGNED_BYTES = tl.constexpr(16)  # of one access to memory


@triton.jit
def _power(base, exponent):
    """Return powers in fp64 with integers below 2**24 as exponents."""
    power = base * 0.0 + 1.0
    for bit in range(_STEP_BITS):
        power = tl.where((exponent >> bit) & 1 == 1, power * base, power)
        base = base * base
    return power


@triton.jit
def corrections_kernel(corrections, steps, words, groups, settings, flag, num_tensors, TILE: tl.constexpr):
    """Count a step of each tensor with a gradient, and compute the factors of its update."""
    tensor = tl.program_id(0) * TILE + tl.arange(0, TILE)
    exists = tensor < num_tensors
    counted = (tl.load(words + GRADIENT * num_tensors + tensor, mask=exists, other=0) != 0).to(tl.float32)
    if flag is not None:
        counted *= (tl.load(flag) == 0.0).to(tl.float32)
    step = tl.load(steps + tensor, mask=exists, other=1.0) + counted
    tl.store(steps + tensor, step, mask=exists)
    group = tl.load(groups + tensor, mask=exists, other=0)
    rates = (words + WORDS * num_tensors).to(tl.pointer_type(tl.float64), bitcast=True)
    rate, decay = tl.load(rates + group), tl.load(settings + 2 + group)
    # In fp64: `1 - beta ** step` is near 0 in the first steps.
    first = 1.0 - _power(tl.load(settings) + decay * 0.0, step.to(tl.int32))
    second = 1.0 - _power(tl.load(settings + 1) + decay * 0.0, step.to(tl.int32))
    tl.store(corrections + tensor, (1.0 - rate * decay).to(tl.float32), mask=exists)
    tl.store(corrections + num_tensors + tensor, (-rate / first).to(tl.float32), mask=exists)
    tl.store(corrections + 2 * num_tensors + tensor, tl.sqrt(second).to(tl.float32), mask=exists)


@triton.jit
def _rounded(x, kind: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return fp32 numbers in a type of 16 bits, the nearest ones."""
    if INTERPRETED and kind == tl.bfloat16:  # the interpreter cuts bits off
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(kind)


@triton.jit
def _pointer(address, start, kind: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the pointer to the element `start` of a tensor."""
    pointer = address.to(tl.pointer_type(kind)) + start
    if ALIGNED:
        pointer = tl.multiple_of(pointer, _ALIGNED_BYTES)
    return pointer


@triton.jit
def _update_tile(
    weight, first, second, gradient, copy, is_rounded, start, size, row, stride, decay, rate, root, factor,
    share_1, beta_2, share_2, eps, ROUNDED: tl.constexpr, LERPS_UP: tl.constexpr, TILE: tl.constexpr,
    INTERPRETED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Update a tile of a tensor; a whole one has no end within it, and addresses that 16 divides."""
    place = tl.arange(0, TILE)
    if WHOLE:
        exists = None
    else:
        exists = place < size - start
    weights = _pointer(weight, start, tl.float32, WHOLE) + place
    firsts = _pointer(first, start, tl.float32, WHOLE) + place
    seconds = _pointer(second, start, tl.float32, WHOLE) + place
    if is_rounded != 0:
        grad = tl.load(_pointer(gradient, start, ROUNDED, WHOLE) + place, mask=exists).to(tl.float32)
    else:
        grad = tl.load(_pointer(gradient, start, tl.float32, WHOLE) + place, mask=exists)
    grad = grad * factor
    old = tl.load(firsts, mask=exists)
    if LERPS_UP:
        new_first = old + share_1 * (grad - old)
    else:
        new_first = grad - (grad - old) * (1.0 - share_1)
    new_second = tl.load(seconds, mask=exists) * beta_2 + share_2 * grad * grad
    denominator = tl.div_rn(tl.sqrt_rn(new_second), root + tl.zeros_like(new_second)) + eps
    stepped = tl.load(weights, mask=exists) * decay + tl.div_rn(rate * new_first, denominator)
    tl.store(weights, stepped, mask=exists)
    tl.store(firsts, new_first, mask=exists)
    tl.store(seconds, new_second, mask=exists)
    if copy != 0:
        rounded = _rounded(stepped, ROUNDED, INTERPRETED)
        if row == 0:
            tl.store(_pointer(copy, start, ROUNDED, WHOLE) + place, rounded, mask=exists)
        else:
            element = start + place
            apart = copy.to(tl.pointer_type(ROUNDED)) + (element // row) * stride + element % row
            tl.store(apart, rounded, mask=exists)


@triton.jit
def update_kernel(
    words, corrections, table, owners, flag, factor, num_tensors, share_1, beta_2, share_2, eps,
    ROUNDED: tl.constexpr, LERPS_UP: tl.constexpr, TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Update a tile of the tensor that owns the program."""
    if flag is not None and tl.load(flag) != 0:
        return
    program = tl.program_id(0)
    tensor = tl.load(owners + program).to(tl.int64)
    words += tensor
    gradient, copy = tl.load(words + GRADIENT * num_tensors), tl.load(words + COPY * num_tensors)
    if gradient == 0:
        return
    is_rounded = tl.load(words + IS_ROUNDED * num_tensors)
    table += tensor
    weight, first = tl.load(table + WEIGHT * num_tensors), tl.load(table + FIRST * num_tensors)
    second, size = tl.load(table + SECOND * num_tensors), tl.load(table + SIZE * num_tensors)
    row, stride = tl.load(table + ROW * num_tensors), tl.load(table + STRIDE * num_tensors)
    start = (program - tl.load(table + PROGRAM * num_tensors)) * TILE
    corrections += tensor
    decay, rate = tl.load(corrections), tl.load(corrections + num_tensors)
    root = tl.load(corrections + 2 * num_tensors)
    if factor is not None:
        scale = tl.load(factor)
    else:
        scale = 1.0
    is_aligned = (weight | first | second | gradient | copy) % _ALIGNED_BYTES == 0
    # Without a mask and with hints, an access moves 16 bytes of a thread; with them, 4.
    if is_aligned & (start + TILE <= size):
        _update_tile(
            weight, first, second, gradient, copy, is_rounded, start, size, row, stride, decay, rate, root, scale,
            share_1, beta_2, share_2, eps, ROUNDED, LERPS_UP, TILE, INTERPRETED, True,
        )  # fmt: skip
    else:
        _update_tile(
            weight, first, second, gradient, copy, is_rounded, start, size, row, stride, decay, rate, root, scale,
            share_1, beta_2, share_2, eps, ROUNDED, LERPS_UP, TILE, INTERPRETED, False,
        )  # fmt: skip
