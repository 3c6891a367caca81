"""Dropout as a pure function of (seed, step, row of the global batch, site, call of the site, position, head).

A site that runs several times in a forward pass (a layer that ALBERT shares, T5's one dropout for both ends of a
stack) has a mask for each call.

All dropout sites of a model refer to one `DropoutKeys`, which holds the key of the current microbatch. A recomputation
in the backward pass may run after the forward pass of another microbatch. It must enter a context from `capture()`,
called in the forward pass, to restore the key of its own microbatch.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.base.errors import UsageError
from trainer.parallel.random import MAX_INDEX_DIMS, element_keys, keep_mask, quantised, stream_key
from trainer.parallel.sequence import SequenceCut

REMEDY = "set `training.layout_invariant_dropout` to false, which uses torch's own dropout"


@dataclass(frozen=True)
class MicrobatchKey:
    """The key of the masks of one microbatch: the optimizer step, and the indices `[batch]` (int64) of its rows."""

    step: int
    rows: Tensor


class _Moment(threading.local):
    """The position of a thread's forward pass; DataParallel runs one thread for each GPU, at the same time."""

    key: MicrobatchKey | None = None

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()  # by site, since the microbatch entered the model


class DropoutKeys:
    """The seed of a model's dropout, and the key of the current microbatch."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._now = _Moment()

    def __reduce__(self) -> tuple[type[DropoutKeys], tuple[int]]:
        """Copy the seed only, since a copied model is in no microbatch."""
        return DropoutKeys, (self.seed,)

    @contextmanager
    def use(self, key: MicrobatchKey | None, calls: Mapping[str, int] | None = None) -> Iterator[None]:
        """Draw the masks of a microbatch inside of this context; `calls` counts those drawn before, by site."""
        previous = self._now.key, self._now.calls
        self._now.key, self._now.calls = key, Counter(calls)
        try:
            yield
        finally:
            self._now.key, self._now.calls = previous

    def capture(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a function that opens a context with the current key and calls, for a recomputation from here on."""
        key, calls = self._now.key, Counter(self._now.calls)
        return lambda: self.use(key, calls)

    def mask(
        self,
        site: str,
        shape: Sequence[int],
        probability: float,
        offsets: Sequence[int] | None = None,
        shared: bool = False,
    ) -> Tensor:
        """Return the keep mask of one call of a site for the current microbatch.

        Args:
            site: the name of the site in the model; each site has its own masks.
            shape: the shape of the activation, `[batch, ..., features]`; the dimensions between are positions, or heads
                and positions.
            probability: the share to drop.
            offsets: the start of this rank's slice of each dimension after the batch; None for zeros.
            shared: whether all rows of the global batch share the activation and its mask, with a batch of one.

        Returns:
            The mask, uint8 of `shape`.

        Raises:
            UsageError: the first dimension is not the number of rows of the microbatch, or there are more than four
                dimensions.
        """
        key = self._now.key
        assert key is not None, f"the dropout at {site} ran outside of a microbatch"
        batch, *between, features = shape
        rows = key.rows.new_zeros(1) if shared else key.rows
        if batch != rows.numel():
            raise UsageError(
                f"the model's dropout at {site} works on {tuple(shape)}, whose first dimension is not that of the"
                f" {key.rows.numel()} rows of the microbatch, so its mask would depend on the layout; {REMEDY}"
            )
        if len(between) > MAX_INDEX_DIMS:
            raise UsageError(
                f"the model's dropout at {site} works on {tuple(shape)}, but masks have at most {MAX_INDEX_DIMS + 2}"
                f" dimensions; {REMEDY}"
            )
        *starts, first_feature = offsets or [0] * (len(shape) - 1)
        call = self._now.calls[site]
        self._now.calls[site] += 1
        keys = element_keys(stream_key(self.seed, key.step, site, call), rows, between, starts)
        return keep_mask(keys, features, probability, first_feature)


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
    dropped: Tensor = _MaskedScale.apply(x, mask, 1.0 / (1.0 - quantised(probability)))  # type: ignore[no-untyped-call]
    return dropped


@dataclass(frozen=True)
class DropoutSite:
    """A place in a model at which activations are dropped.

    If dimension `cut_dim` of the activations is split over the ranks, the mask is this rank's part of the mask of one
    process. `part` is the index of the part, with parts of equal size; with `sequence`, the part begins at its `start`.

    `shared` is set if the activations have no batch because all rows share them (embeddings of relative positions).
    All microbatches of a step then have the same mask, as in one process that takes the step in one microbatch.
    """

    keys: DropoutKeys
    name: str
    cut_dim: int | None = None
    part: int = 0
    sequence: SequenceCut | None = None
    shared: bool = False

    def drop(self, x: Tensor, probability: float) -> Tensor:
        """Drop elements of `x` `[batch, ..., features]` and scale the kept ones by 1 / (share kept).

        A `shared` site takes `x` without a batch.
        """
        assert not (self.shared and self.cut_dim is not None), f"{self.name} is cut, and has no batch"
        shape = (1, *x.shape) if self.shared else tuple(x.shape)
        offsets = [0] * len(shape)
        if self.cut_dim is not None:
            offsets[self.cut_dim] = self.sequence.start if self.sequence else self.part * x.shape[self.cut_dim]
        mask = self.keys.mask(self.name, shape, probability, offsets[1:], self.shared).view(x.shape)
        return _scaled(x, mask, probability)

    def drop_rows(self, x: Tensor, probability: float) -> Tensor:
        """Drop whole rows of `x` `[batch, ...]` and scale the kept ones by 1 / (share kept)."""
        mask = self.keys.mask(self.name, (x.shape[0], 1), probability).view(-1, *[1] * (x.dim() - 1))
        return _scaled(x, mask, probability)


class KeyedDropout(nn.Module):
    """The replacement of `nn.Dropout`, with the masks of a `DropoutSite`."""

    def __init__(self, site: DropoutSite, p: float) -> None:
        super().__init__()
        self.site = site
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        return self.drop(x)

    def drop(self, x: Tensor) -> Tensor:
        return self.site.drop(x, self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}, site={self.site.name}"


class KeyedDropPath(KeyedDropout):
    """Stochastic depth (Huang et al. 2016, arXiv:1603.09382), which drops rows of a residual branch `[batch, ...]`.

    Each row has one bit, so ranks with any part of a row's activations drop the same rows.
    """

    def drop(self, x: Tensor) -> Tensor:
        return self.site.drop_rows(x, self.p)
