"""The key `stages` of a recipe: the stages that it lists, with the overrides of the command line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.base.errors import RecipeError, UsageError
from trainer.features.stages.chain import StageChain
from trainer.features.stages.stage import Stage, StageTrees
from trainer.features.stages.work import with_changes, work_of
from trainer.recipe.paths import shown_value
from trainer.recipe.reading.files import read_file
from trainer.recipe.reading.loading import ResolvedRecipe, base_file, read_layers, resolve_tree
from trainer.recipe.reading.merging import merged
from trainer.recipe.reading.parser import Node, Problem

_KEY, _ONE, _ALL = "stages", "stage", "*"
_OWN = ("name", "from", "start", "processes", "extends")  # keys of a stage that are none of a recipe
_STARTS = ("fresh", "continued")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,49}")
_LEFT_OUT = ("name", "checkpoint", _KEY)  # keys of a recipe that a stage extends
_NOTHING: dict[str, Node] = {}


def resolve_chain(
    file: Path, root: Node, layer: Node, problems: list[Problem], needs_data: bool, is_whole: bool
) -> ResolvedRecipe:
    """Return a recipe with its stages, or one of its stages.

    Args:
        root: the tree of the file, with `stages`.
        layer: the overrides. `stages.NAME.KEY=VALUE` is one of a stage, and `stage=NAME` chooses a stage.
        is_whole: whether the caller takes a recipe with stages.

    Raises:
        RecipeError: all problems of the recipe and its stages.
    """
    common = merged(_without(root, _KEY), _without(layer, _KEY, _ONE))
    own = [layer.members[_KEY]] if _KEY in layer.members else []
    if own and own[0].value is None:
        return resolve_tree(file, merged(common, _without(layer, _KEY)), problems, needs_data)
    reading = _Reading(file)
    nodes = _changed([*_written(file), *own], reading)
    stand_in = common
    for node in nodes:
        _, work, _ = work_of(node)
        if work is not None:
            stand_in = with_changes(stand_in, work.changes(Path(), is_done=False), node.origin)
    whole = resolve_tree(file, stand_in, problems, needs_data)
    reading.folder = Path(whole.recipe.checkpoint.folder)
    for node in nodes:
        reading.add(node)
    reading.require_none()
    trees = StageTrees(file, common, whole.recipe.name, needs_data)
    recipes = reading.resolved(trees)
    one = layer.members.get(_ONE)
    chosen = [stage for stage in reading.stages if one is None or stage.name == one.value]
    if not chosen:
        raise RecipeError(f"`{_ONE}` must be one of {', '.join(recipes)}, but is {shown_value(one and one.plain())}")
    if not is_whole:
        return _single(chosen, one is None, recipes, needs_data)
    written = [_absolute(stage, recipes[stage.name]) for stage in reading.stages]
    whole = replace(
        whole, recipe=whole.recipe.model_copy(update={_KEY: written}), values={**whole.values, _KEY: written}
    )
    return replace(whole, chain=StageChain(whole, trees, tuple(reading.stages), tuple(chosen), recipes))


def _unfit(stages: list[Stage], recipes: Mapping[str, ResolvedRecipe]) -> Iterator[str]:
    """Yield the problems of works: of their keys, and of later stages with their results."""
    for stage in stages:
        if stage.work is None:
            continue
        recipe = recipes[stage.name].recipe
        try:
            stage.work.describe(recipe)
        except UsageError as error:
            yield f"{stage.written.origin}: `{_KEY}.{stage.name}`: {error}"
        # A stage that extends a recipe has rows of its own.
        for later in (one for one in stages if stage in one.works and not one.base.members):
            if problem := stage.work.problem(recipe, recipes[later.name].recipe, later.keys.plain()):
                yield f"{later.written.origin}: `{_KEY}.{later.name}`: {problem}"


def _single(
    chosen: list[Stage], is_open: bool, recipes: Mapping[str, ResolvedRecipe], needs_data: bool
) -> ResolvedRecipe:
    """Return the recipe of the chosen stage, for a caller that takes one training."""
    stage, *_ = trainings = [one for one in chosen if one.work is None] or chosen
    if is_open:
        raise RecipeError(
            f"`{_KEY}` has the trainings {', '.join(one.name for one in trainings)}, but this command takes one; choose"
            f" it, as in {_ONE}={stage.name}"
        )
    if stage.work is not None:
        raise RecipeError(f"`{_KEY}`: {stage.name} is no training, and this command takes one; choose a training")
    if needs_data and stage.parent is not None and not stage.parent.has_model:
        raise RecipeError(
            f"`{_KEY}`: {stage.name} starts from the model of {stage.parent.name}, but {stage.parent.model_folder} does"
            " not exist; run the recipe up to it first"
        )
    return recipes[stage.name]


def _without(node: Node, *keys: str) -> Node:
    return Node({key: value for key, value in node.members.items() if key not in keys}, node.origin, node.key_origin)


def _written(file: Path, chain: tuple[Path, ...] = ()) -> list[Node]:
    """Return the values of `stages` in the files that a recipe extends and in its own, the first of them a list.

    `read_layers` has merged the files, and has replaced a list by an object.
    """
    chain = (*chain, Path(os.path.realpath(file)))
    members = read_file(file)[0].members
    own = [members[_KEY]] if _KEY in members else []
    extends = members.get("extends")
    if extends is None or extends.value is None or (own and not isinstance(own[0].value, dict)):
        return own
    return [*_written(base_file(extends, chain), chain), *own]


def _changed(layers: list[Node], reading: _Reading) -> list[Node]:
    """Return the nodes of the last list, with the changes of each stage by its name in the objects after it."""
    begin = max((index for index, layer in enumerate(layers) if not isinstance(layer.value, dict)), default=0)
    listed, *objects = layers[begin:]
    if not isinstance(listed.value, list) or not listed.value:
        reading.report(listed, f"`{_KEY}` must be a list of stages, but is {shown_value(listed.plain())}; list one")
        return []
    nodes: list[Node] = listed.value
    for layer in objects:
        for name, change in sorted(layer.members.items(), key=lambda item: item[0] != _ALL):
            nodes = _with_change(nodes, name, change, reading)
    if not nodes:
        reading.report(listed, f"`{_KEY}` must keep a stage, but all are removed")
    return nodes


def _with_change(nodes: list[Node], name: str, change: Node, reading: _Reading) -> list[Node]:
    """Return the nodes of stages after a change of one, or of all; null removes it."""
    names = [str(_plain(node, "name")) for node in nodes]
    if name != _ALL and name not in names:
        reading.report(change, f"`{_KEY}.{name}` is no stage; the stages are {', '.join(names)}")
        return nodes
    if change.value is not None and not isinstance(change.value, dict):
        problem = f"must be an object with keys of the stage, but is {shown_value(change.plain())}"
        reading.report(change, f"`{_KEY}.{name}` {problem}; null removes the stage")
        return nodes
    changed = [None if change.value is None else merged(node, change) for node in nodes]
    chosen = (new if name in (_ALL, own) else node for node, own, new in zip(nodes, names, changed, strict=True))
    return [node for node in chosen if node is not None]


def _plain(node: Node, key: str) -> Any:
    return node.members[key].plain() if key in node.members else None


@dataclass
class _Reading:
    """The stages that were read, and their problems."""

    file: Path
    folder: Path = Path()
    stages: list[Stage] = field(default_factory=list)
    works: dict[str, Stage] = field(default_factory=dict)  # the last one of each kind
    messages: list[str] = field(default_factory=list)

    def report(self, node: Node, text: str) -> None:
        self.messages.append(str(Problem(node.origin, text)))

    def require_none(self) -> None:
        """Raise the problems."""
        if self.messages:
            raise RecipeError(*self.messages)

    def resolved(self, trees: StageTrees) -> dict[str, ResolvedRecipe]:
        """Return the recipe of each stage, or raise the problems of all."""
        recipes = {}
        for stage in self.stages:
            try:
                recipes[stage.name] = trees.resolved(stage)
            except RecipeError as error:
                self.messages += [f"{problem} (stage `{stage.name}`)" for problem in error.problems]
        self.require_none()
        self.messages += _unfit(self.stages, recipes)
        self.require_none()
        return recipes

    def add(self, node: Node) -> None:
        """Read a stage, or report its problems."""
        number, before = len(self.stages) + 1, len(self.messages)
        name = _plain(node, "name")
        path = f"{_KEY}[{number - 1}]"
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            rule = "1 to 50 letters, digits, `.`, `_` and `-`, a letter or digit first"
            self.report(node, f"`{path}.name` must be {rule}, but is {shown_value(name)}")
            return
        if name in (stage.name for stage in self.stages):
            self.report(node, f"`{path}.name` is {shown_value(name)}, as that of another stage; rename one")
        path = f"{_KEY}.{name}"
        start, processes = self._start(node, path)
        key, work, problems_of_work = work_of(node)
        for problem in problems_of_work:
            self.report(node, f"`{path}` {problem}")
        parent = None if key else self._parent(node, path)
        for other in ("from", "start") if key else ():
            if other in node.members:
                self.report(node, f"`{path}.{other}` is one of trainings, but `{key}` trains no model; remove it")
        if start == "continued" and parent is None:
            self.report(node, f"`{path}.start` is continued, but no stage comes before it; use fresh")
        self._refuse_set_keys(node, path, parent)
        base, problems = self._base(node)
        if len(self.messages) == before:
            folder = self.folder / f"{number:02d}-{name}"
            # A work replaces an earlier one of its kind, and begins without it.
            works = tuple(stage for kind, stage in self.works.items() if kind != key)
            is_continued = start == "continued"
            keys = _without(node, *_OWN, key)
            stage = Stage(
                number, name, folder, parent, is_continued, processes, keys, base, node, problems, work, works
            )
            self.stages.append(stage)
            if key:
                self.works[key] = stage

    def _start(self, node: Node, path: str) -> tuple[str, int | None]:
        """Return how a stage starts and its number of processes, or report their problems."""
        start, processes = _plain(node, "start") or "fresh", _plain(node, "processes")
        if start not in _STARTS:
            self.report(node, f"`{path}.start` must be fresh or continued, but is {shown_value(start)}")
        if processes is not None and not (type(processes) is int and processes > 0):
            self.report(node, f"`{path}.processes` must be a number from 1 on, but is {shown_value(processes)}")
        return start, processes

    def _parent(self, node: Node, path: str) -> Stage | None:
        named = _plain(node, "from")
        if named is None:
            return next((stage for stage in reversed(self.stages) if stage.work is None), None)
        trainings = [stage for stage in self.stages if stage.work is None]
        parent = next((stage for stage in trainings if stage.name == named), None)
        if parent is None:
            earlier = ", ".join(stage.name for stage in trainings) or "none"
            self.report(node, f"`{path}.from` must be an earlier training ({earlier}), but is {shown_value(named)}")
        return parent

    def _refuse_set_keys(self, node: Node, path: str, parent: Stage | None) -> None:
        """Refuse keys that the chain sets."""
        refused = {"checkpoint": ("folder", "continues"), "model": ("name_or_path", "revision") if parent else ()}
        for section, keys in refused.items():
            for key in keys:
                if key in node.members.get(section, Node(_NOTHING, node.origin)).members:
                    self.report(node, f"`{path}.{section}.{key}` follows from the stage before; remove it")
        if _KEY in node.members:
            self.report(node, f"`{path}.{_KEY}` would be stages of a stage; list them one after another")

    def _base(self, node: Node) -> tuple[Node, tuple[Problem, ...]]:
        """Return the recipe that a stage extends, without the keys of its run."""
        extends = node.members.get("extends")
        if extends is None or extends.value is None:
            return Node({}, node.origin), ()
        chain = (Path(os.path.realpath(self.file)),)
        try:
            base, problems = read_layers(base_file(extends, chain), chain)
        except RecipeError as error:
            self.messages += error.problems
            return Node({}, node.origin), ()
        return _without(base, *_LEFT_OUT), tuple(problems)


def _absolute(stage: Stage, resolved: ResolvedRecipe) -> dict[str, Any]:
    """Return a stage as it is written, with the absolute paths of its recipe."""
    values: dict[str, Any] = _replaced(stage.written.plain(), resolved.recipe.model_dump(mode="json"), _OWN)
    if (extends := stage.written.members.get("extends")) and extends.value:
        values["extends"] = os.path.abspath(base_file(extends, ()))
    return values


def _replaced(written: dict[str, Any], values: Mapping[str, Any], kept: tuple[str, ...] = ()) -> dict[str, Any]:
    replaced = {}
    for key, value in written.items():
        other = values.get(key)
        if key in kept or other is None:
            replaced[key] = value
        elif isinstance(value, dict):
            replaced[key] = _replaced(value, other) if isinstance(other, dict) else value
        else:
            replaced[key] = other if isinstance(value, str | list) else value
    return replaced
