"""The model card: the `README.md` of an exported folder, for people and, in its head, for the hub.

It is written from the facts of a checkpoint, so that a run and `trainer export` write the same.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, though not in its `__all__`
from transformers.utils import CONFIG_NAME

from trainer.base.disk import replace_folder
from trainer.base.extensions import registered
from trainer.base.text import for_terminal, masked
from trainer.checkpoint.counters import Progress
from trainer.recipe.reading.files import RECIPE_FILE
from trainer.tasks.exported import Card, CardForm
from trainer.tasks.registry import card_of
from trainer.training.export_check import Certificate

CARD_NAME = "README.md"


def complete_folder(
    temporary: Path,
    place: Path,
    origin: Mapping[str, Any],
    progress: Progress,
    certificate: Certificate | None = None,
    form: CardForm | None = None,
) -> None:
    """Add card and recipe to a new Hugging Face folder, and put the folder in its place.

    Args:
        temporary: The folder with the model, beside `place`.
        place: The final folder, which is replaced as a whole.
        form: The texts of the card for a folder without the whole weights.

    Raises:
        OSError: It cannot be written.
    """
    origin = masked(origin)  # an earlier version could save an address with a password
    write_card(temporary, origin, progress, certificate, form)
    if recipe := _part(origin, "recipe"):  # for `trainer evaluate` and `trainer predict`
        (temporary / RECIPE_FILE).write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")
    replace_folder(temporary, place)


def write_card(
    folder: Path,
    origin: Mapping[str, Any],
    progress: Progress,
    certificate: Certificate | None = None,
    form: CardForm | None = None,
) -> None:
    """Write the card of a Hugging Face folder; arguments and errors are those of `complete_folder`."""
    card = _card(json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8")), origin, progress, form)
    if certificate is not None:
        card += "\n" + "\n".join(["## Verification", "", *certificate.lines()]) + "\n"
    (folder / CARD_NAME).write_text(card, encoding="utf-8")


def _card(config: Mapping[str, Any], origin: Mapping[str, Any], progress: Progress, form: CardForm | None) -> str:
    recipe, best = _part(origin, "recipe"), progress.best
    task = _part(recipe, "task")
    task_type = str(task.get("type"))
    facts = card_of(task_type) or Card()
    tag, architecture = facts.pipeline_tag, config["architectures"][0]
    names = {
        "ARCHITECTURE": architecture,
        "DTYPE": str(config["dtype"]),
        "PROMPT": json.dumps(f"{task.get('prefix') or ''}..."),
        "FIRST_TOKEN": _plain(config.get("decoder_start_token_id")),
        "BASE": _base(_part(recipe, "model")),
    }
    text: str = _template().render(
        head=_head(recipe, task_type, facts, (form and form.library) or facts.library).to_yaml().strip(),
        recipe=recipe,
        # JSON leaves the control character DEL as it is.
        as_json=json.dumps(recipe, indent=2).replace("\x7f", "\\u007f"),
        architecture=architecture,
        title=_filled(form.title if form else "A `ARCHITECTURE` in `DTYPE`", names),
        usage=_filled(form.usage if form else facts.usage, names),
        task=task_type,
        tag=tag,
        has_pipeline=tag is not None and facts.has_pipeline,
        progress=progress,
        best=f"{_plain(best.name)} {best.value:.6g} at step {best.step:,}" if best else "none",
        features=[*_of_features(recipe)],
        layout=_layout(recipe, _part(origin, "layout")),
        versions=sorted(_part(origin, "versions").items()),
    )
    return text.rstrip() + "\n"


def _base(model: Mapping[str, Any]) -> str:
    """Return the arguments of `from_pretrained` for the model at the start of the training."""
    name = json.dumps(_hub_name(model.get("name_or_path")) or "path/to/the/base/model")
    return f"{name}, revision={json.dumps(model['revision'])}" if model.get("revision") else name


def _filled(text: str, names: Mapping[str, str]) -> str:
    """Return a text with the values of the words that stand for them."""
    # In one pass, because a value, such as a prefix of texts, may hold another of the words.
    return re.sub(rf"\b(?:{'|'.join(names)})\b", lambda word: names[word[0]], text)


@cache  # a run writes several cards, and compiling the template takes longer than filling it
def _template() -> Any:
    from trainer.base.templates import templates  # here: a run needs it at its end only

    environment = templates(Path(__file__).parent)
    environment.filters |= {"plain": _plain, "number": "{:,}".format}
    return environment.get_template("model_card.md.jinja")


def _of_features(recipe: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of features for the values of their keys."""
    for row in registered("card"):
        section, _, key = row.name.rpartition(".")
        if (value := _part(recipe, section).get(key)) is not None:
            yield row.value.format(value=_plain(value))


def _part(values: Any, key: str) -> Mapping[str, Any]:
    part = values.get(key) if isinstance(values, Mapping) else None
    return part if isinstance(part, Mapping) else {}


def _plain(value: Any) -> str:
    """Return a value of a checkpoint on one line, without HTML, links, code spans and control characters."""
    text = for_terminal(" ".join(str(value).split()))
    # The first replacement is that of &, because the others add one.
    for mark, safe in (("&", "&amp;"), ("<", "&lt;"), ("[", "\\["), ("`", "'")):
        text = text.replace(mark, safe)
    return text


def _head(recipe: Mapping[str, Any], task_type: str, facts: Card, library: str) -> ModelCardData:
    """Return the metadata for the hub; it leaves out keys that are None."""
    data = _part(recipe, "data")
    dataset = _hub_name(data.get("name")) if data.get("source") == "hub" else None
    return ModelCardData(
        library_name=library,
        base_model=_hub_name(_part(recipe, "model").get("name_or_path")),
        datasets=[dataset] if dataset else None,
        pipeline_tag=facts.pipeline_tag,
        tags=[task_type.replace("_", "-")] if facts.pipeline_tag else None,
    )


def _hub_name(name: Any) -> str | None:
    """Return a name that the hub can look up; None for a folder, which a recipe holds by its absolute path."""
    if not isinstance(name, str) or os.path.isabs(name):
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def _layout(recipe: Mapping[str, Any], layout: Mapping[str, Any]) -> str:
    strategy = _part(recipe, "parallel").get("strategy")
    degrees = [f"{_plain(axis)} {_plain(degree)}" for axis, degree in layout.items() if degree != 1] or ["one process"]
    return f"{' x '.join(degrees)}, `{_plain(strategy)}`, `{_plain(recipe.get('precision'))}`"
