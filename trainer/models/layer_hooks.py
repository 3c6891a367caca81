"""Hooks on the layers of an unmodified Hugging Face model: sharded sequences, and tokens without padding.

Sharded sequences: from the entry of a stack's first layer to the exit of its last, each rank has its positions of the
hidden states. Embeddings, poolers and heads see all positions on every rank.

Tokens without padding: the first layer gets the tokens of all rows of a microbatch as one sequence `[1, tokens,
hidden]`, and the last layer returns padded rows. Embeddings and heads are those of padded rows, so positions, token
types and pooling stay as they are. transformers passes the argument `FLAT` of the model on to each layer and to the
attention function, which finds the rows: tokens see their own row only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from trainer.base.errors import UsageError
from trainer.models.attention import FLAT, FLAT_ATTENTION, FORMS
from trainer.models.families.table import FAMILIES, layers_of
from trainer.models.names import owner_of, prefixes
from trainer.parallel.dropout import KeyedDropout
from trainer.parallel.flat_rows import FlatRows
from trainer.parallel.groups import Group
from trainer.parallel.sharded_sequence import LayerCut, SequenceCut

HIDDEN_STATES = "hidden_states"  # their keyword in transformers, if they are not the first argument
_ROTATIONS = "position_embeddings"  # cosines and sines `[batch, positions, head_dim]`, of layers and attention


def change_inputs(
    module: nn.Module, change: Callable[[str, Tensor], Tensor], names: Sequence[str] = (HIDDEN_STATES,)
) -> None:
    """Replace the arguments `names` of `module` by `change(name, tensor)` before each call.

    Hidden states that are not a keyword argument are the first argument.
    """

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        changed = {name: change(name, kwargs[name]) for name in names if isinstance(kwargs.get(name), Tensor)}
        # Families differ: some pass hidden states by position, others by name.
        if HIDDEN_STATES not in changed and args:
            args = (change(HIDDEN_STATES, args[0]), *args[1:])
        else:
            assert changed, f"{type(module).__name__} was called without an input"
        return args, kwargs | changed

    module.register_forward_pre_hook(hook, with_kwargs=True)


class Stacks:
    """The layer stacks of a model, with the sequence cuts of each; an encoder has one, an encoder-decoder two.

    Args:
        layers: all repeated layers of the model in order, by their names in the model.
        tensor: the tensor ranks.
        sequence: whether they shard the positions.
        layer_cuts: the cuts over context ranks, by the names of the modules that hold a stack; empty without these.
    """

    def __init__(
        self, layers: Mapping[str, nn.Module], tensor: Group, sequence: bool, layer_cuts: Mapping[str | None, LayerCut]
    ) -> None:
        self._layers = dict(layers)
        self._layer_cuts = layer_cuts
        stacks: dict[str | None, None] = dict.fromkeys(map(owner_of, layers)) if sequence else {}
        self._sequences = {stack: SequenceCut(tensor, layer_cuts.get(stack)) for stack in stacks}

    def sequence_of(self, name: str) -> SequenceCut | None:
        """Return the cut over tensor ranks of the stack with the module `name`; None without one, or in no layer."""
        return self._sequences.get(self._stack_of(name))

    def layer_cut_of(self, name: str) -> LayerCut | None:
        """Return the cut over context ranks of the stack with the module `name`; None without one, or in no layer."""
        return self._layer_cuts.get(self._stack_of(name))

    def _stack_of(self, name: str) -> str | None:
        layer = next((prefix for prefix in reversed(prefixes(name)) if prefix in self._layers), None)
        return None if layer is None else owner_of(layer)

    def cut_ends(self) -> None:
        """Split the input of the first layer of each stack, and join the output of the last."""
        # A cut over tensor ranks splits after the one over context ranks, and joins before it.
        for stack, cut in {**self._layer_cuts, **self._sequences}.items():
            layers = [layer for name, layer in self._layers.items() if owner_of(name) == stack]
            change_inputs(layers[0], partial(_split, cut))
            layers[-1].register_forward_hook(_change_output(cut.join))


def _split(cut: SequenceCut, name: str, hidden: Tensor) -> Tensor:
    return cut.split(hidden)


def _change_output(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return change(output) if isinstance(output, Tensor) else (change(output[0]), *output[1:])

    return hook


def change_rotations(kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    rotations = kwargs.get(_ROTATIONS)
    return kwargs if rotations is None else kwargs | {_ROTATIONS: tuple(map(change, rotations))}


def require_padding_free(model: Any) -> None:
    """Refuse a model with layers that need padding."""
    model_type = model.config.model_type
    family = FAMILIES.get(model_type)
    if family is None or not family.padding_free:
        able = ", ".join(sorted(name for name, family in FAMILIES.items() if family.padding_free))
        raise UsageError(
            f"`data.padding_free` is true, which works for the model types {able}, but the model is of type"
            f" {model_type}; set it to false, and `data.group_by_length` to true, which needs less padding"
        )


def flatten_layers(model: Any) -> None:
    """Make the layers of a model process tokens without padding, whenever it is called with `FLAT`.

    The model is cut over tensor ranks before, and no strategy has wrapped it.

    Raises:
        UsageError: `require_padding_free` refuses the model.
    """
    require_padding_free(model)
    form = FORMS.get(model.config._attn_implementation)
    model.config._attn_implementation = form.flat if form else FLAT_ATTENTION
    layers = list(layers_of(model).values())
    _join_rotations(model)
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, KeyedDropout):
                # A site of flat rows finds row and position of each token, so masks equal those of padded rows.
                module.site = replace(module.site, flat=True)
    # Rows are joined before they are split over tensor or context ranks, and padded after the parts are joined.
    # `prepend`: a hook that cuts the sequence is there already, and must run after this one.
    layers[0].register_forward_pre_hook(_join_input, with_kwargs=True, prepend=True)
    layers[-1].register_forward_hook(_pad_output, with_kwargs=True)


def _join_input(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    flat: FlatRows | None = kwargs.get(FLAT)
    return (flat.join(args[0]), *args[1:]) if flat else args, kwargs


def _join_rotations(model: nn.Module) -> None:
    """Join cosines and sines where they are computed, once for all layers that share them."""
    current: list[FlatRows | None] = [None]

    def begin(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        current[0] = kwargs.get(FLAT)

    def join(rotary: nn.Module, args: tuple[Any, ...], rotations: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return tuple(map(current[0].join, rotations)) if current[0] else rotations

    model.register_forward_pre_hook(begin, with_kwargs=True)
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "rotary_emb":
            module.register_forward_hook(join)


def _pad_output(layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor) -> Tensor:
    flat: FlatRows | None = kwargs.get(FLAT)
    return flat.pad(output) if flat else output
