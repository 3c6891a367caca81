"""The two Hugging Face classes that tasks take as arguments, named without importing their libraries at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import datasets
    import transformers

    Dataset: TypeAlias = datasets.Dataset
    Tokenizer: TypeAlias = transformers.PreTrainedTokenizerBase
else:
    Dataset = Any
    Tokenizer = Any
