"""Cut of an unmodified Hugging Face model over tensor and context ranks, by its family's plan; matching is strict.

Tensor ranks cut the matrices of layers, and context ranks the sequences. Embeddings and heads are cut over the
vocabulary, over all these ranks together.

`parallel/` has the sharded modules; `models/families/` lists the replaced and the replicated modules as data. Every
parameter keeps its name in the unsharded model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from trainer.base.errors import Problems, UsageError
from trainer.models.added import ADDED
from trainer.models.dropout import move_site
from trainer.models.families.family import TensorPlan, matches, relative_name
from trainer.models.families.table import FAMILIES, family_of, layers_of
from trainer.models.forward_context import run_within
from trainer.models.layer_hooks import HIDDEN_STATES, Stacks, change_inputs
from trainer.models.names import owner_of, prefixes, replace_in, tied_names
from trainer.models.sequence_axis import sequence_axis
from trainer.models.vector_scale import scale_of
from trainer.parallel.dropout import KeyedDropout
from trainer.parallel.groups import Group, group_size, index_in_group
from trainer.parallel.pipeline.stand_ins import Absent
from trainer.parallel.placement import (
    CONTEXT_AXIS,
    ROWS_AXIS,
    TENSOR_AXIS,
    ParameterPlacement,
    Placements,
    Split,
    whole,
)
from trainer.parallel.row_groups import RowGroups
from trainer.parallel.sharded_sequence import LayerCut
from trainer.parallel.shards.slices import part_of
from trainer.parallel.tensor.embedding import FeatureParallelEmbedding, VocabParallelEmbedding
from trainer.parallel.tensor.linear import SHARED_INPUT, ColumnParallelLinear, RowParallelLinear, SharedInput
from trainer.parallel.tensor.low_rank import Factors
from trainer.parallel.tensor.trained_rows import TrainedRows

_INPUTS = (HIDDEN_STATES, "key_value_states", "encoder_hidden_states")  # named arguments that are inputs
_Part = ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding | FeatureParallelEmbedding
_HEADS_DIM = 1  # in attention probabilities `[batch, heads, queries, keys]`


@dataclass(frozen=True)
class _Place:
    owner: nn.Module
    attribute: str
    name: str  # relative to the model
    relative: str  # as in patterns
    module: nn.Module


def require_split(model: nn.Module, tensor: int, context: int = 1, sequence: bool = False) -> None:
    """Refuse a model that cannot be cut over tensor and context ranks, given their numbers.

    Args:
        model: the whole model or one pipeline stage, on any device including meta.
        sequence: whether tensor ranks cut the sequences, too.

    Raises:
        UsageError: the model is in no family, or its family has not this parallelism. A tensor degree does not divide
            heads or features. A pattern matches nothing, or the family does not name a matrix.
        RecipeError: several of these hold.
    """
    if context > 1:
        config: Any = model.config
        sequence_axis().check(config.model_type)
    plan = _plan_of(model)
    places = list(_places(model))
    problems = Problems()
    if sequence:
        with problems.collect():
            _require_sequence(model, plan)
    if tensor > 1 or context == 1:  # else the matrices of layers stay whole
        with problems.collect():
            _require_modules(model, plan, places)
            _require_placed(model, plan, places)
        with problems.collect():
            _require_divisors(tensor, [*_heads(model.config, plan), *_features(plan, places)])
    problems.raise_all()


def _heads(config: Any, plan: TensorPlan) -> Iterator[tuple[int, str]]:
    for key in plan.heads:
        heads = getattr(config, key)
        kind = "attention head" if key != "num_key_value_heads" else "key and value head"
        yield heads, f"model's {heads} {kind}{'s' * (heads > 1)}"


def _features(plan: TensorPlan, places: Iterable[_Place]) -> Iterator[tuple[int, str]]:
    columns = [(pattern, 0, blocks) for pattern, blocks in plan.columns.items()]
    for pattern, dim, blocks in [*columns, *((pattern, 1, 1) for pattern in plan.rows)]:
        for place in places:
            if matches(pattern, place.relative):
                # Conv1D of GPT-2 stores `[in, out]`, the transpose of nn.Linear.
                stored_dim = 1 - dim if isinstance(place.module, Conv1D) else dim
                # Each block of a joint matrix, such as query, key and value in one, is cut by itself.
                features = place.module.get_parameter("weight").shape[stored_dim] // blocks
                yield features, f"{features} features of {place.name}"


def _require_divisors(degree: int, counts: Sequence[tuple[int, str]]) -> None:
    """Refuse a degree that does not divide all counts, with the degrees that do; only the first count is named."""
    common = gcd(*(count for count, _ in counts))
    name = next((name for count, name in counts if count % degree), None)
    if name is not None:
        *fitting, last = [str(number) for number in range(1, common + 1) if common % number == 0]
        use = f"{', '.join(fitting)} or {last}" if fitting else last
        raise UsageError(f"`parallel.tensor` must divide the {name}, but is {degree}; use {use}")


def _require_sequence(model: Any, plan: TensorPlan) -> None:
    if not plan.sequence_parallel:
        raise UsageError(
            f"`parallel.sequence` is true, but the family {model.config.model_type} has no sequence parallelism; set"
            " it to false"
        )
    if chunk := getattr(model.config, "chunk_size_feed_forward", 0):
        raise UsageError(
            f"`parallel.sequence` is true, but the model computes its feed-forward in chunks of {chunk} positions"
            " (`chunk_size_feed_forward`), which a tensor rank does not have whole; set one of them to false or 0"
        )


def split_model(model: nn.Module, groups: RowGroups, sequence: bool = False) -> Placements:
    """Replace every large matrix of a transformers model by this rank's part of it.

    With context ranks, layers work on this rank's positions. With context ranks alone, the matrices of layers stay
    whole.

    Args:
        model: the whole model, equal on every rank of the groups, or on the meta device.
        sequence: whether tensor ranks shard the hidden states between the matrices of a layer by position.

    Returns:
        The placement of every parameter.

    Raises:
        UsageError: `require_split` refuses the model.
    """
    assert not any(isinstance(module, _Part) for module in model.modules()), "the model is cut already"
    tensor, context = group_size(groups.tensor), group_size(groups.context)
    require_split(model, tensor, context, sequence)
    plan = _plan_of(model)
    # Before the replacement, which gives each name a parameter of its own.
    tied = tied_names(model)
    stacks = _stacks(model, groups, sequence)
    if tensor == 1 and context > 1:  # matrices of layers stay whole
        plan = replace(plan, columns={}, rows=(), shared_inputs=(), divided={}, split_dropouts=(), partial=(), parts={})
    cutting = _Cutting(model, plan, groups, stacks)
    placements = cutting.replace_matrices()
    cutting.sum_input_gradients()
    cutting.divide_attributes()
    cutting.cut_dropouts()
    cutting.cut_attention()
    placements |= cutting.partial_placements() | cutting.cut_parts()
    stacks.cut_ends()
    if buffers := [name for name in plan.vocabulary_buffers if model._buffers.get(name) is not None]:
        run_within(model, lambda model: _own_columns(model, buffers, groups.vocabulary))
    _tie_again(model, tied)
    for names in tied:  # a tied parameter has one placement, under its first name
        placed = next((placements[name] for name in names if name in placements), None)
        placements |= {names[0]: replace(placed, name=names[0])} if placed else {}
    return whole(model) | {name: placements[name] for name, _ in model.named_parameters() if name in placements}


class _Cutting:
    """The cut of a model over tensor and context ranks, one concern at a time."""

    def __init__(self, model: nn.Module, plan: TensorPlan, groups: RowGroups, stacks: Stacks) -> None:
        self._plan = plan
        self._groups = groups
        self._stacks = stacks
        places = list(_places(model))
        matrices = (*plan.columns, *plan.rows, *plan.embeddings, *plan.head_embeddings, *plan.vocabulary_heads)
        cut = {place.name for place in places if _any(matrices, place)}
        # A module inside of a matrix is a product for LoRA, which its layer cuts.
        self._places = [place for place in places if cut.isdisjoint(prefixes(place.name)[:-1])]
        self._cut = cut

    def _matching(self, patterns: Iterable[str]) -> list[_Place]:
        return [place for place in self._places if _any(patterns, place)]

    def replace_matrices(self) -> Placements:
        """Replace embeddings and matrices by this rank's parts, and return the placements of the parts."""
        shared = [place.name for place in self._matching(self._plan.shared_inputs)]
        placements: Placements = {}
        for place in self._places:
            if place.name in self._cut:
                part = self._part(place, not set(shared).isdisjoint(prefixes(place.name)[:-1]))
                setattr(place.owner, place.attribute, part)
                axes = self._context_axes(place)
                for name, placement in part.placements(f"{place.name}.").items():
                    # A context rank applies the matrix to its positions only, so its gradient is a term of the sum.
                    placements[name] = replace(placement, partial_over=(*placement.partial_over, *axes))
                for module in part.modules():
                    if isinstance(module, KeyedDropout):  # of LoRA
                        module.site = replace(module.site, sequence=self._stacks.layer_cut_of(place.name))
        return placements

    def _part(self, place: _Place, has_sharer: bool) -> _Part:
        """Return the replacement of a module; `has_sharer`: a module around it sums the gradient of its input."""
        plan, group, vocabulary = self._plan, self._groups.tensor, self._groups.vocabulary
        cut = self._stacks.sequence_of(place.name)
        module: Any = place.module
        transposed = isinstance(module, Conv1D)

        def column(blocks: int) -> ColumnParallelLinear:
            part = ColumnParallelLinear(module, group, blocks=blocks, transposed=transposed)
            # The gradient of an input is summed over tensor ranks once: around the module that shares it, or here.
            if not has_sharer:
                part.shared_input = SharedInput(group, cut)
            return part

        makers: list[tuple[Iterable[str], Callable[[], _Part]]] = [
            *(((pattern,), partial(column, blocks)) for pattern, blocks in plan.columns.items()),
            (plan.rows, lambda: RowParallelLinear(module, group, transposed=transposed, sequence_parallel=bool(cut))),
            (plan.embeddings, lambda: VocabParallelEmbedding(module, vocabulary, scale=scale_of(module))),
            (plan.head_embeddings, lambda: FeatureParallelEmbedding(module, group)),
            (plan.vocabulary_heads, lambda: ColumnParallelLinear(module, vocabulary, copies_input=True, pads=True)),
        ]
        return next(make() for patterns, make in makers if _any(patterns, place))

    def sum_input_gradients(self) -> None:
        """Insert `f` before the modules that share inputs: it keeps them, and sums their gradients over the group.

        Hidden states that are sharded by position are gathered instead. A decoder's input from the encoder is whole on
        every rank.
        """
        for place in self._matching(self._plan.shared_inputs):
            shared = SharedInput(self._groups.tensor, self._stacks.sequence_of(place.name))
            vars(place.module)[SHARED_INPUT] = shared
            change_inputs(place.module, partial(_share, shared), _INPUTS)

    def divide_attributes(self) -> None:
        size = group_size(self._groups.tensor)
        for pattern, attributes in self._plan.divided.items():
            for place in self._matching([pattern]):
                for attribute in attributes:
                    # The model's code reshapes hidden states by these numbers, which must be those of one rank.
                    setattr(place.module, attribute, getattr(place.module, attribute) // size)

    def cut_dropouts(self) -> None:
        """Set the part of each dropout that works on this rank's heads, features or positions."""
        plan, index = self._plan, index_in_group(self._groups.tensor)
        for place in self._places:
            cut, module = self._stacks.layer_cut_of(place.name), place.module
            of_heads = cut.part_of_heads(index) if cut else index
            if _any(plan.attention, place):
                move_site(module, partial(replace, cut_dim=_HEADS_DIM, part=of_heads))
            if not isinstance(module, KeyedDropout):
                continue
            if _any(plan.split_dropouts, place):
                module.site = replace(module.site, cut_dim=-1, part=index, sequence=cut)
            elif _any(plan.head_dropouts, place):
                module.site = replace(module.site, cut_dim=_HEADS_DIM, part=of_heads)
            else:
                module.site = replace(module.site, sequence=self._stacks.sequence_of(place.name) or cut)

    def cut_attention(self) -> None:
        """Let attention see all positions, if layers have this rank's positions only."""
        for place in self._matching(self._plan.attention):
            if cut := self._stacks.layer_cut_of(place.name):
                cut.cut_attention(place.module)

    def partial_placements(self) -> Placements:
        """Return the placements of replicated parameters that are applied to this rank's part only."""
        placements = {}
        for place in self._places:
            over_tensor = _any(self._plan.partial, place) or self._stacks.sequence_of(place.name)
            axes = [TENSOR_AXIS] * bool(over_tensor) + self._context_axes(place)
            for name, parameter in place.module.named_parameters(place.name, recurse=False):
                # Matrices that are cut got their placements when they were replaced.
                if axes and place.name not in self._cut:
                    placements[name] = ParameterPlacement(
                        name, tuple(parameter.shape), partial_over=("dp", *axes), trainable=parameter.requires_grad
                    )
        return placements

    def cut_parts(self) -> Placements:
        """Cut the modules that have a function for it, and return the placements of their parts."""
        placements: Placements = {}
        for pattern, cut in self._plan.parts.items():
            for place in self._matching([pattern]):
                axes = self._context_axes(place)
                for name, part in cut(place.module, f"{place.name}.", self._groups.tensor).items():
                    placements[name] = replace(part, partial_over=(*part.partial_over, *axes))
        return placements

    def _context_axes(self, place: _Place) -> list[str]:
        """Return the context axis if a module works on this rank's positions, so that its gradients are partial."""
        return [CONTEXT_AXIS] if self._stacks.layer_cut_of(place.name) else []


def _share(shared: SharedInput, name: str, x: Tensor) -> Tensor:
    return shared(x, name == HIDDEN_STATES)


def _plan_of(model: Any) -> TensorPlan:
    family = family_of(model)
    plan = family.tensor if family else None
    if plan is None:
        raise UsageError(
            "`parallel.tensor` must be 1: tensor parallelism does not support the family"
            f" {model.config.model_type}; use"
            " `parallel.strategy` fsdp to shard its parameters"
        )
    return plan


def _stacks(model: nn.Module, groups: RowGroups, sequence: bool) -> Stacks:
    """Return the stacks of layers with their sequence cuts; context ranks choose the function of attention."""
    axis = sequence_axis() if group_size(groups.context) > 1 else None
    layers = {id(layer) for layer in layers_of(model).values()} if sequence or axis else set()
    named = {name: module for name, module in model.named_modules() if id(module) in layers}
    layer_cuts: dict[str | None, LayerCut] = {}
    if axis is not None:
        axis.set_attention(model.config, groups)
        # The layers of a stack have one parent, such as the encoder.
        layer_cuts = {stack: axis.layer_cut(model.config, groups) for stack in dict.fromkeys(map(owner_of, named))}
    return Stacks(named, groups.tensor, sequence, layer_cuts)


def _places(model: nn.Module) -> Iterable[_Place]:
    for name, module in model.named_modules():
        # A stand-in of another stage has nothing to cut.
        if name and not isinstance(module, Absent):
            parent, _, attribute = name.rpartition(".")
            yield _Place(model.get_submodule(parent), attribute, name, relative_name(model, name), module)


def _any(patterns: Iterable[str], place: _Place) -> bool:
    return any(matches(pattern, place.relative) for pattern in patterns)


def _require_modules(model: Any, plan: TensorPlan, places: list[_Place]) -> None:
    """Require a module for each pattern of the plan."""
    model_type = model.config.model_type
    family = FAMILIES.get(model_type)
    called = {name for names in family.called_dropouts.values() for name in names} if family else set()
    if not any(place.attribute in called for place in places):
        # The dropout is not keyed yet, as in a check without weights.
        kept = tuple(pattern for pattern in plan.split_dropouts if pattern.rpartition(".")[2] not in called)
        plan = replace(plan, split_dropouts=kept)
    for pattern in (
        *plan.columns, *plan.rows, *plan.shared_inputs, *plan.attention, *plan.divided, *plan.partial, *plan.parts,
        *plan.split_dropouts, *plan.head_dropouts,
    ):  # fmt: skip
        if not any(matches(pattern, place.relative) for place in places):
            raise UsageError(
                f"the family {model_type} cuts `{pattern}`, but this {type(model).__name__} has no module of that"
                " name; correct `trainer/models/families/`, or use `parallel.tensor` 1"
            )


def _require_placed(model: Any, plan: TensorPlan, places: list[_Place]) -> None:
    """Require that the plan mentions each matrix: one that it forgets would be whole, beside states that are cut."""
    model_type = model.config.model_type
    known = (
        *plan.columns, *plan.rows, *plan.embeddings, *plan.head_embeddings, *plan.vocabulary_heads, *plan.whole,
        *plan.partial,
    )  # fmt: skip
    for place in places:
        matrices = [name for name, p in place.module.named_parameters(recurse=False) if p.dim() > 1]
        is_ours = isinstance(place.module, Factors | TrainedRows) or prefixes(place.name)[0] == ADDED
        if matrices and not _any(known, place) and not is_ours:
            raise UsageError(
                f"{place.name}.{matrices[0]} of this {type(model).__name__} must be cut or named as whole by the family"
                f" {model_type}, but is neither; add it in `trainer/models/families/`, or use `parallel.tensor` 1"
            )


@contextmanager
def _own_columns(model: nn.Module, names: Iterable[str], group: Group) -> Iterator[None]:
    """Show the model this rank's columns of buffers `[1, vocabulary]`, which stay whole for checkpoints and exports."""
    whole = {name: model._buffers[name] for name in names}
    for name, buffer in whole.items():
        assert buffer is not None, "the buffer was listed"
        model._buffers[name] = part_of(buffer, Split(1, ROWS_AXIS), index_in_group(group), group_size(group))
    try:
        yield
    finally:
        model._buffers.update(whole)


def _tie_again(model: nn.Module, tied: list[list[str]]) -> None:
    """Tie the parts of tied parameters again, such as those of an embedding and a head."""
    for group in tied:
        parts = [model.get_parameter(name) for name in group]
        # A parameter outside the replaced modules is still whole; the part is the smaller one.
        part = min(parts, key=lambda parameter: parameter.numel())
        for name in group:
            replace_in(model, name, part)
