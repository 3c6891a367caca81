"""Cuts an unmodified Hugging Face model into pipeline stages, between its layers, by its family's plan.

A stage is the whole model of which all but its own modules are stood in for (`parallel/stage.py`): its parameters keep
their names, and masks, position embeddings and whatever else the model computes of its inputs are computed on each
stage by the model's own code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from trainer.base.errors import UsageError
from trainer.models.families.family import LayerStack, StagePlan, matches, relative_name
from trainer.models.families.table import FAMILIES, family_of, layers_of
from trainer.models.names import tied_names
from trainer.models.sequence import change_inputs
from trainer.models.shapes import CrossingShapes, multiplications
from trainer.parallel.stage import Absent, Later, Passing, Received, StageLeft, StageTraffic, on_meta
from trainer.recipe.schedules import SCHEDULES

Names = tuple[str, ...]


@dataclass(frozen=True)
class StageSplit:
    """Which layers are whose: stage `s` has the layers from `starts[s]` to before `starts[s + 1]`.

    `layers` are the names of all layers, in the order in which they run.
    """

    layers: Names
    starts: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return len(self.starts)

    def stage_of(self, layer: int) -> int:
        """The stage of the layer with this number."""
        return max(stage for stage, start in enumerate(self.starts) if start <= layer)

    def layers_of(self, stage: int) -> Names:
        """The names of a stage's layers."""
        end = self.starts[stage + 1] if stage + 1 < self.num_stages else len(self.layers)
        return self.layers[self.starts[stage] : end]


@dataclass(frozen=True)
class Crossing:
    """What is sent from one stage to the next."""

    hidden: bool  # states between two layers of a stack
    result: bool  # the output of an earlier stack, which later layers look at

    def __len__(self) -> int:
        return self.hidden + self.result


@dataclass(frozen=True)
class StagePart:
    """What `cut_stage` has made of a model.

    `layers` are its layers, by name. `origins` are the names by which the whole model knows the parameters that it
    holds, where they are not their own: tied ones, and copies of what the first layer has. `holders` are the stages
    that hold such a parameter, by its name in the whole model. `shapes` are of what all stages send.
    """

    layers: Names
    traffic: StageTraffic
    origins: dict[str, str]
    holders: dict[str, tuple[int, ...]]
    receives: Crossing
    sends: Crossing
    shapes: CrossingShapes
    result_as: str | None  # the argument by which the model is given the result of an earlier stack

    def run(self, forward: Callable[..., Any], received: Sequence[Tensor], inputs: Mapping[str, Any]) -> Any:
        """This stage's share of the model's forward pass.

        Args:
            forward: of the model.
            received: from the stage before, each `[batch, positions, hidden]`, or of images perhaps
                `[batch, channels, height, width]`.
            inputs: the model's keyword arguments, on every stage alike.

        Returns:
            The tensors for the next stage, or, on the last stage, what the model returns.
        """
        waiting = list(received)
        self.traffic.hidden = waiting.pop(0) if self.receives.hidden else None
        self.traffic.result = waiting.pop(0) if self.receives.result else None
        if self.result_as is not None:
            inputs = {**inputs, self.result_as: BaseModelOutput(self.traffic.result)}
        try:
            return forward(**inputs)
        except StageLeft as left:
            sent = [left.hidden] * self.sends.hidden + [self.traffic.result] * self.sends.result
        finally:
            self.traffic.hidden = self.traffic.result = None  # or they would be kept until the next microbatch
        assert all(tensor is not None for tensor in sent), "the model was left too early"
        # Torch cuts what was sent off its graph, in place: it must be neither a view nor what was received.
        return tuple(t.clone() if t._is_view() or t.is_leaf else t for t in sent if t is not None)


def plan_of(model: nn.Module) -> StagePlan:
    """The plan of a model's family.

    Raises:
        UsageError: it has none.
    """
    family = family_of(model)
    if family.stages is None:
        able = ", ".join(sorted(name for name, row in FAMILIES.items() if row.stages))
        raise UsageError(
            f"`parallel.pipeline.stages` is above 1, but the family {family.model_type} cannot be cut between its"
            f" layers; the families that can are {able}"
        )
    return family.stages


def split_stages(
    model: nn.Module, num_stages: int, starts: Sequence[str] | None = None, schedule: str = "1f1b"
) -> StageSplit:
    """Assign layers of about equal cost, or those that the recipe names, to each stage.

    Args:
        model: whole, perhaps on the meta device.
        num_stages: of the pipeline.
        starts: the first layer of each stage but the first, by name; None: by cost.
        schedule: the name of the pipeline's schedule.

    Raises:
        UsageError: there are fewer layers than stages, `starts` does not name layers in order, or the family does not
            support the schedule.
    """
    plan = plan_of(model)
    # Layers share the position bias that the first one computes: torch's split backward goes through it twice.
    if SCHEDULES[schedule].splits_backward and any(stack.first_layer for stack in plan.stacks):
        able = ", ".join(name for name, row in SCHEDULES.items() if not row.splits_backward)
        raise UsageError(
            f"`parallel.pipeline.schedule` is {schedule}, which the family {family_of(model).model_type} does not"
            f" support: its layers share one position bias, and the backward pass cannot be split there; use {able}"
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
            f" {num_stages - 1} in all, but names {len(starts)}"
        )
    if unknown := next((name for name in starts if name not in layers), None):
        raise UsageError(
            f"`parallel.pipeline.split` must name layers of the model, from {layers[0]} to {layers[-1]}, but names"
            f" {unknown!r}"
        )
    numbers = tuple(layers.index(name) for name in starts)
    if numbers != tuple(sorted(set(numbers))) or 0 in numbers:
        raise UsageError(
            "`parallel.pipeline.split` must name layers in their order, each once and not the first of all, since every"
            f" stage needs a layer, but is {', '.join(starts)}"
        )
    return StageSplit(layers, (0, *numbers))


def _balanced(costs: tuple[float, list[float], float], num_stages: int) -> tuple[int, ...]:
    """The first layer of each stage, such that the most expensive stage costs the least, and then the next one.

    Args:
        costs: of what is before the layers, of each layer, and of what is after them.
        num_stages: each gets a layer.
    """
    before, layers, after = costs
    sums = [0.0]
    for cost in layers:
        sums.append(sums[-1] + cost)

    def total(first: int, last: int) -> float:
        return sums[last] - sums[first] + before * (first == 0) + after * (last == len(layers))

    # best[s][n]: of s stages over the first n layers, the cost of the most expensive, the sum of squares, the starts
    best: list[dict[int, tuple[float, float, tuple[int, ...]]]] = [{0: (0.0, 0.0, ())}]
    for stage in range(num_stages):
        row: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for first, (most, squares, starts) in best[-1].items():
            for last in range(first + 1, len(layers) - (num_stages - stage - 1) + 1):
                here = total(first, last)
                candidate = (max(most, here), squares + here * here, (*starts, first))
                if candidate < row.get(last, (inf, inf, ())):
                    row[last] = candidate
        best.append(row)
    return best[num_stages][len(layers)][2]


def _costs(model: nn.Module, layers: Names) -> tuple[float, list[float], float]:
    """Multiplications of a forward pass: what is before the layers, each layer, and what is after them."""
    costs = dict.fromkeys(layers, 0.0)
    before = after = 0.0
    plan = plan_of(model)
    for name, cost in _module_costs(model, plan):
        relative = relative_name(model, name)
        layer = next((layer for layer in layers if _within(relative, layer)), None)
        if layer is not None:
            costs[layer] += cost
        elif any(_stands_before(stack, relative) for stack in plan.stacks):
            before += cost
        else:
            after += cost
    return before, [costs[layer] for layer in layers], after


def _module_costs(model: nn.Module, plan: StagePlan) -> Iterator[tuple[str, int]]:
    """What each module with parameters of its own costs: for one token of a text, or for one image."""
    # A convolution uses its parameters once for every place in the image, of which deeper layers have fewer.
    counted = multiplications(model) if plan.changes_shape else None
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if not own:
            continue
        if counted is not None:
            yield name, counted.get(name, 0)
        elif isinstance(module, nn.Embedding):
            yield name, own[0].shape[1]  # a row is looked up and added, whatever its table holds
        else:
            yield name, sum(parameter.numel() for parameter in own)


def _within(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def _stands_before(stack: LayerStack, name: str) -> bool:
    return any(matches(pattern, prefix) for pattern in stack.before for prefix in _prefixes(name))


def _stands_after(stack: LayerStack, name: str) -> bool:
    return any(matches(pattern, prefix) for pattern in stack.after for prefix in _prefixes(name))


def _is_group(stack: LayerStack, name: str) -> bool:
    """Whether a module only calls layers, some of those of its stack, one after the other."""
    parts = stack.layers.split(".")
    first = next((number for number, part in enumerate(parts, 1) if "*" in part), len(parts))
    return any(matches(".".join(parts[:length]), name) for length in range(first, len(parts)))


class _Owners:
    """Which stage each module with parameters belongs to."""

    def __init__(self, model: nn.Module, plan: StagePlan, split: StageSplit) -> None:
        self._model = model
        self._plan = plan
        self._split = split
        self._numbers = [
            [number for number, layer in enumerate(split.layers) if matches(stack.layers, layer)]
            for stack in plan.stacks
        ]

    def stage(self, name: str) -> int:
        """Of the module called `name` in the model."""
        relative = relative_name(self._model, name)
        for number, layer in enumerate(self._split.layers):
            if _within(relative, layer):
                return self._split.stage_of(number)
        for stack, numbers in zip(self._plan.stacks, self._numbers, strict=True):
            if numbers and _stands_before(stack, relative):
                return self._split.stage_of(numbers[0])
            if numbers and _stands_after(stack, relative):
                return self._split.stage_of(numbers[-1])
        return self._split.num_stages - 1

    def stages(self, name: str, module: nn.Module) -> set[int]:
        """Of the modules with parameters in `module`, itself included."""
        return {
            self.stage(f"{name}.{inner}" if inner else name)
            for inner, part in module.named_modules()
            if next(part.parameters(recurse=False), None) is not None
        }


def cut_stage(model: nn.Module, split: StageSplit, stage: int) -> StagePart:
    """Leaves of a transformers model what one stage computes; the rest is stood in for.

    Args:
        model: whole, perhaps on the meta device; changed in place.
        split: of its layers.
        stage: which one, from 0.
    """
    plan = plan_of(model)
    owners = _Owners(model, plan, split)
    traffic = StageTraffic()
    stack_of = [next(stack for stack in plan.stacks if matches(stack.layers, layer)) for layer in split.layers]
    first = split.starts[stage]
    following = first + len(split.layers_of(stage))
    shapes = CrossingShapes(model, [split.layers[start] for start in split.starts[1:]], plan.changes_shape)
    origins = {name: names[0] for names in tied_names(model) for name in names}
    holders: dict[str, set[int]] = {}
    for name, origin in origins.items():
        holders.setdefault(origin, set()).add(owners.stage(name.rpartition(".")[0]))
    for name, origin, holder in _copy_first_layers(model, split, stack_of, stage):
        origins[name] = origin
        holders.setdefault(origin, {split.stage_of(stack_of.index(stack_of[split.starts[holder]]))}).add(holder)

    def stand_in(name: str, module: nn.Module, stages: set[int]) -> nn.Module:
        relative = relative_name(model, name)
        original = on_meta(module)
        if min(stages) > stage:
            # A layer is called with hidden states; what comes before a later stack is called before it has any.
            return Later(original, takes_hidden=relative in split.layers)
        if relative in split.layers:
            return Passing(original, stack_of[split.layers.index(relative)].num_results)
        if any(_stands_before(stack, relative) for stack in plan.stacks):
            return Received(original, traffic)
        return Absent(original)

    def prune(owner: nn.Module, path: str) -> None:
        for attribute, child in list(owner.named_children()):
            name = f"{path}.{attribute}" if path else attribute
            stages = owners.stages(name, child)
            # What only calls layers stays, so that those of earlier stages let pass and the first later one is met.
            is_group = any(_is_group(stack, relative_name(model, name)) for stack in plan.stacks)
            if stage in stages or is_group:
                prune(child, name)
            elif stages:
                setattr(owner, attribute, stand_in(name, child, stages))

    prune(model, "")
    receives, sends = _crossing(plan, stack_of, first), _crossing(plan, stack_of, following)
    base: Any = model.base_model
    if receives.hidden:
        _give_hidden(base.get_submodule(split.layers[first]), traffic)
    for stack in plan.stacks:
        if stack.result is not None and sends.result and not receives.result:
            _keep_result(base.get_submodule(stack.result), traffic)
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return StagePart(
        split.layers_of(stage),
        traffic,
        {name: origin for name, origin in origins.items() if name in own and name != origin},
        {origin: tuple(sorted(stages)) for origin, stages in holders.items() if len(stages) > 1},
        receives,
        sends,
        shapes,
        next((stack.result_as for stack in plan.stacks if stack.result_as), None) if receives.result else None,
    )


def stage_sizes(model: nn.Module, split: StageSplit) -> list[int]:
    """The parameters of each stage; one that several stages hold copies of counts in each.

    Args:
        model: whole, on the meta device; left as it is.
        split: of its layers.
    """
    sizes = []
    for stage in range(split.num_stages):
        part = copy.deepcopy(model)
        cut_stage(part, split, stage)
        sizes.append(sum(parameter.numel() for parameter in part.parameters()))
    return sizes


def _crossing(plan: StagePlan, stack_of: Sequence[LayerStack], layer: int) -> Crossing:
    """What goes from the stage that ends before this layer to the one that begins with it."""
    if not 0 < layer < len(stack_of):
        return Crossing(hidden=False, result=False)
    stack = stack_of[layer]
    return Crossing(hidden=stack is stack_of[layer - 1], result=stack is not stack_of[0])


def _copy_first_layers(
    model: nn.Module, split: StageSplit, stack_of: Sequence[LayerStack], stage: int
) -> Iterator[tuple[str, str, int]]:
    """Gives the first layer of this stage what only the first of its stack has.

    Yields:
        For each stage that has copies: the name of a copied parameter, that of the original, and the stage.
    """
    base: Any = model.base_model
    prefix = next(name for name, module in model.named_modules() if module is base)
    for holder, start in enumerate(split.starts):
        stack = stack_of[start]
        original = split.layers[stack_of.index(stack)]
        if stack.first_layer is None or split.layers[start] == original:
            continue
        inner, flag = stack.first_layer
        source, target = f"{original}.{inner}", f"{split.layers[start]}.{inner}"
        owner, _, attribute = target.rpartition(".")
        module = base.get_submodule(source)
        if holder == stage:
            setattr(base.get_submodule(owner), attribute, copy.deepcopy(module))
            setattr(base.get_submodule(owner), flag, True)
        at = f"{prefix}." if prefix else ""
        for name, _ in module.named_parameters():
            yield f"{at}{target}.{name}", f"{at}{source}.{name}", holder


def _give_hidden(layer: nn.Module, traffic: StageTraffic) -> None:
    def received(name: str, _: Tensor) -> Tensor:
        assert traffic.hidden is not None, "nothing was received"
        return traffic.hidden

    change_inputs(layer, received)


def _keep_result(module: nn.Module, traffic: StageTraffic) -> None:
    def keep(module: nn.Module, args: Any, output: Any) -> None:
        traffic.result = output[0]

    module.register_forward_hook(keep)
