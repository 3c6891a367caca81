"""A recipe file with data and tokenizer for a complete run of about one second."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.helpers.training import TINY_BERT, TINY_VIT

WORDS = [f"word{index}" for index in range(100)]
NUM_TRAIN_ROWS, NUM_VALIDATION_ROWS = 40, 17


def write_tiny_run(folder: Path, **sections: Any) -> Path:
    """Write recipe, data and tokenizer into `folder`, and merge `sections` key by key into the recipe.

    Returns:
        The path of the recipe. The folder of the run is `folder / "run"`.
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
        "evaluation": {"every": "4 steps", "verify_export": 0},
        "checkpoint": {"folder": str(folder / "run")},
        "logging": {"every": "1 step", "to": ["jsonl"]},
    }
    for section, keys in sections.items():
        recipe[section] = {**recipe.get(section, {}), **keys} if isinstance(keys, dict) else keys
    file = folder / "recipe.json"
    file.write_text(json.dumps(recipe), encoding="utf-8")
    return file


def write_tiny_image_run(folder: Path, **sections: Any) -> Path:
    """Like `write_tiny_run`, for a tiny ViT and an image folder in the layout of `datasets`."""
    file = write_tiny_run(folder)
    recipe = json.loads(file.read_text())
    for key in ("train", "validation", "max_length", "group_by_length"):
        del recipe["data"][key]
    recipe |= {
        "task": {"type": "image_classification", "metrics": ["accuracy", "f1_macro"]},
        "model": {"config": {**TINY_VIT, "num_channels": 3}},
        "data": {**recipe["data"], "source": "hub", "name": "./images"},
    }
    for section, keys in sections.items():
        recipe[section] = {**recipe.get(section, {}), **keys} if isinstance(keys, dict) else keys
    file.write_text(json.dumps(recipe))
    _write_images(folder / "images")
    return file


def _write_images(folder: Path) -> None:
    """Write noisy images. The brightness determines the class."""
    noise = np.random.default_rng(0)
    for split, number in (("train", NUM_TRAIN_ROWS), ("validation", NUM_VALIDATION_ROWS)):
        for index in range(number):
            place = folder / split / "abc"[index % 3] / f"{index}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noise.integers(0, 85, (20, 24), np.uint8) + np.uint8(85 * (index % 3))).save(place)


def _write_rows(file: Path, number: int, rows: random.Random) -> None:
    """Write texts of 3 to 12 words. The first word determines the class."""
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
