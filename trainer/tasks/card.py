"""How other programs open the exported folder of a task: the facts of its model card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TEXT_TO_TEXT = "text2text-generation"


@dataclass(frozen=True)
class Card:
    """The facts of a task for model cards and adapters; the defaults suit a head of transformers.

    In `usage` and `graph`, ARCHITECTURE, PROMPT and FIRST_TOKEN stand for the class of the model, for an example of its
    input, and for the first token of a decoder.

    Attributes:
        pipeline_tag: the name of the task on the hub; None: it has none.
        has_pipeline: whether transformers 5 has a pipeline of this name.
        peft_type: the type of the task in PEFT; None: PEFT has none.
        program: the library that opens the folder, and the form in which it does.
        processor: the class of transformers that prepares rows, and `rows`, an example of its arguments.
        usage: lines of Python that use the folder; empty: a pipeline, or else the class of the model.
        graph: lines of Python that complete the inputs of a graph.
    """

    pipeline_tag: str | None = None
    has_pipeline: bool = True
    peft_type: str | None = None
    program: Literal["transformers", "sentence-transformers", "cross-encoder"] = "transformers"
    processor: str = "AutoTokenizer"
    rows: str = '["..."]'
    usage: str = ""
    graph: str = ""

    @property
    def library(self) -> str:
        return "transformers" if self.program == "transformers" else "sentence-transformers"


GENERATION = Card("text-generation", peft_type="CAUSAL_LM")
TEXT_CLASSIFICATION = Card("text-classification", peft_type="SEQ_CLS")
