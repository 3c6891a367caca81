"""The recipe, data, batches and initial model that all trainings of a benchmark share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trainer.data.collate import Padding
from trainer.data.loader import TrainLoader
from trainer.data.order import GlobalOrder
from trainer.data.sources import load_splits
from trainer.data.split import EncodedSplit
from trainer.data.tokenise import encode_split
from trainer.models.building import BuiltModel, build_model
from trainer.models.tokenizer import load_tokenizer
from trainer.parallel.mesh import ParallelMesh
from trainer.reading.loading import load_recipe
from trainer.recipe.plan import RunPlan, plan_run
from trainer.recipe.schema import Recipe
from trainer.tasks.registry import build_task
from trainer.tasks.task import Task

MODELS: dict[str, dict[str, int]] = {
    "small": {},  # the model of the sample
    "medium": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024},
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
}
"""BERTs with random weights, as changes of the sample's configuration. Dropout is BERT's default of 0.1."""


def benchmark_recipe(model: str, total_steps: int, folder: Path, precision: str = "fp32") -> Recipe:
    """Return the sample's recipe with one of `MODELS`, for `total_steps` steps, which writes into `folder`."""
    overrides = [
        *(f"model.config.{key}={value}" for key, value in MODELS[model].items()),
        f"training.max_steps={total_steps}",
        f"data.cache={folder / 'cache'}",
        f"checkpoint.folder={folder / 'run'}",
        "checkpoint.every=null",
        f"precision={precision}",
    ]
    return load_recipe("bert_sample", overrides).recipe


@dataclass(frozen=True)
class Setting:
    """One layout of one recipe, on this rank."""

    recipe: Recipe
    plan: RunPlan
    mesh: ParallelMesh
    task: Task
    train: EncodedSplit

    @classmethod
    def of(cls, recipe: Recipe, world_size: int) -> Setting:
        """Create the setting. If `world_size` is greater than 1, the default process group must exist."""
        plan = plan_run(recipe, world_size)
        rows = load_splits(recipe.data).train
        task = build_task(recipe.task).resolve(rows.rows, rows.where)
        cache = Path(str(recipe.data.cache))
        train = encode_split(rows, task, load_tokenizer(recipe.model), recipe.data.max_length, cache)
        mesh = ParallelMesh(torch.device("cpu"), dp_replicate=world_size)
        # transformers' Trainer does not support a last batch with fewer microbatches than the others.
        return cls(recipe, plan, mesh, task, _first_rows(train, recipe.training.global_batch_size))

    def with_dropout(self, layout_invariant: bool) -> Setting:
        """Return this setting with layout-invariant or torch's dropout, and with its own checkpoint folder."""
        training = self.recipe.training.model_copy(update={"layout_invariant_dropout": layout_invariant})
        folder = f"{self.recipe.checkpoint.folder}-{'keyed' if layout_invariant else 'torch'}"
        checkpoint = self.recipe.checkpoint.model_copy(update={"folder": folder})
        recipe = self.recipe.model_copy(update={"training": training, "checkpoint": checkpoint})
        return replace(self, recipe=recipe, plan=replace(self.plan, recipe=recipe))

    @property
    def total_steps(self) -> int:
        return self.plan.total_steps(len(self.train))

    @property
    def warmup_steps(self) -> int:
        return int(self.recipe.schedule.warmup * self.total_steps)  # the sample gives it as a share of all steps

    def model(self) -> BuiltModel:
        """Build the model with its initial weights, the same at each call."""
        return build_model(
            self.recipe.model, self.recipe.training, self.task.auto_class_name, self.task.model_options()
        )

    def batches(self) -> TrainLoader:
        """Return this rank's part of all global batches. Iteration collates them."""
        training, padding = self.recipe.training, Padding.of(load_tokenizer(self.recipe.model))
        lengths = self.train.lengths if self.recipe.data.group_by_length else None
        order = GlobalOrder(len(self.train), lengths, training.global_batch_size, training.seed)
        return TrainLoader(self.train, order, self.plan.batch, self.mesh.index("dp"), padding, self.total_steps)


def _first_rows(split: EncodedSplit, divisor: int) -> EncodedSplit:
    """Return the first rows of `split`, the largest multiple of `divisor`."""
    num_rows = len(split) // divisor * divisor
    scalars = {name: values[:num_rows] for name, values in split.scalars.items()}
    return EncodedSplit(split.offsets[: num_rows + 1], split.tokens, scalars, split.content_hash)
