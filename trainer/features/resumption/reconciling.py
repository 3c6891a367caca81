"""Differences between a checkpoint and a run that leave the training the same.

Such are another number of steps, if the schedule gives all steps that are done the same rates, and keys with their
defaults that the version of the checkpoint did not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

from packaging.version import InvalidVersion, Version

import trainer
from trainer.base.errors import UsageError
from trainer.base.text import listed
from trainer.checkpoint.identity import differences
from trainer.checkpoint.reading import SavedBoxes
from trainer.recipe.reading.keys import kinds, section_models
from trainer.recipe.registered import schedule_sections
from trainer.recipe.schema import Recipe, Section

_MISSING = object()
_MOST = 5  # keys in a note


def reconcile(
    state: SavedBoxes, present: Mapping[str, Any], total_steps: Callable[..., int]
) -> tuple[Mapping[str, Any], list[str]]:
    """Return the identity of a run without differences to a checkpoint that change nothing, and notes on them.

    Args:
        total_steps: the function that returns the steps of the run with other values of `epochs` and `max_steps`.

    Raises:
        UsageError: only the number of steps differs, and steps that are done would have had other learning rates.
    """
    saved = state.facts.identity
    reconciled, notes = _without_new_defaults(state, present)
    was, now = saved.get("training"), reconciled.get("training", {})
    if not isinstance(was, Mapping) or not {"epochs", "max_steps"} <= was.keys() & now.keys():
        return reconciled, notes
    same_length = {**reconciled, "training": {**now, "epochs": was["epochs"], "max_steps": was["max_steps"]}}
    if differences(saved, reconciled) and not differences(saved, same_length):
        notes.append(_continuation(state, was, now, total_steps))
        return same_length, notes
    return reconciled, notes


def _continuation(
    state: SavedBoxes, was: Mapping[str, Any], now: Mapping[str, Any], total_steps: Callable[..., int]
) -> str:
    """Return a note on the new end of a training, or refuse it."""
    done = state.facts.progress.step
    before, after = (total_steps(epochs=keys["epochs"], max_steps=keys["max_steps"]) for keys in (was, now))
    key = "max_steps" if now["max_steps"] else "epochs"
    if after < done:
        raise UsageError(
            f"`training.{key}` must give at least the {done} steps that are done, but gives {after}; raise it, or give"
            " the run another `checkpoint.folder`"
        )
    keys = state.facts.identity["schedule"]
    schedule = schedule_sections()[keys["name"]].model_validate(keys)
    rates = ((schedule.factor(step, before), schedule.factor(step, after)) for step in range(done))
    other = next((step for step, (old, new) in zip(count(1), rates, strict=False) if old != new), None)
    if other is None:
        return (
            f"the training ends at step {after} instead of {before}; the learning rates of its {done} steps stay"
            + _extra_evaluation(state, before)
            + _last_model(state, before)
        )
    run, recipe = state.folder.parents[1], state.facts.origin.get("recipe")
    is_drawn = isinstance(recipe, Mapping) and (recipe.get("model") or {}).get("name_or_path") is None
    config = " model.config=null" if is_drawn else ""
    # A run exports its model at its end.
    end = "" if (run / "model").is_dir() else f" let this run end at step {before}, and"
    raise UsageError(
        f"`training.{key}` gives {after} steps, but {state.folder} is of a training of {before}: with another end, the"
        f" schedule {keys['name']} gives step {other} another learning rate. To train this model further,{end} start a"
        f" run: trainer run RECIPE model.name_or_path={run / 'model'}{config} checkpoint.folder={run}-2."
        f" To keep the choice, begin a run with the larger number and training.stop_at_step={before}; the same command"
        " continues it"
    )


def _extra_evaluation(state: SavedBoxes, end: int) -> str:
    """Return a note on the best evaluation if it is that of the old end, which is due whatever the interval."""
    best = state.facts.progress.best
    if best is None or best.step != end:
        return ""
    return (
        f"; the best evaluation so far is that of the old end, step {end}, which counts also if"
        " `evaluation.every` leaves it out"
    )


def _last_model(state: SavedBoxes, end: int) -> str:
    """Return a note on the exported model of the old end, which `evaluate` takes where no best one is stored."""
    folder = state.folder.parents[1] / "model"
    return f"; {folder} stays that of step {end} until then" if folder.is_dir() else ""


def _without_new_defaults(state: SavedBoxes, present: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Return the identity without the keys of later versions that have their defaults, and a note on them."""
    if not _is_older(state.facts.origin):
        return present, []
    saved, kept, names = state.facts.identity, dict(present), list[str]()
    for name, value in present.items():
        before = saved.get(name)
        # A section that was null has no keys, and its keys are no new ones.
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            new = set(_new_keys(name, before, value))
            kept[name] = {key: one for key, one in value.items() if key not in new}
            names += [f"`{name}.{key}`" for key in sorted(new)]
    if not names:
        return present, []
    return kept, [f"the checkpoint is of a version without {listed(names, _MOST)}; the defaults stand for it"]


def _new_keys(name: str, before: Mapping[str, Any], value: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of a section that a checkpoint lacks and that have their defaults."""
    if (model := _model_of(name, before, value)) is None:
        return
    for key in value.keys() - before.keys():
        field = model.model_fields.get(key)
        default = None if field is None or field.is_required() else field.get_default(call_default_factory=True)
        if default is not None and value[key] == default:
            yield key


def _model_of(name: str, before: Mapping[str, Any], value: Mapping[str, Any]) -> type[Section] | None:
    """Return the class of a section; None: the section has another kind, or none is known."""
    field = Recipe.model_fields.get(name)
    if field is None:
        return None
    if isinstance(tag := field.discriminator, str):
        return kinds(field).get(str(value.get(tag))) if before.get(tag) == value.get(tag) else None
    models = section_models(field.annotation)
    return models[0] if len(models) == 1 else None


def _is_older(origin: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint is of this version or an older one; development shares one number."""
    versions = origin.get("versions")
    try:
        return isinstance(versions, Mapping) and Version(str(versions["trainer"])) <= Version(trainer.__version__)
    except (KeyError, InvalidVersion):
        return False
