"""What all trainings of the benchmark share: the recipe, the data, the batches and the model they start from."""

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
    "small": {},  # the sample's own
    "medium": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024},
}
"""BERTs with random weights, by what they change of the sample's; dropout is BERT's own, 0.1 everywhere."""


def benchmark_recipe(model: str, total_steps: int, folder: Path) -> Recipe:
    """The sample's recipe with one of `MODELS`, ending after `total_steps`; it keeps what it writes in `folder`."""
    overrides = [
        *(f"model.config.{key}={value}" for key, value in MODELS[model].items()),
        f"training.max_steps={total_steps}",
        f"data.cache={folder / 'cache'}",
        f"checkpoint.folder={folder / 'run'}",
        "checkpoint.every=null",
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
        """Needs the default process group where `world_size` is greater than 1."""
        plan = plan_run(recipe, world_size)
        rows = load_splits(recipe.data).train
        task = build_task(recipe.task).resolve(rows.rows, rows.where)
        cache = Path(str(recipe.data.cache))
        train = encode_split(rows, task, load_tokenizer(recipe.model), recipe.data.max_length, cache)
        mesh = ParallelMesh(torch.device("cpu"), dp_replicate=world_size)
        # Transformers' Trainer cannot take an epoch whose last batch has fewer microbatches than the others.
        return cls(recipe, plan, mesh, task, _first_rows(train, recipe.training.global_batch_size))

    def with_dropout(self, layout_invariant: bool) -> Setting:
        """The same with one or the other kind of dropout, and a folder of its own."""
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
        return int(self.recipe.schedule.warmup * self.total_steps)  # the sample's is a share of all steps

    def model(self) -> BuiltModel:
        """The model with its first weights, the same at each call."""
        return build_model(
            self.recipe.model, self.recipe.training, self.task.auto_class_name, self.task.model_options()
        )

    def batches(self) -> TrainLoader:
        """This rank's part of all global batches, collated while they are iterated over."""
        training, padding = self.recipe.training, Padding.of(load_tokenizer(self.recipe.model))
        order = GlobalOrder(len(self.train), self.train.lengths, training.global_batch_size, training.seed)
        return TrainLoader(self.train, order, self.plan.batch, self.mesh.index("dp"), padding, self.total_steps)


def _first_rows(split: EncodedSplit, divisor: int) -> EncodedSplit:
    """As many of the first rows of `split` as `divisor` divides."""
    num_rows = len(split) // divisor * divisor
    scalars = {name: values[:num_rows] for name, values in split.scalars.items()}
    return EncodedSplit(split.offsets[: num_rows + 1], split.tokens, scalars, split.content_hash)
