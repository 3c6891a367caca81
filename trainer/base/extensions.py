"""Tasks, metrics, optimizers, schedules, model families and others that are registered, and tools that join each run.

A folder of this project registers with its file `extension.json`, so that no other module names it. Another package
names its registering function as an entry point of the group `trainer.extensions`. A recipe holds registered names
only, so that it can never name code.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal, TypeVar

from trainer.base.errors import UsageError

GROUP = "trainer.extensions"

Row = TypeVar("Row")

Kind = Literal[
    # The recipe. A key that asks for a part is the name of its row.
    "keys",  # further keys of a section, by the first of them
    "exclusions",  # a group of `recipe/exclusions.json`
    "rule",  # a rule, by its keys, such as "data.streaming task"; it gets their sections
    "recipes",  # a folder of recipes
    "recipe_format",  # a `RecipeFormat` (`recipe/reading/files.py`), by the ending of its files
    "other_tools",  # the module that knows keys and files of other tools (`recipe/reading/other_tools.py`)
    "chain",  # a function to the `Chain` of a recipe (`recipe/reading/loading.py`), by the key that asks for it
    "stage",  # a `StageWork`: a stage of a chain that trains no model, by the key that asks for it
    "formats",  # a JSON file with the keys of another tool
    # The task
    "task",  # a `Task`, by its word in `task.type`
    "variant",  # the class of a task, by the key that asks for it
    "metric",  # a metric, by its word in `task.metrics`; an object adds the word to the section `keys`
    "chats",  # the encoder of chats (`tasks/text/answers.py`)
    "generator",  # the generator of texts (`tasks/generated.py`)
    "shape",  # a rule of `trainer init`, by its place and its columns
    # The data
    "format",  # a reader of files (`base/file_formats.py`)
    "source",  # a `RowSource` (`training/row_source.py`), by the key that asks for it
    "rows",  # the `RowTransform` of all recipes (`data/row_transform.py`), by its key
    "splits",  # a function that changes the rows of splits (`SplitsChange` of `training/run_data.py`), by its key
    "warnings",  # a function from prepared data to warnings (`DataWarnings` of `training/run_data.py`)
    "batch_sizes",  # the `BatchSizes` (`recipe/plan.py`) of a training, by the key that asks for them
    # The model
    "family",  # a `ModelFamily`, by its `model_type`
    "model",  # a function that changes a `PlacedModel` (`ModelChange` of `engine/forward.py`), by its key
    "second_model",  # a `SecondModel` (`training/second_model.py`), by its key
    "weight_form",  # a `WeightForm` (`models/weight_form.py`), by its key of `model`
    "adapter",  # a `PartsAdder` of an adapter (`models/adapters.py`), by a key of it
    "axis",  # the `SequenceAxis` (`models/sequence_axis.py`), by the key with the number of its ranks
    "experts",  # an `ExpertCut` (`models/place.py`), by the key with the number of its ranks
    "rotation",  # a context of the passes of a model with rotary positions (`engine/forward.py`)
    "kernel",  # a module of Triton kernels, by its use
    # The engine
    "strategy",  # a `Strategy` (`recipe/strategies.py`)
    "precision",  # a `NarrowPrecision` (`engine/precision.py`), by its word in `precision`
    "casts",  # the `Casts` of all runs in 16 bits (`engine/rounded_weights.py`)
    "head",  # `ScoringHeads` (`engine/builders.py`), by a key that a resumed run may change
    "optimizer",  # an optimizer (`engine/optimizers/base.py`)
    "update",  # an `OptimizerUpdate` (`engine/optimizers/base.py`), by the key that asks for it
    "schedule",  # a schedule of learning rates
    # The run
    "run",  # a context manager around a run, or one with its key; it yields a `RunTool` (`training/run_tool.py`)
    "launch",  # a context manager around the start of local ranks, for `around`
    "rank",  # a context manager around the job of a local rank, in its process, for `around`
    "launcher",  # a `LauncherFeature` (`ranks/environment.py`), with the prefix of its variables
    "elastic",  # an `ElasticLaunch` (`recipe/elastic_launch.py`), by its key
    "resumption",  # reconciles a training with a checkpoint whose identity differs (`checkpoint/saving.py`)
    "tier",  # a `TierFeature` (`checkpoint/registered.py`), by its key
    "observer",  # an `ObserverBuilder` (`observe/builders.py`), by the key or environment variable that asks for it
    "callbacks",  # the `Callbacks` (`observe/observer.py`) of the objects that `trainer.run` gets
    "logging",  # a `LoggingTarget` (`base/logging_targets.py`), by its word in `logging.to`
    # The trained model
    "card",  # a line of the model card with the word `{value}`, by the key of the value
    "export",  # an `ExportFormat` (`tasks/exported.py`), by its word in `trainer export --to`
]
"""The kinds of rows. In an `extension.json`, paths of folders and files are relative to `trainer/`."""


@dataclass(frozen=True)
class Registration:
    """A registered name.

    `module` is the module that registered it; None: an entry point did, which every process loads by itself.
    """

    kind: Kind
    name: str
    value: Any
    module: str | None


Consumer = Callable[[Registration], None]


def _of_folders() -> dict[tuple[Kind, str], Registration]:
    """Return the rows of each `extension.json`: by kind, names with the text "module:name".

    Raises:
        UsageError: Two folders register a name of the same kind.
    """
    package, rows = Path(__file__).parents[1], {}
    # Sorted, so that tables have the same order on every machine.
    for file in sorted([*package.glob("*/extension.json"), *package.glob("features/*/extension.json")]):
        for kind, values in json.loads(file.read_text(encoding="utf-8")).items():
            for name, value in values.items():
                if (kind, name) in rows:
                    raise UsageError(
                        f"the {kind} {name!r} must be registered by one folder, but {file} and another register it;"
                        " rename it, or remove one of the folders"
                    )
                rows[kind, name] = Registration(kind, name, value, None)
    return rows


# Read at import, because every process of a run needs them: ranks of other launchers, forked and spawned ranks.
_registered = _of_folders()
_SHIPPED = frozenset(_registered)
_consumers: dict[Kind, list[Consumer]] = {}
_packages: dict[str, str] = {}  # of loaded entry points, by name
_loading: list[str] = []  # the entry point that is being loaded


def register(kind: Kind, name: str, value: Any, module: str) -> None:
    """Add a row to a table, or replace a row that was registered before.

    Raises:
        UsageError: A table cannot take the row, or a folder of this project has the name.
    """
    if (kind, name) in _SHIPPED:
        raise UsageError(f"the {kind} {name!r} ships with trainer; register yours under another name")
    # Every process loads the entry points itself. Other registrations must be repeated there.
    registration = Registration(kind, name, value, None if _loading else module)
    # Consumers may refuse the row, so it is stored after them.
    for consumer in _consumers.get(kind, ()):
        consumer(registration)
    _registered[kind, name] = registration


def consume(kind: Kind, consumer: Consumer, finish: Callable[[], object] | None = None) -> None:
    """Call `consumer` with each registration of a kind, earlier ones and later ones.

    Args:
        finish: is called after each later one.

    Raises:
        UsageError: The consumer refuses an earlier registration.
    """

    def consume_later(registration: Registration) -> None:
        consumer(registration)
        if finish is not None:
            finish()

    for registration in registered(kind):
        consumer(registration)
    _consumers.setdefault(kind, []).append(consume_later)


def registered(kind: Kind | None = None) -> list[Registration]:
    """Return the registrations of a kind, or all of them."""
    return [row for row in _registered.values() if kind in (None, row.kind)]


def rows_of(kind: Kind, row_type: type[Row]) -> dict[str, Row]:
    """Return the rows of a kind by name: objects, or their attributes in an `extension.json`."""
    return {
        row.name: row.value if isinstance(row.value, row_type) else row_type(**row.value) for row in registered(kind)
    }


@contextmanager
def around(kind: Literal["run", "launch", "rank"], *arguments: Any, asked: Sequence[Any] = ()) -> Iterator[list[Any]]:
    """Enter the context managers of a kind, each built from `arguments`, and those `asked` for; yield their values."""
    with ExitStack() as stack:
        always = [resolved(row.value) for row in registered(kind) if "." not in row.name]
        yield [stack.enter_context(build(*arguments)) for build in (*always, *asked)]


def packages() -> dict[str, str]:
    """Return the name and version of the package behind each loaded entry point, by the entry point's name."""
    return dict(_packages)


def resolved(value: Any) -> Any:
    """Return the object that the text "module:name" names, or the module of a text; any other value as it is."""
    if not isinstance(value, str):
        return value
    module, _, name = value.partition(":")
    target = importlib.import_module(module)
    return getattr(target, name) if name else target


def sole(kind: Kind, name: str | None = None) -> Any:
    """Return the object of the row of a name, or of a kind that has one row at most; None: there is no such row."""
    return next((resolved(row.value) for row in registered(kind) if name in (None, row.name)), None)


class Table(UserDict[str, Row]):
    """Rows by name. A row that is the text "module:name" is imported when it is read."""

    def __init__(self, rows: Mapping[str, Row | str]) -> None:
        super().__init__()
        for name, row in rows.items():
            self[name] = row

    def __getitem__(self, name: str) -> Row:
        row: Row = resolved(self.data[name])
        return row

    def __setitem__(self, name: str, row: Row | str) -> None:
        super().__setitem__(name, row)  # type: ignore[assignment]  # a text until it is read


def load() -> None:
    """Load the entry points of installed packages, each once in a process.

    Raises:
        UsageError: An entry point cannot be loaded, or its registrations are refused.
    """
    folders = [folder or os.curdir for folder in sys.path]
    # The times of the folders are part of the key, so packages that were installed meanwhile are found.
    for point in _installed(tuple((name, os.stat(name).st_mtime_ns) for name in folders if os.path.exists(name))):
        if point.name in _packages:
            continue
        package = f"{point.dist.name} {point.dist.version}" if point.dist else "a package without a name"
        _loading.append(point.name)
        try:
            loaded = point.load()
            if callable(loaded):
                loaded()
        except Exception as error:
            raise UsageError(
                f"the extension `{point.name}` of {package} could not be loaded: {type(error).__name__}: {error};"
                " fix the package, or uninstall it"
            ) from error
        finally:
            _loading.pop()
        # After the load, so that the next call tries an extension that failed again.
        _packages[point.name] = package


@cache
def _installed(folders: tuple[tuple[str, int], ...]) -> Sequence[EntryPoint]:
    """Return the entry points in folders of packages, given with the times of their last changes.

    Metadata of every package is read, which takes longer than a recipe. `trainer search` loads a recipe per trial.
    """
    return sorted(entry_points(group=GROUP), key=lambda point: point.name)


def needed_elsewhere() -> Sequence[tuple[str, str, str]]:
    """Return kind, name and module of each registration that another process must repeat.

    Raises:
        UsageError: A registration was made in a script or notebook, which another process cannot import.
    """
    rows = [(row.kind, row.name, row.module) for row in registered() if row.module is not None]
    local = [f"{kind} {name!r}" for kind, name, module in rows if module == "__main__"]
    if local:
        raise UsageError(
            f"this script or notebook registered {', '.join(local)}, which the processes of `processes` cannot see;"
            " move the registration into a module and import that, or start the script itself with torchrun"
        )
    return rows


def repeat(rows: Iterable[tuple[str, str, str]]) -> None:
    """Import the modules of `needed_elsewhere` in another process.

    Raises:
        UsageError: A module cannot be imported, or does not register while it is imported.
    """
    for kind, name, module in rows:
        try:
            importlib.import_module(module)
        except Exception as error:
            raise UsageError(
                f"the module `{module}`, which registers the {kind} {name!r}, could not be imported:"
                f" {type(error).__name__}: {error}; make it importable in every process"
            ) from error
        # The import may have run before, or only defines a function that registers.
        if (kind, name) not in _registered:
            raise UsageError(
                f"the module `{module}` must register the {kind} {name!r} while it is imported, but does not;"
                " call the function at the top level of the module"
            )
