"""Sharded sequences of an unmodified Hugging Face model, by hooks at the ends of its layer stacks and inside them.

From the entry of a stack's first layer to the exit of its last, the hidden states are sharded over the tensor ranks by
position. Embeddings, poolers and heads see all positions on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from trainer.parallel.communication import Group
from trainer.parallel.sharded_sequence import ContextCut, SequenceCut

_ROTATIONS = "position_embeddings"  # their keyword in transformers, an argument of attention
HIDDEN_STATES = "hidden_states"  # their keyword in transformers, if they are not the first argument


class Stacks:
    """The layer stacks of a model, with the sequence cut of each; an encoder has one, an encoder-decoder two.

    Args:
        layers: all repeated layers of the model in order, by their names in the model.
        group: the group of the tensor axis.
        kind: makes the cut of a stack for the group.
    """

    def __init__(
        self, layers: Mapping[str, nn.Module], group: Group, kind: Callable[[Group], SequenceCut] = SequenceCut
    ) -> None:
        self._cuts: dict[str, SequenceCut] = {}
        self._layers = dict(layers)
        for name in layers:
            self._cuts.setdefault(_stack(name), kind(group))

    def cut_of(self, name: str) -> SequenceCut | None:
        """Return the sequence cut of the stack with the module `name`, or None if the module is in no layer."""
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            prefix = ".".join(parts[:length])
            if prefix in self._layers:
                return self._cuts[_stack(prefix)]
        return None

    def cut_ends(self) -> None:
        """Split the input of the first layer of each stack, and join the output of the last."""
        for stack, cut in self._cuts.items():
            layers = [layer for name, layer in self._layers.items() if _stack(name) == stack]
            _split_input(layers[0], cut)
            layers[-1].register_forward_hook(_change_output(cut.join))


def _split_input(layer: nn.Module, cut: SequenceCut) -> None:
    change_inputs(layer, lambda _, hidden: cut.split(hidden))


def _stack(layer: str) -> str:
    return layer.rpartition(".")[0]


def change_inputs(
    module: nn.Module, change: Callable[[str, Tensor], Tensor], names: Sequence[str] = (HIDDEN_STATES,)
) -> None:
    """Replace the arguments `names` of `module` by `change(name, tensor)` before each call.

    Hidden states that are not a keyword argument are the first argument.
    """

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        changed = {name: change(name, kwargs[name]) for name in names if isinstance(kwargs.get(name), Tensor)}
        if HIDDEN_STATES not in changed and args:
            args = (change(HIDDEN_STATES, args[0]), *args[1:])
        else:
            assert changed, f"{type(module).__name__} was called without an input"
        return args, kwargs | changed

    module.register_forward_pre_hook(hook, with_kwargs=True)


def cut_rotations(module: nn.Module, cut: ContextCut) -> None:
    """Give an attention module the rotations `[batch, positions, width]` of this rank's positions."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        rotations = kwargs.get(_ROTATIONS)
        return args, kwargs if rotations is None else kwargs | {_ROTATIONS: tuple(map(cut.own, rotations))}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _change_output(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return change(output) if isinstance(output, Tensor) else (change(output[0]), *output[1:])

    return hook
