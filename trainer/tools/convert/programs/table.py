"""The conversions of programs around the Trainer, by their tools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainer.tools.convert.draft import Draft
from trainer.tools.convert.programs import axolotl, embeddings, llama_factory, trl
from trainer.tools.convert.sources import Sources, Tool


@dataclass(frozen=True)
class Program:
    """The conversion of one program.

    Attributes:
        prepare: sets fields of TrainingArguments that follow from keys of the program.
        convert: proposes model, data and task; it gets the folder of the recipe.
    """

    convert: Callable[[Draft, Path], None]
    prepare: Callable[[Sources], None] = lambda sources: None


PROGRAMS = {
    Tool.AXOLOTL: Program(axolotl.convert, axolotl.prepare),
    Tool.LLAMA_FACTORY: Program(llama_factory.convert, llama_factory.prepare),
    **{tool: Program(trl.convert, trl.prepare) for tool in Tool if tool.value.startswith("trl-")},
    Tool.SENTENCE_TRANSFORMER: Program(embeddings.convert_sentence_transformers),
    Tool.CROSS_ENCODER: Program(embeddings.convert_sentence_transformers),
    Tool.SETFIT: Program(embeddings.convert_setfit, embeddings.prepare_setfit),
}
