"""Compare an exported folder, as other programs open it, with the trained model: the certificate of a model card.

`trainer export --verify` starts a process that does not import this project. The end of a run opens the folder in its
own process, on a few rows, because a start with all imports takes seconds.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.base.errors import UsageError
from trainer.base.text import listed, one_line
from trainer.checkpoint.format import FACTS
from trainer.data.collate import collate
from trainer.data.loader import EvalLoader
from trainer.engine.forward import without_cache
from trainer.engine.precision import PrecisionName
from trainer.engine.state import MODEL_PREFIX
from trainer.models.added import add_module, is_added, write_added
from trainer.parallel.microbatch import POOLED, Microbatch
from trainer.recipe.reading.files import RECIPE_FILE
from trainer.recipe.schema import Recipe
from trainer.tasks.exported import OUTPUTS, ExportFormat
from trainer.tasks.task import Task
from trainer.tools.certify import folder_reader
from trainer.tools.certify.comparing import (
    NotTheTrainedModelError,
    gap_of,
    require_same_labels,
    require_same_tokens,
    texts_of,
)
from trainer.tools.certify.opening import Opened, opened_by, trained_model
from trainer.training.export_check import Certificate
from trainer.training.preparation import Preparation
from trainer.training.row_encoding import load_preparation
from trainer.training.run_data import PreparedData, prepare_data
from trainer.training.whole_split import RowTensors, in_row_order
from trainer.use.evaluate import with_class_names
from trainer.use.export.checkpoint_model import CheckpointModel
from trainer.use.trained import load_trained

_MOST_BYTES = 1_000_000_000  # of outputs, which both processes hold or write
_MOST_SECONDS = 3600.0
_CLOSE = {"fp32": 5e-5, "fp16": 0.02, "bf16": 0.1}
"""The largest difference, relative to the largest output, by the type of the weights."""
# Below it, differences relative to the largest output would show rounding only.
_LEAST_OUTPUT = 1e-2


@dataclass(frozen=True)
class Verification:
    """A request to compare an exported folder with its model.

    `overrides` are those of the recipe, such as "data.validation=FILE". `command` stands in the certificate.
    """

    num_rows: int
    overrides: tuple[str, ...] = ()
    command: str = ""

    def check(
        self, model: CheckpointModel, dtype: PrecisionName, adapter: bool, export_format: ExportFormat | None
    ) -> FolderCheck:
        return FolderCheck(self, model, opened_by(model, dtype, adapter, export_format))


@dataclass(frozen=True)
class DividedHead:
    """A layer with weights and a bias that are divided by a number."""

    name: str
    divisor: float

    def divide(self, model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.get_submodule(self.name).parameters():
                parameter.div_(self.divisor)


@dataclass(frozen=True)
class FolderCheck:
    """A comparison of a new folder, opened by another process, with the model of its checkpoint."""

    asked: Verification
    model: CheckpointModel
    opened: Opened

    def compare(self, folder: Path, head: DividedHead | None = None) -> Certificate:
        """Compare the folder on rows of the validation split.

        Args:
            head: the layer that a calibration has divided in the folder; None: none.

        Raises:
            NotTheTrainedModelError: outputs or tokens differ.
            UsageError: the recipe or its rows are missing, or a package is.
        """
        opened, model = self.opened, trained_model(self.model)
        if head is not None:
            head.divide(model)
        with validation_rows(self.model, self.asked) as (place, data, trained):
            assert data.evaluated is not None
            if (module := data.task.added_module()) is not None:
                add_module(model, module)
            expected = Expected(model, data, trained)
            request = _request(data, folder, opened, expected)
            _write_inputs(data, expected, place)
            if opened.program.opener:
                opener = find_spec(opened.program.opener)
                assert opener is not None
                assert opener.origin is not None
                shutil.copyfile(opener.origin, place / "opener.py")
            reply = _answered(request, place)
            require_same_labels(data.preparation.config.id2label, reply["labels"])
            if "tokens" in reply:
                own = folder_reader.tokens_of(data.evaluated.tokenizer, request["texts"])
                require_same_tokens(request["texts"], own, reply["tokens"])
            found = _outputs(data, opened, expected, place)
            there: Sequence[Mapping[str, Tensor]] = expected.outputs
            if "scores" in found[0]:
                there = [{"scores": expected.scores(data.task, number)} for number in range(len(expected.batches))]
            difference, largest = _compared(found, there, expected.batches)
            _require_same(difference, largest, opened.dtype, reply["lost"])
            rows = f"{len(data.evaluated.rows):,} rows of {one_line(data.evaluated.where.split(' (')[0])}"
            by = f"Another process, without `trainer`, with {opened.program.name} on the CPU in fp32,"
            metrics, num_texts = _metrics(data, expected, found), len(request["texts"])
            return Certificate(by, rows, difference, largest, metrics, num_texts, reply["versions"], self.asked.command)


@contextmanager
def validation_rows(model: CheckpointModel, asked: Verification) -> Iterator[tuple[Path, PreparedData, Recipe]]:
    """Yield a temporary folder, the rows of a comparison, prepared as in the training, and their recipe.

    Raises:
        UsageError: the recipe or its rows are missing.
    """
    state = model.state
    if not isinstance(recipe := state.facts.origin.get("recipe"), Mapping):
        raise UsageError(
            f"`--verify` and `--calibrate` need the recipe of the training, but {state.folder / FACTS} has none; leave"
            " them out"
        )
    names = [name for key in state.shapes if is_added(name := key.removeprefix(MODEL_PREFIX))]
    added = {name: model.read(f"{MODEL_PREFIX}{name}") for name in names}
    with tempfile.TemporaryDirectory(prefix="trainer-") as name:
        place = Path(name)
        yield place, *_data(model.preparation, added, recipe, asked, place)


def _data(
    preparation: Path, added: Mapping[str, Tensor], recipe: Mapping[str, Any], asked: Verification, place: Path
) -> tuple[PreparedData, Recipe]:
    """Return the rows, prepared as in the training, and their recipe."""
    folder = place / "preparation"
    # A copy, because recipe and weights are written into it, and the checkpoint must stay as it is.
    shutil.copytree(preparation, folder)
    write_added(added, folder, torch.float32)
    # In fp32, so that a difference comes from the folder and not from rounding.
    plain: dict[str, Any] = {key: "fp32" for key in ("precision", "weights", "residuals") if key in recipe}
    plain |= {key: None for key in ("fp8_features",) if key in recipe}
    if "packing" in recipe["task"]:  # other programs read one document in a row
        plain["task"] = {**recipe["task"], "packing": "none"}
    (folder / RECIPE_FILE).write_text(json.dumps({**recipe, **plain}), encoding="utf-8")
    trained = with_class_names(load_trained(folder, None, asked.overrides, 1, evaluates=True).resolved.recipe)
    if trained.data.validation is None:
        raise UsageError(
            "`--verify` and `--calibrate` need the rows of `data.validation`, but it is null; name rows by a further"
            " argument: data.validation=FILE"
        )
    data = prepare_data(trained, most_rows=asked.num_rows, cache=place / "cache", load=_recording)
    assert data.validation is not None
    if not len(data.validation):
        raise UsageError(
            "`--verify` and `--calibrate` need rows with a token in `data.validation`, but it has none; name other rows"
        )
    return data, trained


def _recording(recipe: Recipe) -> Preparation:
    return load_preparation(recipe).recording()


class Expected:
    """Batches of rows and the outputs of the trained model for them; the first batch is one row of a later one."""

    def __init__(self, model: nn.Module, data: PreparedData, recipe: Recipe) -> None:
        assert data.validation is not None
        task, constants = data.task, without_cache(model)
        size = min(recipe.evaluation.batch_size, 16)
        loader = EvalLoader(data.validation, size, 0, 1, data.preparation.batching, masking=data.masking)
        self.batches: list[Microbatch] = []
        self.inputs: list[dict[str, Tensor]] = []
        self.outputs: list[dict[str, Tensor]] = []
        num_bytes = 0
        model.eval()
        alone = np.array([int(np.argmin(data.validation.lengths))])  # its own length, and a batch of one row
        batching = data.preparation.batching
        # A row alone finds a wrong padding side or mask, which a comparison of equal batches could hide.
        for batch in (collate(data.validation, alone, batching, alone, masking=data.masking), *loader):
            inputs = task.model_inputs(batch.inputs)
            with torch.no_grad():
                output = model(**inputs, **constants)
            outputs = {name: output[name].float() for name in OUTPUTS if output.get(name) is not None}
            num_bytes += sum(tensor.nbytes for tensor in outputs.values())
            # The row alone and one whole batch are compared in any case.
            if len(self.batches) > 1 and num_bytes > _MOST_BYTES:
                break
            self.batches.append(batch)
            self.inputs.append(inputs)
            self.outputs.append(outputs)
        self.is_whole = len(self.batches) == 1 + len(loader)

    def scores(self, task: Task, number: int) -> Tensor:
        batch = self.batches[number]
        return task.scores(SimpleNamespace(**self.outputs[number]), batch.inputs, batch.labels)


def _request(data: PreparedData, folder: Path, opened: Opened, expected: Expected) -> dict[str, Any]:
    program = opened.program
    for package in program.packages:
        if find_spec(package.replace("-", "_")) is None:
            raise UsageError(
                f"`--verify` opens the folder with {package}, which is not installed; pip install {package}"
            )
    assert data.evaluated is not None
    task, rows = data.task, data.evaluated.rows
    texts = [] if data.evaluated.tokenizer is None else texts_of(task.columns, rows)
    request: dict[str, Any] = {
        "program": program.name,
        "folder": str(folder),
        "base": opened.base,
        "revision": opened.revision,
        "quantization": opened.quantization,
        "auto_class": task.auto_class_name,
        "inputs": list(expected.inputs[0]),
        "outputs": list(expected.outputs[0]),
        "texts": texts,
        "processor": data.preparation.other_processor,
        "num_batches": 1 if program.reads_texts else len(expected.batches),
        "packages": ["torch", "transformers", *program.packages],
    }
    return request | (task.exported.inputs(rows) if program.reads_texts else {})


def _write_inputs(data: PreparedData, expected: Expected, place: Path) -> None:
    evaluated = data.evaluated
    assert evaluated is not None
    for number, (batch, inputs) in enumerate(zip(expected.batches, expected.inputs, strict=True)):
        arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in inputs.items()}
        if POOLED in batch.inputs:  # which a graph may read
            arrays[POOLED] = batch.inputs[POOLED].flatten(0, -2).numpy()
        if data.preparation.other_processor:
            # The validation rows are prepared last.
            rows = data.preparation.recorded(batch.rows.tolist(), len(evaluated.rows))
            arrays = {f"{index:06d}": row for index, row in enumerate(rows)}
        np.savez(place / f"inputs-{number}.npz", **arrays)


def _answered(request: Mapping[str, Any], place: Path) -> dict[str, Any]:
    """Return the reply of a new process, which runs a copy of the script outside of this package.

    Raises:
        NotTheTrainedModelError: it cannot open the folder.
    """
    (place / "request.json").write_text(json.dumps(request), encoding="utf-8")
    script = place / "folder_reader.py"
    # A copy: Python puts the folder of a script first on its path, where modules of this package would hide others.
    shutil.copyfile(folder_reader.__file__, script)
    # On the CPU and without the network, so the result does not depend on the machine.
    quiet = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, str(script), str(place)]
    try:
        done = subprocess.run(
            command,
            env=os.environ | quiet,
            cwd=place,
            capture_output=True,
            text=True,
            timeout=_MOST_SECONDS,
            check=False,
        )
        # The last line of a traceback has the error itself.
        problem = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    except subprocess.TimeoutExpired:
        done, problem = None, [f"it took more than {_MOST_SECONDS:.0f} s; lower --rows"]
    if done is None or done.returncode:
        raise NotTheTrainedModelError(
            f"the exported folder must open in another program, but {request['program']} failed:"
            f" {one_line(problem[0])}; the folder was not kept. Correct the model or the packages, and export again"
        )
    reply: dict[str, Any] = json.loads((place / "reply.json").read_text(encoding="utf-8"))
    return reply


def _outputs(data: PreparedData, opened: Opened, expected: Expected, place: Path) -> list[dict[str, Tensor]]:
    """Return the outputs of the other program for each batch; of embeddings and texts, the scores of the task."""
    if opened.program.reads_texts:
        (whole,) = _stored(place, 0).values()
        assert data.evaluated is not None
        whole = data.task.exported.scores(whole, data.evaluated.rows)
        found = [{"scores": whole[batch.rows].float()} for batch in expected.batches]
    else:
        found = [_stored(place, number) for number in range(len(expected.batches))]
        for one, batch in zip(found, expected.batches, strict=True):
            if (scores := one.get("scores")) is not None:
                one["scores"] = scores.view(len(batch.rows), -1, scores.shape[-1])
    for number, one in enumerate(found):
        if "scores" in one:
            one["scores"] = data.task.exported.completed(one["scores"], expected.scores(data.task, number))
    return found


def _stored(place: Path, number: int) -> dict[str, Tensor]:
    with np.load(place / f"outputs-{number}.npz") as stored:
        return {name: torch.from_numpy(value) for name, value in stored.items()}


def _metrics(
    data: PreparedData, expected: Expected, found: Sequence[Mapping[str, Tensor]]
) -> dict[str, tuple[float, float]]:
    task = data.task.for_evaluation()
    if task.inputs_of_start is not None:
        return {}
    of_model = [expected.scores(task, number) for number in range(1, len(expected.batches))]
    of_folder = [
        one["scores"] if "scores" in one else task.scores(SimpleNamespace(**one), batch.inputs, batch.labels)
        for one, batch in zip(found[1:], expected.batches[1:], strict=True)
    ]
    trained, exported = (_metrics_of(task, data, expected, scores) for scores in (of_model, of_folder))
    return {name: (exported[name], value) for name, value in trained.items()}


def _metrics_of(task: Task, data: PreparedData, expected: Expected, scores: Sequence[Tensor]) -> dict[str, float]:
    assert data.validation is not None
    assert data.evaluated is not None
    loss_sum = num_valid = 0.0
    rows = RowTensors()
    # Without the first batch, whose row is in a later one too.
    for batch, of_batch in zip(expected.batches[1:], scores, strict=True):
        if not task.rows_depend:
            loss_sum += float(task.loss_sum(of_batch, batch.labels))
            num_valid += float(task.num_valid(batch.labels))
        rows.add(batch.rows, task.predictions(of_batch, batch.labels))
    loss = {} if task.rows_depend else {"loss": loss_sum / max(1.0, num_valid)}
    # The metrics of a run cover the whole split, so those of a part would not compare with them.
    if task.generates or not expected.is_whole:
        return loss
    return loss | task.split_metrics(in_row_order([rows.joined()], len(data.validation)), data.evaluated)


def _compared(
    found: Sequence[Mapping[str, Tensor]], expected: Sequence[Mapping[str, Tensor]], batches: Sequence[Microbatch]
) -> tuple[float, float]:
    """Return the largest difference of outputs at tokens that are no padding, and the largest output."""
    difference = largest = 0.0
    for one, other, batch in zip(found, expected, batches, strict=True):
        mask = batch.inputs.get("attention_mask")
        for name, there in other.items():
            own = one.get(name)
            if own is None or own.shape != there.shape:
                # A missing output is the largest possible difference.
                return math.inf, largest
            is_of_tokens = there.dim() > 2 or name in ("start_logits", "end_logits")
            if is_of_tokens and mask is not None and mask.shape == there.shape[:2]:
                own, there = own[mask == 1], there[mask == 1]
            if name == "scores" and batch.labels.shape == there.shape:  # a row may have fewer documents
                own, there = own[batch.labels >= 0], there[batch.labels >= 0]
            gap = gap_of(own, there)
            difference = max(difference, gap.max().item() if gap.numel() else 0.0)
            # Masked logits are -inf by design, and would make every tolerance infinite.
            finite = there[there.isfinite()]
            largest = max(largest, finite.abs().max().item() if finite.numel() else 0.0)
    return difference, largest


def _require_same(difference: float, largest: float, dtype: str, lost: Sequence[str]) -> None:
    if not lost and difference <= _CLOSE[dtype] * max(largest, _LEAST_OUTPUT):
        return
    without = f"; the folder has no {listed(lost, 3)}" if lost else ""
    raise NotTheTrainedModelError(
        f"the exported model must compute the outputs of the trained one, but differs by {difference:.3g} with outputs"
        f" up to {largest:.3g}{without}; do not use the folder, and export again"
    )
