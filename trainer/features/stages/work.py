"""Stages that are works and no trainings: tools register them as `stage`, by the key that asks for one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import ValidationError

from trainer.base import extensions
from trainer.launch.local import run_on_fresh_ranks
from trainer.recipe.reading.merging import merged
from trainer.recipe.reading.parser import Node, Origin
from trainer.recipe.schema import Parallel, Recipe

if TYPE_CHECKING:
    from trainer.ranks.environment import LaunchEnvironment
    from trainer.recipe.reading.loading import ResolvedRecipe


class StageWork(Protocol):
    """The keys of a work, and the work; its recipe has the keys of the stage over the common ones."""

    def describe(self, recipe: Recipe) -> str:
        """Return what it does, in words.

        Raises:
            UsageError: a key is missing, or does not fit the recipe.
        """
        ...

    def changes(self, folder: Path, is_done: bool) -> Mapping[str, Mapping[str, Any]]:
        """Return the sections of later stages with the keys that follow from its result in `folder`; None removes one.

        Before it is done, others may stand for them.
        """
        ...

    def problem(self, recipe: Recipe, later: Recipe, written: Mapping[str, Any]) -> str | None:
        """Return why a later stage, with the keys that it writes, cannot use the result; None: it can, or does not."""
        ...

    def run(self, resolved: ResolvedRecipe, folder: Path, processes: int | None) -> None:
        """Do the work, or the rest of it after a stop.

        Raises:
            TrainerError: it cannot be done.
        """
        ...

    def model_dump(self, *, mode: str) -> dict[str, Any]:
        """Return its keys."""
        ...


def work_of(node: Node) -> tuple[str, StageWork | None, list[str]]:
    """Return the key that asks for a work, the work, and the problems of its keys; an empty key: a training."""
    asked = {row.name: row.value for row in extensions.registered("stage") if row.name in node.members}
    if not asked:
        return "", None, []
    key, *others = asked
    if others:
        return key, None, [f"has `{key}` and `{others[0]}`, but a stage does one work; list two stages"]
    try:
        return key, extensions.resolved(asked[key])(**(node.members[key].plain() or {})), []
    except ValidationError as error:
        places = [(".".join(map(str, (key, *one["loc"]))), one["msg"]) for one in error.errors()]
        return key, None, [f"has a wrong `{place}`: {problem}; correct it" for place, problem in places]
    except TypeError:
        return key, None, [f"must have an object in `{key}`, such as {{}}"]


def with_changes(tree: Node, changes: Mapping[str, Mapping[str, Any]], origin: Origin) -> Node:
    """Return a recipe with other keys in sections; None removes one."""
    for section, keys in changes.items():
        before = tree.members.get(section) or Node({}, origin)
        kept = {key: node for key, node in before.members.items() if keys.get(key, key) is not None}
        tree = Node({**tree.members, section: Node(kept, before.origin, before.key_origin)}, tree.origin)
        given = {key: value for key, value in keys.items() if value is not None}
        tree = merged(tree, _node({section: given}, origin))
    return tree


def _node(value: Any, origin: Origin) -> Node:
    """Return the tree of plain values."""
    if isinstance(value, dict):
        return Node({key: _node(inner, origin) for key, inner in value.items()}, origin)
    return Node([_node(inner, origin) for inner in value] if isinstance(value, list) else value, origin)


def do_work(work: StageWork, resolved: ResolvedRecipe, folder: Path, processes: int | None) -> None:
    """Do a work in a process of its own.

    Raises:
        TrainerError: it failed, or a signal stopped it.
    """
    recipe = resolved.recipe.model_copy(update={"parallel": Parallel()})  # one process, whatever the trainings have
    code = run_on_fresh_ranks(replace(resolved, recipe=recipe), 1, _Job(work, folder, processes))
    assert code == 0, "the job returns no other code, and the caller counts the work as done"


@dataclass(frozen=True)
class _Job:
    work: StageWork
    folder: Path
    processes: int | None

    def __call__(self, resolved: ResolvedRecipe, environment: LaunchEnvironment) -> int:
        self.work.run(resolved, self.folder, self.processes)
        return 0
