"""Search for layouts: the fastest ones on given devices, the fewest devices, the largest batch, length or model."""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from copy import copy
from dataclasses import dataclass
from functools import cached_property, reduce
from math import ceil, inf
from multiprocessing import get_context
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

from trainer.base.errors import TrainerError, UsageError
from trainer.base.extensions import registered
from trainer.base.text import dotted_leaves
from trainer.models.configuration import load_config, max_positions, number_of_experts
from trainer.ranks.environment import available_cores
from trainer.recipe.plan import RunPlan, plan_run
from trainer.recipe.reading.loading import ResolvedRecipe, load_recipe
from trainer.recipe.reading.overrides import override_layer
from trainer.recipe.schedules import SCHEDULES
from trainer.recipe.schema import Recipe
from trainer.recipe.strategies import STRATEGIES, Strategy
from trainer.tools.plan.hardware import Devices
from trainer.tools.plan.recipe_plan import Choice, RecipePlan, plan_recipe
from trainer.tools.plan.shapes import shaped
from trainer.tools.plan.simulated_step import planned_task
from trainer.tools.plan.timing import BUBBLE, COMMUNICATION, OPTIMIZER
from trainer.tools.writing import write_recipe

MOST_PLANS = 60
"""Plans of one search, if the caller gives no number."""

MOST_SHOWN = 10
"""Layouts that a search shows; one that cannot be among them need not be planned."""

_TENSOR, _STAGES = (1, 2, 4, 8), (1, 2, 4, 8)
_EXPERTS = (8, 4, 2)
# gpipe has the bubble of 1f1b, and keeps more activations.
_SCHEDULES = tuple(sorted(set(SCHEDULES) - {"gpipe"}, key=lambda name: (name != "1f1b", name)))
_VARIANTS_AT_ONCE = 4
_ROUNDS = 4  # microbatches for each stage of a pipeline; fewer make the bubble long
_RECOMPUTED = "activation_checkpointing=full"
_LONG_TOKENS, _SHARING_ROWS = 4096, (2, 4, 8)
_SIZES = ((1, 1), (2, 1), (4, 1), *((8, 2**power) for power in range(8)))  # devices of a machine, and machines
_GUESSES = 5
_MOST_WORKERS = 4  # each has about half a GiB
_LAYOUTS_OF_A_WORKER = 8  # a worker imports torch first, which takes as long as some plans
_MOST_ROWS, _MOST_TOKENS, _MOST_HEADS = 2**20, 2**17, 512
_WIDTHS = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "n_inner", "ffn_dim", "hidden_dim"
)  # fmt: skip
"""Keys of configurations that grow with the width of a model; a key that a configuration leaves open follows it."""


class Tried(NamedTuple):
    """The result of one layout."""

    overrides: tuple[str, ...]  # the layout
    fitting: Sequence[Choice]  # its plans that fit
    problem: str  # the reason if none fits, or if it cannot run; else empty
    made: int  # the number of plans made


@dataclass(frozen=True)
class SearchResult:
    """The layouts that were planned, and the number of those that were not.

    `too_slow` is the number of layouts that cannot be among the fastest, by a bound from plans of their neighbours.
    """

    tried: Sequence[Tried]
    left_out: int = 0
    too_slow: int = 0

    @property
    def choices(self) -> list[Choice]:
        """The layouts that fit, the fastest first."""
        return sorted((choice for one in self.tried for choice in one.fitting), key=lambda choice: choice.seconds)

    @property
    def failures(self) -> list[Tried]:
        """The layouts that do not fit or cannot run."""
        return [one for one in self.tried if one.problem]


def layouts(local: int, world: int) -> Iterator[tuple[Strategy, int, int, tuple[str, ...]]]:
    """Yield strategy, tensor degree, stages and overrides of every layout; those that cut the model less come first."""
    cuts = [(t, s) for t in _TENSOR for s in _STAGES if local % t == 0 and world % (t * s) == 0]
    for tensor, stages in sorted(cuts, key=lambda cut: (cut[0] * cut[1], cut[0])):
        for row in STRATEGIES.values():
            for sequence in ("false", "true")[: 1 + (tensor > 1)]:
                yield (
                    row,
                    tensor,
                    stages,
                    (
                        f"parallel.strategy={row.name}",
                        f"parallel.tensor={tensor}",
                        f"parallel.sequence={sequence}",
                        *(f"{axis.name}=1" for axis in (*registered("axis"), *registered("experts"))),
                        f"parallel.pipeline.stages={stages}",
                        # Tensor ranks are neighbours on one machine, so its other ranks shard, and the replicas are on
                        # other machines.
                        *([f"parallel.shard={local // tensor}"] if row.groups else []),
                    ),
                )


def planned_experts(recipe: Recipe) -> int:
    """Return the number of experts of a layer; 0 without any, or if the model's configuration cannot be read."""
    # The devices may have no place for the recipe's own layout.
    alone = recipe.model_copy(update={"parallel": type(recipe.parallel)()})
    with suppress(TrainerError):
        return number_of_experts(_config(plan_run(alone, 1)))
    return 0


def expert_degree(experts: int, ranks: int) -> int | None:
    """Return the largest number of ranks that divide the experts of a layer and the ranks; None: experts stay whole."""
    return next((one for one in _EXPERTS if experts and experts % one == 0 and ranks % one == 0), None)


def changing(words: Iterable[str], own: Mapping[str, Any], given: Container[str]) -> tuple[str, ...]:
    """Return the overrides that change a recipe, without those of keys that the user gave.

    `own` is the recipe as JSON values.
    """

    def holds(key: str, text: str) -> bool:
        value: Any = reduce(getitem, key.split("."), own)
        return text == (value if isinstance(value, str) else json.dumps(value))

    pairs = [(word, *word.split("=", 1)) for word in words]
    return tuple(word for word, key, text in pairs if key not in given and not holds(key, text))


class Variant(NamedTuple):
    """A layout with a strategy or a schedule that has a faster-planned neighbour with the same cuts."""

    row: Strategy
    schedule: str  # its pipeline schedule; empty without a pipeline
    cuts: tuple[str, ...]  # the overrides of tensor, sequence and stages, which neighbours share
    overrides: tuple[str, ...]  # all its overrides


class LayoutSearch:
    """The plans of a recipe on given devices under different overrides.

    It changes no override of the user. Texts have `length` tokens; None: `data.max_length`. It ends after `most_plans`.

    Raises:
        TrainerError: the recipe is wrong under every layout.
    """

    def __init__(
        self,
        recipe: str,
        overrides: Sequence[str],
        devices: Devices,
        nodes: int = 1,
        length: int | None = None,
        most_plans: int = MOST_PLANS,
        any_precision: bool = False,
    ) -> None:
        self._recipe, self._overrides, self._length = recipe, tuple(overrides), length
        self._devices, self._nodes = devices, nodes
        self._given = {word.partition("=")[0] for word in overrides}
        self._left = most_plans
        self._any_precision = any_precision
        self._own = load_recipe(recipe, self._overrides, needs_data=False).recipe.model_dump(mode="json")

    def fastest(self) -> SearchResult:
        """Plan layouts: DDP, FSDP and HSDP with tensor ranks, DDP with stages; then their variants within bounds.

        A layout is planned with the largest microbatches that fit. If these have one row, or none fits, it is planned
        with recomputation, too; if none fits then, with ranks that share long rows, or else with offload. Of the keys
        that change the training, only precision is tried, on demand. The variants are ZeRO, other pipeline schedules,
        and sharded parameters in a pipeline. One is planned only if its bound is below the time of the tenth fastest
        layout, the lowest bounds first.

        Raises:
            UsageError: the devices have no known speed.
        """
        if self._devices.machine is None:
            raise UsageError(
                f"`--search` compares times, but no speed is known for {self._devices.name}; give --gpus a name, such"
                " as 8xA100-80, or a file of `trainer plan --measure FILE.json`"
            )
        tried, left = self._tried(self._layouts())
        if left:
            return SearchResult(tried, left + len(self._variants()))
        choices = SearchResult(tried).choices
        # The index decides between equal bounds, since variants cannot be compared.
        variants = sorted((self._bound(one, choices), index, one) for index, one in enumerate(self._variants()))
        while variants:
            # A variant above the last layout that is shown would not be shown.
            limit = [choice.seconds for choice in SearchResult(tried).choices][MOST_SHOWN - 1 : MOST_SHOWN] or [inf]
            fast = [one.overrides for bound, _, one in variants[:_VARIANTS_AT_ONCE] if bound < limit[0]]
            more, left = self._tried(fast)
            tried += more
            is_over = len(fast) < len(variants[:_VARIANTS_AT_ONCE])  # bounds ascend
            variants = variants[len(fast) :]
            if left:
                return SearchResult(tried, left + len(variants))
            if is_over:
                return SearchResult(tried, too_slow=len(variants))
        return SearchResult(tried)

    def _with_precisions(self, layouts: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
        found = list(layouts)
        if self._any_precision and self._own["precision"] == "fp32":
            found = [(*layout, *more) for layout in found for more in ((), self._free("precision=bf16"))]
        return list(dict.fromkeys(found))

    def _tried(self, layouts: Iterable[tuple[str, ...]]) -> tuple[list[Tried], int]:
        """Plan layouts until no plan is left; return the results, and the number of layouts that was left out."""
        found: list[Tried] = []
        wanted = self._with_precisions(layouts)
        # Results are taken in the order of the layouts, so that the number of workers does not change them.
        with closing(self._results(wanted)) as results:
            while self._left > 0 and len(found) < len(wanted):
                found.append(next(results))
                self._left -= found[-1].made
        return found, len(wanted) - len(found)

    def _variants(self) -> list[Variant]:
        """Return the layouts that `_layouts` leaves to bounds; none of a strategy or a schedule that the user gave."""
        local, world = self._devices.number, self._devices.number * self._nodes
        found: dict[tuple[str, ...], Variant] = {}
        planned = set(self._layouts())
        for row, tensor, stages, words in layouts(local, world):
            if not (self._can_run(row, tensor, stages) and self._keeps_given(row, tensor, stages)):
                continue
            for schedule in _SCHEDULES if stages > 1 else ("",):
                if schedule and "parallel.pipeline.schedule" in self._given:
                    continue
                overrides = self._free(*words, *([f"parallel.pipeline.schedule={schedule}"] if schedule else []))
                if overrides not in planned:
                    # Without the keys that the user gave, several layouts may be one.
                    found.setdefault(overrides, Variant(row, schedule, _cuts(overrides), overrides))
        return list(found.values())

    def _keeps_given(self, row: Strategy, tensor: int, stages: int) -> bool:
        """Return whether a layout has the strategy and the cuts that the user gave."""
        own = self._own["parallel"]
        pairs = {
            "parallel.strategy": (row.name, own["strategy"]),
            "parallel.tensor": (tensor, own["tensor"]),
            "parallel.pipeline.stages": (stages, own["pipeline"]["stages"]),
        }
        return all(value == wanted for key, (value, wanted) in pairs.items() if key in self._given)

    def _can_run(self, row: Strategy, tensor: int, stages: int) -> bool:
        """Return whether the devices have the ranks, and the machines, that a strategy needs beside other cuts."""
        data_ranks = self._devices.number * self._nodes // (tensor * stages)
        no_ranks = row.single_process or (row.cuts_anything and data_ranks == 1)
        return not (no_ranks or (row.no_pipeline and stages > 1) or (row.groups and self._nodes == 1))

    def _bound(self, variant: Variant, choices: Iterable[Choice]) -> float:
        """Return seconds that a variant cannot beat, from the plans of layouts with the same cuts; 0 without any.

        Ranks with the same cuts compute the same. ZeRO waits for the collectives that DDP and FSDP hide, and shards the
        optimizer at best. Another schedule changes the bubble alone.
        """
        bounds = []
        for choice in choices:
            if _cuts(choice.overrides) != variant.cuts:
                continue
            assert choice.made.time is not None
            plan, parts = choice.made.plan, choice.made.time.parts
            seconds = choice.seconds - parts[OPTIMIZER]
            if not variant.row.package or plan.strategy.cuts_parameters != variant.row.cuts_parameters:
                seconds -= parts[COMMUNICATION]
            if (own := plan.pipeline) is not None and variant.schedule:
                row = SCHEDULES[variant.schedule]
                bubble = row.bubble(own.num_ranks, row.stages_per_rank, own.num_microbatches)
                # Without the bubble of its own schedule, and with that of the other one.
                seconds = (seconds - parts[BUBBLE]) / (1 - bubble)
            bounds.append(seconds)
        return min(bounds, default=0.0)

    def _results(self, layouts: Sequence[tuple[str, ...]]) -> Generator[Tried, None, None]:
        """Yield the result of each layout, from several processes if there are many layouts."""
        workers = min(_MOST_WORKERS, available_cores(), self._left, len(layouts) // _LAYOUTS_OF_A_WORKER)
        if workers < 2:
            yield from map(self._try, layouts)
            return
        # Forks would inherit the locks of torch's threads.
        with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
            try:
                # A list submits all layouts before the first result is awaited; a generator would run one after the
                # other.
                for future in [pool.submit(self._try, layout) for layout in layouts]:
                    yield future.result()
            except BrokenProcessPool as error:
                raise TrainerError(
                    f"one of the {workers} processes of the search was killed, perhaps because the host's memory is"
                    " full (each needs about half a GiB); free memory, or plan fewer layouts with `--plans`"
                ) from error
            finally:
                # `_tried` closes this generator when no plan is left, and no worker may then begin another layout.
                pool.shutdown(cancel_futures=True)

    def _try(self, layout: tuple[str, ...]) -> Tried:
        """Plan a layout; a copy of this search counts the plans, because it may run in another process."""
        # The count of plans must not change here: `_tried` subtracts it in the order of the layouts.
        search = copy(self)
        try:
            fitting = list(search._fitting(layout))
            problem = "" if fitting else "does not fit, even with recomputation, microbatches of one row and offload"
        except TrainerError as error:
            fitting, problem = [], str(error).splitlines()[0]
        return Tried(layout, fitting, problem, self._left - search._left)

    def _layouts(self) -> Iterator[tuple[str, ...]]:
        local, world = self._devices.number, self._devices.number * self._nodes
        for row, tensor, stages, words in layouts(local, world):
            if self._is_tried(row, data_ranks := world // (tensor * stages), stages):
                yield self._free(*words)
                yield from self._with_experts(words, min(data_ranks, local // tensor))

    def _with_experts(self, words: Sequence[str], ranks: int) -> Iterator[tuple[str, ...]]:
        """Yield a layout with its experts divided over data ranks of one machine."""
        for one in registered("experts"):
            if one.name not in self._given and (degree := expert_degree(self._num_experts, ranks)):
                others = [word for word in words if not word.startswith(f"{one.name}=")]
                yield self._free(*others, f"{one.name}={degree}")

    @cached_property
    def _num_experts(self) -> int:
        return planned_experts(load_recipe(self._recipe, self._overrides, needs_data=False).recipe)

    def _is_tried(self, row: Strategy, data_ranks: int, stages: int) -> bool:
        """Return whether a search plans a strategy; it plans the one that the user gave in any case."""
        if "parallel.strategy" in self._given or row.name == "ddp":
            return row.name == "ddp"  # the word is left out if the user gave another one
        if row.single_process or row.package or data_ranks == 1 or stages > 1:
            return False
        return self._nodes > 1 or not row.groups  # on one machine, hsdp is fsdp

    def _free(self, *words: str) -> tuple[str, ...]:
        return changing(words, self._own, self._given)

    def _fitting(self, layout: tuple[str, ...]) -> Iterator[Choice]:
        """Yield plans of a layout that fit; shared rows, then offload, which is slow, only where nothing else fits."""
        fits = False
        # Both are equal if the recipe recomputes already, or if the user gave the key; then one of them is planned.
        for recomputed in dict.fromkeys((layout, (*layout, *self._free(_RECOMPUTED)))):
            choice = self.largest_microbatch(recomputed)
            if choice is not None:
                fits = True
                yield choice
                if choice.made.plan.batch.micro_batch_size > 1:
                    return
        if not fits and (choice := self._sharing_rows(layout)):
            fits = True
            yield choice
        if not fits and (offloaded := self._offloaded(layout)):
            choice = self.largest_microbatch(offloaded)
            if choice is not None:
                yield choice

    def _sharing_rows(self, layout: tuple[str, ...]) -> Choice | None:
        """Return the plan of a layout with the fewest ranks that share positions of long rows; None if none fits."""
        if (self._length or self._own["data"]["max_length"]) < _LONG_TOKENS:
            return None
        for axis in registered("axis"):
            others = [word for word in layout if not word.startswith(f"{axis.name}=")]
            for degree in _SHARING_ROWS if axis.name not in self._given else ():
                # The model, its batch or another key may not allow it.
                with suppress(TrainerError):
                    words = self._free(_RECOMPUTED, f"{axis.name}={degree}")
                    if choice := self.largest_microbatch((*others, *words)):
                        return choice
        return None

    def _offloaded(self, layout: tuple[str, ...]) -> tuple[str, ...]:
        """Return a layout with recomputation and the most offload; empty if it has none that the user left open."""
        parallel = self._load(layout).recipe.parallel
        # Tables of strategies list `offloads` from none to the most.
        most = STRATEGIES[parallel.strategy].offloads[-1]
        if parallel.offload != "none" or most == "none" or "parallel.offload" in self._given:
            return ()
        return (*layout, *self._free(_RECOMPUTED, f"parallel.offload={most}"))

    def largest_microbatch(self, overrides: tuple[str, ...]) -> Choice | None:
        """Return the plan with the largest microbatches that fit, or None if no size fits.

        Raises:
            TrainerError: the recipe cannot be laid out with these overrides.
        """
        key = "training.micro_batch_size"
        plan = self._run_plan(overrides)
        rows = plan.batch.rank_batch_size
        if key in self._given or plan.batch.micro_batch_tokens is not None:
            made = self.plan(overrides)
            return Choice(overrides, made) if made.fits else None
        # A pipeline needs enough microbatches to hide its bubble.
        fewest = _ROUNDS * plan.layout.pp if plan.layout.pp > 1 else 1
        # Different numbers of microbatches may give one size, which is planned once.
        sizes = sorted({ceil(rows / number) for number in range(min(fewest, rows), rows + 1)})
        return self._largest(lambda size: (*overrides, f"{key}={size}"), sizes, most_first=True)

    def largest_batch(self) -> Choice | None:
        """Return the plan with the largest global batch of one microbatch that fits; None if one row does not fit."""
        plan = self._run_plan()
        layout = plan.layout
        microbatches = 2 * layout.pp if layout.pp > 1 else 1
        ranks = layout.data_parallel_size * microbatches
        return self._largest(
            lambda rows: (
                f"training.global_batch_size={rows * ranks}",
                f"training.micro_batch_size={rows}",
                # With `micro_batch_tokens`, a plan does not read the number of rows.
                *["training.micro_batch_tokens=null"] * (plan.recipe.training.micro_batch_tokens is not None),
            ),
            range(1, _MOST_ROWS),
        )

    def largest_length(self) -> Choice | None:
        """Return the plan with the longest texts that fit, at most the model's positions; None if no length fits."""
        most = max_positions(_config(self._run_plan())) or _MOST_TOKENS
        return self._largest(lambda length: (f"data.max_length={length}",), range(min(8, most), most + 1))

    def largest_model(self) -> Choice | None:
        """Return the plan of the largest model of the recipe's shape that fits; None if the smallest does not fit.

        All models of a shape have the same size of a head, and the same ratios of layers, heads and feed-forward size
        to the hidden size.

        Raises:
            UsageError: the weights are pretrained, or the configuration has no such single shape.
        """
        plan = self._run_plan()
        model, layout = plan.recipe.model, plan.layout
        if not model.is_random:
            raise UsageError(
                f"`--largest model` changes the shape of the model, but `model.name_or_path` is"
                f" {str(model.name_or_path)!r}, which has one; describe a model in `model.config`, and set"
                " `model.name_or_path` to null"
            )
        config = _config(plan)
        # `attribute_map` of transformers has a model's own names, such as `n_embd` of GPT-2 for `hidden_size`.
        names = {name: config.attribute_map.get(name, name) for name in (*_WIDTHS, "num_hidden_layers")}
        own: dict[str, int] = {}
        for key in names.values():
            value = getattr(config, key, None)
            if isinstance(value, int) and value > 0:
                own[key] = value
        needed = [names[name] for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")]
        if config.is_encoder_decoder or not own.keys() >= {*needed}:
            raise UsageError(
                f"`--largest model` needs a model of one stack of equal layers, but {config.model_type} is none; plan"
                " some sizes of it"
            )
        _, heads, depth = needed
        # The scaled number of key heads must be whole, and divide by the tensor degree.
        groups = own.get("num_key_value_heads", own[heads])

        def scaled(key: str, number: int) -> int:
            return max(1, round(own[key] * number / own[heads]))

        numbers = [
            number
            for number in range(layout.tp, _MOST_HEADS + 1, layout.tp)
            if groups * number % (own[heads] * layout.tp) == 0 and scaled(depth, number) >= layout.pp
        ]
        # Parameters grow with the cube of the width: layers times the square of it.
        if not numbers:
            return None
        return self._largest(
            # In floating point, the cube root of a cube may miss the whole number by a bit.
            lambda cube: tuple(f"model.config.{key}={scaled(key, round(cube ** (1 / 3)))}" for key in own),
            [number**3 for number in numbers],
        )

    def _largest(
        self, words: Callable[[int], tuple[str, ...]], values: Sequence[int], most_first: bool = False
    ) -> Choice | None:
        """Return the plan with the largest of the ascending values that fits; it is close to it after some guesses.

        Memory grows with rows about linearly. Two plans give a guess that the next plan verifies. `most_first` tries
        the largest value before all others.
        """

        def planned(index: int) -> Choice:
            return Choice(words(values[index]), self.plan(words(values[index])))

        low, high = 0, len(values)  # the value at `low` fits, that at `high` does not
        if most_first:
            best = planned(high - 1)
            if best.made.fits or high == 1:
                return best if best.made.fits else None
            high -= 1
        best = planned(low)
        if not best.made.fits:
            return None
        slope: float | None = None
        for _ in range(_GUESSES):
            if high - low < 2:
                break
            if slope is None:
                # The first guess without a slope: about twice as many.
                index = min(2 * low + 1, high - 1)
            else:
                spare = self._devices.memory_bytes - best.made.needed
                # Linear from the last plan; a plan that fits moves `low`, another one moves `high`.
                guess = values[low] + (spare / slope if slope > 0 else values[-1])
                index = min(max(bisect_right(values, guess) - 1, low + 1), high - 1)
            tried = planned(index)
            slope = (tried.made.needed - best.made.needed) / (values[index] - values[low])
            if tried.made.fits:
                low, best = index, tried
            else:
                high = index
        return best

    def plan(self, overrides: Iterable[str]) -> RecipePlan:
        """Plan the recipe with overrides.

        Raises:
            TrainerError: the recipe cannot be laid out over the devices, or its step cannot be planned.
        """
        self._left -= 1
        return plan_recipe(self._load(overrides), self._devices, self._nodes, self._length)

    def _load(self, overrides: Iterable[str]) -> ResolvedRecipe:
        return load_recipe(self._recipe, [*self._overrides, *overrides], needs_data=False)

    def _run_plan(self, overrides: Iterable[str] = ()) -> RunPlan:
        return plan_run(self._load(overrides).recipe, self._devices.number * self._nodes, self._devices.number)


def _config(plan: RunPlan) -> Any:
    plan = shaped(plan)
    return load_config(plan.recipe.model, planned_task(plan).model_options())


def fewest_devices(
    recipe: str, overrides: Sequence[str], device: Devices, length: int | None = None
) -> tuple[Devices, int, Choice]:
    """Return the fewest devices on which a recipe fits, as devices of a machine and machines, and the layout.

    FSDP with recomputation and microbatches of one row needs the least memory; tensor parallelism cuts activations.

    Raises:
        UsageError: it fits on no number of devices, or the recipe cannot be laid out over any.
    """
    reason = "its plan failed"
    for number, nodes in _SIZES:
        devices = device.numbered(number)
        search = LayoutSearch(recipe, overrides, devices, nodes, length)
        for layout in _lean(number * nodes, search._num_experts):
            try:
                choice = search.largest_microbatch(search._free(*layout))
            except TrainerError as error:
                reason = str(error).splitlines()[0]
                continue
            if choice is not None:
                return devices, nodes, choice
            reason = "it needs more memory"
    raise UsageError(f"no number of {device.name} up to {number * nodes} was found that holds the recipe: {reason}")


def _lean(world: int, experts: int) -> Iterator[tuple[str, ...]]:
    """Yield overrides that need little memory, the fast ones first."""
    strategy = "parallel.strategy=fsdp" if world > 1 else "parallel.strategy=ddp"
    yield (strategy,)
    yield (strategy, _RECOMPUTED)
    if world > 1:
        for one in registered("experts"):
            if degree := expert_degree(experts, min(world, 8)):
                yield (strategy, f"{one.name}={degree}", _RECOMPUTED)
        tensor = min(world, 8)
        yield (strategy, f"parallel.tensor={tensor}", "parallel.sequence=true", _RECOMPUTED)


def _cuts(overrides: Iterable[str]) -> tuple[str, ...]:
    keys = ("parallel.tensor", "parallel.sequence", "parallel.pipeline.stages")
    return tuple(sorted(word for word in overrides if word.partition("=")[0] in keys))


def write_extending(file: Path, recipe: str, overrides: Sequence[str]) -> None:
    """Write a recipe that extends another one with overrides, as JSON or YAML by its ending.

    Raises:
        UsageError: the file exists, or cannot be written.
    """
    # `extends` is relative to the file that has it.
    base = os.path.relpath(recipe, file.parent) if Path(recipe).is_file() else recipe
    values = override_layer(overrides)[0].plain()
    if file.parent.resolve() != Path.cwd().resolve():
        _make_absolute(values, load_recipe(recipe, overrides, needs_data=False).values)
    write_recipe(file, {"extends": base, **values}, f"{base}, with other values", "--write")


def _make_absolute(values: dict[str, Any], resolved: Mapping[str, Any]) -> None:
    """Replace places relative to the current folder, which the folder of a recipe would change."""
    for key, value in dotted_leaves(values).items():
        place = resolved.get(key)
        first = place[0] if isinstance(place, list) and place else place
        if place != value and isinstance(first, str) and os.path.isabs(first) and key != "checkpoint.folder":
            *sections, last = key.split(".")
            reduce(getitem, sections, values)[last] = place
