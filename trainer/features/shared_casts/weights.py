"""The weights of matrix products in 16 bits, rounded at once for all passes of a step.

Autocast rounds each weight in each forward pass, and returns each gradient to fp32 in each backward pass, by an
operation for each of them. A GPU waits for so many operations of small models. The numbers here are those of autocast.
Weights that are stored in 16 bits need no rounding, but their gradients return to fp32 in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from trainer.engine.products import products
from trainer.engine.rounded_weights import in_fp32, nowhere, used_once
from trainer.parallel.microbatch import Microbatch
from trainer.parallel.weight_copies import kept_copy

_User = tuple[int, dict[str, Any], str]
"""The place of a copy, the attributes of a module that has its parameter, and the parameter's name there."""


class StepWeights:
    """Copies of weights, with which their modules compute inside of the context `use`.

    The gradients of the copies are added to those of the weights in fp32. The copies of trained weights live in the
    context only, unless an optimizer writes them; those of frozen ones stay until the weights change. A trained weight
    in 16 bits is its own copy.

    Args:
        models: the models, on their device. Embeddings and norms keep their weights, also if a product shares them.
        together: whether the layers of a model return their gradients to fp32 layer by layer; else, module by module.
        place_of: returns memory for the gradient of a weight in this pass; None: the pass allocates it.
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        dtype: torch.dtype,
        together: bool = True,
        place_of: Callable[[Tensor], Tensor | None] = nowhere,
    ) -> None:
        self._dtype, self._place_of = dtype, place_of
        users: list[tuple[Tensor, dict[str, Any], str]] = []
        found: dict[Tensor, None] = {}  # in order
        groups: dict[str, list[Tensor]] = {}
        for number, model in enumerate(models):
            for name, module in products(model):
                for key, parameter in module.named_parameters(recurse=False):
                    if parameter.dtype == torch.float32 or parameter.requires_grad:  # others stay as they are stored
                        # A weight that two products share belongs to one group, and has one copy.
                        if parameter not in found and parameter.requires_grad:
                            group = f"{number}.{_layer(name) if together else name}"
                            groups.setdefault(group, []).append(parameter)
                        found[parameter] = None
                        users.append((parameter, vars(module), key))
        self._groups = list(groups.values())
        self._trained = [parameter for group in self._groups for parameter in group]
        self._frozen = [parameter for parameter in found if not parameter.requires_grad]
        # Copies are listed as trained, then frozen; `use` joins them in this order.
        place = {parameter: number for number, parameter in enumerate((*self._trained, *self._frozen))}
        self._users: list[_User] = [(place[parameter], attributes, key) for parameter, attributes, key in users]
        self._of_frozen: tuple[list[int], list[Tensor]] = ([], [])  # versions of the weights, and their copies
        # Nothing is known before the first backward pass: every gradient is cast by itself, which is always right.
        self._used_once: Set[Tensor] = frozenset()
        self._may_stay: list[Tensor] = []
        self._rounded_gradients: set[Tensor] = set()  # the weights with gradients that stay in 16 bits

    def leave(self, weights: Iterable[Tensor]) -> None:
        trained = set(self._trained)
        self._may_stay = [weight for weight in weights if weight in trained and weight.dtype == torch.float32]
        for weight in self._may_stay:
            weight.grad_dtype = None  # torch else refuses a gradient of another type than the weight

    def learn(self, loss: Tensor) -> None:
        # The gradients of other weights in 16 bits are cast one by one, because their sum is in fp32.
        once = used_once(loss)
        copies = {place: attributes[key] for place, attributes, key in self._users if place < len(self._trained)}
        # `get_gradient_edge` returns the node and output of the copy, in the form that `used_once` collects.
        self._used_once = {self._trained[i] for i, copy in copies.items() if get_gradient_edge(copy)[:2] in once}
        # A tied weight gets a gradient in fp32, too. Uses of one copy are added in 16 bits in any case.
        self._rounded_gradients.update(weight for weight in self._may_stay if get_gradient_edge(weight)[:2] in once)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Let the modules compute with rounded weights inside of this context."""
        # An attribute of the object hides the parameter, which stays a parameter of the module.
        copies = [*self._recorded(), *self._kept()]
        for place, attributes, key in self._users:
            attributes[key] = copies[place]
        try:
            yield
        finally:
            for _, attributes, key in self._users:
                # The parameter of the module is visible again.
                del attributes[key]

    def used_in(self, function: Callable[[Microbatch], Tensor]) -> Callable[[Microbatch], Tensor]:
        def run(microbatch: Microbatch) -> Tensor:
            with self.use():
                return function(microbatch)

        return run

    @torch.no_grad()
    def refresh(self) -> None:
        changed = [
            (weight, kept)
            for weight in self._trained
            if (kept := kept_copy(weight)) is not None and not kept.is_current(weight)
        ]
        # At the same addresses as before, because graphs read them.
        memory = [self._copy(weight) if kept.tensor is None else kept.tensor for weight, kept in changed]
        if changed:
            torch._foreach_copy_(memory, [weight for weight, _ in changed])
        for (weight, kept), copy in zip(changed, memory, strict=True):
            kept.tensor, kept.version = copy, weight._version

    def _recorded(self) -> Iterator[Tensor]:
        self.refresh()
        kept = {weight: one.tensor for weight in self._trained if (one := kept_copy(weight)) is not None}
        copies = iter(self._copies([weight for weight in self._trained if weight not in kept]))
        for group in self._groups:
            # A view, because autograd writes its node into a copy.
            rounded = [
                next(copies) if (copy := kept.get(weight)) is None else self._typed(copy.detach(), weight)
                for weight in group
            ]
            # One node for each group: its gradients return to fp32 as soon as the last of them is computed.
            arguments = rounded, self._place_of, self._rounded_gradients
            yield from _Rounded.apply(*arguments, *group)  # type: ignore[no-untyped-call]

    def _kept(self) -> list[Tensor]:
        versions, copies = self._of_frozen
        # Torch raises the version at each change in place, such as the loading of a checkpoint.
        now = [parameter._version for parameter in self._frozen]
        if versions != now:
            copies = self._copies(self._frozen)
            self._of_frozen = now, copies
        return copies

    @torch.no_grad()
    def _copies(self, weights: list[Tensor]) -> list[Tensor]:
        copies = [self._copy(weight) for weight in weights]
        # One kernel for all weights. Weights in 16 bits are views, so nothing is copied for them.
        if exact := [weight for weight in weights if weight.dtype == torch.float32]:
            rounded = [copy for copy, weight in zip(copies, weights, strict=True) if weight.dtype == torch.float32]
            torch._foreach_copy_(rounded, exact)
        return copies

    def _copy(self, weight: Tensor) -> Tensor:
        """Return memory for the copy of a weight in fp32, or a view of one in 16 bits."""
        is_exact = weight.dtype == torch.float32
        return self._typed(torch.empty_like(weight, dtype=self._dtype) if is_exact else weight.detach(), weight)

    def _typed(self, copy: Tensor, weight: Tensor) -> Tensor:
        """Set the type of the gradients of a copy."""
        is_exact = weight.dtype == torch.float32
        if not is_exact or self._dtype == torch.float16:
            # Autograd casts the gradient of each use to this type, before it adds them; None: it does not. Products in
            # fp16 have gradients of weights in fp32.
            copy.grad_dtype = None if weight in self._used_once and not is_exact else torch.float32
        return copy


class _Rounded(torch.autograd.Function):
    """The rounding of weights. A backward pass frees nothing of it, so several may run through it."""

    @staticmethod
    def forward(
        ctx: Any,
        copies: Sequence[Tensor],
        place_of: Callable[[Tensor], Tensor | None],
        stay: Set[Tensor],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        # A weight without a use in this pass gets no gradient, as by autocast, and not zeros.
        ctx.set_materialize_grads(False)
        ctx.place_of, ctx.stay, ctx.weights = place_of, stay, weights
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        weights = ctx.weights
        rounded = {n: g for n, g in enumerate(gradients) if g is not None and weights[n] not in ctx.stay}
        # Asked now and not before: the place is free only if no earlier pass left a gradient.
        places = [ctx.place_of(weights[number]) for number in rounded]
        exact = dict(zip(rounded, in_fp32([*rounded.values()], places), strict=True))
        return None, None, None, *(exact.get(number, gradient) for number, gradient in enumerate(gradients))


def _layer(name: str) -> str:
    """Return the name of the outermost element of a list that holds the module `name`, or else `name`."""
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])
