"""The check of folders of token ids: the recipe has the tokenizer, the task and the length that wrote them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.base.errors import DataError, UsageError
from trainer.data.sources import Splits
from trainer.recipe.paths import is_url
from trainer.recipe.schema import Recipe
from trainer.training.row_encoding import ENCODED, encoding_facts, tokenizer_of


def checked(recipe: Recipe, splits: Splits, folders: Sequence[tuple[str, str, str]]) -> Splits:
    """Return the splits with a note on each folder; refuse one that another recipe wrote.

    Args:
        folders: the key, the place and the description of each folder.

    Raises:
        DataError: the description of a folder cannot be read, or a file has another size.
        UsageError: task, length or tokenizer differ.
    """
    notes, own = list(splits.notes), None
    for key, folder, description in folders:
        own = own or encoding_facts(recipe, tokenizer_of(recipe))
        try:
            facts = json.loads(description)
            fit, files, name = facts["fit"], facts["files"], facts["tokenizer"]
            numbers = f"{facts['rows']:,} rows with {facts['tokens']:,} tokens"
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"`{key}` names files of {folder}, where {ENCODED} must be that of `trainer encode`, but is not:"
                f" {error!r}; copy it again"
            ) from error
        for fact in own:
            if fit.get(fact) != own[fact]:
                raise UsageError(_differs(key, folder, fact, fit.get(fact), own[fact], name))
        _require_sizes(key, folder, files)
        notes.append(f"`{key}` is of {folder}, which `trainer encode` wrote: {numbers}")
    return Splits(splits.train, splits.validation, tuple(notes))


def _differs(key: str, folder: str, fact: str, theirs: Any, ours: Any, name: str) -> str:
    fix = "encode the texts again, or correct the recipe"
    if fact == "tokenizer":
        return (
            f"`{key}` names token ids of {folder}, which the tokenizer `{name}` with the digest {str(theirs)[:12]}"
            f" made, but the recipe's has the digest {str(ours)[:12]}; {fix}"
        )
    return f"`{fact}` must be {theirs!r}, as in {folder} of `{key}`, but is {ours!r}; {fix}"


def _require_sizes(key: str, folder: str, files: dict[str, dict[str, Any]]) -> None:
    for name, file in files.items() if not is_url(folder) else ():
        path = Path(folder) / name
        size = path.stat().st_size if path.is_file() else None
        if size != file["bytes"]:
            found = "does not exist" if size is None else f"has {size:,} bytes"
            raise DataError(
                f"`{key}` names files of {folder}, where {name} must have {file['bytes']:,} bytes, but {found}; copy it"
                " again, or encode the texts again into the same folder"
            )
