"""Checks of a recipe's data and model where they are on this machine, for `check`, `doctor` and `run`.

The rules are those of the run itself: the same functions read the data, prepare its first rows, and build and cut the
model, on the meta device. Nothing is trained, and nothing is written outside of temporary folders.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from trainer.base.errors import Problems
from trainer.checkpoint.memory_folder import KEPT, room_in
from trainer.checkpoint.mirror import open_place
from trainer.data.loader import require_fitting_rows
from trainer.engine.optimizers.table import optimizer_class
from trainer.engine.precision import rounded_by_autocast
from trainer.models.adapters import adapt
from trainer.models.configuration import load_config
from trainer.models.describe import ModelUse, describe
from trainer.models.families.table import FAMILIES
from trainer.models.fill import check_weights
from trainer.models.layer_hooks import check_packing
from trainer.models.sentence_folder import embedding_notes
from trainer.models.stage_split import split_stages, stage_sizes
from trainer.models.tensor_split import check_split, context_notes
from trainer.observe.observer import Observer
from trainer.recipe.drawing import StageContents
from trainer.recipe.local_parts import Hand
from trainer.recipe.plan import RunPlan
from trainer.recipe.schema import ImageKeys, Recipe
from trainer.tasks.classes import NamedClasses
from trainer.tasks.registry import build_task
from trainer.training.row_encoding import (
    Preparation,
    TextPreparation,
    load_preparation,
    require_fit,
    tokenizer_of,
)
from trainer.training.run_data import PreparedData, UnknownClassesError, prepare_data
from trainer.training.teaching import check_teacher

_FP32_BYTES, _BF16_BYTES = 4, 2
MOST_ROWS = 10_000
MOST_IMAGES = 200
"""Rows of each split that a check prepares."""


@dataclass(frozen=True)
class Checked:
    """The problems of data and model, notes for the user, and the pipeline stages."""

    problems: tuple[str, ...]
    notes: tuple[str, ...]
    stages: list[StageContents] | None


def check_parts(plan: RunPlan) -> Checked:
    """Check the data and the model of a plan, as far as they are on this machine."""
    recipe = plan.recipe
    hand = Hand.of(recipe)
    notes = list(hand.notes)
    problems = Problems()
    with problems.collect():
        optimizer_class(recipe.optimizer).require_package()
    if recipe.checkpoint.mirror is not None:
        with problems.collect():
            open_place(recipe.checkpoint.mirror)
    data = stages = None

    def load(recipe: Recipe) -> Preparation:
        if hand.has_model and hand.has_tokenizer:
            with problems.collect():
                return load_preparation(recipe)
            return _standing_in(recipe, Hand(False, False, True))
        return _standing_in(recipe, hand)

    if hand.has_data:
        is_text = not isinstance(recipe.task, ImageKeys)
        with problems.collect(), tempfile.TemporaryDirectory(prefix="trainer-") as cache:
            try:
                data = prepare_data(
                    recipe, MOST_ROWS if is_text else MOST_IMAGES, Path(cache), load if is_text else load_preparation
                )
            except UnknownClassesError:
                notes.append("rows are not checked: the first rows of a large file may lack some classes")
    if data is not None:
        notes += data.data_notes
        if hand.has_tokenizer:
            with problems.collect():
                require_fitting_rows(data.train, plan.batch)
    if hand.has_model:
        with problems.collect():
            notes += embedding_notes(recipe)
        with problems.collect():
            stages = check_model(plan, data.task.model_options() if data else None, problems)
            notes += context_notes(load_config(recipe.model, {}), recipe.parallel.context)
    if recipe.checkpoint.memory is not None:
        with problems.collect():
            notes += _memory_notes(recipe, hand.has_model)
    if hand.has_teacher:
        own = data.preparation if data is not None and hand.has_model and hand.has_tokenizer else None
        with problems.collect():
            check_teacher(plan, data.task if data else build_task(recipe.task), own)
    return Checked(tuple(problems.messages), tuple(notes), stages)


def _memory_notes(recipe: Recipe, has_model: bool) -> list[str]:
    """Return a note if this machine cannot hold the checkpoints in memory; it need not be a machine of the run.

    Raises:
        UsageError: the model cannot be built.
    """
    assert recipe.checkpoint.memory is not None
    folder = Path(recipe.checkpoint.memory.folder)
    if not os.access(folder, os.W_OK):
        return [f"`checkpoint.memory.folder` is {folder}, which cannot be written here; each host of the run needs it"]
    if not has_model or recipe.model.adapter is not None or recipe.model.freeze:
        return []  # the weights in a checkpoint are few, or their number is unknown
    task = build_task(recipe.task)
    is_known = not isinstance(task, NamedClasses) or task.class_names is not None
    options = task.model_options() if is_known else {}
    model = describe(recipe.model, recipe.training, ModelUse(task.auto_class_name, options)).on_meta()
    in_bf16 = set() if recipe.weights == "fp32" else rounded_by_autocast(model)
    needed = KEPT * sum(
        parameter.numel() * (_BF16_BYTES if name in in_bf16 else _FP32_BYTES)
        for name, parameter in model.named_parameters()
    )
    room, where = room_in(folder)
    if needed <= room:
        return []
    return [
        f"`checkpoint.memory.folder` is {folder}, with {room / 2**20:,.1f} MiB free {where} of this machine, but {KEPT}"
        f" checkpoints need {needed / 2**20:,.1f} MiB for the weights alone, over all hosts; enlarge it (docker run"
        " --shm-size, --memory), use more hosts, or set `checkpoint.memory` to null; `trainer plan` shows the bytes of"
        " each host"
    ]


def prepare_checked(plan: RunPlan, observer: Observer | None = None) -> PreparedData:
    """Return the prepared data of a run, after a check of its model; the problems of both are reported together.

    A model of an unknown family is checked when it is built, because it may need real weights for this.

    Raises:
        TrainerError: the data cannot be prepared, or the model cannot be built.
        RecipeError: there are several problems.
    """
    recipe = plan.recipe
    problems = Problems()
    data = None
    with problems.collect():
        optimizer_class(recipe.optimizer).require_package()
    if recipe.checkpoint.mirror is not None:
        with problems.collect():
            open_place(recipe.checkpoint.mirror)
    if Hand.of(recipe).has_model:
        with problems.collect():
            if load_config(recipe.model, {}).model_type in FAMILIES:
                check_model(plan)
    with problems.collect():
        data = prepare_data(recipe, observer=observer)
        require_fitting_rows(data.train, plan.batch)
    if data is not None and recipe.distillation is not None:
        with problems.collect():
            check_teacher(plan, data.task, data.preparation)
    problems.raise_all()
    assert data is not None
    return data


def _standing_in(recipe: Recipe, hand: Hand) -> Preparation:
    """Return a preparation of texts with stand-ins for parts that are not at hand: a tokenizer of bytes, any model."""
    tokenizer = tokenizer_of(recipe) if hand.has_tokenizer else _byte_tokenizer()
    config = load_config(recipe.model, {}) if hand.has_model else _ANY_CONFIGURATION
    return TextPreparation(tokenizer, recipe.data.max_length, config=config)


_ANY_CONFIGURATION = SimpleNamespace(
    model_type="gpt2", decoder_start_token_id=0, forced_bos_token_id=None, is_encoder_decoder=False
)


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    special = {name: f"<{name}>" for name in ("bos_token", "eos_token", "pad_token", "mask_token")}
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *special.values()]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    first, last = special["bos_token"], special["eos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B:1 {last}:1",
        special_tokens=[(token, words.index(token)) for token in (first, last)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template="{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}",
        **special,
    )


def check_model(
    plan: RunPlan, options: Mapping[str, Any] | None = None, found: Problems | None = None
) -> list[StageContents] | None:
    """Return the contents of each pipeline stage of a plan; None without a pipeline.

    Args:
        plan: the plan.
        options: the configuration keys of the resolved task; None: the data decides some of them.
        found: collects the problems; None: they are raised.

    Raises:
        UsageError: there is no such model, its weights do not fit, an adapter's target is missing, or the model cannot
            be cut over the plan's tensor ranks or stages.
        RecipeError: several of these hold.
    """
    recipe, parallel = plan.recipe, plan.recipe.parallel
    task = build_task(recipe.task)
    known = options
    if known is None:  # transformers' default number of classes stands in
        unknown = isinstance(task, NamedClasses) and task.class_names is None
        options = {} if unknown else task.model_options()
    problems = found or Problems()
    if not isinstance(recipe.task, ImageKeys):
        with problems.collect():
            require_fit(recipe, load_config(recipe.model, {}))
    stages = described = model = None
    with problems.collect():
        described = describe(recipe.model, recipe.training, ModelUse(task.auto_class_name, options or {}))
    if described is not None:
        with problems.collect():
            check_weights(described, has_options=known is not None)
        with problems.collect():
            model = described.on_meta()
    if model is not None:
        with problems.collect():
            adapt(model, recipe.model, recipe.training.seed)
    if model is not None and recipe.data.packing:
        with problems.collect():
            check_packing(model)
    if model is not None and parallel.tensor_ranks > 1:
        with problems.collect():
            check_split(model, parallel.tensor_ranks, parallel.sequence, parallel.context > 1)
    if model is not None and plan.pipeline is not None:
        with problems.collect():
            split = split_stages(model, plan.pipeline.num_stages, parallel.pipeline.split, parallel.pipeline.schedule)
            stages = [
                StageContents(split.layers_of(stage), size) for stage, size in enumerate(stage_sizes(model, split))
            ]
    if found is None:
        problems.raise_all()
    return stages
