"""A tiny training without files, which the parity tests run with every layout and compare."""

from __future__ import annotations

import gc
import hashlib
import importlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers.families import CONFIGS
from trainer.checkpoint.counters import Progress
from trainer.data.collate import Batching, Padding
from trainer.data.loader import TrainLoader
from trainer.data.split import EncodedSplit
from trainer.engine.engine import Engine
from trainer.engine.results import StepResult
from trainer.engine.state import MODEL_PREFIX
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.microbatch import IGNORED_LABEL, TokenMasking
from trainer.parallel.shards.boxes import Box, TensorPart, own_share
from trainer.recipe.plan import Layout, RunPlan, plan_run
from trainer.recipe.schema import Recipe
from trainer.recipe.strategies import STRATEGIES
from trainer.tasks.classes import NamedClasses
from trainer.tasks.registry import build_task
from trainer.tasks.task import Task
from trainer.training.assembly import Assembly, assemble
from trainer.training.checking import CheckedModel, check_parts
from trainer.training.process_group import open_mesh
from trainer.training.run_data import PreparedData, prepare_data

# Scanning the imported modules in every collection would take as long as the training steps of these tests.
gc.freeze()

NUM_ROWS, NUM_CLASSES, VOCABULARY = 50, 3, 211
T5_END = 1
NUM_SPECIAL, MASK_TOKEN = 5, 4  # special tokens come first, and padding is 0
RANK_STRATEGIES = [name for name, row in STRATEGIES.items() if not row.single_process]
"""Every strategy that runs on several ranks. Tests cover a new row of the table without a change."""

TINY_BERT = {
    "model_type": "bert",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}


TINY_VIT = {
    "model_type": "vit",
    "image_size": 16,
    "patch_size": 4,
    "num_channels": 1,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}

TINY_T5 = {
    "model_type": "t5",
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
}

TINY_BART = {"model_type": "bart", **CONFIGS["bart"], "init_std": 0.2}

_LLAMA_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
}
TINY_DECODERS = {
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 32,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "initializer_range": 0.2,
    },
    "llama": {"model_type": "llama", **_LLAMA_SIZES},
    "mistral": {"model_type": "mistral", "sliding_window": 4, **_LLAMA_SIZES},
    "qwen2": {"model_type": "qwen2", **_LLAMA_SIZES},
    "qwen3": {"model_type": "qwen3", "head_dim": 8, **_LLAMA_SIZES},
}

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "muon": {"optimizer": {"name": "muon", "learning_rate": 0.1}},
    "adafactor": {"optimizer": {"name": "adafactor"}},
    "stable": {"optimizer": {"name": "stable_adamw"}},
    "8 bits": {"optimizer": {"name": "adamw_8bit"}},
    "schedule-free": {
        "optimizer": {"name": "schedule_free_adamw", "learning_rate": 1e-3},
        "schedule": {"name": "constant"},
    },
}
"""Sections of recipes with an optimizer that has a state of its own kind, by the name of a test."""

TINY_RESNET = {
    "model_type": "resnet",
    "num_channels": 1,
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [2, 2],
    "layer_type": "basic",
}


def tiny_recipe(**sections: Any) -> Recipe:
    """Return a recipe for a tiny model with random weights, with `sections` merged into it key by key.

    Model and task come from the entry of `TINY_TASKS` for the `type` in the section `task`. The default is a BERT for
    sequence classification.
    """
    tiny = TINY_TASKS[sections.get("task", {}).get("type", "sequence_classification")]
    recipe: dict[str, Any] = {
        "name": "tiny",
        "task": tiny.keys,
        "model": tiny.model,
        "data": {"source": "files", "train": "none", "group_by_length": True},
        "training": {"max_steps": 20, "global_batch_size": 12, "micro_batch_size": 12},
        "optimizer": {"name": "adamw", "learning_rate": 1e-3, "weight_decay": 0.01},
        "schedule": {"name": "linear", "warmup": 0.1},
    }
    for section, keys in sections.items():
        recipe[section] = {**recipe.get(section, {}), **keys} if isinstance(keys, Mapping) else keys
    return Recipe.model_validate(recipe)


def tiny_task(recipe: Recipe) -> Task:
    """Return the recipe's task. A classification task without names has three classes."""
    task = _tiny_of(recipe).completed(build_task(recipe.task), recipe)
    unnamed = isinstance(task, NamedClasses) and task.class_names is None
    return task.with_classes(tuple("abc"), None) if unnamed else task


def tiny_masking(recipe: Recipe) -> TokenMasking | None:
    """Return the masking for rows of a `tiny_split` if `task.type` is masked_lm, else None."""
    if recipe.task.type != "masked_lm":
        return None
    from trainer.features.masked_lm.masking import Masking  # tests of the core run without features

    return Masking(
        recipe.training.seed,
        recipe.task.mask_probability,
        MASK_TOKEN,
        special_tokens=torch.arange(NUM_SPECIAL),
        ordinary_tokens=torch.arange(NUM_SPECIAL, VOCABULARY),
    )


def tiny_split(num_rows: int = NUM_ROWS, has_classes: bool = True) -> EncodedSplit:
    """Return rows of 3 to 17 random tokens, the same on every rank. `has_classes` adds random classes as labels."""
    random = np.random.default_rng(0)
    lengths = random.integers(3, 18, num_rows)
    return EncodedSplit(
        offsets=np.concatenate([[0], lengths.cumsum()]),
        tokens={"input_ids": random.integers(NUM_SPECIAL, VOCABULARY, int(lengths.sum()))},
        scalars={"labels": random.integers(0, NUM_CLASSES, num_rows)} if has_classes else {},
        content_hash="tiny",
    )


def tiny_tuples(num_rows: int = NUM_ROWS, texts_per_row: int = 3, has_scores: bool = False) -> EncodedSplit:
    """Return rows of several random texts of 3 to 17 tokens. `has_scores` adds scores, some of them equal."""
    texts = tiny_split(num_rows * texts_per_row, has_classes=False)
    scores = np.random.default_rng(1).integers(0, 6, num_rows) / 5
    return EncodedSplit(
        texts.offsets,
        texts.tokens,
        scalars={"labels": scores} if has_scores else {},
        content_hash="tiny tuples",
        texts_per_row=texts_per_row,
    )


def tiny_documents(num_rows: int = NUM_ROWS, packed: bool = False) -> EncodedSplit:
    """Return rows of 3 to 17 random tokens that are labelled with their next tokens, the same on every rank.

    Every fifth label is ignored, as in a prompt. A packed row holds documents of at most 5 tokens.
    """
    split = tiny_split(num_rows, has_classes=False)
    split.tokens["labels"] = np.roll(split.tokens["input_ids"], -1)
    split.tokens["labels"][::5] = IGNORED_LABEL
    if packed:
        places = [np.arange(length) % 5 for length in split.lengths]
        split.tokens["position_ids"] = np.concatenate(places)
    return split


def tiny_numbers(num_rows: int = NUM_ROWS) -> EncodedSplit:
    """Return the rows of `tiny_split` with random numbers between 0 and 1."""
    split = tiny_split(num_rows, has_classes=False)
    split.scalars["labels"] = np.random.default_rng(1).random(num_rows).astype(np.float32)
    return split


@dataclass(frozen=True)
class TinyTask:
    """The parts of a tiny training that depend on the type of task."""

    keys: dict[str, Any]  # the recipe's `task`
    model: dict[str, Any]  # the recipe's `model`
    split: Callable[[int], EncodedSplit]
    batching: Batching
    completed: Callable[[Task, Recipe], Task] = lambda task, recipe: task
    graphs_refusal: str = ""  # why CUDA graphs cannot capture its passes


_TEXT_MODEL = {"config": TINY_BERT, "tokenizer": "none"}
TINY_TASKS = {
    "sequence_classification": TinyTask(
        {"type": "sequence_classification", "text": "text"}, _TEXT_MODEL, tiny_split, Padding(0)
    ),
    "weighted_classification": TinyTask(
        {
            "type": "sequence_classification",
            "text": "text",
            "class_weights": {"a": 0.005, "b": 0.03, "c": 0.07},
            "label_smoothing": 0.1,
        },
        {"config": {**TINY_BERT, "initializer_range": 0.2}, "tokenizer": "none"},
        tiny_split,
        Padding(0),
    ),
    "sequence_regression": TinyTask(
        {"type": "sequence_regression", "text": "text"},
        {"config": {**TINY_BERT, "initializer_range": 0.2}, "tokenizer": "none"},
        tiny_numbers,
        Padding(0),
    ),
    "masked_lm": TinyTask(
        {"type": "masked_lm", "text": "text"}, _TEXT_MODEL, partial(tiny_split, has_classes=False), Padding(0)
    ),
    "causal_lm": TinyTask(
        {"type": "causal_lm", "text": "text"},
        {"config": TINY_DECODERS["llama"], "tokenizer": "none"},
        tiny_documents,
        Padding(0),
    ),
    "causal_lm_packed": TinyTask(
        {"type": "causal_lm", "text": "text", "packing": "documents", "logits_chunk": 7},
        {"config": TINY_DECODERS["gpt2"], "tokenizer": "none"},
        partial(tiny_documents, packed=True),
        Padding(0),
        graphs_refusal="a pass of this model cannot be captured (operation not permitted",
    ),
}


def parallel_keys(strategy: str, world_size: int) -> dict[str, Any]:
    """Return the section `parallel`. A strategy that shards within groups gets two groups if `world_size` is even."""
    if STRATEGIES[strategy].groups and world_size % 2 == 0:
        return {"strategy": strategy, "shard": world_size // 2}
    return {"strategy": strategy}


def sgd_sections(learning_rate: float = 1.0) -> dict[str, Any]:
    """Return sections for plain gradient descent. Its step shows the gradient's scale, which Adam would hide."""
    return {
        "optimizer": {"name": "sgd", "learning_rate": learning_rate, "weight_decay": 0.0},
        "schedule": {"name": "constant", "warmup": 0},
    }


def _tiny_of(recipe: Recipe) -> TinyTask:
    """Return the entry of `TINY_TASKS` with the most keys of the recipe's task."""
    keys = recipe.task.model_dump()
    of_type = [tiny for tiny in TINY_TASKS.values() if tiny.keys["type"] == recipe.task.type]
    return max(of_type, key=lambda tiny: sum(keys[key] == value for key, value in tiny.keys.items()))


@dataclass
class Curve:
    """The loss and gradient norm of each step, and the final weights."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    # Digests of this rank's parts by mesh axes and indices: ranks with the same key hold the same bits.
    digests: dict[str, str] = field(default_factory=dict)


@dataclass
class MemorySource:
    """A state in memory with unsharded tensors. `whole_state` returns one, and an engine loads it."""

    tensors: dict[str, Tensor]
    scalars: dict[str, float] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def fill(self, parts: Iterable[TensorPart]) -> None:
        for part in parts:
            for box in part.boxes:
                box.view.copy_(_block(self.tensors[part.name], box))


def _block(whole: Tensor, box: Box) -> Tensor:
    return whole[tuple(slice(first, first + size) for first, size in zip(box.start, box.shape, strict=True))]


def whole_state(engine: Engine, mesh: ParallelMesh) -> MemorySource:
    """Return the unsharded state on every rank. Each element must be saved exactly once. All ranks must call it."""
    state = engine.state()
    own = [(part.name, tuple(part.shape), tuple(box.start), box.view.detach()) for part, box in own_share(state.parts)]
    gathered = mesh.share(mesh.gather(own))
    tensors: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    for name, shape, start, view in (entry for entries in gathered for entry in entries):
        box = Box(start, view)
        whole = tensors.setdefault(name, torch.zeros(shape, dtype=box.view.dtype))
        _block(whole, box).copy_(box.view)
        _block(seen.setdefault(name, torch.zeros(shape)), box).add_(1)
    assert all(bool((count == 1).all()) for count in seen.values()), "an element is saved twice, or not at all"
    return MemorySource(tensors, dict(state.scalars))


def weights_of(engine: Engine, mesh: ParallelMesh) -> dict[str, Tensor]:
    """Return the unsharded weights on every rank. All ranks must call it."""
    return {
        name.removeprefix(MODEL_PREFIX): tensor
        for name, tensor in whole_state(engine, mesh).tensors.items()
        if name.startswith(MODEL_PREFIX)
    }


@dataclass(frozen=True)
class TinyPreparation:
    """The preparation of rows that are prepared already. It saves no files with the model."""

    batching: Batching

    notes = ()
    normalisation = None
    padding_token = None
    text_tokenizer = None

    def save(self, folder: Path) -> None:
        pass


@dataclass
class TinyTraining:
    """The parts of a training on this rank, assembled as by `trainer run`."""

    parts: Assembly
    loader: TrainLoader

    @property
    def engine(self) -> Engine:
        return self.parts.engine

    @property
    def model(self) -> nn.Module:
        return self.parts.models[0]

    @property
    def mesh(self) -> ParallelMesh:
        return self.parts.mesh

    @property
    def total_steps(self) -> int:
        return self.parts.total_steps

    def steps(self, number: int) -> list[StepResult]:
        """Train the first `number` steps."""
        return [self.engine.train_step(batch) for batch in islice(self.loader, number)]

    def close(self) -> None:
        """Remove DeepSpeed's global state: hooks that keep the engine alive, and its linear function."""
        deepspeed = getattr(self.engine, "_engine", None)
        if deepspeed is not None:
            deepspeed.destroy()
            from deepspeed.utils import groups

            groups.mpu = None  # otherwise the next engine of this process would use its data-parallel group
            nn.functional.linear = torch._C._nn.linear


@cache
def _mesh(layout: Layout, device: torch.device) -> ParallelMesh:
    """Return one mesh for all trainings of a process, because process groups are never released."""
    return open_mesh(layout, device)


def _compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the model to `dtype`, and its floating-point inputs (images are fp32)."""

    def cast(module: nn.Module, args: Any, kwargs: dict[str, Tensor]) -> tuple[Any, Any]:
        return args, {
            name: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for name, t in kwargs.items()
        }

    model.to(dtype).register_forward_pre_hook(cast, with_kwargs=True)


def check_model(plan: RunPlan) -> CheckedModel:
    """Return the checked model of a plan without data, and raise its problems."""
    checked = check_parts(plan, lambda _: None)
    checked.problems.raise_all()
    return checked.model


def build_tiny(
    recipe: Recipe,
    dtype: torch.dtype = torch.float32,
    num_rows: int = NUM_ROWS,
    start_sample: int = 0,
    device: str = "cpu",
    progress: Progress | None = None,
) -> TinyTraining:
    """Build a training on all ranks of the default process group, or on one process without a group.

    With `progress`, the data is that of the recipe's files, from there on.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    plan = plan_run(recipe, world_size)
    mesh = _mesh(plan.layout, torch.device(device))
    if progress is not None:
        parts = replace(assemble(plan, mesh, prepare_data(recipe)), progress=progress)
        return TinyTraining(parts, parts.train_loader)
    tiny, task = _tiny_of(recipe), tiny_task(recipe)
    split = tiny.split(num_rows)
    # Encoder-decoders classify at the end of a sequence.
    if recipe.model.config and recipe.model.config["model_type"] in ("t5", "bart"):
        split.tokens["input_ids"][split.offsets[1:] - 1] = T5_END
    if recipe.data.source_weights:  # a fifth of the rows are of the first source
        split.sources = (num_rows // 5, num_rows - num_rows // 5)
    batching = tiny.batching
    if isinstance(batching, Padding):
        batching = replace(batching, multiple_of=recipe.data.pad_to)
    if task.inputs_of_start:  # each training computes its own, and rank 0 keeps it
        folder = tempfile.TemporaryDirectory()
        cached = recipe.data.model_copy(update={"cache": folder.name})
        plan = replace(plan, recipe=recipe.model_copy(update={"data": cached}))
    data = PreparedData(task, tiny_masking(recipe), TinyPreparation(batching), split, None)
    adapt = None if dtype == torch.float32 else partial(_compute_in, dtype=dtype)
    parts = replace(assemble(plan, mesh, data, adapt), progress=Progress(samples=start_sample))
    return TinyTraining(parts, parts.train_loader)


@contextmanager
def tiny_training(recipe: Recipe, dtype: torch.dtype = torch.float32, **options: Any) -> Iterator[TinyTraining]:
    """Build a training as `build_tiny` does, and remove it from the process on exit."""
    training = build_tiny(recipe, dtype, **options)
    try:
        yield training
    finally:
        training.close()
        del training
        gc.collect()


def train_tiny(
    recipe: Recipe,
    dtype: torch.dtype = torch.float32,
    num_rows: int = NUM_ROWS,
    num_steps: int | None = None,
    **options: Any,
) -> Curve:
    """Train the first `num_steps` steps, or all if it is None."""
    with tiny_training(recipe, dtype, num_rows=num_rows, **options) as training:
        curve = Curve()
        for result in training.steps(num_steps or training.total_steps):
            curve.losses.append(result.loss)
            curve.grad_norms.append(result.grad_norm)
        curve.weights = weights_of(training.engine, training.mesh)
        curve.digests = digests_of(training)
        return curve


def digests_of(training: TinyTraining) -> dict[str, str]:
    """Return one digest for each placement of parameters."""
    hashes: dict[str, Any] = {}
    for name, part in training.engine.held().items():
        placement = training.engine.placements[name]
        parts = [f"{axis} {training.mesh.index(axis)}" for axis in placement.split_axes]
        if placement.stages:
            parts.append(f"held by stages {placement.stages}: {placement.name}")
        elif training.mesh.size("pp") > 1:
            parts.append(f"pp {training.mesh.index('pp')}")
        key = " ".join(parts)
        hashes.setdefault(key, hashlib.sha256()).update(part.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return {key: digest.hexdigest() for key, digest in hashes.items()}


# The tasks of features, whose modules import this one.
for _file in sorted(Path(__file__).parents[1].glob("features/*/tiny_tasks.py")):
    TINY_TASKS |= importlib.import_module(f"tests.features.{_file.parent.name}.tiny_tasks").TASKS
