"""Predicted and measured memory of small models on CPU ranks, as a table: `python -m tests.benchmarks.planned_memory`.

On one process, the measured peak is that of torch's allocator. On more ranks, it is that of the tensors alive in the
real step, because gloo allocates buffers that a GPU does not have.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.helpers.ranks import RankError, RankPools
from tests.helpers.training import TINY_DECODERS, TINY_T5, TINY_TASKS, TINY_VIT
from tests.tools.plan.measured import SMALL_BERT, Measured, measure, planned

PAGE = Path(__file__).parent / "planned_memory.md"
START, END = "<!-- measured: python -m tests.benchmarks.planned_memory --write -->", "<!-- end -->"
# DeepSpeed's bucket of 64 MiB would hide all else in models this small.
SMALL_BUCKETS = {"deepspeed": {"zero_optimization": {"reduce_bucket_size": 50_000}}}

_LARGER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
MODELS: dict[str, dict[str, Any]] = {
    "BERT": {"model": {"config": SMALL_BERT, "tokenizer": "none"}},
    "Llama": {
        "model": {"config": {**TINY_DECODERS["llama"], **_LARGER, "vocab_size": 997}, "tokenizer": "none"},
        "task": TINY_TASKS["causal_lm"].keys,
    },
    "Llama, preferences": {
        "model": {"config": {**TINY_DECODERS["llama"], **_LARGER, "vocab_size": 997}, "tokenizer": "none"},
        "task": {"type": "preference"},
    },
    "T5": {
        "model": {"config": {**TINY_T5, "d_model": 64, "d_ff": 128, "vocab_size": 997}, "tokenizer": "none"},
        "task": TINY_TASKS["seq2seq_lm"].keys,
    },
    "ViT": {"model": {"config": {**TINY_VIT, **_LARGER}}, "task": TINY_TASKS["image_classification"].keys},
}

_BF16, _FULL = {"precision": "bf16"}, {"activation_checkpointing": "full"}
_SELECTIVE, _FP16 = {"activation_checkpointing": "selective"}, {"precision": "fp16"}


def _parallel(strategy: str, **keys: Any) -> dict[str, Any]:
    buckets = SMALL_BUCKETS if strategy.startswith("zero") else {}
    return {"parallel": {"strategy": strategy, **buckets, **keys}}


ALONE = {"one process": {}, "bf16": _BF16, "full checkpointing": _FULL, "bf16, full checkpointing": _BF16 | _FULL}
ON_TWO = {
    "ddp": _parallel("ddp"),
    "fsdp": _parallel("fsdp"),
    "fsdp, gathered once": _parallel("fsdp", reshard_after_forward=False),
    "zero1": _parallel("zero1"),
    "zero2": _parallel("zero2"),
    "zero3": _parallel("zero3"),
    "fsdp, offload": _parallel("fsdp", offload="parameters"),
    "tensor 2": _parallel("ddp", tensor=2),
}
WITH_STAGES = {
    "tensor 2, sequence": _parallel("ddp", tensor=2, sequence=True),
    "pipeline 2": _parallel("ddp", pipeline={"stages": 2}),
    "ddp, bf16": _parallel("ddp") | _BF16,
    "fsdp, bf16, full checkpointing": _parallel("fsdp") | _BF16 | _FULL,
    "zero2, bf16": _parallel("zero2") | _BF16,
    "zero3, full checkpointing": _parallel("zero3") | _FULL,
    "zero2, offload": _parallel("zero2", offload="optimizer"),
    "zero3, offload": _parallel("zero3", offload="parameters"),
}
ON_TWO_OF_BERT = {
    "pipeline 2, gpipe": _parallel("ddp", pipeline={"stages": 2, "schedule": "gpipe"}),
    "ddp, selective checkpointing": _parallel("ddp") | _SELECTIVE,
    "fsdp, fp16": _parallel("fsdp") | _FP16,
    "zero1, fp16": _parallel("zero1") | _FP16,
    "zero1, offload": _parallel("zero1", offload="optimizer"),
    "zero3, optimizer offload": _parallel("zero3", offload="optimizer"),
}
ON_FOUR_OF_BERT = {
    "hsdp, shard 2": _parallel("hsdp", shard=2),
    "fsdp, tensor 2": _parallel("fsdp", tensor=2),
    "fsdp, pipeline 2": _parallel("fsdp", pipeline={"stages": 2}),
    "zero2, tensor 2": _parallel("zero2", tensor=2),
    "ddp, 4 ranks": _parallel("ddp"),
    "zero3, 4 ranks": _parallel("zero3"),
}


def layouts() -> Iterator[tuple[str, str, int, dict[str, Any]]]:
    """Yield model, layout, number of ranks and keys of each row."""
    for ranks, names, rows in (
        (1, MODELS, ALONE),
        (2, MODELS, ON_TWO),
        (2, ("BERT", "Llama"), WITH_STAGES),
        (2, ("BERT",), ON_TWO_OF_BERT),
        (4, ("BERT",), ON_FOUR_OF_BERT),
    ):
        for name in names:
            for layout, keys in rows.items():
                yield name, layout, ranks, {**MODELS[name], **keys}


@dataclass(frozen=True)
class Row:
    """A layout with the peaks of the rank that differs most, in bytes; `above` is that over the resident memory."""

    model: str
    layout: str
    ranks: int
    planned: int
    measured: int
    above: float
    traffic_agrees: bool

    @property
    def error(self) -> float:
        return abs(self.planned / self.measured - 1)

    def __str__(self) -> str:
        differ = "" if self.traffic_agrees else ", collectives differ"
        return (
            f"| {self.model} | {self.layout} | {self.ranks} | {self.planned:,} | {self.measured:,} |"
            f" {self.above:.2%}{differ} |"
        )


def row(model: str, layout: str, ranks: int, keys: Mapping[str, Any], pools: RankPools) -> Row:
    """Plan and measure a layout."""
    found: list[Measured] = [measure(keys)] if ranks == 1 else pools(ranks).run(measure, keys)
    rows = []
    for rank, real in enumerate(found):
        plan = planned(keys, ranks, rank)
        most = real.allocated if ranks == 1 else real.alive
        rows.append(
            Row(
                model,
                layout,
                ranks,
                plan.resident + plan.alive,
                real.resident + most,
                abs(plan.alive / most - 1),
                plan.traffic == real.traffic,
            )
        )
    return max(rows, key=lambda row: row.error)


def page(rows: list[Row]) -> str:
    """Return the table with its summary."""
    errors, above = [row.error for row in rows], [row.above for row in rows]
    summary = (
        f"{len(rows)} layouts. Peak: median error {median(errors):.2%}, worst {max(errors):.2%}. Above resident: median"
        f" {median(above):.2%}, worst {max(above):.2%}. Collectives agree in {sum(row.traffic_agrees for row in rows)}"
        " layouts."
    )
    head = "| model | layout | ranks | planned (bytes) | measured (bytes) | error above resident |"
    return "\n".join([summary, "", head, "|---|---|---|---|---|---|", *map(str, rows)])


def published() -> list[tuple[str, str, int, int, int]]:
    """Return the rows of the page: model, layout, ranks, planned and measured bytes."""
    text = PAGE.read_text(encoding="utf-8").split(START)[1].split(END)[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "%" in line[1:]]
    return [
        (model, layout, int(ranks), int(plan.replace(",", "")), int(found.replace(",", "")))
        for model, layout, ranks, plan, found, *_ in (row for row in cells if len(row) > 1)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of the name of the layouts to measure")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}")
    arguments = parser.parse_args()
    rows, pools = [], RankPools()
    try:
        for model, layout, ranks, keys in layouts():
            if arguments.only in f"{model} {layout}":
                try:
                    rows.append(row(model, layout, ranks, keys, pools))
                except RankError as error:
                    print(f"| {model} | {layout} | {ranks} | failed: {error} |", flush=True)
                    continue
                print(rows[-1], flush=True)
    finally:
        pools.close()
    if rows:
        print(page(rows).split("\n")[0])
    if arguments.write:
        text = PAGE.read_text(encoding="utf-8")
        before, after = text.split(START)[0], text.split(END)[1]
        PAGE.write_text(f"{before}{START}\n\n{page(rows)}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
