"""A recipe file with its data and tokenizer, small enough that a whole run takes about a second."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.helpers.training import TINY_BERT

WORDS = [f"word{index}" for index in range(100)]
NUM_TRAIN_ROWS, NUM_VALIDATION_ROWS = 40, 17


def write_tiny_run(folder: Path, **sections: Any) -> Path:
    """Writes recipe, data and tokenizer into `folder`; `sections` are merged key by key into the recipe.

    Returns:
        The recipe's file; the run lies in `folder / "run"`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = random.Random(0)
    _write_rows(folder / "train.jsonl", NUM_TRAIN_ROWS, rows)
    _write_rows(folder / "validation.jsonl", NUM_VALIDATION_ROWS, rows)
    _write_tokenizer(folder / "tokenizer")
    recipe: dict[str, Any] = {
        "name": "tiny",
        "task": {"type": "sequence_classification", "text": "text", "metrics": ["accuracy", "f1_macro"]},
        "model": {"config": TINY_BERT, "tokenizer": "tokenizer"},
        "data": {
            "source": "files",
            "train": "train.jsonl",
            "validation": "validation.jsonl",
            "max_length": 16,
            "group_by_length": True,
            "cache": "cache",
        },
        "training": {"max_steps": 8, "global_batch_size": 8, "micro_batch_size": 4},
        "optimizer": {"name": "adamw", "learning_rate": 1e-3, "weight_decay": 0.01},
        "schedule": {"warmup": 0.25},
        "evaluation": {"every": "4 steps"},
        "checkpoint": {"folder": str(folder / "run")},
        "logging": {"every": "1 step", "to": ["jsonl"]},
    }
    for section, keys in sections.items():
        recipe[section] = {**recipe.get(section, {}), **keys} if isinstance(keys, dict) else keys
    file = folder / "recipe.json"
    file.write_text(json.dumps(recipe), encoding="utf-8")
    return file


def _write_rows(file: Path, number: int, rows: random.Random) -> None:
    """Texts of 3 to 12 words, whose class is that of their first word."""
    with file.open("w", encoding="utf-8") as lines:
        for _ in range(number):
            words = rows.choices(WORDS, k=rows.randint(3, 12))
            label = "abc"[WORDS.index(words[0]) % 3]
            lines.write(json.dumps({"text": " ".join(words), "label": label}) + "\n")


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: index for index, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    ).save_pretrained(folder)
