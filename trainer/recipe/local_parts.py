"""The parts of a recipe that are on this machine: model, tokenizer and data, in folders or in the hub's cache."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trainer.base.extensions import registered
from trainer.ranks.environment import datasets_cache
from trainer.recipe.schema import HubData

if TYPE_CHECKING:
    from trainer.recipe.schema import Recipe

_NAME = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)?")
_CONFIGURATION = ("config.json",)
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_VOCABULARY = (
    "tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "spm.model", "source.spm", "tekken.json",
)  # fmt: skip


@dataclass(frozen=True)
class LocalParts:
    """Whether the parts of a recipe are on this machine; `unchecked` names the others, for the user."""

    has_model: bool
    has_tokenizer: bool
    has_data: bool
    unchecked: tuple[str, ...] = ()
    has_second_model: bool = True  # true without one

    @classmethod
    def of(cls, recipe: Recipe) -> LocalParts:
        """Return the parts of a resolved recipe that are on this machine."""
        data = recipe.data
        model = _Source("model.name_or_path", recipe.model.name_or_path, recipe.model.revision)
        tokenizer = model if recipe.model.tokenizer is None else _Source("model.tokenizer", recipe.model.tokenizer)
        other = recipe.task.other_inputs
        lacking: dict[_Source, list[str]] = {}

        def finds(source: _Source, files: tuple[str, ...], part: str) -> bool:
            is_here = source.holds(files)
            if not is_here:
                lacking.setdefault(source, []).append(part)
            return is_here

        has_model = finds(model, _CONFIGURATION, "configuration")
        finds(model, _WEIGHTS, "weights")
        has_part = other is None or finds(model, other.files, other.part)
        has_tokenizer = other is not None or finds(tokenizer, _VOCABULARY, "tokenizer and lengths of rows")
        has_second = True
        for name, key in (row.name.split(".") for row in registered("second_model")):
            if (section := getattr(recipe, name)) is None:
                continue
            second = _Source(f"{name}.{key}", getattr(section, key), section.revision)
            has_second = finds(second, _CONFIGURATION, "configuration")
            finds(second, _WEIGHTS, "weights")
            has_second = (other is not None or finds(second, _VOCABULARY, "tokenizer")) and has_second
        has_data = not isinstance(data, HubData) or _has_rows(data)
        if isinstance(data, HubData) and not has_data:
            lacking[_Source("data.name", data.name, data.revision, "--repo-type dataset")] = ["rows"]
        unchecked = tuple(source.unchecked(parts) for source, parts in lacking.items())
        return cls(has_model, has_tokenizer, has_data and has_part, unchecked, has_second)

    @property
    def has_preparation(self) -> bool:
        """Whether rows of texts can be prepared as in a run."""
        return self.has_model and self.has_tokenizer

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to check."""
        return not self.has_model and not self.has_data


class _Source(NamedTuple):
    """A folder or a name on the hub, its key in a recipe, and an option that fetches it; None: it is not needed."""

    key: str
    name: str | None
    revision: str | None = None
    option: str | None = None

    def holds(self, files: tuple[str, ...]) -> bool:
        """Return whether it is a folder, or one of the files is in the hub's cache."""
        if self.name is None or os.path.isabs(self.name):
            return True
        if not _NAME.fullmatch(self.name):  # the check that reads it has a message
            return True
        from huggingface_hub import constants  # not what reads the cache, which takes longer than this check

        folder = Path(constants.HF_HUB_CACHE, f"models--{self.name.replace('/', '--')}")
        revision = self.revision or "main"
        with suppress(OSError):
            # The hub's cache has the commit of a branch or a tag in a file; for a commit there is none.
            revision = (folder / "refs" / revision).read_text(encoding="utf-8")
        return any(_is_whole(folder / "snapshots" / revision / file) for file in files)

    def unchecked(self, parts: list[str]) -> str:
        revision = f" --revision {self.revision}" if self.revision else ""
        command = f"hf download {self.name}{f' {self.option}' if self.option else ''}{revision}"
        return (
            f"`{self.key}` ({', '.join(parts)}): {self.name} is neither a folder here nor in the hub's cache;"
            f" `{command}` fetches it, unless it is misspelt"
        )


def _is_whole(file: Path) -> bool:
    """Return whether there is a file and, if it is the index of weights, all files that it names."""
    if not file.name.endswith(".index.json"):
        return file.is_file()
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        return False
    except ValueError:  # the check that reads it has a message
        return True
    weights = index.get("weight_map") if isinstance(index, dict) else None
    names = set(map(str, weights.values())) if isinstance(weights, dict) else set()
    return all((file.parent / name).is_file() for name in names)


def _has_rows(data: HubData) -> bool:
    """Return whether a data set is a folder, or `datasets` has prepared it in its cache."""
    if os.path.isabs(data.name):
        return True
    wanted = _letters(data.name)
    folders = (folder for folder in datasets_cache().glob("*") if _letters(folder.name) == wanted)
    pattern = f"{data.subset or '*'}/*/{data.revision or '*'}"
    return any(any(folder.glob(pattern)) for folder in folders)


def _letters(name: str) -> str:
    """Return a name as the same text on the hub and, with other signs and cases, in the cache of `datasets`."""
    return re.sub(r"[\W_]", "", name).lower()
