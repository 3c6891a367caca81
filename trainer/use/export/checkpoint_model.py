"""The model of a checkpoint, and the facts of its training.

The checkpoint is read tensor by tensor; nothing in it is unpickled, imported or run.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from transformers.utils import CONFIG_NAME

from trainer.base.errors import UsageError
from trainer.checkpoint.format import FACTS, MODEL_FOLDER
from trainer.checkpoint.identity import FROZEN_WEIGHTS
from trainer.checkpoint.reading import SavedState, open_verified
from trainer.checkpoint.store import CheckpointStore
from trainer.engine.state import MODEL_PREFIX
from trainer.models.added import values_of
from trainer.models.freezing import adapt
from trainer.models.registered_forms import form_of
from trainer.models.weight_files import described_model
from trainer.parallel.shards.boxes import Box, TensorPart
from trainer.parallel.shards.digest import joined, own_digest
from trainer.recipe.schema import Adapter, Recipe
from trainer.tasks.exported import Card
from trainer.tasks.registry import build_task, card_of
from trainer.training.row_encoding import with_folder
from trainer.use.export.base_model import build_base


class CheckpointModel:
    """The model of a verified checkpoint: its configuration, its tensors and its recipe.

    Attributes:
        state: the tensors and the facts of the checkpoint.
        preparation: its folder with the configuration and the tokenizer, or another processor.
    """

    def __init__(self, state: SavedState) -> None:
        self.state = state
        self.preparation = state.folder / MODEL_FOLDER

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration of the model."""
        file = self.preparation / CONFIG_NAME
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
            if isinstance(config, dict):
                return config
            problem = "it is no object"
        except (ValueError, RecursionError) as error:
            problem = str(error)
        raise UsageError(
            f"`CHECKPOINT` must hold the model's configuration, but {file} cannot be read: {problem}; name another"
            " checkpoint"
        )

    @cached_property
    def described(self) -> Any:
        """The model on `meta`; an `UnknownModelError`: it is none of transformers."""
        return described_model(self.config)

    @property
    def card(self) -> Card:
        """The facts of the task."""
        return card_of(self.task_type) or Card()

    @property
    def task_type(self) -> str:
        """The type of the task; empty: it is unknown."""
        return str(_group(_group(self.state.facts.origin, "recipe"), "task").get("type", ""))

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe of the training."""
        with self._reading("its recipe"):
            return Recipe.model_validate(self.state.facts.origin["recipe"])

    @cached_property
    def adapter(self) -> Adapter | None:
        """The keys of the adapter; None: there is none."""
        adapter = _group(self.state.facts.identity, "model").get("adapter")
        if not adapter:
            return None
        with self._reading("`model.adapter`"):
            return Adapter.model_validate(adapter)

    @property
    def frozen_digest(self) -> Any:
        """The digest of the frozen weights, which the checkpoint lacks; None: it has all weights."""
        return _group(self.state.facts.identity, "model").get(FROZEN_WEIGHTS)

    @property
    def seed(self) -> int:
        """The seed of the training."""
        with self._reading("`training.seed`"):
            return int(self.state.facts.identity["training"]["seed"])

    def read(self, key: str) -> Tensor:
        """Return a tensor of the checkpoint."""
        try:
            return self.state.read(key)
        except (OSError, ValueError, SafetensorError) as error:
            raise UsageError(
                f"`CHECKPOINT` must stay as it is while it is read, but {key} of {self.state.folder} can no longer be"
                f" read: {error}; export again, or from another"
            ) from error

    def base_weights(self, saved: Collection[str]) -> tuple[dict[str, Tensor], set[str]]:
        """Return the frozen weights that the checkpoint leaves out, from their origin; none if it has all weights.

        The second result names those that are drawn from the seed, because the origin lacks them.

        Raises:
            UsageError: the origin is missing, or its weights are others than those of the training.
        """
        if self.frozen_digest is None:
            return {}, set()
        keys, seed = self.recipe.model, self.seed
        model, drawn, encoded = build_base(self.described, keys, seed)
        # Only weights that the checkpoint lacks; the others would hide the trained values.
        base = {name: p.detach() for name, p in model.named_parameters() if name not in saved}
        # Before another form, which replaces the names of weights by those of their parts.
        found_drawn = base.keys() & drawn
        if (form := form_of(keys)) is not None:
            adapted = copy.deepcopy(self.described)
            adapt(adapted, keys, seed, drawn)
            base = form.encoded(adapted, base, encoded)
        added = values_of(with_folder(build_task(self.recipe.task), self.recipe).added_module())
        base |= {name: value for name, value in added.items() if name not in saved}
        parts = [
            TensorPart(f"{MODEL_PREFIX}{name}", tuple(tensor.shape), (Box((0,) * tensor.dim(), tensor),))
            for name, tensor in base.items()
        ]
        # The hub's model may have changed since; merged with other weights, an adapter is wrong in silence.
        if (digest := joined([own_digest(parts)])) != self.frozen_digest:
            raise UsageError(
                "`model.name_or_path` of the run must hold the frozen weights of the training, but their digest is"
                f" {digest} and should be {self.frozen_digest}; restore the weights of"
                f" {keys.name_or_path or 'model.config'}"
            )
        return base, found_drawn

    @contextmanager
    def _reading(self, subject: str) -> Iterator[None]:
        """Refuse a checkpoint with facts that the block cannot read."""
        try:
            yield
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:  # pydantic's errors are `ValueError`s
            raise UsageError(
                f"`CHECKPOINT` must hold the facts of its training, but {subject} in {self.state.folder / FACTS} is"
                " missing or wrong; name a checkpoint that trainer saved"
            ) from error


def open_checkpoint(checkpoint: Path) -> tuple[CheckpointModel, list[str]]:
    """Return the model of a checkpoint, or of the newest whole one of a run, and notes on those that were skipped.

    Raises:
        UsageError: there is no whole checkpoint.
    """
    store = CheckpointStore(checkpoint, keep=1)
    if (checkpoint / FACTS).exists() or not store.folder.is_dir():
        return CheckpointModel(_verified(checkpoint)), []
    notes: list[str] = []
    # The newest whole checkpoint: the last one may be damaged or half written.
    for step in reversed(store.steps()):
        try:
            return CheckpointModel(_verified(store.path(step))), notes
        except UsageError as error:
            notes.append(f"skipped a checkpoint: {error}")
    problems = "".join(f"; {note}" for note in notes)
    raise UsageError(
        f"`CHECKPOINT` must hold a whole checkpoint, but {checkpoint} holds none{problems}. Name another run, or train"
        " this one until it has saved"
    )


def _verified(folder: Path) -> SavedState:
    if not folder.is_dir() or not (folder / FACTS).exists():
        raise UsageError(
            "`CHECKPOINT` must be the folder of a checkpoint, such as runs/NAME/checkpoints/step-00000120, or of a run,"
            f" but {folder} {'is neither' if folder.exists() else 'does not exist'}; name one of these"
        )
    try:
        return open_verified(folder)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"`CHECKPOINT` must be whole, but {folder} is not: {error}; name another of its run, or the run's folder to"
            " take the newest that is"
        ) from error


def _group(facts: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    group = facts.get(key)
    return group if isinstance(group, Mapping) else {}
