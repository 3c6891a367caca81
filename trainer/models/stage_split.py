"""Cut of an unmodified Hugging Face model into pipeline stages, between its layers, by its family's plan.

A stage is the whole model with stand-ins for the modules of other stages (`parallel/pipeline/stand_ins.py`). Its
parameters keep their names. The model's own code runs on each stage and computes masks, position embeddings and other
functions of the inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, cast

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from trainer.base.errors import UsageError
from trainer.models.families.family import StagePlan, matches, relative_name
from trainer.models.families.table import FAMILIES, layers_of
from trainer.models.layer_hooks import change_inputs
from trainer.models.names import owner_of, prefixes, replace_in, tied_names
from trainer.models.stage_shapes import Crossing, CrossingShapes, multiplications
from trainer.models.statistics import persistent_buffers
from trainer.parallel.pipeline.stand_ins import Absent, Later, Passing, Received, StageLeft, StageTraffic, on_meta
from trainer.recipe.schedules import SCHEDULES

Names = tuple[str, ...]


@dataclass(frozen=True)
class StageSplit:
    """The assignment of layers to stages: stage `s` has the layers from `starts[s]` up to `starts[s + 1]`, exclusive.

    `layers` are the names of all layers, in the order of execution.
    """

    layers: Names
    starts: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return len(self.starts)

    def stage_of(self, layer: int) -> int:
        return max(stage for stage, start in enumerate(self.starts) if start <= layer)

    def layers_of(self, stage: int) -> Names:
        end = self.starts[stage + 1] if stage + 1 < self.num_stages else len(self.layers)
        return self.layers[self.starts[stage] : end]


@dataclass(frozen=True)
class StagePart:
    """The part of a model that `cut_stage` leaves.

    `layers` are the names of its layers. `origins` maps names of its parameters to their names in the whole model, if
    they differ. These are tied parameters, and copies of parameters of the first layer. `holders` are the stages with
    such a parameter, by its name in the whole model. `shapes` are the shapes of the tensors that all stages send.
    """

    layers: Names
    traffic: StageTraffic
    origins: dict[str, str]
    holders: dict[str, tuple[int, ...]]
    receives: Crossing
    sends: Crossing
    shapes: CrossingShapes
    result_as: str | None  # the model's argument for the result of an earlier stack

    def run(self, forward: Callable[..., Any], received: Sequence[Tensor], inputs: Mapping[str, Any]) -> Any:
        """Run this stage's part of the model's forward pass.

        Args:
            received: the tensors of the previous stage, each `[batch, positions, hidden]`, or of another shape if
                layers change shapes.
            inputs: the model's keyword arguments, equal on all stages.

        Returns:
            The tensors for the next stage, or the output of the model on the last stage.
        """
        # In the order in which the stage before sends: hidden states, then the result of an earlier stack.
        waiting = list(received)
        self.traffic.hidden = waiting.pop(0) if self.receives.hidden else None
        self.traffic.result = waiting.pop(0) if self.receives.result else None
        if self.result_as is not None:
            # Models of transformers that get the result of their encoder do not run it.
            inputs = {**inputs, self.result_as: BaseModelOutput(self.traffic.result)}
        try:
            return forward(**inputs)
        # A stand-in of the next stage raises it when the model's code calls it: this stage's part is done.
        except StageLeft as left:
            sent = [left.hidden] * self.sends.hidden + [self.traffic.result] * self.sends.result
        finally:
            self.traffic.hidden = self.traffic.result = None  # frees them before the next microbatch
        assert all(tensor is not None for tensor in sent), "the model was left too early"
        # Torch detaches a sent tensor in place, so it must be neither a view nor a received tensor.
        return tuple(t.clone() if t._is_view() or t.is_leaf else t for t in sent if t is not None)


def _plan_of(model: Any) -> StagePlan:
    """Return the stage plan of a model's family; a plan of transformers has no stages.

    Raises:
        UsageError: the family has no stage plan.
    """
    model_type = model.config.model_type
    family = FAMILIES.get(model_type)
    if family is None or family.stages is None:
        able = ", ".join(sorted(name for name, row in FAMILIES.items() if row.stages))
        raise UsageError(
            f"`parallel.pipeline.stages` is above 1, but the family {model_type} cannot be cut between its layers;"
            f" the families that can are {able}; set it to 1, or use `parallel.strategy` fsdp"
        )
    return family.stages


def split_stages(
    model: Any, num_stages: int, starts: Sequence[str] | None = None, schedule: str = "1f1b"
) -> StageSplit:
    """Assign layers to stages, by `starts` or with balanced costs.

    Args:
        model: the whole model, on any device including meta.
        starts: the names of the first layers of all stages but the first; None balances the costs.

    Raises:
        UsageError: there are fewer layers than stages, `starts` does not name layers in order, or the family does not
            support the schedule.
    """
    plan = _plan_of(model)
    # Layers share the first layer's position bias or the encoder's output. Torch's split backward would go through it
    # twice.
    if SCHEDULES[schedule].splits_backward and any(stack.first_layer or stack.result for stack in plan.stacks):
        able = ", ".join(name for name, row in SCHEDULES.items() if not row.splits_backward)
        raise UsageError(
            f"`parallel.pipeline.schedule` is {schedule}, which the family {model.config.model_type} does not"
            f" support: its layers share a position bias or the output of an encoder, where the backward pass cannot be"
            f" split; use {able}"
        )
    layers = tuple(layers_of(model))
    if len(layers) < num_stages:
        raise UsageError(
            f"`parallel.pipeline` asks for {num_stages} stages, but the model has {len(layers)} layers and every stage"
            f" needs one; use at most {len(layers)}"
        )
    if starts is None:
        return StageSplit(layers, _balanced(_costs(model, layers), num_stages))
    if len(starts) != num_stages - 1:
        raise UsageError(
            f"`parallel.pipeline.split` must name the first layer of each of the {num_stages} stages but the first,"
            f" {num_stages - 1} in all, but names {len(starts)}; null balances the layers"
        )
    if unknown := next((name for name in starts if name not in layers), None):
        raise UsageError(
            f"`parallel.pipeline.split` must name layers of the model, from {layers[0]} to {layers[-1]}, but names"
            f" {unknown!r}; null balances the layers"
        )
    numbers = (0, *map(layers.index, starts))
    if list(numbers) != sorted(set(numbers)):
        raise UsageError(
            "`parallel.pipeline.split` must name layers in their order, each once and not the first of all, since every"
            f" stage needs a layer, but is {', '.join(starts)}; sort the names, or write null"
        )
    return StageSplit(layers, numbers)


def _balanced(costs: tuple[float, list[float], float], num_stages: int) -> tuple[int, ...]:
    """Return the first layer of each stage; minimise the highest cost of a stage, then the sum of squared costs.

    Args:
        costs: the cost before the layers, of each layer, and after the layers.
        num_stages: the number of stages; each gets at least one layer.
    """
    before, layers, after = costs
    sums = [0.0]
    for cost in layers:
        sums.append(sums[-1] + cost)

    def total(first: int, last: int) -> float:
        return sums[last] - sums[first] + before * (first == 0) + after * (last == len(layers))

    # best[s][n]: for s stages over the first n layers, the highest cost, the sum of squared costs, and the starts
    best: list[dict[int, tuple[float, float, tuple[int, ...]]]] = [{0: (0.0, 0.0, ())}]
    for stage in range(num_stages):
        row: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for first, (most, squares, starts) in best[-1].items():
            # Each later stage must get a layer, too.
            for last in range(first + 1, len(layers) - (num_stages - stage - 1) + 1):
                here = total(first, last)
                # Tuples compare by their first difference: cost, squares, then starts. All ranks find the same split.
                candidate = (max(most, here), squares + here * here, (*starts, first))
                if candidate < row.get(last, (inf, inf, ())):
                    row[last] = candidate
        best.append(row)
    return best[num_stages][len(layers)][2]


def _costs(model: nn.Module, layers: Names) -> tuple[float, list[float], float]:
    costs = dict.fromkeys(layers, 0.0)
    before = after = 0.0
    plan = _plan_of(model)
    for name, cost in _module_costs(model, plan):
        relative = relative_name(model, name)
        layer = next((layer for layer in layers if _within(relative, layer)), None)
        if layer is not None:
            costs[layer] += cost
        elif any(_stands_in(stack.before, relative) for stack in plan.stacks):
            before += cost
        else:
            after += cost
    return before, [costs[layer] for layer in layers], after


def _module_costs(model: nn.Module, plan: StagePlan) -> Iterator[tuple[str, int]]:
    """Yield each module with direct parameters, and its cost for one token or for one row."""
    # A convolution uses its parameters once per position, and deeper layers have fewer positions.
    row = plan.costed_row(model.config) if plan.costed_row else None
    counted = None if row is None else multiplications(model, row)
    for name, module in model.named_modules():
        direct = list(module.parameters(recurse=False))
        if not direct:
            continue
        if counted is not None:
            yield name, counted.get(name, 0)
        elif isinstance(module, nn.Embedding):
            yield name, direct[0].shape[1]  # the lookup reads one row, independent of the table's size
        else:
            yield name, sum(parameter.numel() for parameter in direct)


def _within(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


def _stands_in(patterns: Names, name: str) -> bool:
    return any(matches(pattern, prefix) for pattern in patterns for prefix in prefixes(name))


class _StagedModel:
    """A whole model and its split: the stacks of the layers, and the stages of modules."""

    def __init__(self, model: nn.Module, split: StageSplit) -> None:
        self.model = model
        self.split = split
        self.plan = _plan_of(model)
        self.stack_of = [
            next(stack for stack in self.plan.stacks if matches(stack.layers, layer)) for layer in split.layers
        ]

    def relative(self, name: str) -> str:
        return relative_name(self.model, name)

    def stage(self, name: str) -> int:
        relative = self.relative(name)
        for number, layer in enumerate(self.split.layers):
            if _within(relative, layer):
                return self.split.stage_of(number)
        for stack in self.plan.stacks:
            numbers = [number for number, of_layer in enumerate(self.stack_of) if of_layer is stack]
            if numbers and _stands_in(stack.before, relative):
                return self.split.stage_of(numbers[0])
            if numbers and _stands_in(stack.after, relative):
                return self.split.stage_of(numbers[-1])
        # Modules that no stack mentions, such as heads, run after the last layer.
        return self.split.num_stages - 1

    def stages(self, name: str, module: nn.Module) -> set[int]:
        """Return the stages of all modules with direct parameters in `module`, including itself."""
        return {
            self.stage(f"{name}.{inner}" if inner else name)
            for inner, part in module.named_modules()
            if next(part.parameters(recurse=False), None) is not None
        }

    def is_group(self, name: str) -> bool:
        """Return whether a module only calls some layers of its stack in order."""
        relative = self.relative(name)
        for stack in self.plan.stacks:
            parts = stack.layers.split(".")
            # Prefixes of the pattern from its first `*` on name the modules that hold several layers.
            first = next((number for number, part in enumerate(parts, 1) if "*" in part), len(parts))
            if any(matches(".".join(parts[:length]), relative) for length in range(first, len(parts))):
                return True
        return False

    def crossing(self, layer: int) -> Crossing:
        """Return the crossing from the stage that ends before this layer to the stage that begins with it."""
        if not 0 < layer < len(self.stack_of):
            return Crossing(hidden=False, result=False)
        stack = self.stack_of[layer]
        # The first layer of another stack gets hidden states from that stack's own embeddings.
        return Crossing(hidden=stack is self.stack_of[layer - 1], result=stack is not self.stack_of[0])

    def copied_module(self, stage: int) -> tuple[str, str, str] | None:
        """Return the module that only the first layer of a stack has, if this stage's first layer needs a copy.

        These are the names of the module and of its copy in the base model, and the attribute that marks its presence.
        """
        start = self.split.starts[stage]
        stack = self.stack_of[start]
        original = self.split.layers[self.stack_of.index(stack)]
        if stack.first_layer is None or self.split.layers[start] == original:
            return None
        inner, flag = stack.first_layer
        return f"{original}.{inner}", f"{self.split.layers[start]}.{inner}", flag


def cut_stage(model: nn.Module, split: StageSplit, stage: int) -> StagePart:
    """Cut a transformers model in place to one stage, with stand-ins for the modules of other stages.

    Args:
        model: the whole model, on any device including meta; it is changed in place.
    """
    staged, traffic = _StagedModel(model, split), StageTraffic()
    first, layers = split.starts[stage], split.layers_of(stage)
    receives, sends = staged.crossing(first), staged.crossing(first + len(layers))
    later = split.starts[1:]
    shapes = CrossingShapes(
        model, [split.layers[start] for start in later], list(map(staged.crossing, later)), staged.plan
    )
    # Before anything is replaced: the stand-ins hide which names are tied.
    origins, holders = _shared_parameters(staged)
    # Before the stand-ins take the place of the first layer, which has the module.
    _copy_first_layer(staged, stage)
    _stand_in(staged, stage, traffic)
    _connect(staged, traffic, split.layers[first] if receives.hidden else None, sends.result and not receives.result)
    # After the stand-ins: the names that this stage still has.
    held = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return StagePart(
        layers,
        traffic,
        {name: origin for name, origin in origins.items() if name in held and name != origin},
        {origin: tuple(sorted(stages)) for origin, stages in holders.items() if len(stages) > 1},
        receives,
        sends,
        shapes,
        next((stack.result_as for stack in staged.plan.stacks if stack.result_as), None) if receives.result else None,
    )


def _shared_parameters(staged: _StagedModel) -> tuple[dict[str, str], dict[str, set[int]]]:
    """Return the first name of each parameter that is tied or copied, and the stages with it, by its first name."""
    model, base = staged.model, cast(Any, staged.model.base_model)
    origins = {name: names[0] for names in tied_names(model) for name in names}
    held = [(origin, staged.stage(owner_of(name))) for name, origin in origins.items()]
    path = next(name for name, module in model.named_modules() if module is base)
    at = f"{path}." if path else ""
    for stage in range(staged.split.num_stages):
        if copied := staged.copied_module(stage):
            source, target, _ = copied
            for name, _ in base.get_submodule(source).named_parameters():
                origin = origins[f"{at}{target}.{name}"] = f"{at}{source}.{name}"
                # Both stages hold the parameter, so their gradients are summed as those of tied weights.
                held += [(origin, staged.stage(owner_of(origin))), (origin, stage)]
    holders: dict[str, set[int]] = {}
    for origin, stage in held:
        holders.setdefault(origin, set()).add(stage)
    return origins, holders


def _copy_first_layer(staged: _StagedModel, stage: int) -> None:
    """Copy the module that only the first layer of a stack has into the first layer of this stage."""
    base: Any = staged.model.base_model
    if copied := staged.copied_module(stage):
        source, target, flag = copied
        # A copy with equal values; `TiedGradients` keeps it equal to the original.
        replace_in(base, target, copy.deepcopy(base.get_submodule(source)))
        # The layer uses the copy only with this flag, such as `has_relative_attention_bias` of T5.
        setattr(base.get_submodule(owner_of(target)), flag, True)


def _stand_in(staged: _StagedModel, stage: int, traffic: StageTraffic) -> None:
    """Replace the modules of other stages by stand-ins."""
    split, stack_of = staged.split, staged.stack_of

    def stand_in(name: str, module: nn.Module, stages: set[int]) -> nn.Module:
        # On `meta`, because a stand-in needs the code and the shapes of the module, but not its weights.
        relative, original = staged.relative(name), on_meta(module)
        # The module runs after this stage.
        if min(stages) > stage:
            # A layer's input is hidden states; modules before a later stack run before there are hidden states.
            return Later(original, takes_hidden=relative in split.layers)
        if relative in split.layers:
            # A layer before this stage: it hands its input on, in the shape of the outputs of a layer.
            return Passing(original, stack_of[split.layers.index(relative)].num_results)
        if any(_stands_in(stack.before, relative) for stack in staged.plan.stacks):
            # A module before the layers, such as an embedding: the model reads the shape of its output for masks.
            return Received(original, traffic)
        return Absent(original)

    def prune(owner: nn.Module, path: str) -> None:
        # A list, because the loop replaces children.
        for attribute, child in list(owner.named_children()):
            name = f"{path}.{attribute}" if path else attribute
            stages = staged.stages(name, child)
            # A module that only calls layers stays, because the stand-ins of its layers must be called.
            if stage in stages or staged.is_group(name):
                prune(child, name)
            elif stages:
                setattr(owner, attribute, stand_in(name, child, stages))

    prune(staged.model, "")
    if stage < split.num_stages - 1:  # like a head, a buffer of the model itself belongs to the last stage
        for name in [name for name in persistent_buffers(staged.model) if "." not in name]:
            staged.model._buffers[name] = None


def _connect(staged: _StagedModel, traffic: StageTraffic, first_layer: str | None, keeps_result: bool) -> None:
    """Give received hidden states to the first layer, and keep the output of a stack that this stage ends."""
    base: Any = staged.model.base_model

    def received(name: str, _: Tensor) -> Tensor:
        assert traffic.hidden is not None, "nothing was received"
        return traffic.hidden

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        traffic.result = output[0]

    if first_layer is not None:
        change_inputs(base.get_submodule(first_layer), received)
    for stack in staged.plan.stacks:
        if stack.result is not None and keeps_result:
            base.get_submodule(stack.result).register_forward_hook(keep)


def trainable_stages(model: nn.Module, split: StageSplit) -> set[int]:
    """Return the stages with a parameter that is not frozen; `model` is whole."""
    staged = _StagedModel(model, split)
    # All names of a tied weight, because each stage with one of them trains a copy.
    names = (name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad)
    return {staged.stage(owner_of(name)) for name in names}


def stage_sizes(model: nn.Module, split: StageSplit) -> list[int]:
    """Return the number of parameters of each stage; a parameter with copies on several stages counts in each.

    Args:
        model: the whole model on the meta device; it is not changed.
    """
    sizes = []
    for stage in range(split.num_stages):
        part = copy.deepcopy(model)
        cut_stage(part, split, stage)
        sizes.append(sum(parameter.numel() for parameter in part.parameters()))
    return sizes
