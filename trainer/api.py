"""The Python interface: load and run recipes, assemble the parts of a training, register extensions.

`trainer` offers these names lazily, so that `import trainer` imports no torch.
"""

from __future__ import annotations

import json
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from trainer.base import extensions
from trainer.base.errors import ExitCode, LaunchError, UsageError
from trainer.base.file_formats import FileFormat
from trainer.base.logging_targets import LoggingTarget
from trainer.base.scratch import scratch_folder
from trainer.ranks.environment import detect, forbid_telemetry, problems_name_the_machine
from trainer.recipe.reading import loading
from trainer.recipe.reading.loading import ResolvedRecipe
from trainer.recipe.registered import optimizer_name, schedule_name, strategy_name, task_name

if TYPE_CHECKING:
    from torch import nn

    from trainer import Callback
    from trainer.models.families.family import ModelFamily
    from trainer.observe.preview_records import Preview
    from trainer.observe.records import BestMetric, EvaluationRecord, LoggedRecord, StepRecord
    from trainer.recipe.schema import OptimizerKeys, ScheduleKeys, TaskKeys
    from trainer.recipe.strategies import Strategy
    from trainer.tasks.task import Task
    from trainer.tools.plan.machines import MachineResult
    from trainer.tools.plan.recipe_plan import RecipePlan
    from trainer.training.assembly import Assembly
    from trainer.use.export.exporting import Exported

_JUDGED = (ExitCode.DONE, ExitCode.FAILED)
"""Exit codes of commands that judge: both have results."""


def load_recipe(source: str | Path, overrides: Mapping[str, Any] | Sequence[str] = ()) -> ResolvedRecipe:
    """Load a recipe and check it.

    Args:
        source: A recipe file, or the name of a shipped or registered recipe.
        overrides: Values by dotted keys, such as `{"training.epochs": 1}`, or texts such as "training.epochs=1".

    Raises:
        RecipeError: The recipe is wrong; the error holds all its problems.
    """
    if isinstance(overrides, Mapping):
        overrides = [f"{key}={json.dumps(value, default=str)}" for key, value in overrides.items()]
    with problems_name_the_machine():
        return loading.load_recipe(str(source), overrides, is_whole=True)


@dataclass(frozen=True)
class RunResult:
    """The result of a run, as its folder holds it; the same on every rank.

    `metrics` are those of the last evaluation, and empty without one. `best_folder` holds the model of the best
    evaluation, `model_folder` the model at the end; None: there is none, as after a run that was stopped.
    """

    outcome: Literal["finished", "stopped"]
    folder: Path
    model_folder: Path | None
    best_folder: Path | None
    best: BestMetric | None
    metrics: Mapping[str, float]
    steps: Sequence[StepRecord]
    evaluations: Sequence[EvaluationRecord]
    logged: Sequence[LoggedRecord]
    stages: Mapping[str, RunResult] = field(default_factory=dict)  # of a recipe with stages, whose last one is this


def run(
    recipe: ResolvedRecipe | str | Path,
    *,
    processes: int | None = None,
    max_restarts: int = 0,
    callbacks: Sequence[Callback] = (),
) -> RunResult:
    """Train a recipe, as `trainer run` does.

    Under torchrun and other launchers every rank calls it, and it joins the ranks. Alone it trains in this process, or
    starts local ranks in new processes.

    Args:
        recipe: The result of `load_recipe`, a recipe file, or a name.
        processes: Ranks to start on this machine; None: one for each GPU, or one.
        max_restarts: How often to start failed ranks again from the last checkpoint.
        callbacks: Objects that follow the run and make requests; the same list on every rank. Ranks in new processes
            make them again, from their classes and the fields of dataclasses.

    Raises:
        UsageError: A callback is none, or cannot be made in another process.
        TrainerError: The run failed; its class is the kind of failure.
    """
    from trainer.launch.local import Training, join, plan_start
    from trainer.observe.observer import callbacks_of
    from trainer.tools.apart import run_apart

    forbid_telemetry()
    callbacks = tuple(callbacks)
    of_ranks = callbacks_of(callbacks)
    resolved = recipe if isinstance(recipe, ResolvedRecipe) else load_recipe(recipe)
    if (chain := resolved.chain) is not None:
        if detect().has_ranks:
            code = chain.run(processes, max_restarts, Training(of_ranks))
        else:
            code = run_apart(resolved, processes, max_restarts, callbacks)
        places = {name: Path(stage.recipe.checkpoint.folder) for name, stage in chain.stages.items()}
        of_stages = {name: _result(place, code) for name, place in places.items() if place.is_dir()}
        return replace([*of_stages.values()][-1], stages=of_stages)
    environment, number = plan_start(resolved, processes, max_restarts)
    in_thread = threading.current_thread() is not threading.main_thread()
    if in_thread and environment.has_ranks:
        raise LaunchError("a rank must call `run` in its main thread, which gets the signals; call it there")
    if number is None and in_thread:
        number = 1
    if number is None:
        code = join(resolved, environment, Training(of_ranks))
    else:
        code = run_apart(resolved, number, max_restarts, callbacks)
    return _result(Path(resolved.recipe.checkpoint.folder), code)


@overload
def plan(  # type: ignore[overload-overlap]
    recipe: ResolvedRecipe | str | Path, gpus: Literal["any"], *, length: int | None = None, rows: int | None = None,
    within: str | None = None, at_most: str | None = None,
) -> MachineResult: ...  # fmt: skip
@overload
def plan(
    recipe: ResolvedRecipe | str | Path, gpus: str, *, nodes: int = 1, length: int | None = None,
    link: str | None = None, network: str | None = None, host_memory: str | None = None,
) -> RecipePlan: ...  # fmt: skip
def plan(
    recipe: ResolvedRecipe | str | Path,
    gpus: str,
    *,
    nodes: int = 1,
    length: int | None = None,
    link: str | None = None,
    network: str | None = None,
    host_memory: str | None = None,
    rows: int | None = None,
    within: str | None = None,
    at_most: str | None = None,
) -> RecipePlan | MachineResult:
    """Plan a training step on GPUs that need not exist, as `trainer plan` does; with "any", find the machines.

    Args:
        recipe: The result of `load_recipe`, a recipe file, or a name.
        gpus: The GPUs of each machine, such as "8x80GiB" or "8xA100-80"; only a name has a time. "any": all known ones.
        nodes: The number of machines.
        length: The tokens of each text; None: `data.max_length`.
        link: The link between the GPUs of a machine, such as "pcie"; None: the usual one of the device.
        network: The network of each machine, such as "8x400Gb"; None: the usual one of the device.
        host_memory: The memory of each machine, such as "512GiB"; None: it gives no verdict.
        rows: With "any", the rows of an epoch.
        within: With "any", the longest time of the training, such as "6h".
        at_most: With "any", its highest price, such as "50USD".

    Raises:
        TrainerError: The recipe cannot be laid out over the GPUs, or its step cannot be planned.
        LaunchError: This process is a rank of a run, which has collectives of its own.
    """
    from trainer.tools.plan.hardware import parse_devices
    from trainer.tools.plan.machine_request import ANY, MachineLimits, MachineRequest, require_unused
    from trainer.tools.plan.machines import find_machines
    from trainer.tools.plan.recipe_plan import checked_plan

    if _is_rank():
        raise LaunchError("`plan` needs a process of its own, but this one is a rank; plan before the ranks start")
    if isinstance(recipe, ResolvedRecipe):
        resolved = recipe
    else:
        with problems_name_the_machine():
            resolved = loading.load_recipe(str(recipe), needs_data=False)
    limits = MachineLimits(within, at_most)
    if gpus.strip().lower() == ANY:
        require_unused({"nodes": nodes > 1, "link": link, "network": network, "host_memory": host_memory})
        with _command("plan", recipe) as words:
            return find_machines(MachineRequest.of(words[1], (), length, rows, limits), resolved)
    limits.require_any(gpus)
    return checked_plan(resolved, parse_devices(gpus, link, network, host_memory), nodes, length)


def preview(
    recipe: ResolvedRecipe | str | Path, *, rows: int = 3, split: str = "training", processes: int = 1, rank: int = 0
) -> Preview:
    """Describe what a model will see, as `trainer preview` does: rows with marked tokens, lengths, classes and types.

    Args:
        recipe: The result of `load_recipe`, a recipe file, or a name.
        rows: The rows of the split, and at most those of the first microbatch, to describe.
        split: `training` or `validation`.
        processes: The ranks of the layout; none is started.
        rank: The data-parallel rank of the microbatch.

    Raises:
        TrainerError: The data cannot be prepared, or the model cannot be described.
    """
    from trainer.recipe.plan import plan_run
    from trainer.tools.preview import preview_recipe

    forbid_telemetry()
    resolved = recipe if isinstance(recipe, ResolvedRecipe) else load_recipe(recipe)
    return preview_recipe(plan_run(resolved.recipe, processes), rows, split, rank)


def export(
    run: str | Path,
    folder: str | Path,
    *,
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
    adapter: bool = False,
    to: str = "safetensors",
    verify_rows: int = 0,
    calibrate: bool = False,
    overrides: Sequence[str] = (),
) -> Exported:
    """Write the model of a checkpoint as a Hugging Face folder, as `trainer export` does.

    Args:
        run: The folder of a checkpoint, or of a run: then its newest whole checkpoint.
        folder: An empty or missing folder.
        dtype: The type of the weights.
        adapter: Whether to write the adapter alone, in the format of PEFT.
        to: "safetensors", weights for transformers, or another registered format, such as a graph of "onnx".
        verify_rows: The rows of the validation split on which another process compares the folder with the trained
            model; 0: none.
        calibrate: Whether to divide the logits of classes by the temperature that fits the validation split best.
        overrides: Keys of the recipe for these rows, such as "data.validation=FILE".

    Raises:
        NotTheTrainedModelError: The folder holds another model.
        TrainerError: The checkpoint is broken, or the folder cannot be written.
    """
    from trainer.tools.calibrating import Calibration
    from trainer.tools.certify.verifying import Verification
    from trainer.use.export import exporting

    forbid_telemetry()
    command = f"trainer.export({str(run)!r}, {str(folder)!r}, verify_rows={verify_rows})"
    verification = Verification(verify_rows, tuple(overrides), command) if verify_rows else None
    asked = Calibration(tuple(overrides), verification) if calibrate else verification
    return exporting.export(Path(run), Path(folder), dtype, adapter=adapter, verification=asked, to=to)


def check(
    recipe: ResolvedRecipe | str | Path, overrides: Sequence[str] = (), *, processes: int = 1
) -> Mapping[str, Any]:
    """Check a recipe, its data and its model, as `trainer check --json` does.

    Args:
        recipe: The result of `load_recipe`, a recipe file, or a name.
        overrides: Texts such as "training.epochs=1".
        processes: The ranks of the layout; none is started.

    Returns:
        The object of `trainer check --json`; its `problems` are empty if the recipe can run.

    Raises:
        RecipeError: The recipe is wrong.
    """
    with _command("check", recipe) as words:
        return _object(_answer([*words, *overrides, f"--processes={processes}", "--json"], True, tuple(ExitCode)))


def evaluate(
    run: str | Path,
    overrides: Sequence[str] = (),
    *,
    recipe: str | Path | None = None,
    processes: int | None = None,
) -> Mapping[str, float]:
    """Compute the metrics of a trained model, as `trainer evaluate` does.

    Args:
        run: The folder of a run or of an exported model.
        overrides: Keys of the recipe, such as "data.validation=FILE".
        recipe: The recipe of a model that trainer did not export.
        processes: Ranks to start on this machine; None: one for each GPU, or one.

    Raises:
        TrainerError: There is no model, or the rows do not fit it.
    """
    words = ["evaluate", str(run), *overrides, *_options(recipe=recipe, processes=processes), "--json"]
    from trainer.observe.metrics_file import decode_number

    found = _object(_answer(words, True))["metrics"]
    return {name: decode_number(value) for name, value in found.items()}


def predict(
    run: str | Path,
    rows: Iterable[Mapping[str, Any]] | str | Path,
    overrides: Sequence[str] = (),
    *,
    recipe: str | Path | None = None,
    processes: int | None = None,
    batch_size: int | None = None,
    top: int | None = None,
) -> list[dict[str, Any]]:
    """Return the predictions of a trained model for rows, as `trainer predict` writes them.

    Args:
        run: The folder of a run or of an exported model.
        rows: Rows by the columns of the task, or a file of them. All predictions are in memory; `trainer predict`
            takes files of any size.
        overrides: Keys of the recipe.
        recipe: The recipe of a model that trainer did not export.
        processes: Ranks to start on this machine; None: one for each GPU, or one.
        batch_size: Rows of one forward pass; None: `evaluation.batch_size`.
        top: The number of classes with a probability; None: all.

    Raises:
        TrainerError: There is no model, or a row does not fit it.
    """
    with scratch_folder() as folder:
        output, given = folder / "predictions.jsonl", folder / "rows.jsonl"
        if not isinstance(rows, str | Path):
            given.write_text("".join(f"{json.dumps(dict(row))}\n" for row in rows), encoding="utf-8")
            rows = given
        options = _options(recipe=recipe, processes=processes, batch_size=batch_size, top=top)
        _answer(["predict", str(run), *overrides, f"--input={rows}", f"--output={output}", *options])
        with output.open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]


def compare(
    recipe: ResolvedRecipe | str | Path,
    overrides: Sequence[str] = (),
    *,
    layouts: Sequence[str] = (),
    processes: int | None = None,
    steps: int = 30,
    seeds: int | None = None,
    folder: str | Path | None = None,
    hardware: str | None = None,
) -> Mapping[str, Any]:
    """Train a recipe under several layouts on this machine, as `trainer compare` does.

    Args:
        recipe: The result of `load_recipe`, a recipe file, or a name.
        overrides: Texts such as "parallel.strategy=ddp,fsdp"; several values of a key are compared.
        layouts: Layouts as texts of overrides, such as "parallel.tensor=2 precision=bf16".
        processes: The ranks of each layout; None: one for each GPU, or one.
        steps: The steps of each turn of a layout.
        seeds: Train each to its end with so many seeds, and compare the metrics.
        folder: For the results; None: `runs/NAME-compare`.
        hardware: A device, to plan the time of a step.

    Returns:
        The object of the file `compare.json`.

    Raises:
        TrainerError: No layout can start.
    """
    with _command("compare", recipe) as words, scratch_folder() as scratch:
        place = Path(folder or f"runs/{load_recipe(words[1]).recipe.name}-compare")
        options = _options(processes=processes, steps=steps, seeds=seeds, output=place, hardware=hardware)
        if layouts:
            (scratch / "layouts").write_text("\n".join(layouts), encoding="utf-8")
            options.append(f"--layouts={scratch / 'layouts'}")
        _answer([*words, *overrides, *options])
        return _object((place / "compare.json").read_text(encoding="utf-8"))


def reproduce(
    recipe: ResolvedRecipe | str | Path,
    overrides: Sequence[str] = (),
    *,
    seeds: int | None = None,
    processes: int | None = None,
    folder: str | Path | None = None,
) -> Mapping[str, Any]:
    """Train a recipe with several seeds beside the metrics that it expects, as `trainer reproduce` does.

    Args:
        recipe: The result of `load_recipe`, a recipe file, or a name.
        overrides: Texts such as "precision=bf16".
        seeds: The number of seeds; None: that of the recipe.
        processes: The ranks of each run; None: one for each GPU, or one.
        folder: For the results; None: `runs/NAME-reproduce`.

    Returns:
        The object of the file `reproduce.json`; `reproduced` of each metric says whether its mean is as expected.

    Raises:
        TrainerError: The recipe expects nothing.
    """
    with _command("reproduce", recipe) as words:
        place = Path(folder or f"runs/{load_recipe(words[1], overrides).recipe.name}-reproduce")
        options = _options(seeds=seeds, processes=processes, output=place)
        _answer([*words, *overrides, *options], accepts=_JUDGED)
        return _object((place / "reproduce.json").read_text(encoding="utf-8"))


def suite(
    recipes: str | Path,
    model: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    folder: str | Path,
    seeds: int = 3,
    processes: int | None = None,
) -> Mapping[str, Any]:
    """Train a list of recipes over one model, as `trainer suite` does.

    Args:
        recipes: A file of the list, or the name of a shipped one, such as "glue".
        model: The folder of a run or a model, or a name on the hub; None: the models of the recipes.
        overrides: Texts for all recipes, such as "precision=bf16".
        folder: For the results.
        seeds: The seeds of each recipe.
        processes: The ranks of each run; None: one for each GPU, or one.

    Returns:
        The object of the file `suite.json`; the score of a recipe that failed is None.

    Raises:
        TrainerError: The list or a recipe of it is wrong.
    """
    options = _options(model=model, seeds=seeds, processes=processes, output=folder)
    _answer(["suite", str(recipes), *overrides, *options], accepts=_JUDGED)
    return _object((Path(folder) / "suite.json").read_text(encoding="utf-8"))


def search(
    recipe: ResolvedRecipe | str | Path,
    overrides: Sequence[str],
    *,
    trials: int = 20,
    processes: int | None = None,
    at_once: int = 1,
    seeds: int = 1,
    sampler: str = "tpe",
    pruner: str = "median",
    storage: str | None = None,
    folder: str | Path | None = None,
    test: str | None = None,
) -> Mapping[str, Any]:
    """Search for better values of keys, as `trainer search` does.

    Args:
        recipe: The result of `load_recipe`, a recipe file, or a name.
        overrides: Keys to search, such as "optimizer.lr=1e-5..1e-3,log", and overrides of all trials.
        trials: The number of trials, those of earlier calls included.
        processes: The ranks of each trial; None: one for each GPU, or one.
        at_once: The trials that train at the same time.
        seeds: The seeds of the three best trials.
        sampler: "tpe", "random" or "grid".
        pruner: "median", "hyperband" or "none".
        storage: A database for several machines; None: a file in the folder.
        folder: For the trials; None: `runs/NAME-search`.
        test: A third split, on which the best trial is scored once.

    Returns:
        The object of the file `search.json`.

    Raises:
        TrainerError: The trials cannot start.
    """
    with _command("search", recipe) as words:
        place = Path(folder or f"runs/{load_recipe(words[1]).recipe.name}-search")
        options = _options(
            trials=trials, processes=processes, at_once=at_once, seeds=seeds, sampler=sampler, pruner=pruner,
            storage=storage, output=place, test=test,
        )  # fmt: skip
        _answer([*words, *overrides, *options])
        return _object((place / "search.json").read_text(encoding="utf-8"))


def audit(
    source: ResolvedRecipe | str | Path, overrides: Sequence[str] = (), *, write: str | Path | None = None
) -> Mapping[str, Any]:
    """Find the rows of a recipe, or of a run with `logging.rows`, that are repeated, damaged or likely wrong.

    Args:
        source: The result of `load_recipe`, a recipe file, a name, or the folder of a run.
        overrides: Texts such as "data.train=FILE".
        write: A CSV file of the rows to write, which `data.leave_out` takes.

    Returns:
        The object of `trainer audit --json`.

    Raises:
        TrainerError: The rows cannot be read, or the run has no record of them.
    """
    with _command("audit", source) as words:
        return _object(_answer([*words, *overrides, *_options(write=write), "--json"], True))


def certify(
    recipe: ResolvedRecipe | str | Path,
    overrides: Sequence[str] = (),
    *,
    layouts: Sequence[str] = (),
    steps: int = 8,
    processes: int | None = None,
    folder: str | Path | None = None,
) -> Mapping[str, Any]:
    """Certify that layouts of a recipe train the same, as `trainer certify` does.

    Args:
        recipe: The result of `load_recipe`, a recipe file, a name, or a recorded run or certificate.
        overrides: Texts of all layouts, such as "precision=bf16"; or another record, to compare with the first one.
        layouts: Layouts such as "fsdp" and "tensor=2".
        steps: The steps of each layout.
        processes: The ranks of each layout; None: one for each GPU, or one.
        folder: For the certificate; None: `runs/NAME-certify`.

    Returns:
        The certificate, with the first tensor that differs for each layout that trains otherwise.

    Raises:
        TrainerError: No layout can start, or a record cannot be read.
    """
    options = _options(layouts="; ".join(layouts) or None, steps=steps, processes=processes, output=folder)
    with _command("certify", recipe) as words:
        return _object(_answer([*words, *overrides, *options, "--json"], True, _JUDGED))


@contextmanager
def _command(verb: str, recipe: ResolvedRecipe | str | Path) -> Iterator[list[str]]:
    """Yield the first words of a command: the verb and a recipe that it can read."""
    from trainer.tools.apart import recipe_file

    if not isinstance(recipe, ResolvedRecipe):
        yield [verb, str(recipe)]
        return
    with scratch_folder() as folder:
        yield [verb, recipe_file(recipe, folder)]


def _options(**values: Any) -> list[str]:
    """Return options of a command; None: it is not given."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]


def _answer(
    arguments: Sequence[str],
    captures: bool = False,
    accepts: Sequence[int] = (ExitCode.DONE, ExitCode.STOPPED),
) -> str:
    from trainer.tools.apart import answer_apart

    if _is_rank():
        raise LaunchError(
            f"`{arguments[0]}` starts its own ranks, but this process is a rank; call it without a launcher"
        )
    return answer_apart(arguments, captures, accepts)


def _object(text: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(text)
    return values


def _result(folder: Path, code: int) -> RunResult:
    from trainer.checkpoint.reading import SavedState
    from trainer.checkpoint.store import CheckpointStore
    from trainer.observe.metrics_file import METRICS_FILE_NAME
    from trainer.tools.run_metrics import read_metrics

    metrics = read_metrics(folder / METRICS_FILE_NAME)
    store = CheckpointStore(folder, keep=1)
    steps = store.steps()
    best = SavedState(store.path(steps[-1])).facts.progress.best if steps else None
    finished = code == ExitCode.DONE
    return RunResult(
        outcome="finished" if finished else "stopped",
        folder=folder,
        model_folder=folder / "model" if finished else None,
        best_folder=folder / "best" if best else None,
        best=best,
        metrics=metrics.evaluations[-1].metrics if metrics.evaluations else {},
        steps=metrics.steps,
        evaluations=metrics.evaluations,
        logged=metrics.logged,
    )


@contextmanager
def assemble(
    recipe: ResolvedRecipe | str | Path, adapt: Callable[[nn.Module], None] | None = None
) -> Iterator[Assembly]:
    """Build the parts of a training for a loop of one's own; the ranks leave each other after the block.

    Under torchrun and other launchers every rank calls it. Alone it builds for one process.

    Args:
        recipe: The result of `load_recipe`, a recipe file, or a name.
        adapt: A function that changes the built model in place, for example to freeze parameters.

    Raises:
        TrainerError: The parts cannot be built.
    """
    from trainer.launch.local import plan_start
    from trainer.launch.rank_job import set_threads
    from trainer.recipe.plan import plan_run
    from trainer.training import assembly, checking, process_group

    forbid_telemetry()
    resolved = recipe if isinstance(recipe, ResolvedRecipe) else load_recipe(recipe)
    environment, _ = plan_start(resolved, None if _is_rank() else 1, 0)
    set_threads(environment)
    plan = plan_run(resolved.recipe, environment.world_size, environment.local_world_size)
    prepare = partial(checking.prepare_checked, plan)
    with process_group.joined_ranks(resolved, plan, environment, prepare) as (device, (data, models)):
        mesh = process_group.open_mesh(plan.layout, device)
        parts = assembly.assemble(plan, mesh, data, adapt, models=models)
        try:
            yield weakref.proxy(parts)  # nothing may hold the parts when the ranks leave the process group
        finally:
            del parts


def _is_rank() -> bool:
    from trainer.ranks.environment import detect

    return detect().has_ranks


@dataclass(frozen=True)
class TaskRow:
    """A registered task: its keys in a recipe and its builder."""

    keys: type[TaskKeys]
    build: Callable[[Any], Task] | str
    pipeline_tag: str | None


@dataclass(frozen=True)
class MetricRow:
    """A registered metric: its function and the tasks that may name it."""

    compute: Callable[[Any, Any], float] | str
    tasks: tuple[str, ...]
    greater_is_better: bool
    reads: Literal["predictions", "probabilities"] = "predictions"


def register_task(
    keys: type[TaskKeys],
    build: Callable[[Any], Task] | str,
    pipeline_tag: str | None = None,
) -> None:
    """Register a task. Recipes name it in `task.type`.

    Args:
        keys: The keys of `task`: a class below `TextKeys` or `ImageKeys` with `type: Literal["NAME"]` and `metrics`.
        build: A function from these keys to the task, or the text "module:function", which is imported when needed.
        pipeline_tag: The name of the task on the hub, such as "text-classification".

    Raises:
        UsageError: The keys are not those of a task, or the name is taken.
    """
    extensions.register("task", task_name(keys), TaskRow(keys, build, pipeline_tag), _calling_module())


def register_optimizer(keys: type[OptimizerKeys]) -> None:
    """Register an optimizer. Recipes name it in `optimizer.name`.

    Args:
        keys: The keys of `optimizer`: a class below `OptimizerKeys` with `name: Literal["NAME"]`. Its `implementation`
            is the text "module:class" of an `EngineOptimizer`, which is imported when needed.

    Raises:
        UsageError: The keys are not those of an optimizer, or the name is taken.
    """
    extensions.register("optimizer", optimizer_name(keys), keys, _calling_module())


def register_strategy(strategy: Strategy) -> None:
    """Register a strategy. Recipes name it in `parallel.strategy`.

    Args:
        strategy: Its row. Its `builder` is the text "module:name" of a function that returns an `Engine`.

    Raises:
        UsageError: It is no row, or the name is taken.
    """
    extensions.register("strategy", strategy_name(strategy), strategy, _calling_module())


def register_schedule(keys: type[ScheduleKeys]) -> None:
    """Register a schedule of the learning rate. Recipes name it in `schedule.name`.

    Args:
        keys: The keys of `schedule`: a class below `ScheduleKeys` with `name: Literal["NAME"]` and its `curve`.

    Raises:
        UsageError: The keys are not those of a schedule, or the name is taken.
    """
    extensions.register("schedule", schedule_name(keys), keys, _calling_module())


def register_logging(
    word: str,
    observer: str,
    *,
    has_project: bool = False,
    writes: Sequence[str] = (),
    no_telemetry: Mapping[str, str] | None = None,
) -> None:
    """Register a target of the metrics of runs. Recipes name it in `logging.to`.

    Args:
        word: Its word there.
        observer: The text "module:name" of an `Observer` or of a function that returns one, which is imported when
            needed.
        has_project: Whether `logging.project` applies to it. If so, `observer` is called with the project, and with a
            function that shows a note on the console.
        writes: Entries of the run's folder that it opens in place, so that a link there could lead elsewhere.
        no_telemetry: Environment variables that stop its package from reporting its use.

    Raises:
        UsageError: The word is taken.
    """
    target = LoggingTarget(observer, has_project, tuple(writes), dict(no_telemetry or {}))
    extensions.register("logging", word, target, _calling_module())


def register_format(
    name: str,
    reader: str,
    endings: Sequence[str],
    *,
    shown: str | None = None,
    has_header: bool = False,
    in_chunks: bool = False,
    is_written: bool = False,
) -> None:
    """Register a format of files of rows. Recipes name it in `data.format`, or by the endings of files.

    Args:
        name: Its name there.
        reader: The text "module:name" of a `Reader`, which is imported when needed.
        endings: The endings of its files, such as ".txt".
        shown: Its name in texts; None: `name`.
        has_header: Whether the first row of a file holds the names of the columns.
        in_chunks: Whether the reader has `rows`, for files to predict.
        is_written: Whether the reader has `write`, for predictions.

    Raises:
        UsageError: The name or an ending is taken.
    """
    row = FileFormat(
        reader, shown or name, tuple(endings), has_header=has_header, in_chunks=in_chunks, is_written=is_written
    )
    extensions.register("format", name, row, _calling_module())


def register_metric(
    name: str,
    compute: Callable[[Any, Any], float] | str,
    *,
    tasks: Sequence[str] = (),
    greater_is_better: bool = True,
    reads: Literal["predictions", "probabilities"] = "predictions",
) -> None:
    """Register a metric. Recipes name it in `task.metrics`.

    Args:
        name: The name.
        compute: A function of predictions and labels, arrays `[rows]`, or the text "module:function".
        tasks: The types of the tasks that may name it.
        greater_is_better: Whether larger values are better.
        reads: The first argument of `compute`; probabilities of classes are `[rows, classes]`.

    Raises:
        UsageError: The name is taken, a task is unknown, or it has no probabilities.
    """
    extensions.register("metric", name, MetricRow(compute, tuple(tasks), greater_is_better, reads), _calling_module())


def register_family(model_type: str, family: ModelFamily | str) -> None:
    """Register a model family, for strategies that need its layers.

    Args:
        model_type: The model type of transformers.
        family: The family, or the text "module:NAME", which is imported when needed.

    Raises:
        UsageError: The model type is taken.
    """
    extensions.register("family", model_type, family, _calling_module())


def register_recipes(folder: str | Path) -> None:
    """Register a folder of recipes, which then have names as the shipped ones do.

    Raises:
        UsageError: There is no such folder, or a recipe has the name of a shipped one.
    """
    from trainer.recipe.reading.shipped import own_recipes, recipes_in

    place = Path(folder).resolve()
    if not place.is_dir():
        raise UsageError(f"the folder of recipes must exist, but {place} does not; name another")
    taken = recipes_in(place).keys() & own_recipes().keys()
    if taken:
        raise UsageError(f"{place} holds {', '.join(sorted(taken))}, which ship with trainer; rename these recipes")
    extensions.register("recipes", str(place), place, _calling_module())


def _calling_module() -> str:
    """Return the name of the module that called the function which calls this."""
    return str(sys._getframe(2).f_globals.get("__name__", "__main__"))
