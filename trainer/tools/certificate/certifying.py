"""The certificate: layouts that train in turns with fingerprints, each beside the reference."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from trainer.base.digests import digest_of, source_digest
from trainer.base.disk import read_plain, replace_text
from trainer.base.distribution import versions
from trainer.base.errors import TrainerError, UsageError, storage_error
from trainer.launch.local import number_of_ranks
from trainer.ranks.environment import LaunchEnvironment, detect
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.schema import Recipe
from trainer.tools.certificate.causes import Finding, likely
from trainer.tools.certificate.differences import compare
from trainer.tools.certificate.layouts import named_layouts, one_process, usual_layouts
from trainer.tools.certificate.page import page
from trainer.tools.certificate.recording import FOLDER, Recording, read_recording
from trainer.tools.certificate.result import Certificate, JobEndedError, LayoutResult, content_hash
from trainer.tools.compare.contestants import Contestant
from trainer.tools.compare.turns import Measurement, folder_name, measured_recipe, measured_words, train_turn

MOST_STEPS = 16
"""The steps that `logging.fingerprints` records."""
JSON, PAGE = "certificate.json", "certificate.html"
_MOST_BYTES = 1 << 26


@dataclass(frozen=True)
class CertifyRequest:
    """The options of `trainer certify RECIPE`."""

    recipe: str  # the name or path of the recipe
    overrides: Sequence[str]  # of all layouts
    layouts: str | None  # such as "fsdp; tensor=2"; None: those that make sense here
    steps: int
    processes: int | None  # the ranks of a layout that names none
    output: Path | None  # the folder of the results; None: `runs/NAME-certify`
    against_first: bool = False  # whether the first layout is the reference, and not one process


def certify(
    request: CertifyRequest, show: Callable[[str], None], finish: Callable[[Certificate], None] = lambda _: None
) -> int:
    """Train each layout with fingerprints, compare it with the reference, write the certificate; return the exit code.

    In a job of a launcher, rank 0 does so, and leads the other ranks.

    Args:
        show: shows a line of the progress.
        finish: shows the certificate.

    Raises:
        TrainerError: the recipe or a layout cannot be read, or the reference fails.
        KeyboardInterrupt: a signal.
    """
    environment = detect()
    recipe = load_recipe(request.recipe, request.overrides).recipe
    folder = request.output or Path("runs") / f"{recipe.name}-certify"
    turns = Turns(request, folder, _layouts(request, environment))

    def lead(train: Callable[[int, int], None]) -> int:
        found = _in_turns(turns, recipe, train, show)
        finish(found)
        return found.exit_code

    if not environment.has_ranks:
        return lead(turns.train)
    from trainer.tools.certificate.job import in_job

    facts = [recipe.model_dump(mode="json"), str(request), [str(one) for one in turns.layouts], source_digest()]
    return in_job(environment, recipe, digest_of(facts), turns, lambda leader: lead(leader.train))


def _in_turns(
    turns: Turns, recipe: Recipe, train: Callable[[int, int], None], show: Callable[[str], None]
) -> Certificate:
    request, folder, layouts = turns.request, turns.folder, turns.layouts
    show(f"{len(layouts)} layouts, {request.steps} steps each, in {folder}")
    reference: Recording | None = None
    results: list[LayoutResult] = []
    for number, contestant in enumerate(layouts):
        name = turns.name(number)
        result = _result(turns, number, train)
        if reference is None:
            if result.recording is None:
                raise TrainerError(f"the reference of the certificate ({name}) must train, but failed: {result.reason}")
            reference, result = (
                result.recording,
                LayoutResult(name, contestant.processes, None, result.recording, is_reference=True),
            )
        elif result.recording is not None:
            result = beside(name, contestant.processes, result.recording, reference)
        results.append(result)
        show(f"{number + 1}/{len(layouts)} {name}: {result.sentence()}")
    assert reference is not None
    facts = {
        "recipe": request.recipe,
        "overrides": list(request.overrides),
        "steps": request.steps,
        "records": str(reference.folder.parent.relative_to(folder)),
        "recipe_digest": hashlib.sha256(recipe.model_dump_json(exclude={"checkpoint", "logging"}).encode()).hexdigest(),
        **machine(),
    }
    return write(
        Certificate(results, facts, [note for one in results if one.recording for note in one.recording.notes]), folder
    )


def certify_records(place: Path, other: Path, output: Path | None) -> Certificate:
    """Compare two recorded runs, or the references of two certificates; the first is the reference.

    Raises:
        UsageError: a folder has no fingerprints, they are damaged, or no step is in both.
    """
    reference, run = read_recording(_run_of(place)), read_recording(_run_of(other))
    if not reference.steps.keys() & run.steps.keys():
        raise UsageError(
            f"{place} and {other} must have a step in common, but hold the steps {_range(reference)} and {_range(run)};"
            " record the same steps"
        )
    notes = [*reference.notes, *run.notes]
    if reference.steps.keys() != run.steps.keys():
        notes.append(f"the runs hold the steps {_range(reference)} and {_range(run)}; those in both are compared")
    results = [
        LayoutResult(str(place), reference.header["world_size"], None, reference, is_reference=True),
        beside(str(other), run.header["world_size"], run, reference),
    ]
    facts = {
        "recipe": reference.header["recipe"],
        "runs": [
            {"place": str(at), "layout": one.header["layout"], "strategy": one.header["strategy"],
             "precision": one.header["precision"], "device": one.header["device"], "versions": one.header["versions"]}
            for at, one in ((place, reference), (other, run))
        ],
        **machine(),
    }  # fmt: skip
    certificate = Certificate(results, facts, notes)
    return certificate if output is None else write(certificate, output)


def beside(name: str, processes: int, run: Recording, reference: Recording) -> LayoutResult:
    """Return the result of a recorded layout."""
    found = compare(run, reference)
    cause = "" if found.first is None else likely(Finding(found.first, run, reference, found))
    return LayoutResult(name, processes, found, run, cause=cause)


def write(certificate: Certificate, folder: Path) -> Certificate:
    """Write the certificate and its page into a folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / JSON, json.dumps(certificate.as_object(), indent=2, allow_nan=False) + "\n")
        replace_text(folder / PAGE, page(certificate))
    except OSError as error:
        raise storage_error(f"`--output` is {folder}, which cannot be written ({error.strerror})", error) from error
    return Certificate(certificate.results, certificate.facts, certificate.notes, folder)


def machine() -> dict[str, Any]:
    """Return the device, the driver and the versions of this machine."""
    import torch

    gpus = [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())]
    driver = Path("/proc/driver/nvidia/version")
    return {
        "devices": gpus or [f"cpu, {platform.machine()}, {os.cpu_count()} cores"],
        "driver": driver.read_text().partition("\n")[0] if driver.exists() else None,
        "cuda": torch.version.cuda,
        "versions": versions(),
        "source": source_digest(),
        "written": datetime.now().astimezone().isoformat(" ", "minutes"),
    }


def _layouts(request: CertifyRequest, environment: LaunchEnvironment) -> list[Contestant]:
    import torch

    gpus = torch.cuda.device_count()
    # A launcher that starts one process only knows the number that it was asked for.
    asked = request.processes or (environment.is_alone and number_of_ranks(None)) or None
    world = environment.world_size if environment.has_ranks else None
    if request.layouts is None:
        ranks = asked or world or max(2, gpus)
        found = usual_layouts(request.recipe, request.overrides, ranks, gpus)
    else:
        found = named_layouts(request.layouts, request.recipe, request.overrides, asked, world)
    first = [] if request.against_first else [one_process(request.recipe, request.overrides)]
    found = list(dict.fromkeys([*first, *found]))
    for one in found:
        if world is not None and one.processes > world:
            raise UsageError(
                f"a layout must have at most the {world} ranks of the job, but {one.name} needs {one.processes}; start"
                " more ranks, or leave it out"
            )
    return found


@dataclass(frozen=True)
class Turns:
    """The turns of a certificate; each trains one layout."""

    request: CertifyRequest
    folder: Path
    layouts: Sequence[Contestant]

    def name(self, number: int) -> str:
        """Return the name of a layout."""
        contestant = self.layouts[number]
        if contestant.processes == 1 and not self.request.against_first and not number:
            return "one process"
        is_unique = sum(one.name == contestant.name for one in self.layouts) == 1
        return contestant.name + ("" if is_unique else f" processes={contestant.processes}")

    def place(self, number: int) -> Path:
        """Return the folder of a layout."""
        return self.folder / "runs" / f"{number}-{folder_name(self.name(number))}"

    def train(self, number: int, processes: int) -> None:
        """Train a layout on new ranks of this machine."""
        self(number, None)

    def __call__(self, number: int, place: LaunchEnvironment | None) -> None:
        """Train a layout on new ranks, or that of a place.

        Raises:
            TrainerError: the layout failed.
            KeyboardInterrupt: a signal.
        """
        request, contestant, folder = self.request, self.layouts[number], self.place(number)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _not_written(self.folder, error) from error
        measured = {**measured_words(folder, request.steps), "logging.fingerprints": "true"}
        resolved = measured_recipe(request.recipe, [*request.overrides, *contestant.overrides], measured)
        train_turn(resolved, contestant.processes, Measurement(folder / "output.txt", None), place)


def _result(turns: Turns, number: int, train: Callable[[int, int], None]) -> LayoutResult:
    """Train one layout; its result holds the recording, or the reason of its failure."""
    contestant = turns.layouts[number]
    shutil.rmtree(turns.place(number), ignore_errors=True)
    try:
        train(number, contestant.processes)
        recording = read_recording(turns.place(number))
    except TrainerError as error:
        if isinstance(error, JobEndedError):
            raise
        return LayoutResult(turns.name(number), contestant.processes, reason=str(error))
    except OSError as error:
        raise _not_written(turns.folder, error) from error
    return LayoutResult(turns.name(number), contestant.processes, recording=recording)


def _not_written(folder: Path, error: OSError) -> TrainerError:
    return storage_error(f"`--output` is {folder}, which cannot be written: {error}", error)


def _run_of(place: Path) -> Path:
    """Return the folder of the recorded run that a path names: a run, or a certificate with its reference."""
    if (place / FOLDER).is_dir():
        return place
    file = place / JSON if place.is_dir() else place
    if not file.exists():
        raise UsageError(
            f"{place} must be a run with fingerprints or a certificate, but is neither; train the run with"
            " logging.fingerprints=true"
        )
    try:
        content = json.loads(read_plain(file, _MOST_BYTES))
        if content["hash"] != content_hash(content):
            raise ValueError("its content has another hash")
        records = str(content["records"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{file} must be a certificate of layouts, but is not ({error}); certify the recipe again"
        ) from error
    return file.parent / records


def _range(run: Recording) -> str:
    return f"{min(run.steps)} to {max(run.steps)}" if run.steps else "none"
