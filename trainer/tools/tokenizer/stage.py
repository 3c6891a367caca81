"""A tokenizer as a stage of a recipe."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from trainer.base.errors import UsageError
from trainer.base.terminal import say
from trainer.recipe.schema import Recipe, Section

if TYPE_CHECKING:
    from trainer.recipe.reading.loading import ResolvedRecipe
    from trainer.tools.tokenizer.training import TokenizerRequest

_FOLDER = "tokenizer"


class TokenizerStage(Section):
    """The keys of a stage that trains a tokenizer on the training texts of its recipe, for the stages after it."""

    kind: Literal["wordpiece", "bpe", "unigram"] | None = None
    """Kind of model; null: that of the family."""
    family: Literal["bert", "modernbert", "roberta", "gpt2", "llama", "t5"] | None = None
    """Special tokens, template and class; null: bert, or modernbert for bpe, t5 for unigram."""
    size: Annotated[int, Field(gt=0)] | None = None
    """Tokens of the vocabulary, with the special ones; null: `model.config.vocab_size`."""
    min_frequency: Annotated[int, Field(gt=0)] = 2
    """Fewest occurrences of a pair that is joined."""
    lowercase: bool | None = None
    """Write small letters; null: for bert alone."""
    max_length: Annotated[int, Field(gt=0)] | None = None
    """Most tokens that its models take; null: no limit."""

    def describe(self, recipe: Recipe) -> str:
        """Return what the stage does.

        Raises:
            UsageError: no key gives the size.
        """
        return f"trains a tokenizer of at most {self._size(recipe):,} tokens on `data.train`"

    def changes(self, folder: Path, is_done: bool) -> dict[str, Any]:
        """Return the key of later stages with the folder; a name that no tokenizer has stands for it."""
        return {"model": {"tokenizer": str(folder / _FOLDER) if is_done else f"stages/{folder.name or _FOLDER}"}}

    def problem(self, recipe: Recipe, later: Recipe, written: Mapping[str, Any]) -> str | None:
        """Return None: the model of a later stage tells whether the tokenizer fits."""
        return None

    def run(self, resolved: ResolvedRecipe, folder: Path, processes: int | None) -> None:
        """Train the tokenizer; one that a stopped run left is trained again.

        Raises:
            DataError, UsageError: as `train_tokenizer`.
        """
        from trainer.tools.tokenizer.recipe_texts import RecipeTexts
        from trainer.tools.tokenizer.training import lines, train_tokenizer

        output = folder / _FOLDER
        if output.exists():
            shutil.rmtree(output)
        say(*lines(train_tokenizer(self._request(resolved.recipe, output), RecipeTexts(resolved.recipe)), output))

    def _request(self, recipe: Recipe, output: Path) -> TokenizerRequest:
        from trainer.tools.tokenizer.training import TokenizerRequest

        return TokenizerRequest(
            ["data.train"], output, self.kind, self.family, self._size(recipe), None, self.min_frequency,
            self.lowercase, self.max_length,
        )  # fmt: skip

    def _size(self, recipe: Recipe) -> int:
        size = self.size or (recipe.model.config or {}).get("vocab_size")
        if not isinstance(size, int):
            raise UsageError(
                "`tokenizer.size` must be the tokens of the vocabulary, or `model.config.vocab_size`; set one"
            )
        return size
