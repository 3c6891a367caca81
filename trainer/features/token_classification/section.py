"""The section `task` of token classification."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from trainer.recipe.schema.fields import Name
from trainer.recipe.schema.section import Contradiction, clash, repeated, shared
from trainer.recipe.schema.task_keys import TaskKeys, Traits


class TokenClassification(TaskKeys):
    """Assign a tag to each word of a list (`words`, `tags`), or find spans in a text (`text`, `spans`).

    A text with more tokens than `data.max_length` is cut into windows that overlap. Each word is labelled in the window
    that has the most context for it, so that loss and metrics count it once.
    """

    implementation = "trainer.features.token_classification.token_classification:TokenClassificationTask"
    type: Literal["token_classification"]
    traits = Traits(streams=True, teacher=True)
    pipelines = ("ner",)
    also_called = ("named_entity_recognition",)
    words: Name | None = None
    """Column of lists of words."""
    tags: Name | None = None
    """Column of one tag for each word: of entities (IOB2 or IOBES, such as B-PER), plain (such as NOUN), or
    integers from 0."""
    text: Name | None = None
    """Column of a text, instead of `words`."""
    spans: Name | None = None
    """Column of the entities of `text`: a list of {start, end, label}, in characters, the end excluded."""
    labels: Annotated[list[Name], Field(min_length=2)] | None = None
    """Tags in order, such as O, B-PER and I-PER; null: as for the labels of `sequence_classification`."""
    label_all: bool = False
    """Train on all tokens of a word, the further ones with the tag I-; false: on its first token only."""
    stride: Annotated[int, Field(ge=0)] | None = None
    """Tokens that two windows of a long text share; null: a third of `data.max_length`."""
    metrics: list[Literal["f1", "precision", "recall", "f1_macro", "accuracy"]] = Field(
        default=["f1", "precision", "recall"], min_length=1
    )
    """F1, precision and recall of whole entities (also f1/TYPE of each type); `f1_macro` is the mean of the types, or
    of plain tags; `accuracy` is that of words."""

    def contradictions(self) -> Iterator[Contradiction]:
        yield from super().contradictions()
        yield from repeated("task.labels", self.labels or [])
        pairs = (("words", "tags"), ("text", "spans"))
        columns = {key: getattr(self, key) for pair in pairs for key in pair}
        written = tuple(key for key, column in columns.items() if column is not None)
        if written not in pairs:
            found = ", ".join(f"`task.{key}`" for key in written) or "none"
            text = f"must be set with `task.tags`, or `task.text` with `task.spans`, but set is {found}"
            yield clash(text, *(f"task.{key}" for key in columns))
            return
        yield from shared(columns)
