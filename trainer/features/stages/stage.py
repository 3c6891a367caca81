"""A stage of a recipe, and the trees of keys that the stages are.

The layers of a stage, in increasing precedence: the recipe without `stages`, the results of works before it, a recipe
that the stage extends, the keys of the stage, and the model of its parent, which is the stage that it starts from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.features.stages import evidence
from trainer.features.stages.work import StageWork, with_changes
from trainer.recipe.reading.loading import ResolvedRecipe, resolve_tree
from trainer.recipe.reading.merging import merged
from trainer.recipe.reading.parser import Node, Problem

_WEIGHTS = ("name_or_path", "revision", "tokenizer", "config", "new_tokens")
"""Keys of `model` that the model of the parent replaces."""
_CHANGES = ("config", "new_tokens")
"""Those that change a model that is loaded."""
_TRAINING = ("task", "data", "training", "optimizer", "schedule", "evaluation")
"""Sections of a stage that extends a recipe, which are those of that recipe alone."""
_MOST = 100  # characters of the name of a run


@dataclass(frozen=True)
class Stage:
    """A stage; `keys` are those over the recipe, `base` is the recipe that it extends, `written` all that it says.

    `work` is None for a training; `works` are the last stages before it with a work of each kind.
    """

    number: int
    name: str
    folder: Path
    parent: Stage | None
    is_continued: bool
    processes: int | None
    keys: Node
    base: Node
    written: Node
    problems: tuple[Problem, ...] = ()
    work: StageWork | None = None
    works: tuple[Stage, ...] = ()

    @property
    def model_folder(self) -> Path:
        """The folder of its final model."""
        return self.folder / "model"

    @property
    def has_model(self) -> bool:
        """Whether its final model is there."""
        return (self.model_folder / "config.json").is_file()

    @property
    def own_model(self) -> Node:
        """Its keys of `model`, which change the model of its parent."""
        return _member(merged(_without_weights(self.base, is_base=True), self.keys), "model")

    @property
    def line(self) -> list[Stage]:
        """The stages from the first one to this, each the parent of the next one."""
        return [*(self.parent.line if self.parent else ()), self]


@dataclass(frozen=True)
class StageTrees:
    """The recipes of stages; `common` is the recipe without `stages`, and `name` its name."""

    file: Path
    common: Node
    name: str
    needs_data: bool

    def resolved(self, stage: Stage) -> ResolvedRecipe:
        """Return the recipe of a stage; without the model of its parent, that of the first stage stands for it.

        Raises:
            RecipeError: the problems of the stage.
        """
        origin, layers = stage.keys.origin, [self._before(stage), stage.base]
        if stage.base.members:  # steps of a pretraining, for example, would end a fine-tuning
            kept = {key: value for key, value in layers[0].members.items() if key not in _TRAINING}
            layers[0] = Node(kept, self.common.origin)
        start: dict[str, Node] = {}
        if stage.parent is not None:
            layers = [_without_weights(layer, is_base=layer is stage.base) for layer in layers]
            place = Node(str(stage.parent.model_folder), origin)
            start = {"name_or_path": place} if stage.parent.has_model else self._stand_in(stage)
        tree = self._merged([*layers, stage.keys])
        checkpoint = {"folder": Node(str(stage.folder), origin)}
        if stage.is_continued and stage.parent is not None:
            checkpoint["continues"] = Node(str(stage.parent.folder), origin)
        members = {**tree.members, "name": Node(f"{self.name}-{stage.name}"[:_MOST], origin)}
        for section, values in (("checkpoint", checkpoint), ("model", start)):
            before = _member(tree, section)
            members[section] = Node({**before.members, **values}, before.origin, before.key_origin)
        whole = Node(members, tree.origin)
        return resolve_tree(self.file, whole, list(stage.problems), self.needs_data)

    def _before(self, stage: Stage) -> Node:
        """Return the recipe with the results of the works before a stage; its own work has none yet."""
        tree = self.common
        for one in (*stage.works, stage):
            if one.work is not None:
                is_done = one is not stage and evidence.run_of(one.folder) is not None
                tree = with_changes(tree, one.work.changes(one.folder, is_done), one.written.origin)
        return tree

    def _merged(self, layers: Sequence[Node]) -> Node:
        tree = layers[0]
        for layer in layers[1:]:
            tree = merged(tree, layer)
        return tree

    def _stand_in(self, stage: Stage) -> dict[str, Node]:
        """Return the keys of the first stage's model, with the changes of the configuration since."""
        first, *later = stage.line
        model = _member(self._merged([self._before(first), first.base, first.keys]), "model").members
        kept = {key: model[key] for key in _WEIGHTS if key in model}
        for other in later:
            own = other.own_model.members
            for key in _CHANGES:
                if key in own:
                    kept[key] = _added(kept.get(key), own[key])
        if "name_or_path" not in kept or kept["name_or_path"].value is None:
            kept["new_head"] = Node(False, stage.keys.origin)  # all weights are random
        return kept


def _added(before: Node | None, own: Node) -> Node:
    if before is None or before.value is None:
        return own
    if isinstance(before.value, list) and isinstance(own.value, list):
        return Node([*before.value, *own.value], own.origin)
    return Node({**before.members, **own.members}, own.origin)


def _member(node: Node, key: str) -> Node:
    return node.members.get(key) or Node({}, node.origin)


def _without_weights(layer: Node, is_base: bool) -> Node:
    """Return a layer without the keys that the model of the parent replaces.

    A new head in the recipe is one of its first stage; in a recipe that a stage extends, it is of that stage. So are
    changes of a model that such a recipe starts from.
    """
    model = _member(layer, "model")
    start = model.members.get("name_or_path")
    changes = _CHANGES if is_base and start is not None and start.value is not None else ()
    left_out = {*_WEIGHTS, *(() if is_base else ("new_head",))}.difference(changes)
    kept = {key: value for key, value in model.members.items() if key not in left_out}
    return Node({**layer.members, "model": Node(kept, model.origin, model.key_origin)}, layer.origin)
