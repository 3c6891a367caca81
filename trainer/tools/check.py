"""The work of `trainer check`: the data and the model of a recipe, as far as they are on this machine.

The rules are those of the run itself: the same functions read the data, prepare its first rows, and build and cut the
model, on the meta device. Nothing is trained, and nothing is written outside of temporary folders.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from huggingface_hub import constants
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from trainer.base.errors import Problems
from trainer.checkpoint.registered import registered_tiers
from trainer.models.configuration import load_config
from trainer.recipe.local_parts import LocalParts
from trainer.recipe.plan import RunPlan
from trainer.recipe.schema import Recipe
from trainer.tools.plan.shapes import shape_notes, shaped
from trainer.training.checking import CheckedParts, check_parts, check_places
from trainer.training.preparation import Preparation
from trainer.training.row_encoding import TextPreparation, load_preparation, tokenizer_of
from trainer.training.run_data import PreparedData, UnknownClassesError, prepare_data

_MOST_BYTES_OF_A_TOKEN = 16  # on average over a row
MOST_ROWS = 10_000
"""Rows of texts of each split that a check prepares."""


@contextmanager
def local_files_only() -> Iterator[None]:
    """Read models and data sets of the hub from its caches alone, inside the block."""
    import datasets

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    # Both packages read the variable of the environment once, when they are imported.
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


@local_files_only()
def check_local_parts(plan: RunPlan) -> CheckedParts:
    """Check the data and the model of a plan, as far as they are on this machine; the hub is not asked."""
    notes = shape_notes(plan.recipe)
    needs_weights, plan = not notes, shaped(plan)
    recipe, local = plan.recipe, LocalParts.of(plan.recipe)

    def prepare(problems: Problems) -> PreparedData | None:
        check_places(recipe, problems)
        if local.has_data:
            with tempfile.TemporaryDirectory(prefix="trainer-") as cache, suppress(UnknownClassesError):
                return prepare_data(recipe, _most_rows(recipe), Path(cache), partial(_preparation, local, problems))
            notes.append("rows are not checked: the first rows of a large file may lack some classes")
        return None

    checked = check_parts(plan, prepare, needs_weights=needs_weights)
    notes += checked.notes
    for tier in registered_tiers(recipe):
        with checked.problems.collect():
            notes += tier.notes(recipe, checked.model.whole)
    return replace(checked, notes=tuple(notes))


def num_checked_rows(plan: RunPlan, data: PreparedData | None) -> int:
    """Return the rows of the training split; 0 if they are not counted, or only the first ones are checked."""
    rows = len(data.train) if data and data.counts_rows else 0
    return rows if rows < _most_rows(plan.recipe) else 0


def _most_rows(recipe: Recipe) -> int:
    other = recipe.task.other_inputs
    return MOST_ROWS if other is None else other.most_checked


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
