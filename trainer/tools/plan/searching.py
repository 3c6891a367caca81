"""Search for layouts: the fastest ones on given devices, the fewest devices, the largest batch, length or model."""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from copy import copy
from dataclasses import dataclass, replace
from math import ceil
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from trainer.base.errors import TrainerError, UsageError
from trainer.models.building import load_config, max_positions
from trainer.ranks.environment import available_cores
from trainer.recipe.plan import RunPlan, plan_run
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.schedules import SCHEDULES
from trainer.recipe.strategies import STRATEGIES, Strategy
from trainer.tools.plan.hardware import Devices
from trainer.tools.plan.recipe_plan import RecipePlan, plan_recipe
from trainer.tools.plan.simulated_step import planned_task
from trainer.tools.plan.timing import BUBBLE, COMMUNICATION, OPTIMIZER

MOST_PLANS = 60
"""Plans of one search, if the caller gives no number."""

MOST_SHOWN = 10
"""Layouts that a search shows; one that cannot be among them need not be planned."""

_TENSOR, _STAGES = (1, 2, 4, 8), (1, 2, 4, 8)
# gpipe has the bubble of 1f1b, and keeps more activations.
_SCHEDULES = tuple(sorted(set(SCHEDULES) - {"gpipe"}, key=lambda name: (name != "1f1b", name)))
_VARIANTS_AT_ONCE = 4
_ROUNDS = 4  # microbatches for each stage of a pipeline; fewer make the bubble long
_RECOMPUTED = "activation_checkpointing=full"
_NUMBERS = (1, 2, 4, 8)  # of devices on one machine; then whole machines of the last number
_MOST_NODES = 128
_GUESSES = 5
_MOST_WORKERS = 4  # each has about half a GiB
_LAYOUTS_OF_A_WORKER = 8  # a worker imports torch first, which takes as long as some plans
_MOST_ROWS, _MOST_TOKENS, _MOST_HEADS = 2**20, 2**17, 512
_WIDTHS = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "n_inner",
    "ffn_dim",
    "hidden_dim",
)
"""Keys of configurations that grow with the width of a model; a key that a configuration leaves open follows it."""


@dataclass(frozen=True)
class Choice:
    """Overrides of a recipe, and its plan with them."""

    overrides: tuple[str, ...]
    made: RecipePlan

    @property
    def seconds(self) -> float:
        """The likely seconds of a step."""
        assert self.made.time is not None
        return self.made.time.likely


@dataclass(frozen=True)
class Failure:
    """Overrides with which a recipe does not fit or cannot run, and the reason."""

    overrides: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Found:
    """The result of a search: layouts that fit, the fastest first; those that do not; the number not planned.

    `too_slow` is the number of layouts that cannot be among the fastest, by a bound from plans of their neighbours.
    """

    choices: Sequence[Choice]
    failures: Sequence[Failure]
    left_out: int
    too_slow: int = 0


def layouts(local: int, world: int) -> Iterator[tuple[Strategy, int, int, tuple[str, ...]]]:
    """Yield strategy, tensor degree, stages and overrides of every layout; those that cut the model less come first.

    Args:
        local: the ranks of a machine.
        world: all ranks.
    """
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
                        "parallel.context=1",
                        f"parallel.pipeline.stages={stages}",
                        *([f"parallel.shard={local // tensor}"] if row.groups else []),
                    ),
                )


def changes(words: Iterable[str], own: Mapping[str, Any], given: Container[str]) -> tuple[str, ...]:
    """Return the overrides that change a recipe, without those of keys that the user gave.

    Args:
        words: overrides.
        own: the recipe as JSON values.
        given: keys.
    """

    def holds(key: str, text: str) -> bool:
        value: Any = own
        for name in key.split("."):
            value = value[name]
        return text == (value if isinstance(value, str) else json.dumps(value))

    pairs = [(word, *word.split("=", 1)) for word in words]
    return tuple(word for word, key, text in pairs if key not in given and not holds(key, text))


class Variant(NamedTuple):
    """A layout with a strategy or a schedule that has a faster-planned neighbour with the same cuts.

    Args:
        row: its strategy.
        schedule: its pipeline schedule; empty without a pipeline.
        cuts: the overrides of tensor, sequence and stages, which neighbours share.
        overrides: all its overrides.
    """

    row: Strategy
    schedule: str
    cuts: tuple[str, ...]
    overrides: tuple[str, ...]


class Tried(NamedTuple):
    """The result of one layout: its plans that fit; the problem if none does, else empty; the number of plans made."""

    fitting: Sequence[Choice]
    problem: str
    made: int


class Search:
    """The plans of a recipe on given devices under different overrides.

    Args:
        recipe: the name or path of the recipe.
        overrides: those of the user, which the search does not change.
        devices: the devices of each machine.
        nodes: the number of machines.
        length: the tokens of each text; None: `data.max_length`.
        most_plans: the number of plans after which the search ends.
        any_precision: whether fp32 may become bf16.

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
        self._own = load_recipe(recipe, self._overrides).recipe.model_dump(mode="json")

    def fastest(self) -> Found:
        """Plan layouts: DDP, FSDP and HSDP with tensor ranks, DDP with stages; then their variants within bounds.

        A layout is planned with the largest microbatches that fit. If these have one row, or none fits, it is planned
        with recomputation, too; if none fits then, with offload. Of the keys that change the training, only precision
        is tried, on demand. The variants are ZeRO, other pipeline schedules, and sharded parameters in a pipeline. One
        is planned only if its bound is below the time of the tenth fastest layout, the lowest bounds first.

        Raises:
            UsageError: the devices have no known speed.
        """
        if self._devices.machine is None:
            raise UsageError(
                f"`--search` compares times, but no speed is known for {self._devices.name}; give --gpus a name, such"
                " as 8xA100-80, or a file of `trainer plan --measure FILE.json`"
            )
        choices: list[Choice] = []
        failures: list[Failure] = []
        layouts = self._with_precisions(self._layouts())
        if rest := self._plan_all(layouts, choices, failures):
            return _sorted(choices, failures, rest + len(self._variants()), 0)
        variants = sorted(((self._bound(v, choices), i, v) for i, v in enumerate(self._variants())))
        for begin in range(0, len(variants), _VARIANTS_AT_ONCE):
            limit = sorted(choice.seconds for choice in choices)[MOST_SHOWN - 1 : MOST_SHOWN]
            batch = variants[begin : begin + _VARIANTS_AT_ONCE]
            some = [v.overrides for bound, _, v in batch if not limit or bound < limit[0]]
            rest = self._plan_all(self._with_precisions(some), choices, failures)
            others = len(variants) - begin - len(some)
            if rest:
                return _sorted(choices, failures, rest + others, 0)
            if len(some) < len(batch):  # bounds ascend
                return _sorted(choices, failures, 0, others)
        return _sorted(choices, failures, 0, 0)

    def _with_precisions(self, layouts: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
        found = list(layouts)
        if self._any_precision and self._own["precision"] == "fp32":
            found = [(*layout, *more) for layout in found for more in ((), self._free("precision=bf16"))]
        return list(dict.fromkeys(found))

    def _plan_all(self, layouts: Sequence[tuple[str, ...]], choices: list[Choice], failures: list[Failure]) -> int:
        """Plan layouts, add the results to the lists, and return the number that was left out."""
        # Results are taken in the order of the layouts, so that the number of workers does not change them.
        with closing(self._tried(layouts)) as results:
            for index, layout in enumerate(layouts):
                if self._left <= 0:
                    return len(layouts) - index
                fitting, problem, made = next(results)
                self._left -= made
                choices += fitting
                if problem:
                    failures.append(Failure(layout, problem))
        return 0

    def _variants(self) -> list[Variant]:
        """Return the layouts that `_layouts` leaves to bounds; none of a strategy or a schedule that the user gave."""
        local, world = self._devices.number, self._devices.number * self._nodes
        found: dict[tuple[str, ...], Variant] = {}
        planned, own = set(self._layouts()), self._own["parallel"]
        fixed = {"parallel.tensor": own["tensor"], "parallel.pipeline.stages": own["pipeline"]["stages"]}
        for row, tensor, stages, words in layouts(local, world):
            cuts = {"parallel.tensor": tensor, "parallel.pipeline.stages": stages}
            if any(key in self._given and cuts[key] != value for key, value in fixed.items()):
                continue
            data_ranks = world // (tensor * stages)
            no_ranks = row.single_process or (row.cuts_anything and data_ranks == 1)
            if no_ranks or (row.no_pipeline and stages > 1) or (row.groups and self._nodes == 1):
                continue
            if "parallel.strategy" in self._given and row.name != own["strategy"]:
                continue
            for schedule in _SCHEDULES if stages > 1 else ("",):
                if schedule and "parallel.pipeline.schedule" in self._given:
                    continue
                overrides = self._free(*words, *([f"parallel.pipeline.schedule={schedule}"] if schedule else []))
                if overrides not in planned:
                    found.setdefault(overrides, Variant(row, schedule, _cuts(overrides), overrides))
        return list(found.values())

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
            if not variant.row.zero_stage or plan.strategy.cuts_parameters != variant.row.cuts_parameters:
                seconds -= parts[COMMUNICATION]
            if (own := plan.pipeline) is not None and variant.schedule:
                row = SCHEDULES[variant.schedule]
                bubble = row.bubble(own.num_ranks, row.stages_per_rank, own.num_microbatches)
                seconds = (seconds - parts[BUBBLE]) / (1 - bubble)
            bounds.append(seconds)
        return min(bounds, default=0.0)

    def _tried(self, layouts: Sequence[tuple[str, ...]]) -> Generator[Tried, None, None]:
        """Yield the result of each layout, from several processes if there are many layouts."""
        workers = min(_MOST_WORKERS, available_cores(), self._left, len(layouts) // _LAYOUTS_OF_A_WORKER)
        if workers < 2:
            yield from map(self._try, layouts)
            return
        with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
            try:
                for future in [pool.submit(self._try, layout) for layout in layouts]:
                    yield future.result()
            except BrokenProcessPool as error:
                raise TrainerError(
                    f"one of the {workers} processes of the search was killed, perhaps because the host's memory is"
                    " full (each needs about half a GiB); free memory, or plan fewer layouts with `--plans`"
                ) from error
            finally:
                pool.shutdown(cancel_futures=True)

    def _try(self, layout: tuple[str, ...]) -> Tried:
        """Plan a layout; a copy of this search counts the plans, because it may run in another process."""
        search = copy(self)
        try:
            fitting = list(search._fitting(layout))
            problem = "" if fitting else "does not fit, even with recomputation, microbatches of one row and offload"
        except TrainerError as error:
            fitting, problem = [], str(error).splitlines()[0]
        return Tried(fitting, problem, self._left - search._left)

    def _layouts(self) -> Iterator[tuple[str, ...]]:
        local, world = self._devices.number, self._devices.number * self._nodes
        for row, tensor, stages, words in layouts(local, world):
            if self._is_tried(row, world // (tensor * stages), stages):
                yield self._free(*words)

    def _is_tried(self, row: Strategy, data_ranks: int, stages: int) -> bool:
        """Return whether a search plans a strategy; it plans the one that the user gave in any case."""
        if "parallel.strategy" in self._given or row.name == "ddp":
            return row.name == "ddp"  # the word is left out if the user gave another one
        if row.single_process or row.zero_stage or data_ranks == 1 or stages > 1:
            return False
        return self._nodes > 1 or not row.groups  # on one machine, hsdp is fsdp

    def _free(self, *words: str) -> tuple[str, ...]:
        return changes(words, self._own, self._given)

    def _fitting(self, layout: tuple[str, ...]) -> Iterator[Choice]:
        """Yield plans of a layout that fit; offload, which is slow, only where nothing else fits."""
        fits = False
        for recomputed in dict.fromkeys((layout, (*layout, *self._free(_RECOMPUTED)))):
            choice = self.largest_microbatch(recomputed)
            if choice is not None:
                fits = True
                yield choice
                if choice.made.plan.batch.micro_batch_size > 1:
                    return
        if not fits and (offloaded := self._offloaded(layout)):
            choice = self.largest_microbatch(offloaded)
            if choice is not None:
                yield choice

    def _offloaded(self, layout: tuple[str, ...]) -> tuple[str, ...]:
        """Return a layout with recomputation and the most offload; empty if it has none that the user left open."""
        parallel = load_recipe(self._recipe, [*self._overrides, *layout]).recipe.parallel
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
        resolved = load_recipe(self._recipe, [*self._overrides, *overrides])
        plan = plan_run(resolved.recipe, self._devices.number * self._nodes, self._devices.number)
        rows = plan.batch.rank_batch_size
        if key in self._given or plan.batch.micro_batch_tokens is not None:
            made = self.plan(overrides)
            return Choice(overrides, made) if made.fits else None
        fewest = _ROUNDS * plan.layout.pp if plan.layout.pp > 1 else 1
        sizes = sorted({ceil(rows / number) for number in range(min(fewest, rows), rows + 1)})
        return self._largest(lambda size: (*overrides, f"{key}={size}"), sizes, most_first=True)

    def largest_batch(self) -> Choice | None:
        """Return the plan with the largest global batch of one microbatch that fits; None if one row does not fit."""
        resolved = load_recipe(self._recipe, self._overrides)
        world = self._devices.number * self._nodes
        layout = plan_run(resolved.recipe, world, self._devices.number).layout
        microbatches = 2 * layout.pp if layout.pp > 1 else 1
        ranks = layout.data_parallel_size * microbatches
        return self._largest(
            lambda rows: (
                f"training.global_batch_size={rows * ranks}",
                f"training.micro_batch_size={rows}",
                *["training.micro_batch_tokens=null"] * (resolved.recipe.training.micro_batch_tokens is not None),
            ),
            range(1, _MOST_ROWS),
        )

    def largest_length(self) -> Choice | None:
        """Return the plan with the longest texts that fit, at most the model's positions; None if no length fits."""
        config = self._config(self._plan())
        positions = max_positions(config)
        return self._largest(lambda length: (f"data.max_length={length}",), range(8, (positions or _MOST_TOKENS) + 1))

    def _plan(self) -> RunPlan:
        recipe = load_recipe(self._recipe, self._overrides).recipe
        return plan_run(recipe, self._devices.number * self._nodes, self._devices.number)

    @staticmethod
    def _config(plan: RunPlan) -> Any:
        return load_config(plan.recipe.model, planned_task(plan).model_options())

    def largest_model(self) -> Choice | None:
        """Return the plan of the largest model of the recipe's shape that fits; None if the smallest does not fit.

        All models of a shape have the same size of a head, and the same ratios of layers, heads and feed-forward size
        to the hidden size.

        Raises:
            UsageError: the weights are pretrained, or the configuration has no such single shape.
        """
        plan = self._plan()
        model, layout = plan.recipe.model, plan.layout
        if not model.is_random:
            raise UsageError(
                f"`--largest model` changes the shape of the model, but `model.name_or_path` is"
                f" {str(model.name_or_path)!r}, which has one; describe a model in `model.config`, and set"
                " `model.name_or_path` to null"
            )
        config = self._config(plan)
        names = {name: config.attribute_map.get(name, name) for name in (*_WIDTHS, "num_hidden_layers")}
        found = {key: getattr(config, key, None) for key in names.values()}
        own = {key: value for key, value in found.items() if isinstance(value, int) and value > 0}
        needed = [names[name] for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")]
        if config.is_encoder_decoder or not own.keys() >= {*needed}:
            raise UsageError(
                f"`--largest model` needs a model of one stack of equal layers, but {config.model_type} is none; plan"
                " some sizes of it"
            )
        _, heads, depth = needed
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
                index = min(2 * low + 1, high - 1)
            else:
                spare = self._devices.memory_bytes - best.made.needed
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
        resolved = load_recipe(self._recipe, [*self._overrides, *overrides])
        return plan_recipe(resolved, self._devices, self._nodes, self._length)


def fewest_devices(
    recipe: str, overrides: Sequence[str], device: Devices, length: int | None = None
) -> tuple[Devices, int, Choice]:
    """Return the fewest devices on which a recipe fits, as devices of a machine and machines, and the layout.

    FSDP with recomputation and microbatches of one row needs the least memory; tensor parallelism cuts activations.

    Args:
        recipe: the name or path of the recipe.
        overrides: those of the user.
        device: one device.
        length: the tokens of each text.

    Raises:
        UsageError: it fits on no number of devices, or the recipe cannot be laid out over any.
    """
    sizes = [(number, 1) for number in _NUMBERS]
    nodes = 2
    while nodes <= _MOST_NODES:
        sizes.append((_NUMBERS[-1], nodes))
        nodes *= 2
    reason = "its plan failed"
    for number, nodes in sizes:
        search = Search(recipe, overrides, _several(device, number), nodes, length)
        for layout in _lean(number * nodes):
            try:
                choice = search.largest_microbatch(search._free(*layout))
            except TrainerError as error:
                reason = str(error).splitlines()[0]
                continue
            if choice is not None:
                return _several(device, number), nodes, choice
            reason = "it needs more memory"
    raise UsageError(f"no number of {device.name} up to {sizes[-1][0] * sizes[-1][1]} was found to fit: {reason}")


def _several(device: Devices, number: int) -> Devices:
    machine = device.machine and replace(device.machine, local_ranks=number)
    return replace(device, number=number, machine=machine)


def _lean(world: int) -> Iterator[tuple[str, ...]]:
    """Yield overrides that need little memory, the fast ones first."""
    strategy = "parallel.strategy=fsdp" if world > 1 else "parallel.strategy=ddp"
    yield (strategy,)
    yield (strategy, _RECOMPUTED)
    if world > 1:
        tensor = min(world, _NUMBERS[-1])
        yield (strategy, f"parallel.tensor={tensor}", "parallel.sequence=true", _RECOMPUTED)


def _cuts(overrides: Iterable[str]) -> tuple[str, ...]:
    keys = ("parallel.tensor", "parallel.sequence", "parallel.pipeline.stages")
    return tuple(sorted(word for word in overrides if word.partition("=")[0] in keys))


def _sorted(choices: Iterable[Choice], failures: Sequence[Failure], left_out: int, too_slow: int) -> Found:
    return Found(sorted(choices, key=lambda choice: choice.seconds), failures, left_out, too_slow)


def write_recipe(file: Path, recipe: str, overrides: Sequence[str]) -> None:
    """Write a recipe that extends another one with overrides.

    Args:
        file: the new file.
        recipe: the name or path of the extended recipe.
        overrides: the words `key=value`.

    Raises:
        UsageError: the file exists, or cannot be written.
    """
    base = os.path.relpath(recipe, file.parent) if Path(recipe).is_file() else recipe
    written: dict[str, Any] = {"extends": base}
    for word in overrides:
        path, _, text = word.partition("=")
        *sections, key = path.split(".")
        place = written
        for section in sections:
            place = place.setdefault(section, {})
        try:
            place[key] = json.loads(text)
        except ValueError:
            place[key] = text
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(json.dumps(written, indent=2) + "\n")
    except FileExistsError as error:
        raise UsageError(f"`--write` is {file}, which exists; name another file") from error
    except OSError as error:
        raise UsageError(f"`--write` is {file}, which cannot be written ({error.strerror}); name another") from error
