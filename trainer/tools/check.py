"""The work of `trainer check`: the data and the model of a recipe, as far as they are on this machine.

The rules are those of the run itself: the same functions read the data, prepare its first rows, and build and cut the
model, on the meta device. Nothing is trained, and nothing is written outside of temporary folders.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from trainer.base.errors import Problems, TrainerError
from trainer.checkpoint.registered import registered_tiers
from trainer.data.loader import require_fitting_rows
from trainer.models.configuration import load_config
from trainer.models.hub_files import local_files_only
from trainer.recipe.drawing import StageContents
from trainer.recipe.local_parts import LocalParts
from trainer.recipe.plan import RunPlan
from trainer.recipe.schema import Recipe
from trainer.tasks.registry import build_task
from trainer.training.checking import CheckedModel, check_model, check_needs
from trainer.training.preparation import Preparation
from trainer.training.row_encoding import TextPreparation, load_preparation, model_folder, tokenizer_of
from trainer.training.run_data import PreparedData, UnknownClassesError, prepare_data
from trainer.training.second_model import second_model

_MOST_BYTES_OF_A_TOKEN = 16  # on average over a row
MOST_ROWS = 10_000
"""Rows of texts of each split that a check prepares."""


@dataclass(frozen=True)
class Checked:
    """The problems of data and model, notes for the user, and the model and data that were prepared; None: not here.

    `unchecked` names the parts that are not on this machine.
    """

    problems: tuple[str, ...]
    error: TrainerError | None  # with these problems
    notes: tuple[str, ...]
    unchecked: tuple[str, ...]
    model: CheckedModel | None
    data: PreparedData | None
    most_rows: int = MOST_ROWS  # of each split that a check prepares; more are not counted

    @property
    def stages(self) -> list[StageContents] | None:
        """The contents of the pipeline stages; None without any, or without the model."""
        return self.model.stages if self.model else None

    @property
    def groups(self) -> Sequence[Sequence[str]]:
        """The table of the parameters, its header first; empty without the model."""
        return self.model.groups.table if self.model else ()

    @property
    def num_rows(self) -> int:
        """The rows of the training split; 0 if they are not counted."""
        rows = len(self.data.train) if self.data and self.data.counts_rows else 0
        return rows if rows < self.most_rows else 0


@local_files_only()
def check_parts(plan: RunPlan) -> Checked:
    """Check the data and the model of a plan, as far as they are on this machine; the hub is not asked."""
    recipe = plan.recipe
    local = LocalParts.of(recipe)
    notes: list[str] = []
    problems = Problems()
    check_needs(recipe, problems)
    data = model = None
    other = recipe.task.other_inputs
    most = MOST_ROWS if other is None else other.most_checked
    if local.has_data:
        with problems.collect(), tempfile.TemporaryDirectory(prefix="trainer-") as cache:
            try:
                data = prepare_data(recipe, most, Path(cache), partial(_preparation, local, problems))
            except UnknownClassesError:
                notes.append("rows are not checked: the first rows of a large file may lack some classes")
    if data is not None:
        notes += data.data_notes
        if data.preparation.counts_tokens:
            with problems.collect():
                require_fitting_rows(data.train, plan.batch)
    if local.has_model:
        with problems.collect():
            folder = model_folder(recipe)
            notes += folder.notes if folder else ()
        with problems.collect():
            model = check_model(plan, data.task if data else None, problems)
            notes += model.notes
    for tier in registered_tiers(recipe):
        with problems.collect():
            notes += tier.notes(recipe, model.whole if model else None)
    if local.has_second_model and (second := second_model(recipe)):
        own = data.preparation if data is not None and local.has_preparation else None
        with problems.collect():
            second.check(plan, data.task if data else build_task(recipe.task), own)
    return Checked(tuple(problems.messages), problems.error, tuple(notes), local.unchecked, model, data, most)


def _preparation(local: LocalParts, problems: Problems, recipe: Recipe) -> Preparation:
    """Return the preparation; for texts, with stand-ins for parts that are not here, or that cannot be read."""
    if recipe.task.other_inputs is not None:
        return load_preparation(recipe)
    if not local.has_preparation:
        return _standing_in(recipe, local)
    with problems.collect():
        return load_preparation(recipe)
    return _standing_in(recipe, LocalParts(has_model=False, has_tokenizer=False, has_data=True))


def _standing_in(recipe: Recipe, local: LocalParts) -> Preparation:
    """Return a preparation of texts with stand-ins for parts that are on the hub: a tokenizer of bytes, any model.

    Bytes are no tokens, so rows are cut far beyond their maximum length.
    """
    config = load_config(recipe.model, {}) if local.has_model else _ANY_CONFIGURATION
    if local.has_tokenizer:
        return TextPreparation(tokenizer_of(recipe), recipe.data.max_length, config=config)
    return TextPreparation(
        _byte_tokenizer(), recipe.data.max_length * _MOST_BYTES_OF_A_TOKEN, config=config, counts_tokens=False
    )


_ANY_CONFIGURATION = SimpleNamespace(
    model_type="gpt2", decoder_start_token_id=0, forced_bos_token_id=None, is_encoder_decoder=False, is_causal=False
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
