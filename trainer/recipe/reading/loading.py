"""Loading of a recipe from its file and the command line, with the origin of every value.

The layers, in increasing precedence: the defaults of the schema, the recipes that a recipe `extends`, the recipe, the
command line (see `merging.py`). A `RecipeError` has all problems of a recipe, sorted by place.
"""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import ValidationError

import trainer.recipe.registered  # noqa: F401  # puts registered tasks into the schema
from trainer.base import extensions
from trainer.base.errors import RecipeError
from trainer.base.file_formats import formats_by_ending
from trainer.base.text import leaves, without_secrets
from trainer.recipe.paths import KeyPath, dotted, is_url, shown_value
from trainer.recipe.reading.files import RECIPE_FILE, read_file, read_text, recipe_endings, recipe_formats, shown_path
from trainer.recipe.reading.keys import find_node, nearest_node, path_base_of, section_model
from trainer.recipe.reading.merging import merged, with_default_kinds
from trainer.recipe.reading.overrides import override_layer
from trainer.recipe.reading.parser import DEFAULT, Node, Origin, Problem
from trainer.recipe.reading.rules import contradictions, message
from trainer.recipe.reading.shipped import meant, shipped_recipes, without_ending
from trainer.recipe.schema import PathBase, Recipe, Section
from trainer.recipe.schema.checkpoint import with_name

if TYPE_CHECKING:
    from trainer.recipe.reading.explaining import Finding

MAX_EXTENDS = 16
MAX_PROBLEMS = 50
_ANY_ROWS = Node(
    {"data": Node({key: Node(value, DEFAULT) for key, value in (("source", "files"), ("train", "rows"))}, DEFAULT)},
    DEFAULT,
)
"""The layer below a recipe that needs no rows."""
FILE_KEYS = ("$schema", "extends")
"""Keys of a recipe file that are not keys of the recipe."""
_OWN_KEYS = ("expects",)
"""Keys that a recipe does not inherit, because they describe one training."""


class Chain(Protocol):
    """Trainings of one recipe, one after another; the `chain` that a feature registers under a key resolves them."""

    stages: Mapping[str, ResolvedRecipe]
    """The recipe of each training by name; the model of an earlier one that is not trained yet has a stand-in."""
    works: Mapping[str, str]
    """Words of each work beside the trainings, such as a tokenizer, by name."""

    def unchecked(self, name: str) -> tuple[str, ...]:
        """Return the parts of a training that a check cannot see."""
        ...

    def run(self, processes: int | None, max_restarts: int, job: Any) -> int:
        """Do all trainings that are not done, as `run_or_join` does one."""
        ...


@dataclass(frozen=True)
class ResolvedRecipe:
    """A valid recipe, and the origin of each value.

    In `recipe`, every path is absolute; `model.name_or_path`, `model.tokenizer` and `data.name` are hub names if they
    are not absolute.
    """

    recipe: Recipe
    origins: Mapping[str, Origin]  # by dotted key path; a list is one value
    values: Mapping[str, Any]  # JSON values by dotted key path
    file: Path
    chain: Chain | None = None  # the trainings of a recipe with several


def load_recipe(
    source: str, overrides: Sequence[str] = (), needs_data: bool = True, is_whole: bool = False
) -> ResolvedRecipe:
    """Load a recipe from a file, or a shipped recipe by name (`bert_sample`), and apply `key=value` overrides.

    The extensions of installed packages are loaded first.

    Args:
        needs_data: whether the recipe must name rows, and their files and folders must exist.
        is_whole: whether the caller takes a recipe of several trainings.

    Raises:
        RecipeError: All problems of the recipe.
        UsageError: An extension cannot be loaded.
    """
    extensions.load()
    try:
        os.getcwd()
    except OSError as error:
        raise RecipeError(f"the current folder cannot be used: {error.strerror}; change to another one") from error
    file = _find_recipe(source, Path())
    root, problems = read_layers(file)
    layer, override_problems = override_layer(overrides)
    problems += override_problems
    for row in extensions.registered("chain"):
        if row.name in root.members and root.members[row.name].value is not None:
            resolved: ResolvedRecipe = extensions.resolved(row.value)(file, root, layer, problems, needs_data, is_whole)
            return resolved
    return resolve_tree(file, merged(root, layer), problems, needs_data)


def resolve_tree(file: Path, root: Node, problems: list[Problem], needs_data: bool) -> ResolvedRecipe:
    """Complete the tree of a recipe, and `resolve` it."""
    root = root if needs_data else merged(_ANY_ROWS, root)
    return resolve(file, with_default_kinds(root), problems, needs_data)


def load_values(values: Mapping[str, Any], overrides: Sequence[str] = (), needs_data: bool = True) -> ResolvedRecipe:
    """Load a recipe from plain values, such as those of a run, as `load_recipe` does from a file, with its errors."""
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        file = Path(folder) / RECIPE_FILE
        file.write_text(json.dumps(values), encoding="utf-8")
        # Through a file, so that overrides, rules and errors are those of any other recipe.
        return load_recipe(str(file), overrides, needs_data)


def _find_recipe(source: str, folder: Path) -> Path:
    """Return the file at a path relative to `folder`, or else of the shipped recipe of this name.

    Raises:
        RecipeError: there is neither.
    """
    path = folder / os.path.expanduser(source)
    if os.path.isfile(path):
        return path
    shipped = shipped_recipes()
    name = without_ending(source)
    if name in shipped:
        return shipped[name]
    if os.path.exists(path):
        raise RecipeError(f"{shown_path(path)}: is not a recipe file; `trainer recipes` lists the shipped recipes")
    if source.startswith("-"):
        raise RecipeError(f"`{source}` is no option; name the recipe alone, as in: trainer run RECIPE")
    raise RecipeError(f"{shown_path(path)}: no such file, and no shipped recipe has this name; {meant(source)}")


# Layers


def read_layers(file: Path, chain: tuple[Path, ...] = ()) -> tuple[Node, list[Problem]]:
    """Return the recipe in `file` merged over those that it extends, and the problems of the parser."""
    # Real paths, so that a link cannot hide a circle.
    chain = (*chain, Path(os.path.realpath(file)))
    # An object or a comment begins a recipe; for other text, errors of the parser would mislead.
    is_json = file.suffix.lower() not in recipe_formats()
    if len(chain) > 1 and is_json and read_text(file).lstrip()[:1] not in ("{", "/"):
        raise RecipeError(f"{shown_path(file)}: is not a recipe, which is an object {{...}}; name another file")
    of_data = tuple(end for end in formats_by_ending() if end not in recipe_endings())
    if len(chain) == 1 and file.name.lower().removesuffix(".gz").endswith(of_data):
        command = f"trainer init {shlex.quote(shown_path(file))}"
        raise RecipeError(f"{shown_path(file)}: is a file of data, not a recipe; write a recipe for it with: {command}")
    node, problems = read_file(file)
    if not isinstance(node.value, dict):
        raise RecipeError(f"{node.origin}: a recipe must be an object {{...}}, but is {shown_value(node.plain())}")
    unknown = node.members.keys() - Recipe.model_fields.keys()
    # Every recipe needs one of these sections.
    if unknown and {"task", "model", "data", "extends"}.isdisjoint(node.members):
        from trainer.recipe.reading.other_tools import file_problem  # few files need it

        problem = file_problem(unknown, shown_path(file))
        if problem is not None:
            raise RecipeError(f"{shown_path(file)}: {problem}")
    left_out = FILE_KEYS if len(chain) == 1 else (*FILE_KEYS, *_OWN_KEYS)
    layer = Node({key: member for key, member in node.members.items() if key not in left_out}, node.origin)
    extends = node.members.get("extends")
    if extends is None or extends.value is None:
        return layer, problems
    try:
        base, base_problems = read_layers(base_file(extends, chain), chain)
    except RecipeError as error:
        raise RecipeError(*map(str, problems), *error.problems) from error
    return merged(base, layer), problems + base_problems


def base_file(extends: Node, chain: tuple[Path, ...]) -> Path:
    """Return the file that a key `extends` names; `chain` has the files that lead to it."""
    if not isinstance(extends.value, str) or not extends.value:
        raise RecipeError(
            f"{extends.origin}: `extends` must be a path or a shipped name, but is {shown_value(extends.plain())}"
        )
    try:
        base = _find_recipe(extends.value, extends.origin.folder)
    except RecipeError as error:
        raise RecipeError(f"{extends.origin}: `extends` {shown_value(extends.value)}: {error}") from error
    if Path(os.path.realpath(base)) in chain:
        circle = " -> ".join(shown_path(path) for path in (*chain, base))
        raise RecipeError(f"{extends.origin}: `extends` is circular: {circle}")
    if len(chain) >= MAX_EXTENDS:
        raise RecipeError(f"{extends.origin}: `extends` is nested deeper than the limit of {MAX_EXTENDS} recipes")
    return base


# Validation


def resolve(file: Path, root: Node, problems: list[Problem], needs_data: bool = True) -> ResolvedRecipe:
    """Validate the merged tree of a recipe, and complete it.

    Args:
        file: the file of the recipe, for messages.
        problems: those of the parser.
        needs_data: whether files and folders of rows must exist.

    Raises:
        RecipeError: all problems of the recipe.
    """
    recipe: Recipe | None = None
    issues: list[Finding] = []
    problems = list(problems)
    try:
        recipe = Recipe.model_validate(root.plain())
    except ValidationError as error:
        from trainer.recipe.reading.explaining import correct, explain, findings  # a valid recipe needs no words

        issues = findings(error)
        if correct(issues, root):
            return resolve(file, root, problems, needs_data)
        problems += [problem for finding in issues[:MAX_PROBLEMS] for problem in explain(finding, root)]
    # The sound sections of an invalid recipe are checked too, so that all problems show at once.
    sections = dict(recipe) if recipe else _sound_sections(root, issues)
    sections = {name: _with_places(value, (name,), root) for name, value in sections.items()}
    broken = {finding.path[:2] for finding in issues}
    for contradiction in contradictions(sections):
        if contradiction.is_missing_data and not needs_data:
            continue
        if broken.isdisjoint(key[:2] for key in contradiction.keys):  # else it may follow from another problem
            problems.append(Problem(nearest_node(root, contradiction.keys[0]).origin, message(contradiction)))
    if recipe is None or problems:
        raise RecipeError(*_report(problems, shown_path(file), len(issues)))
    return _resolved(_completed(recipe.model_copy(update=sections)), root, file)


def _resolved(recipe: Recipe, root: Node, file: Path) -> ResolvedRecipe:
    values = dict(leaves(recipe.model_dump(mode="json")))
    written = {path: find_node(root, path) for path in values}
    origins = {dotted(path): node.origin if node else DEFAULT for path, node in written.items()}
    return ResolvedRecipe(recipe, origins, {dotted(path): value for path, value in values.items()}, file)


def _sound_sections(root: Node, issues: Sequence[Finding]) -> dict[str, Any]:
    """Return the sections of an invalid recipe without the invalid keys, to check them for contradictions."""
    data = root.plain()
    for name, *inner in (finding.path for finding in issues):
        if inner and isinstance(data.get(name), dict):
            # The default takes the place of an invalid key, so that rules on the other keys are still checked.
            data[name].pop(inner[0], None)
        else:
            data[name] = None
    sections = {}
    for name, field in Recipe.model_fields.items():
        model = section_model(field, root.members.get(name, Node({}, DEFAULT)))
        try:
            if model is not None:
                sections[name] = model.model_validate(data.get(name, {}))
        except ValidationError:  # the section or a required key is missing or invalid
            continue
    return sections


def _report(problems: Sequence[Problem], file: str, num_findings: int) -> list[str]:
    """Sort problems by place: the recipe's file, the files that it extends, the command line."""

    def place(problem: Problem) -> tuple[bool, bool, str, int, int]:
        origin = problem.origin
        return origin.line == 0, origin.source != file, origin.source, origin.line, origin.column

    lines = list(dict.fromkeys(without_secrets(str(problem)) for problem in sorted(problems, key=place)))
    hidden = max(0, len(lines) - MAX_PROBLEMS) + max(0, num_findings - MAX_PROBLEMS)
    return lines[:MAX_PROBLEMS] + ([f"and {hidden} more"] if hidden else [])


# Completion


def _with_places(value: Any, path: KeyPath, root: Node) -> Any:
    """Make the paths of a section absolute; return other values unchanged."""
    if not isinstance(value, Section):
        return value
    updates = {}
    for name, field in type(value).model_fields.items():
        before = getattr(value, name)
        folder = nearest_node(root, (*path, name)).origin.folder
        after = _with_places(before, (*path, name), root)
        if path_base_of(field) is PathBase.RECIPE:
            several = isinstance(before, list)
            after = [_absolute(item, folder) for item in before] if several else _absolute(before, folder)
        elif path_base_of(field) is PathBase.RECIPE_OR_HUB:
            after = _absolute_unless_hub(before, folder)
        if after != before:
            updates[name] = after
    return value.model_copy(update=updates) if updates else value


def _absolute(place: Any, folder: Path) -> Any:
    """Return a path as absolute; other values, such as a share of rows or a URL, stay."""
    if not isinstance(place, str) or is_url(place):
        return place
    # Not `realpath`: a link to the newest data keeps its name in checkpoints and model cards.
    return os.path.normpath(os.path.join(folder, os.path.expanduser(place)))


def _absolute_unless_hub(place: str | None, folder: Path) -> str | None:
    path = _absolute(place, folder)
    looks_like_path = place is not None and (place in (".", "..") or place.startswith(("./", "../", "/", "~")))
    return path if looks_like_path or (path is not None and os.path.isdir(path)) else place


def _completed(recipe: Recipe) -> Recipe:
    folder = os.path.abspath(os.path.expanduser(with_name(recipe.checkpoint.folder, recipe.name)))
    updates: dict[str, Section] = {"checkpoint": recipe.checkpoint.model_copy(update={"folder": folder})}
    if recipe.data.validation is None:
        updates["evaluation"] = recipe.evaluation.model_copy(update={"every": None})
    return recipe.model_copy(update=updates)
