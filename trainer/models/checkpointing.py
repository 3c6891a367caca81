"""Activation checkpointing: recomputation of a layer's activations in the backward pass.

A recomputation draws the dropout masks of its own microbatch again. The forward pass captures the key, because a
pipeline runs the forward pass of another microbatch before the recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from trainer.parallel import varlen  # noqa: F401  # registers its operation
from trainer.parallel.dropout import DropoutKeys
from trainer.parallel.launching import KEPT

Result = TypeVar("Result")
CheckpointingName = Literal["none", "selective", "full"]
_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_aten = torch.ops.aten
# Matrix products and fused attention are expensive to recompute, relative to the memory of their results.
_KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.torch_attn._varlen_attn.default,
}


def _keep_products(context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT or op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


_Results = list[Any] | Iterator[Any]
_RESULTS: ContextVar[_Results | None] = ContextVar("kept_results", default=None)
"""The list for results of a forward pass, or those for its recomputation; None: neither is under way."""


def kept_result(compute: Callable[[], Result]) -> Result:
    """Return the result of `compute`; a recomputation gets that of its forward pass, which has the same calls."""
    results = _RESULTS.get()
    if isinstance(results, Iterator):
        return cast(Result, next(results))
    result = compute()
    if results is not None:
        results.append(result)
    return result


class _Pass:
    """The contexts of a forward pass or of its recomputation, with the results that this gets from that.

    It may be entered several times, because a schedule with a split backward pass recomputes for both halves.
    """

    def __init__(self, results: Callable[[], _Results], *contexts: Callable[[], AbstractContextManager[Any]]) -> None:
        self._results, self._contexts, self._stack = results, contexts, ExitStack()

    def __enter__(self) -> None:
        self._stack.callback(_RESULTS.reset, _RESULTS.set(self._results()))
        for context in self._contexts:
            self._stack.enter_context(context())

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)


def _contexts(selective: bool, keys: DropoutKeys | None) -> _Contexts:
    """Return the contexts of the forward pass and of its recomputation."""
    forward, again = (
        create_selective_checkpoint_contexts(_keep_products)  # type: ignore[no-untyped-call]
        if selective
        else (nullcontext(), nullcontext())
    )
    results: list[Any] = []
    # `capture` now, in the forward pass: at the recomputation another microbatch's key is current.
    captured = [keys.capture()] if keys else []
    return _Pass(lambda: results, lambda: forward), _Pass(lambda: iter(results), *captured, lambda: again)


def checkpoint_layers(layers: Iterable[nn.Module], how: CheckpointingName, keys: DropoutKeys | None) -> int:
    """Make each of `layers` recompute its activations in the backward pass.

    With `selective`, the results of matrix products and of fused attention are kept. The parameters keep their names.
    Hooks on the layers (FSDP's, DeepSpeed's) run outside the recomputation.

    Returns:
        The number of layers that recompute.
    """
    if how == "none":
        return 0
    count = 0
    for layer in layers:
        # The method of the object is replaced and not the module, so names of parameters and hooks stay.
        layer.forward = partial(_run_checkpointed, layer.forward, how == "selective", keys)
        count += 1
    return count


def _run_checkpointed(
    forward: Callable[..., Any], selective: bool, keys: DropoutKeys | None, *args: Any, **kwargs: Any
) -> Any:
    # There is no backward pass to recompute for.
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling():  # a compiled layer gets its dropout keys as a tensor, which its backward keeps
        if selective:
            kwargs["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    # A selective recomputation must run the same operations as its forward pass. ALBERT calls one layer several times;
    # with autocast's cache, only the first call would cast its weights.
    with _without_autocast_cache() if selective else nullcontext():
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            context_fn=partial(_contexts, selective, keys),
            # Keyed dropout has no generator, so its state need not be saved for each layer.
            preserve_rng_state=keys is None,
            **kwargs,
        )


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def not_recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` such that selective checkpointing does not see its operations.

    A recomputation must run the operations of its forward pass, but it may gather other weights.
    """

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        # Only the mode on top of the stack can be taken off.
        is_recorded = isinstance(_get_current_dispatch_mode(), _CachingTorchDispatchMode | _CachedTorchDispatchMode)
        with _pop_mode_temporarily() if is_recorded else nullcontext():
            return function(*args, **kwargs)

    return run
