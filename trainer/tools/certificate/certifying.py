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

from trainer.base.digests import source_digest
from trainer.base.disk import read_plain, replace_text
from trainer.base.distribution import versions
from trainer.base.errors import ExitCode, TrainerError, UsageError, storage_error
from trainer.launch.local import number_of_ranks, run_on_fresh_ranks
from trainer.ranks.environment import detect
from trainer.recipe.reading.loading import load_recipe
from trainer.tools.certificate.causes import Finding, likely
from trainer.tools.certificate.differences import compare
from trainer.tools.certificate.layouts import named_layouts, one_process, usual_layouts
from trainer.tools.certificate.page import page
from trainer.tools.certificate.recording import FOLDER, Recording, read_recording
from trainer.tools.certificate.result import Certificate, LayoutResult, content_hash
from trainer.tools.compare.contestants import Contestant
from trainer.tools.compare.turns import Measurement, folder_name, measured_recipe, measured_words

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


def certify(request: CertifyRequest, show: Callable[[str], None]) -> Certificate:
    """Train each layout with fingerprints, compare it with the reference, and write the certificate.

    Args:
        show: shows a line of the progress.

    Raises:
        TrainerError: the recipe or a layout cannot be read, or the reference fails.
        KeyboardInterrupt: a signal.
    """
    if detect().has_ranks:
        raise UsageError(
            "`trainer certify RECIPE` starts its own ranks, but a launcher has started this one; run it without a"
            " launcher, or train each layout of the job with logging.fingerprints=true and compare the folders of the"
            " runs: trainer certify A B"
        )
    recipe = load_recipe(request.recipe, request.overrides).recipe
    folder = request.output or Path("runs") / f"{recipe.name}-certify"
    layouts = _layouts(request)
    show(f"{len(layouts)} layouts, {request.steps} steps each, in {folder}")
    reference: Recording | None = None
    results: list[LayoutResult] = []
    for number, contestant in enumerate(layouts):
        name = (
            "one process" if contestant.processes == 1 and not request.against_first and not number else contestant.name
        )
        result = _train(request, contestant, name, folder, number)
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


def _layouts(request: CertifyRequest) -> list[Contestant]:
    import torch

    if request.layouts is None:
        ranks = number_of_ranks(request.processes) if request.processes else max(2, torch.cuda.device_count())
        found = usual_layouts(request.recipe, request.overrides, ranks, torch.cuda.device_count())
    else:
        found = named_layouts(request.layouts, request.recipe, request.overrides, request.processes)
    first = [] if request.against_first else [one_process(request.recipe, request.overrides)]
    return list(dict.fromkeys([*first, *found]))


def _train(request: CertifyRequest, contestant: Contestant, name: str, folder: Path, number: int) -> LayoutResult:
    """Train one layout; its result holds the recording, or the reason of its failure."""
    place = folder / "runs" / f"{number}-{folder_name(name)}"
    shutil.rmtree(place, ignore_errors=True)
    try:
        place.mkdir(parents=True)
        measured = {**measured_words(place, request.steps), "logging.fingerprints": "true"}
        resolved = measured_recipe(request.recipe, [*request.overrides, *contestant.overrides], measured)
        run_on_fresh_ranks(resolved, contestant.processes, Measurement(place / "output.txt", None))
        recording = read_recording(place)
    except TrainerError as error:
        if error.exit_code == ExitCode.STOPPED:
            raise KeyboardInterrupt from error
        return LayoutResult(name, contestant.processes, reason=str(error))
    except OSError as error:
        raise storage_error(f"`--output` is {folder}, which cannot be written: {error}", error) from error
    return LayoutResult(name, contestant.processes, recording=recording)


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
