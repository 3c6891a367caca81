"""Activation checkpointing: a layer's activations are computed again in the backward pass instead of being kept.

A recomputation draws the dropout masks of its own microbatch again: the key is captured in the forward and entered
anew, because under a pipeline another microbatch's forward has run in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from trainer.parallel.dropout import DropoutKeys

CheckpointingName = Literal["none", "selective", "full"]
_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_aten = torch.ops.aten
# What costs much to compute for the memory it takes: matrix products, and the fused attention.
_KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def _keep_products(context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class _Again:
    """A moment of the forward pass, and another context inside of it.

    It may be entered several times: a schedule that splits the backward pass recomputes for both of its halves.
    """

    def __init__(self, moment: Callable[[], AbstractContextManager[None]], inner: AbstractContextManager[Any]) -> None:
        self._moment = moment
        self._inner = inner
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(self._moment())
        self._stack.enter_context(self._inner)

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)


def _contexts(selective: bool, keys: DropoutKeys | None) -> _Contexts:
    """The contexts of the forward pass and of its recomputation."""
    forward, again = (
        create_selective_checkpoint_contexts(_keep_products)  # type: ignore[no-untyped-call]
        if selective
        else (nullcontext(), nullcontext())
    )
    return forward, _Again(keys.capture(), again) if keys else again


def checkpoint_layers(layers: Iterable[nn.Module], how: CheckpointingName, keys: DropoutKeys | None) -> int:
    """Makes each of `layers` recompute in its backward pass: all of it, or all but matrix products (`selective`).

    The parameters keep their names, and hooks on the layers (FSDP's, DeepSpeed's) run outside of the recomputation.

    Returns:
        The number of layers.
    """
    if how == "none":
        return 0
    count = 0
    for layer in layers:
        layer.forward = partial(
            _run_checkpointed,
            layer.forward,
            how == "selective",
            partial(_contexts, how == "selective", keys),
            keys is None,
        )
        count += 1
    return count


def _run_checkpointed(
    forward: Callable[..., Any],
    selective: bool,
    contexts: Callable[[], _Contexts],
    preserve_rng_state: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # A selective recomputation must run the operations of its forward pass. ALBERT calls one layer several times: with
    # autocast's cache, only the first call would cast its weights.
    with _without_autocast_cache() if selective else nullcontext():
        return checkpoint(
            forward, *args, use_reentrant=False, context_fn=contexts, preserve_rng_state=preserve_rng_state, **kwargs
        )


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
