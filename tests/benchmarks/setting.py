"""The recipe, data, batches and initial model that all trainings of a benchmark share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from trainer.models.fill import build_model
from trainer.models.place import PlacedModel
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.microbatch import RankBatch
from trainer.recipe.plan import RunPlan, plan_run
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.schema import Recipe
from trainer.tasks.task import Task
from trainer.training.assembly import train_batches
from trainer.training.describing import describe_model
from trainer.training.process_group import open_mesh
from trainer.training.run_data import PreparedData, prepare_data

MODELS: dict[str, dict[str, int]] = {
    "small": {},  # the model of the sample
    "medium": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024},
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
}
"""BERTs with random weights, as changes of the sample's configuration. Dropout is BERT's default of 0.1."""


TASKS = {
    "classification": "bert_sample",
    "tags": "ner_sample",
    "questions": "qa_sample",
    "choices": "choice_sample",
    "masked words": "bert_sample_mlm",
}
"""The recipes of BERTs that are fine-tuned or pretrained, by their task."""


def benchmark_recipe(
    model: str,
    total_steps: int,
    folder: Path,
    precision: str = "fp32",
    task: str = "classification",
    keys: Sequence[str] = (),
) -> Recipe:
    """Return a sample's recipe with one of `MODELS`, for `total_steps` steps, which writes into `folder`."""
    overrides = [
        *(f"model.config.{key}={value}" for key, value in MODELS[model].items()),
        f"training.max_steps={total_steps}",
        f"data.cache={folder / 'cache'}",
        f"checkpoint.folder={folder / 'run'}",
        "checkpoint.every=null",
        f"precision={precision}",
        *keys,
    ]
    return load_recipe(TASKS[task], overrides).recipe


@dataclass(frozen=True)
class Setting:
    """One layout of one recipe, on this rank."""

    recipe: Recipe
    plan: RunPlan
    mesh: ParallelMesh
    data: PreparedData

    @classmethod
    def of(cls, recipe: Recipe, world_size: int) -> Setting:
        """Create the setting. If `world_size` is greater than 1, the default process group must exist."""
        plan = plan_run(recipe, world_size)
        return cls(recipe, plan, open_mesh(plan.layout, torch.device("cpu")), prepare_data(recipe))

    @property
    def task(self) -> Task:
        return self.data.task

    @property
    def total_steps(self) -> int:
        return self.plan.total_steps(len(self.data.train))

    @property
    def batches_per_epoch(self) -> int:
        """The batches of an epoch without its last rows, which do not fill a batch."""
        return len(self.data.train) // self.plan.batch.global_batch_size

    def model(self) -> PlacedModel:
        """Build the model with its initial weights, the same at each call."""
        return build_model(describe_model(self.recipe, self.data.task, self.data.preparation.padding_token))

    def batches(self) -> Iterator[RankBatch]:
        """Yield this rank's part of each global batch; iteration collates them.

        transformers' Trainer does not support a last batch of an epoch with fewer microbatches than the others.
        """
        training = self.recipe.training.model_copy(update={"max_steps": 2 * self.total_steps})
        longer = plan_run(self.recipe.model_copy(update={"training": training}), self.plan.layout.world_size)
        batches = train_batches(longer, self.mesh, self.data)
        full = (batch for batch in batches if batch.num_rows == self.plan.batch.global_batch_size)
        return islice(full, self.total_steps)
