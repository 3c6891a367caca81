"""Files of folders of sentence-transformers, of any kind of model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.base.errors import UsageError
from trainer.base.text import listed
from trainer.models.hub_files import find_file
from trainer.recipe.schema import Model

MODULES = "modules.json"
_ROLES = ("query", "document")


def place_of(model: Model) -> str:
    """Return the start of messages on a folder of sentence-transformers."""
    return f"`model.name_or_path` is {str(model.name_or_path)!r}, a folder of sentence-transformers"


def unreachable(model: Model) -> str:
    """Return the note on a hub that cannot be reached."""
    return (
        f"`model.name_or_path`: whether {model.name_or_path} has a {MODULES} of sentence-transformers is not checked:"
        " the hub cannot be reached"
    )


def prompts_of(config: Mapping[str, Any], place: str) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, null ones as empty texts, and the name of the default one."""
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or any(
        text is not None and not isinstance(text, str) for text in prompts.values()
    ):
        raise UsageError(f"{place}, but `prompts` must be texts by name, and are {prompts!r}; correct them in a copy")
    if default is not None and default not in (*prompts, *_ROLES):  # these two are empty by default
        names = listed(list(prompts), 10) or "none"
        raise UsageError(
            f"{place} with the `default_prompt_name` {default!r}, but its prompts are {names}; name one of them, or"
            " null, in a copy"
        )
    return {name: text or "" for name, text in prompts.items()}, default


def read_json(model: Model, name: str, kind: type) -> Any:
    """Return the content of a JSON file of a model's folder; None if there is no such file."""
    file = find_file(model, name)
    if file is None:
        return None
    try:
        content = json.loads(Path(file).read_text("utf-8"))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, kind):
        what = "a list" if kind is list else "an object"
        raise UsageError(
            f"`model.name_or_path` has a {name} that must hold {what} in JSON, but {file} holds none; correct it"
        )
    return content
