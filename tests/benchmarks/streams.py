"""Rows and tokens a second that one core prepares from a stream: of texts by a tokenizer, and of shards of token ids.

The way is that of a rank: shards are read, encoded, written as windows, shuffled, masked and padded. The seconds are
those of the processor, so that other programs change little.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tests.helpers.processes import ROOT
from trainer.data.workers import one_thread_of_tokenizers
from trainer.recipe.plan import plan_run
from trainer.recipe.reading.loading import load_values
from trainer.tools.encode.encoding import EncodeRequest, encode_recipe
from trainer.training.assembly import batches_of
from trainer.training.run_data import prepare_data

SAMPLE = ROOT / "recipes" / "sample"
BATCH = 64
TOKENS = {128: 1 << 21, 1024: 1 << 21}
"""The tokens of the rows that are prepared, by the length of rows."""


def texts(length: int, number: int) -> Iterator[str]:
    """Yield texts of at least `length` tokens, of the sentences of the sample."""
    sentences = cycle(json.loads(line)["text"] for line in (SAMPLE / "train.jsonl").read_text().splitlines())
    for _ in range(number):
        words: list[str] = []
        while len(words) < length:  # a token has one word at most
            words += next(sentences).split()
        yield " ".join(words[:length])


def recipe(folder: Path, length: int, number: int) -> dict[str, Any]:
    """Return a recipe of masked language modelling on a stream of texts, and write them."""
    tokenizer = AutoTokenizer.from_pretrained(SAMPLE / "tokenizer")
    tokenizer.model_max_length = length
    tokenizer.save_pretrained(folder / "tokenizer")
    rows = folder / "texts.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(length, number)))
    return {
        "name": "streams",
        "task": {"type": "masked_lm", "text": "text"},
        "model": {
            "config": {"model_type": "bert", "vocab_size": 3000, "max_position_embeddings": length},
            "tokenizer": str(folder / "tokenizer"),
        },
        "data": {
            "source": "files",
            "train": str(rows),
            "validation": None,
            "max_length": length,
            "streaming": True,
            "shuffle_window": 2048,
        },
        "training": {"max_steps": max(1, number // BATCH), "global_batch_size": BATCH, "micro_batch_size": BATCH},
        "optimizer": {"learning_rate": 1e-3},
        "evaluation": {"every": None},
        "checkpoint": {"folder": str(folder / "run")},
    }


def measured(values: dict[str, Any], cache: Path) -> dict[str, float]:
    """Return rows and tokens of a second of one core over all batches of a recipe, without the first one."""
    plan = plan_run(load_values(values).recipe, 1)
    data = prepare_data(plan.recipe, cache=cache)
    batches = iter(batches_of(plan, data, 0))
    num_rows = num_tokens = 0
    started = time.process_time()
    for batch in batches:
        for microbatch in batch.microbatches:
            num_rows += len(microbatch.rows)
            num_tokens += int(microbatch.inputs["attention_mask"].sum())
    seconds = time.process_time() - started
    return {"rows": num_rows, "tokens": num_tokens, "rows/s": num_rows / seconds, "tokens/s": num_tokens / seconds}


def figures(lengths: Sequence[int], share: float = 1.0, profile: bool = False) -> dict[str, dict[str, float]]:
    """Return the figures of each kind of stream and length."""
    found: dict[str, dict[str, float]] = {}
    for length in lengths:
        with tempfile.TemporaryDirectory(prefix="streams-") as name, one_thread_of_tokenizers():
            folder = Path(name)
            values = recipe(folder, length, max(BATCH, int(share * TOKENS[length]) // length))
            kinds = {"texts": values}
            request = EncodeRequest(folder / "shards", num_processes=1)
            encode_recipe(load_values(values), request)
            kinds["shards"] = json.loads((folder / "shards" / "recipe.json").read_text())
            for kind, of_kind in kinds.items():
                profiler = cProfile.Profile()
                if profile:
                    profiler.enable()
                found[f"{kind}, {length} tokens"] = measured(of_kind, folder / f"cache-{kind}")
                if profile:
                    profiler.disable()
                    print(kind, length)
                    pstats.Stats(profiler).sort_stats("tottime").print_stats(14)
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--lengths", type=int, nargs="+", default=[128, 1024], choices=list(TOKENS))
    arguments.add_argument("--share", type=float, default=1.0, help="Share of the rows.")
    arguments.add_argument("--profile", action="store_true", help="Show the functions with the most time.")
    given = arguments.parse_args()
    for name, found in figures(given.lengths, given.share, given.profile).items():
        print(f"{name:<22} {found['rows/s']:>10,.0f} rows/s {found['tokens/s']:>12,.0f} tokens/s")


if __name__ == "__main__":
    main()
