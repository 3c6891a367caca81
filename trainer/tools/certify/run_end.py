"""The check at the end of a run: the exported folder, opened by transformers, has the losses of the trained model.

It takes a few rows and no new process, so it costs little. `trainer export --verify` compares more, in another process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor

from trainer.base.text import listed
from trainer.data.collate import collate
from trainer.engine.engine import Engine
from trainer.engine.forward import without_cache
from trainer.models.hub_files import without_report
from trainer.models.registered_forms import form_of
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.microbatch import Microbatch
from trainer.recipe.schema import Recipe
from trainer.tools.certify import folder_reader
from trainer.tools.certify.comparing import (
    NotTheTrainedModelError,
    gap_of,
    require_same_labels,
    require_same_tokens,
    texts_of,
)
from trainer.training.assembly import Assembly
from trainer.training.export_check import Certificate, ExportCheck
from trainer.training.run_data import PreparedData
from trainer.training.run_tool import RunTool
from trainer.use.export.refused import REFUSED

_MOST_BYTES = 8_000_000_000  # of weights, which the host holds beside the trained model
_CLOSE = {True: (1e-4, 1e-5), False: (0.05, 0.02)}
"""The largest difference of the loss, relative and for each label, of runs in fp32 and of other runs."""


class CheckedExport(RunTool):
    """The check of the model that the end of a run exports, on `evaluation.verify_export` rows."""

    def export_check(self, parts: Assembly) -> ExportCheck:
        return RefusedOrKept(ComparedRows.of(parts.recipe, parts.data, parts.engine, parts.mesh))


@dataclass(frozen=True)
class RefusedOrKept:
    """A check that leaves a file beside a folder that it refuses."""

    rows: ComparedRows | None

    def compare(self, folder: Path) -> Certificate | None:
        """Compare the folder; see `ComparedRows.compare`."""
        refused = folder.with_name(REFUSED)
        # It was left by an earlier end of this run.
        refused.unlink(missing_ok=True)
        try:
            return self.rows.compare(folder) if self.rows else None
        except NotTheTrainedModelError as error:
            with suppress(OSError):  # the error of the model matters more
                refused.write_text(f"{error}\n", encoding="utf-8")
            raise


@dataclass(frozen=True)
class ComparedRows:
    """A few rows, with the loss and the predictions of the trained model for them."""

    recipe: Recipe
    data: PreparedData
    batch: Microbatch
    loss_sum: float
    predictions: Mapping[str, Tensor]

    @classmethod
    def of(cls, recipe: Recipe, data: PreparedData, engine: Engine, mesh: ParallelMesh) -> ComparedRows | None:
        """Return the rows with the results of the engine, on rank 0. All ranks must call it.

        None: the recipe asks for no rows, or the task has a module of its own after the model of transformers.
        """
        split = data.train if data.validation is None else data.validation
        ids = np.arange(min(recipe.evaluation.verify_export, recipe.evaluation.batch_size, len(split)))
        if not len(ids) or data.task.added_module() is not None:
            return None
        batch = collate(split, ids, data.preparation.batching, ids, masking=data.masking)
        result = engine.eval_step(batch)
        gathered = mesh.gather((result.loss_sum, result.predictions)) or [(0.0, {})]
        # In a pipeline, the ranks of the last stage alone have predictions.
        loss_sum, predictions = next((one for one in gathered if one[1]), gathered[0])
        return cls(recipe, data, batch, loss_sum, predictions)

    def compare(self, folder: Path) -> Certificate | None:
        """Open a folder, and compare it with the trained model; None: it is too large for this check.

        Raises:
            NotTheTrainedModelError: it has another loss or another tokenizer.
        """
        if sum(file.stat().st_size for file in folder.glob("*.safetensors")) > _MOST_BYTES:
            return None
        num_texts = self._compare_tokens(folder)
        task, batch = self.data.task, self.batch
        auto = getattr(transformers, task.auto_class_name)
        with without_report():
            model, loading = auto.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        if task.class_names:
            require_same_labels(dict(enumerate(task.class_names)), model.config.id2label)
        model.eval()
        with torch.no_grad(), without_report():
            output = model(**task.model_inputs(batch.inputs), **without_cache(model))
            scores = task.scores(output, batch.inputs, batch.labels)
            predictions = task.predictions(scores, batch.labels)
            num_valid = float(task.num_valid(batch.labels))
            own = 0.0 if task.rows_depend else float(task.for_evaluation().loss_sum(scores, batch.labels))
        relative, absolute = self._tolerances
        pairs = [(torch.tensor(own), torch.tensor(self.loss_sum), absolute * num_valid)]
        pairs += [
            (predictions[name].float(), there.float(), absolute)
            for name, there in self.predictions.items()
            if name in predictions and there.is_floating_point()
        ]
        difference, lost = 0.0, sorted(loading["missing_keys"])
        for one, other, least in pairs:
            largest = _largest(gap_of(one, other)) if one.shape == other.shape else math.inf
            difference = max(difference, largest)
            # The bound follows the largest value: a small logit has the rounding of the large ones.
            if lost or largest > relative * _largest(other.nan_to_num(0.0, 0.0, 0.0)) + least:
                raise NotTheTrainedModelError(
                    f"the exported model must have the loss of the trained one, {self.loss_sum:.6g} for"
                    f" {len(batch.labels)} rows, but has {own:.6g}{f' and lacks {listed(lost, 3)}' if lost else ''};"
                    f" it was not kept. Export a checkpoint with `trainer export {self.recipe.checkpoint.folder}"
                    " FOLDER --verify`, or set evaluation.verify_export=0"
                )
        rows = f"{len(batch.labels)} rows"
        loss = {} if task.rows_depend else {"loss": (own / max(num_valid, 1), self.loss_sum / max(num_valid, 1))}
        return Certificate("The end of the run, with transformers,", rows, difference, abs(own), loss, num_texts, {})

    @property
    def _tolerances(self) -> tuple[float, float]:
        rounds = (self.recipe.tf32 and torch.cuda.is_available()) or form_of(self.recipe.model) is not None
        return _CLOSE[self.recipe.precision == "fp32" and not rounds]

    def _compare_tokens(self, folder: Path) -> int:
        """Require the tokens of the training, and return the number of texts."""
        tokenizer, evaluated = self.data.preparation.text_tokenizer, self.data.evaluated
        if tokenizer is None or evaluated is None:
            return 0
        few = evaluated.rows.select(range(min(len(evaluated.rows), self.recipe.evaluation.verify_export)))
        texts = texts_of(self.data.task.columns, few)
        found = transformers.AutoTokenizer.from_pretrained(folder)
        own, there = (folder_reader.tokens_of(one, texts) for one in (tokenizer, found))
        require_same_tokens(texts, own, there)
        return len(texts)


def _largest(values: Tensor) -> float:
    return values.abs().max().item() if values.numel() else 0.0
