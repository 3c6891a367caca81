"""Dropout as a pure function of (seed, step, row of the global batch, site, call of the site, position, head).

A site that runs several times in a forward pass (a layer that ALBERT shares, T5's one dropout for both ends of a
stack) has a mask for each call.

All dropout sites of a model refer to one `DropoutKeys`, which holds the keys of the current microbatch. A recomputation
in the backward pass may run after the forward pass of another microbatch. It must enter a context from `capture()`,
called in the forward pass, to restore the keys of its own microbatch.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.base.errors import UsageError
from trainer.parallel.kernel_support import KERNELS, missing
from trainer.parallel.launching import operation
from trainer.parallel.random import (
    MAX_INDEX_DIMS,
    element_keys,
    keep_mask,
    pointwise_mask,
    quantised,
    row_keys,
    stream_key,
    stream_keys,
    token_keys,
)
from trainer.parallel.rounded_inputs import after_products

if TYPE_CHECKING:
    from trainer.parallel.flat_rows import FlatRows
    from trainer.parallel.sharded_sequence import SequenceCut

REMEDY = "set `training.layout_invariant_dropout` to false, which uses torch's own dropout"


@dataclass(frozen=True)
class MicrobatchKey:
    """The key of the masks of one microbatch: the optimizer step, and the indices `[batch]` (int64) of its rows.

    `flat` are the tokens of the rows, if layers process them without padding. `mask` is 1 for the tokens of each row
    and 0 for its padding, `[batch, positions]`; None: rows have no padding.
    """

    step: int
    rows: Tensor
    flat: FlatRows | None = None
    mask: Tensor | None = None


_Call = tuple[str, int]
"""The name of a site, and the number of its earlier calls in the forward pass."""


class _Draws:
    """The keys of a microbatch's rows, for each call of each site, computed at once before the forward pass.

    A call that no forward pass has made before is computed when it is made.
    """

    def __init__(self, keys: DropoutKeys, key: MicrobatchKey) -> None:
        self.key = key
        self._keys = keys
        self.eager_calls: list[_Call] = []  # outside of compiled layers, in order
        self.calls_of_layers: Counter[int] = Counter()  # of compiled ones
        calls, of_calls = keys.known(key.step, key.rows.device)
        self.table = self._row_keys_of(of_calls) if calls else of_calls.new_empty(0, len(key.rows) + 1)
        self._row_keys = dict(zip(calls, self.table.unbind(), strict=True))

    def row_keys(self, call: _Call) -> Tensor:
        """Return the keys for a call of a site, int64 `[batch + 1]`; the last is that of a mask that all rows share."""
        self.eager_calls.append(call)
        kept = self._row_keys.get(call)
        if kept is None:
            keys = torch.full((1, 1), self._keys.learn(call, self.key.step), device=self.key.rows.device)
            kept = self._row_keys[call] = self._row_keys_of(keys)[0]
        return kept

    def _row_keys_of(self, keys: Tensor) -> Tensor:
        """Return the keys of rows for calls with `keys` [calls, 1], int64 `[calls, batch + 1]`."""
        rows = self.key.rows
        if missing("dropout", rows.device) is None:
            table: Tensor = KERNELS["dropout"].row_keys(keys, rows)
            return table
        # Row 0 comes last, for masks that all rows share.
        return row_keys(keys, torch.cat([rows, rows.new_zeros(1)]))


class _LayerDraws:
    """The keys of a compiled layer's calls, read in the order of the calls, and the tokens without padding."""

    def __init__(self, table: Tensor, flat: FlatRows | None) -> None:
        self._table, self.flat = table, flat
        self._next = 0

    def row_keys(self) -> Tensor:
        self._next += 1
        return self._table[self._next - 1]


class _Moment(threading.local):
    """The position of a thread's forward pass; DataParallel runs one thread for each GPU, at the same time."""

    draws: _Draws | None = None

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()  # by site, since the microbatch entered the model


class DropoutKeys:
    """The seed of a model's dropout, and the keys of the current microbatch.

    The calls of sites in a forward pass are learned from the first one. Later, a step computes their keys at once.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._now = _Moment()
        self._calls: dict[_Call, None] = {}  # all that were made so far, in order
        self._of_step: dict[torch.device, tuple[int, list[_Call], Tensor]] = {}  # the result of `known`
        self._of_layer: _LayerDraws | None = None  # while a compiled layer is traced

    def __reduce__(self) -> tuple[type[DropoutKeys], tuple[int]]:
        """Copy the seed only, since a copied model is in no microbatch."""
        return DropoutKeys, (self.seed,)

    def known(self, step: int, device: torch.device) -> tuple[list[_Call], Tensor]:
        """Return all known calls, and their keys in a step, int64 `[calls, 1]`, on `device`."""
        draws = self._of_step.get(device)
        # A new step has other keys, and a call that was just learned makes the table longer.
        if draws is None or draws[0] != step or len(draws[1]) != len(self._calls):
            calls = list(self._calls)
            keys = torch.tensor(stream_keys((self.seed, step), calls), dtype=torch.int64).unsqueeze(-1)
            # Pinning would initialise CUDA in a process that trains on a CPU.
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                keys = keys.pin_memory()  # the host need not wait for the copy
            if draws is not None and len(draws[1]) == len(calls):
                of_calls = draws[2].copy_(keys, non_blocking=True)  # CUDA graphs read this memory
            else:
                of_calls = keys.to(device, non_blocking=True)
            draws = self._of_step[device] = (step, calls, of_calls)
        return draws[1:]

    def learn(self, call: _Call, step: int) -> int:
        """Add a call to the known ones, and return its key in a step."""
        # A dict keeps the order of the calls, and the place of a call is its row in the tables.
        self._calls[call] = None
        return stream_key(self.seed, step, *call)

    @contextmanager
    def use(self, key: MicrobatchKey | None) -> Iterator[None]:
        """Draw the masks of a microbatch inside of this context."""
        with self._resume(_Draws(self, key) if key else None, Counter()):
            yield

    @contextmanager
    def _resume(self, draws: _Draws | None, calls: Counter[str]) -> Iterator[None]:
        """Draw masks by `draws` inside of this context; `calls` counts those drawn before, by site."""
        previous = self._now.draws, self._now.calls
        self._now.draws, self._now.calls = draws, calls
        try:
            yield
        finally:
            self._now.draws, self._now.calls = previous

    def record(self) -> Callable[[], slice]:
        """Return a function that returns the places of the calls that were made since, among all known calls."""
        draws = self._now.draws
        assert draws is not None, "a layer ran outside of a microbatch"
        first = len(draws.eager_calls)

        def places() -> slice:
            calls, places = draws.eager_calls[first:], {call: place for place, call in enumerate(self._calls)}
            start = places[calls[0]] if calls else 0
            # A compiled layer reads its keys from one slice in order, so its calls must be neighbours among the known
            # ones.
            assert [places[call] for call in calls] == [*range(start, start + len(calls))], "calls in another order"
            return slice(start, start + len(calls))

        return places

    def table(self, places: slice) -> Tensor:
        """Return the keys of the current microbatch for calls that `record` found, int64 `[calls, batch + 1]`."""
        assert self._now.draws is not None, "a layer ran outside of a microbatch"
        return self._now.draws.table[places]

    def count_layer(self, layer: int) -> int:
        """Return the number of earlier calls of a compiled layer in this forward pass."""
        assert self._now.draws is not None, "a layer ran outside of a microbatch"
        self._now.draws.calls_of_layers[layer] += 1
        return self._now.draws.calls_of_layers[layer] - 1

    def run_with(self, table: Tensor, flat: FlatRows | None, function: Callable[[], Any]) -> Any:
        """Run a function with the keys of its calls, without any other state of this object; dynamo traces it."""
        self._of_layer = _LayerDraws(table, flat)
        try:
            return function()
        finally:
            self._of_layer = None

    def capture(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a function that opens a context with the current key and calls, for a recomputation from here on."""
        # The counters are copied here, since the forward pass counts on, and again for each recomputation.
        draws, calls = self._now.draws, Counter(self._now.calls)
        return lambda: self._resume(draws, Counter(calls))

    def num_calls(self, site: str) -> int:
        """Return the number of earlier calls of a site in this forward pass."""
        return self._now.calls[site]

    def row_keys(self, site: str, shape: Sequence[int], shared: bool = False) -> Tensor:
        """Return the keys of the rows of the current microbatch for the next call of a site.

        Args:
            shape: the shape of the activation, `[batch, ..., features]`; the dimensions between are positions, or heads
                and positions.
            shared: whether all rows of the global batch share the activation and its mask, with a batch of one.

        Returns:
            The keys, int64 `[batch]`.

        Raises:
            UsageError: the first dimension is not the number of rows of the microbatch, or there are more than four
                dimensions.
        """
        keys = self._of_layer.row_keys() if self._of_layer else self._next_row_keys(site)
        # The last key is that of row 0, for masks that all rows share.
        keys = keys[-1:] if shared else keys[:-1]
        if shape[0] != len(keys):
            raise UsageError(
                f"the model's dropout at {site} must work on the {len(keys)} rows of the microbatch, but its input is"
                f" {tuple(shape)}: its mask would depend on the layout; {REMEDY}"
            )
        if len(shape) > MAX_INDEX_DIMS + 2:
            raise UsageError(
                f"the model's dropout at {site} works on {tuple(shape)}, but masks have at most {MAX_INDEX_DIMS + 2}"
                f" dimensions; {REMEDY}"
            )
        return keys

    @property
    def key(self) -> MicrobatchKey | None:
        """The key of the current microbatch; None outside of one."""
        return self._now.draws.key if self._now.draws else None

    @property
    def flat(self) -> FlatRows | None:
        """The tokens of the current microbatch, if layers process them without padding."""
        if self._of_layer:
            return self._of_layer.flat
        return self.key.flat if self.key else None

    def _next_row_keys(self, site: str) -> Tensor:
        draws = self._now.draws
        assert draws is not None, f"the dropout at {site} ran outside of a microbatch"
        call = self._now.calls[site]
        self._now.calls[site] += 1
        return draws.row_keys((site, call))


class _MaskedScale(torch.autograd.Function):
    """`x * mask * scale`; the gradient is the same product, so only the mask (1 byte per element) is saved."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale  # type: ignore[attr-defined]
        return x.mul(mask).mul_(scale)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grads[0].mul(mask).mul_(ctx.scale), None, None  # type: ignore[attr-defined]


def _scaled(x: Tensor, mask: Tensor, probability: float) -> Tensor:
    """Return `x * mask / (share kept)`."""
    # Scaled for the share that the mask really drops, so that the mean stays.
    dropped: Tensor = _MaskedScale.apply(x, mask, 1.0 / (1.0 - quantised(probability)))  # type: ignore[no-untyped-call]
    return dropped


def _draw(
    row_keys: Tensor, token_rows: Tensor | None, token_positions: Tensor | None, shape: Sequence[int],
    offsets: Sequence[int], probability: float, draw: Callable[..., Tensor] = keep_mask,
) -> Tensor:  # fmt: skip
    """Return the mask of kept elements; the arguments are those of `_Streams`."""
    if token_rows is None or token_positions is None:
        keys = element_keys(row_keys, shape[1:-1], offsets[1:-1])
    else:
        part = slice(offsets[1], offsets[1] + shape[1])
        keys = token_keys(row_keys, token_rows[part], token_positions[part])
        # Context ranks pad the joined sequence at its end, and use no mask there.
        keys = F.pad(keys, [0, shape[1] - len(keys)]).unsqueeze(0)
    return draw(keys, shape[-1], probability, offsets[-1])


# A compiler does not look into an operation.
_draw_apart = operation(
    "trainer::keep_mask",
    "(Tensor row_keys, Tensor? token_rows, Tensor? token_positions, SymInt[] shape, SymInt[] offsets,"
    " float probability) -> Tensor",
)(_draw)
OVERFLOWS_ARE_UNDEFINED = {"cpu"}
"""Devices with code in C++, in which Inductor multiplies signed numbers, so a compiler may change the words.

Inductor has no option for g++'s `-fwrapv` (pytorch/pytorch#175966).
"""


@torch.library.register_fake("trainer::keep_mask")  # type: ignore[untyped-decorator]
def _empty_mask(
    row_keys: Tensor, token_rows: Tensor | None, token_positions: Tensor | None, shape: Sequence[int],
    offsets: Sequence[int], probability: float,
) -> Tensor:  # fmt: skip
    return row_keys.new_empty(shape, dtype=torch.uint8)


class _Streams(NamedTuple):
    shape: tuple[int, ...]  # the shape of the activations, `[batch, ..., features]`
    offsets: list[int]  # the start of each dimension in that of one process
    row_keys: Tensor  # the keys of the rows, int64 `[batch]`
    # the row and the position of each token of flat rows, int64 `[tokens]`; the batch is then 1
    tokens: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)

    def mask(self, probability: float) -> Tensor:
        rows, positions = self.tokens
        arguments = self.row_keys, rows, positions, self.shape, self.offsets, probability
        if not torch.compiler.is_compiling():
            return _draw(*arguments)
        if self.row_keys.device.type in OVERFLOWS_ARE_UNDEFINED:
            mask: Tensor = _draw_apart(*arguments)
            return mask
        return _draw(*arguments, pointwise_mask)


@dataclass(frozen=True)
class DropoutSite:
    """A place in a model at which activations are dropped.

    If dimensions of the activations are split over the ranks, the mask is this rank's part of the mask of one process.
    `cut_dim` is in equal parts, and `part` is the index of this one. With `sequence`, positions begin at its `start`.

    From the call `shared_from` of a forward pass on, the activations have no batch, because all rows share them
    (embeddings of relative positions). All microbatches of a step then have the same mask, as in one process that takes
    the step in one microbatch. None: they always have a batch.

    `flat` is set if the activations are `[1, tokens, features]` in a microbatch without padding.
    """

    keys: DropoutKeys
    name: str
    cut_dim: int | None = None
    part: int = 0
    sequence: SequenceCut | None = None
    shared_from: int | None = None
    flat: bool = False

    def drop(self, x: Tensor, probability: float, keys: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """Drop elements of `x` `[batch, ..., features]`, scale the kept ones by 1 / (share kept), and add a residual.

        `keys` are the keys of the rows of `x` for this call, int64 `[batch]`; None: `x` has all rows of the microbatch,
        and this is the site's next call.
        """
        streams = self._streams(x.shape, keys)
        # A compiler fuses the mask with the operations around it, but not a kernel.
        is_plain = torch.compiler.is_compiling() or missing("dropout", x.device) is not None
        if is_plain or not KERNELS["dropout"].takes(x, residual):
            dropped = _scaled(x, streams.mask(probability).view(x.shape), probability)
            return dropped if residual is None else dropped + residual
        result: Tensor = KERNELS["dropout"].KeyedDropout.apply(
            x, streams.row_keys, *streams.tokens, streams.offsets, probability, x.dtype, residual
        )
        return result

    def mask(self, shape: Sequence[int], probability: float, keys: Tensor | None = None) -> Tensor:
        """Return the mask of kept elements, uint8 of `shape` `[batch, ..., features]`; see `drop`."""
        return self._streams(shape, keys).mask(probability).view(tuple(shape))

    def _streams(self, shape: Sequence[int], keys: Tensor | None) -> _Streams:
        flat = self.keys.flat if self.flat else None
        if flat is not None:
            keys = self.keys.row_keys(self.name, (flat.shape[0], *shape[1:]))
            return _Streams(tuple(shape), self.offsets(shape), keys, (flat.rows, flat.positions))
        is_shared = self.shared_from is not None and self.keys.num_calls(self.name) >= self.shared_from
        is_cut = self.cut_dim is not None or self.sequence is not None
        assert not (is_shared and is_cut), f"{self.name} is cut, and has no batch"
        # Activations that all rows share have no batch dimension; their mask is drawn for a batch of one.
        whole = (1, *shape) if is_shared else tuple(shape)
        if keys is None:
            keys = self.keys.row_keys(self.name, whole, is_shared)
        return _Streams(whole, self.offsets(whole), keys)

    def offsets(self, shape: Sequence[int]) -> list[int]:
        """Return the start of this rank's part of each dimension of activations of a local shape."""
        offsets = [0] * len(shape)
        if self.cut_dim is not None:
            # The parts are equal, so the number of this one gives its start.
            offsets[self.cut_dim] = self.part * shape[self.cut_dim]
        if self.sequence is not None:
            offsets[self.sequence.dim] = self.sequence.start
        return offsets

    def drop_rows(self, x: Tensor, probability: float) -> Tensor:
        """Drop whole rows of `x` `[batch, ...]` and scale the kept ones by 1 / (share kept)."""
        mask = self.mask((x.shape[0], 1), probability).view(-1, *[1] * (x.dim() - 1))
        return _scaled(x, mask, probability)


class KeyedDropout(nn.Module):
    """The replacement of `nn.Dropout`, with the masks of a `DropoutSite`."""

    def __init__(self, site: DropoutSite, p: float) -> None:
        super().__init__()
        self.site = site
        self.p = p

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return `x` with dropped elements, and the sum with a residual of its shape."""
        if residual is not None:
            residual = after_products(residual)
        if not self.training or self.p == 0.0:
            return x if residual is None else x + residual
        return self.drop(x, residual)

    def drop(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return self.site.drop(x, self.p, residual=residual)

    def extra_repr(self) -> str:
        return f"p={self.p}, site={self.site.name}"


class KeyedDropPath(KeyedDropout):
    """Stochastic depth (Huang et al. 2016, arXiv:1603.09382), which drops rows of a residual branch `[batch, ...]`.

    Each row has one bit, so ranks with any part of a row's activations drop the same rows.
    """

    def drop(self, x: Tensor, residual: Tensor | None) -> Tensor:
        assert residual is None, "no module passes one"
        return self.site.drop_rows(x, self.p)
