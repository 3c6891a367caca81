"""The weights of matrix products in 16 bits, rounded at once for all passes of a step.

Autocast rounds each weight in each forward pass, and returns each gradient to fp32 in each backward pass, by an
operation for each of them. A GPU waits for so many operations of small models. The numbers here are those of autocast.
Weights that are stored in 16 bits need no rounding, but their gradients return to fp32 in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from trainer.engine.products import products
from trainer.engine.rounded_weights import in_fp32, nowhere, used_once
from trainer.parallel.device_traits import traits_of
from trainer.parallel.microbatch import Microbatch
from trainer.parallel.weight_copies import kept_copy

if TYPE_CHECKING:
    from trainer.features.shared_casts.joint_products import AttentionWatch

_Unit = tuple[Tensor, ...]
"""The weights of one copy: one, or several that lie in it one after the other."""
_User = tuple[_Unit, dict[str, Any], str]
"""The weights of a copy, the attributes of a module that uses it, and its name there."""


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
        self._users: list[_User] = []
        self._groups: dict[str, list[_Unit]] = {}
        frozen: dict[Tensor, None] = {}  # in order
        unit_of: dict[Tensor, _Unit] = {}
        models = list(models)
        for number, model in enumerate(models):
            for name, module in products(model):
                for key, parameter in module.named_parameters(recurse=False):
                    if parameter.dtype == torch.float32 or parameter.requires_grad:  # others stay as they are stored
                        # A weight that two products share belongs to one group, and has one copy.
                        if parameter not in unit_of:
                            unit_of[parameter] = (parameter,)
                            if parameter.requires_grad:
                                group = f"{number}.{_layer(name) if together else name}"
                                self._groups.setdefault(group, []).append(unit_of[parameter])
                            else:
                                frozen[parameter] = None
                        self._users.append((unit_of[parameter], vars(module), key))
        self._frozen = list(frozen)
        self._of_frozen: tuple[list[int], list[Tensor]] = ([], [])  # versions of the weights, and their copies
        self._wholes: dict[Tensor, Tensor] = {}  # joint copies that an optimizer writes, by their first weights
        # Nothing is known before the first backward pass: every gradient is cast by itself, which is always right.
        self._used_once: Set[Tensor] = frozenset()
        self._may_stay: list[Tensor] = []
        self._rounded_gradients: set[Tensor] = set()  # the weights with gradients that stay in 16 bits
        self._watches: Sequence[AttentionWatch] = ()
        device = next(iter(unit_of)).device if unit_of else torch.device("cpu")
        # On a CPU, one large product takes as long as its parts.
        if together and dtype == torch.bfloat16 and not traits_of(device).is_cpu:
            from trainer.features.shared_casts.joint_products import watches

            self._watches = watches(models)

    @property
    def _trained(self) -> list[_Unit]:
        return [unit for group in self._groups.values() for unit in group]

    def leave(self, weights: Iterable[Tensor]) -> None:
        trained = set(chain.from_iterable(self._trained))
        self._may_stay = [weight for weight in weights if weight in trained and weight.dtype == torch.float32]
        for weight in self._may_stay:
            weight.grad_dtype = None  # torch else refuses a gradient of another type than the weight

    def learn(self, loss: Tensor) -> None:
        # The gradients of other weights in 16 bits are cast one by one, because their sum is in fp32.
        once = used_once(loss)
        copies = {unit[0]: attributes[key] for unit, attributes, key in self._users if unit[0].requires_grad}
        # `get_gradient_edge` returns the node and output of the copy, in the form that `used_once` collects.
        self._used_once = {weight for weight, copy in copies.items() if get_gradient_edge(copy)[:2] in once}
        # A tied weight gets a gradient in fp32, too. Uses of one copy are added in 16 bits in any case.
        self._rounded_gradients.update(weight for weight in self._may_stay if get_gradient_edge(weight)[:2] in once)

    @contextmanager
    def use(self) -> Iterator[None]:
        with self._used():
            yield
        self.join()

    @contextmanager
    def _used(self) -> Iterator[None]:
        # An attribute of the object hides the parameter, which stays a parameter of the module.
        copies = dict([*self._recorded(), *self._kept()])
        for unit, attributes, key in self._users:
            attributes[key] = copies[unit[0]]
        try:
            yield
        finally:
            for _, attributes, key in self._users:
                # The parameter of the module is visible again.
                del attributes[key]

    def used_in(self, function: Callable[[Microbatch], Tensor]) -> Callable[[Microbatch], Tensor]:
        def run(microbatch: Microbatch) -> Tensor:
            with self._used():
                return function(microbatch)

        return run

    @torch.no_grad()
    def refresh(self) -> None:
        changed = [
            (weight, kept)
            for weight in chain.from_iterable(self._trained)
            if (kept := kept_copy(weight)) is not None and not kept.is_current(weight)
        ]
        # At the same addresses as before, because graphs read them.
        memory = [self._copy((weight,)) if kept.tensor is None else kept.tensor for weight, kept in changed]
        if changed:
            torch._foreach_copy_(memory, [weight for weight, _ in changed])
        for (weight, kept), copy in zip(changed, memory, strict=True):
            kept.tensor, kept.version = copy, weight._version

    @torch.no_grad()
    def join(self) -> None:
        if not any(watch.has_run for watch in self._watches):
            return
        number_of = Counter(unit[0] for unit, _, _ in self._users)

        def fits(weight: Tensor) -> bool:
            # A weight in 16 bits is its own copy, and a shared one has other users.
            return weight.requires_grad and weight.dtype == torch.float32 and number_of[weight] == 1

        joined: dict[Tensor, _Unit] = {}
        for joint in chain.from_iterable(watch.joints(fits) for watch in self._watches):
            for key, unit in joint.parameters():
                joined.update(dict.fromkeys(unit, unit))
                self._users.append((unit, joint.attributes, key))
                if kept_copy(unit[0]) is not None:
                    whole = self._wholes[unit[0]] = self._copy(unit)
                    for weight, part in zip(unit, _parts(whole, unit), strict=True):
                        kept = kept_copy(weight)
                        assert kept is not None, "an optimizer writes the copies of all its weights"
                        assert kept.tensor is not None, "the first pass read it"
                        kept.tensor = part.copy_(kept.tensor)
        self._watches = ()
        self._users = [user for user in self._users if len(user[0]) > 1 or user[0][0] not in joined]
        for name, units in self._groups.items():
            new = {id(unit): unit for unit in (joined.get(one[0], one) for one in units)}
            self._groups[name] = [*new.values()]

    def _recorded(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.refresh()
        copies = iter(self._copies([unit for unit in self._trained if kept_copy(unit[0]) is None]))
        for units in self._groups.values():
            rounded = []
            for unit in units:
                kept = kept_copy(unit[0])
                copy = next(copies) if kept is None else self._wholes.get(unit[0], kept.tensor)
                assert copy is not None, "a kept copy is current"
                # A view, because autograd writes its node into a copy.
                rounded.append(copy if kept is None else self._typed(copy.detach(), unit[0]))
            # One node for each group: its gradients return to fp32 as soon as the last of them is computed.
            arguments = rounded, self._place_of, self._rounded_gradients, units
            outputs = _Rounded.apply(*arguments, *chain.from_iterable(units))  # type: ignore[no-untyped-call]
            yield from zip([unit[0] for unit in units], outputs, strict=True)

    def _kept(self) -> Iterator[tuple[Tensor, Tensor]]:
        versions, copies = self._of_frozen
        # Torch raises the version at each change in place, such as the loading of a checkpoint.
        now = [parameter._version for parameter in self._frozen]
        if versions != now:
            copies = self._copies([(parameter,) for parameter in self._frozen])
            self._of_frozen = now, copies
        return zip(self._frozen, copies, strict=True)

    @torch.no_grad()
    def _copies(self, units: Sequence[_Unit]) -> list[Tensor]:
        copies = [self._copy(unit) for unit in units]
        # One kernel for all weights. Weights in 16 bits are views, so nothing is copied for them.
        exact = [(copy, unit) for copy, unit in zip(copies, units, strict=True) if unit[0].dtype == torch.float32]
        if exact:
            parts = [part for copy, unit in exact for part in _parts(copy, unit)]
            torch._foreach_copy_(parts, [weight for _, unit in exact for weight in unit])
        return copies

    def _copy(self, unit: _Unit) -> Tensor:
        """Return memory for the copy of weights in fp32, or a view of one in 16 bits."""
        weight = unit[0]
        if len(unit) > 1:
            return weight.new_empty((sum(map(len, unit)), *weight.shape[1:]), dtype=self._dtype)
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
        units: Sequence[_Unit],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        # A weight without a use in this pass gets no gradient, as by autocast, and not zeros.
        ctx.set_materialize_grads(False)
        ctx.place_of, ctx.stay, ctx.units = place_of, stay, units
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *of_units: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = []
        for gradient, unit in zip(of_units, ctx.units, strict=True):
            gradients += [None] * len(unit) if gradient is None else _parts(gradient, unit)
        weights = [*chain.from_iterable(ctx.units)]
        rounded = {n: g for n, g in enumerate(gradients) if g is not None and weights[n] not in ctx.stay}
        # Asked now and not before: the place is free only if no earlier pass left a gradient.
        places = [ctx.place_of(weights[number]) for number in rounded]
        exact = dict(zip(rounded, in_fp32([*rounded.values()], places), strict=True))
        return None, None, None, None, *(exact.get(number, gradient) for number, gradient in enumerate(gradients))


def _parts(whole: Tensor, unit: _Unit) -> Sequence[Tensor]:
    """Return the parts of a joint tensor for its weights."""
    return (whole,) if len(unit) == 1 else torch.split(whole, [len(weight) for weight in unit])


def _layer(name: str) -> str:
    """Return the name of the outermost element of a list that holds the module `name`, or else `name`."""
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])
