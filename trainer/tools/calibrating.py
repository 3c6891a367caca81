"""`trainer export --calibrate`: one temperature for the logits of classes, in the weights of a linear head.

Guo et al. 2017 divide the logits by the temperature T that minimises their loss on the validation rows. Weights and
bias of a linear head, divided by T, give these logits in every program that opens the folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trainer.base.errors import UsageError
from trainer.base.text import one_line
from trainer.engine.forward import without_cache
from trainer.engine.precision import PrecisionName
from trainer.tasks.exported import ExportFormat
from trainer.tasks.metrics.table import METRICS
from trainer.tasks.task import Task
from trainer.tools.certify.opening import trained_model
from trainer.tools.certify.verifying import DividedHead, Expected, Verification, validation_rows
from trainer.training.export_check import Certificate, ExportCheck
from trainer.training.model_card import CARD_NAME
from trainer.use.export.checkpoint_model import CheckpointModel
from trainer.use.export.refused import require_not_refused

FILE = "calibration.json"
_MOST_ROWS = 1 << 31  # of the validation split: all
_WIDEST = 100.0
"""The largest temperature, and the smallest one is its inverse; the best one at these bounds is none."""
_CLOSE = 1e-4  # of scaled logits, relative to the largest one


@dataclass(frozen=True)
class Calibration:
    """A request to calibrate an exported folder, and perhaps to verify it then.

    Attributes:
        overrides: those of the recipe, such as "data.validation=FILE".
        verification: the comparison with the trained model; None: there is none.
    """

    overrides: tuple[str, ...] = ()
    verification: Verification | None = None

    def check(
        self, model: CheckpointModel, dtype: PrecisionName, adapter: bool, export_format: ExportFormat | None
    ) -> ExportCheck:
        """Return the calibration of the folder before its comparison.

        Raises:
            UsageError: the folder has no weights of classes to scale.
        """
        if adapter or export_format is not None:
            wrong = "`--adapter`" if adapter else "`--to`"
            raise UsageError(
                f"`--calibrate` divides weights of the whole model, which {wrong} does not write; leave one of them out"
            )
        if not model.recipe.task.has_probabilities:
            raise UsageError(
                "`--calibrate` needs a task with the classes of rows, such as sequence_classification, but `task.type`"
                f" is {model.task_type}; leave it out"
            )
        if self.verification is None:
            require_not_refused(model.state.folder)
        return _CalibratedFolder(self, model, dtype)


@dataclass(frozen=True)
class _CalibratedFolder:
    """The calibration of a new folder of safetensors, with the comparison after it."""

    asked: Calibration
    model: CheckpointModel
    dtype: PrecisionName

    def compare(self, folder: Path) -> Certificate | None:
        """Divide the head in the folder by the temperature, and compare the folder with the model divided likewise.

        Raises:
            NotTheTrainedModelError: outputs or tokens differ.
            UsageError: the head is no linear layer, or the rows have no best temperature.
        """
        model = trained_model(self.model)
        with validation_rows(self.model, Verification(_MOST_ROWS, self.asked.overrides)) as (_, data, trained):
            assert data.evaluated is not None
            where = f"{len(data.evaluated.rows):,} rows of {one_line(data.evaluated.where.split(' (')[0])}"
            expected, task = Expected(model, data, trained), data.task
        # Without the first batch, whose row is in a later one too.
        logits = torch.cat([expected.scores(task, place) for place in range(1, len(expected.batches))]).double()
        labels = torch.cat([batch.labels for batch in expected.batches[1:]])
        temperature = fitted_temperature(task, logits, labels)
        head = divide_head(model, logits.shape[-1], expected.inputs[1], temperature)
        divided = model.get_submodule(head.name).named_parameters()
        _replace(folder, {f"{head.name}.{key}": value.detach() for key, value in divided})
        before, after = (_measured(task, one, labels) for one in (logits, logits / temperature))
        result = {"temperature": temperature, "head": head.name, "rows": where, "before": before, "after": after}
        (folder / FILE).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        if self.asked.verification is None:
            return None
        check = self.asked.verification.check(self.model, self.dtype, False, None)
        return check.compare(folder, head)


def fitted_temperature(task: Task, logits: Tensor, labels: Tensor) -> float:
    """Return the temperature T that minimises the loss of `logits / T`, which has one minimum in 1 / T.

    Raises:
        UsageError: the best temperature is at a bound, as for rows that are all right.
    """
    from scipy.optimize import minimize_scalar

    plain = task.for_evaluation()

    def loss(exponent: float) -> float:
        return float(plain.loss_sum(logits / math.exp(exponent), labels)) / len(labels)

    bound = math.log(_WIDEST)
    found = float(minimize_scalar(loss, bounds=(-bound, bound), method="bounded", options={"xatol": 1e-7}).x)
    if not loss(found) < min(loss(-bound), loss(bound)):
        raise UsageError(
            f"`--calibrate` finds no temperature between {1 / _WIDEST} and {_WIDEST:.0f} for {len(labels):,} rows of"
            " `data.validation`: the model predicts all of them right, or by chance; name other rows by a further"
            " argument: data.validation=FILE"
        )
    return math.exp(found)


def divide_head(model: nn.Module, num_classes: int, inputs: Mapping[str, Tensor], temperature: float) -> DividedHead:
    """Divide the linear layer that gives the logits by the temperature.

    Raises:
        UsageError: no such layer gives them.
    """
    names = [
        name for name, layer in model.named_modules() if type(layer) is nn.Linear and layer.out_features == num_classes
    ]
    if names:
        head, before = DividedHead(names[-1], temperature), _logits(model, inputs)
        head.divide(model)
        difference = (_logits(model, inputs) * temperature - before).abs().max()
        if difference <= _CLOSE * max(1.0, float(before.abs().max())):
            return head
    raise UsageError(
        f"`--calibrate` divides a linear layer with the {num_classes} logits as its outputs, but the head of"
        f" {type(model).__name__} is none; leave it out, and divide the logits in your program"
    )


def _logits(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    with torch.no_grad():
        output = model(**inputs, **without_cache(model))
    logits: Tensor = output["logits"].float()
    return logits


def _replace(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Replace tensors in the files of a folder, in their type there."""
    missing = dict(tensors)
    for file in sorted(folder.glob("*.safetensors")):
        stored = load_file(file)
        held = missing.keys() & stored.keys()
        if held:
            stored |= {name: missing.pop(name).to(stored[name].dtype).contiguous() for name in held}
            save_file(stored, file, {"format": "pt"})
    if missing:
        raise UsageError(
            f"`--calibrate` needs {', '.join(sorted(missing))} in the exported weights, which have other names; leave"
            " it out, and divide the logits in your program"
        )


def _measured(task: Task, logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the loss of each row, and the calibration error if its feature is installed."""
    plain = task.for_evaluation()
    found = {"loss": float(plain.loss_sum(logits, labels)) / len(labels)}
    if "ece" in METRICS:
        probabilities = plain.answers(logits, {})["probabilities"].float().numpy()
        found["ece"] = float(METRICS["ece"].compute(probabilities, labels.numpy()))
    return found


def calibration_lines(folder: Path) -> Sequence[str]:
    """Write the section of a calibrated folder into its model card, and return its lines."""
    result = json.loads((folder / FILE).read_text(encoding="utf-8"))
    numbers = (f"{name} {result['before'][name]:.4g} -> {value:.4g}" for name, value in result["after"].items())
    line = (
        f"calibrated: the weights of `{result['head']}` are divided by the temperature {result['temperature']:.4g},"
        f" fitted to {result['rows']}: {', '.join(numbers)}"
    )
    card = folder / CARD_NAME
    card.write_text(f"{card.read_text(encoding='utf-8')}\n## Calibration\n\n- {line}\n", encoding="utf-8")
    return [line]
