"""A recipe for a complete run of a tiny T5 with targets, and its tokenizer."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.helpers.tiny_run import NUM_TRAIN_ROWS, NUM_VALIDATION_ROWS, WORDS, write_tiny_run
from tests.helpers.training import TINY_T5

SPECIAL = ("<pad>", "</s>", "<unk>")  # ids 0, 1 and 2, as T5's


def tiny_tokenizer(adds_end: bool = True) -> Any:
    """Return a tokenizer of `WORDS` with T5's special tokens; `adds_end` appends the end token to each text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_end:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
    )


def multilingual_tokenizer(model_type: str) -> Any:
    """Return a tokenizer of `WORDS` that marks languages as mBART does, or else as NLLB does."""
    from transformers import MBartTokenizer, NllbTokenizer
    from transformers.models.mbart.tokenization_mbart import FAIRSEQ_LANGUAGE_CODES

    first = ["<s>", "<pad>", "</s>", "<unk>"]
    if model_type == "mbart":
        words = [*first, *(f"▁{word}" for word in WORDS), *FAIRSEQ_LANGUAGE_CODES, "<mask>"]
        return MBartTokenizer(vocab=[(word, 0.0) for word in words])
    characters = sorted({character for word in WORDS for character in word})
    return NllbTokenizer(vocab={token: index for index, token in enumerate([*first, "▁", *characters])}, merges=[])


def write_seq2seq_run(folder: Path, task: Mapping[str, Any] = {}) -> Path:
    """Write recipe, data and tokenizer as `write_tiny_run` does; a target is the last words of its source, reversed."""
    keys = {"type": "seq2seq_lm", "metrics": ["rougeL", "bleu", "perplexity"], "generation": {"max_new_tokens": 8}}
    recipe = write_tiny_run(folder, model={"config": TINY_T5})
    content = json.loads(recipe.read_text()) | {"task": {**keys, **task}}
    recipe.write_text(json.dumps(content))
    rows = random.Random(0)
    for split, number in (("train", NUM_TRAIN_ROWS), ("validation", NUM_VALIDATION_ROWS)):
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as lines:
            for _ in range(number):
                words = rows.choices(WORDS, k=rows.randint(3, 12))
                row = {"source": " ".join(words), "target": " ".join(words[: -rows.randint(2, 6) : -1])}
                lines.write(json.dumps(row) + "\n")
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    return recipe
