"""The budget of a step on an H200: expected figures beside measured ones, and the assumption of each.

Expected figures are counts of bytes and products, divided by rates. They are not measured.
`tests/benchmarks/first_gpu.py` writes a line for each after every part, and `docs/benchmarks.md` has their table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.helpers.processes import ROOT

TOLERANCE = 0.15
"""The relative difference from which an assumption counts as wrong."""
COPY_RATE, PRODUCT_RATE = 4.11e12, 576e12
BYTES_OF_UPDATE, BYTES_OF_TORCHS_UPDATE = 34, 46
"""The bytes that the norm, clipping, AdamW and the copy in bf16 read and write for each parameter.

Gradients, weights and moments are in fp32. The kernel reads 16 and writes 14, and the norm reads 4. Torch's clipping
reads and writes 8 more, and its copy reads 4.
"""
BERT_LARGE, BERT_BASE, LLAMA = "BERT-large, 32 x 384", "BERT-base, 32 x 128", "Llama 1B, 2 x 2048"
EAGER, GRAPHS, BOTH = "keyed dropout", "keyed dropout, CUDA graphs", "compiled, CUDA graphs"
_UNITS = {"ms": 1e3, "TFLOP/s": 1e-12, "TB/s": 1e-12, "ns a parameter": 1.0, "operations": 1.0}


@dataclass(frozen=True)
class Expected:
    """An expected figure, and its place in the results of a part."""

    name: str
    file: str  # the file of the part, without ".json"
    place: tuple[str, ...]  # the keys of its figure
    unit: str  # a key of `_UNITS`
    value: float  # in this unit
    assumption: str  # it is wrong if the figure is far from the expected one

    def measured(self, results: Mapping[str, Any]) -> float | None:
        """Return the figure of a part's results in `unit`; None if they lack it."""
        found: Any = results
        for key in self.place:
            found = found.get(key) if isinstance(found, Mapping) else None
        return None if not isinstance(found, int | float) else _UNITS[self.unit] * found


def case_name(work: str, variant: str) -> str:
    """Return the name of a training in the results of `tests/benchmarks/gpu.py`."""
    return f"{work} tokens, bf16, ddp, {variant}"


@cache
def counted_operations(work: str) -> int:
    """Return the operations of a step of a model by count (`python -m tests.benchmarks.operations`)."""
    stored = json.loads((ROOT / "docs" / "operations.json").read_text(encoding="utf-8"))
    return int(stored[f"{work}, bf16, one process"]["operations"])


def budget() -> Iterator[Expected]:
    """Yield the expected figures in the order of the parts."""
    product = ("ceilings", "product, BERT-large, feed-forward", "flops_per_second")
    yield Expected(
        "products of BERT-large", "ceilings", product, "TFLOP/s", PRODUCT_RATE / 1e12, "the rate of products"
    )
    copied = ("ceilings", "copy", "bytes_per_second")
    yield Expected("copies", "ceilings", copied, "TB/s", COPY_RATE / 1e12, "the rate of elementwise operations")
    for work, value in ((BERT_LARGE, 64.0),):
        place = ("compiled", case_name(work, EAGER), "step_seconds")
        yield Expected(
            f"{work}, compiled plain loop", "loops", place, "ms", value, "62 to 66 ms by the bytes of fused operations"
        )
    for work, variant, value, why in (
        (BERT_LARGE, GRAPHS, 65.2, "gains of graphs, AdamW, attention and one product for q, k and v: 1.9, 2, 4, 2 ms"),
        (BERT_LARGE, BOTH, 60.0, "compiled layers move 3.18 GB, and the mask's words cost nothing"),
        (BERT_BASE, GRAPHS, 8.7, "gains of graphs, AdamW, attention and one product: 0.8, 0.6, 0.3, 0.9 ms"),
        (BERT_BASE, BOTH, 7.5, "compiled layers gain 1.2 ms"),
        (LLAMA, GRAPHS, 102.5, "gains of graphs, the head, AdamW and one product: 5, 14, 6.6, 1 ms"),
        (LLAMA, BOTH, 84.0, "compiled layers gain 18 ms"),
    ):
        kind = "compiled and captured" if variant == BOTH else "captured"
        place = ("training", case_name(work, variant), "step_seconds")
        yield Expected(f"{work}, {kind}", "ours", place, "ms", value, why)
    attention = ("attention", "BERT-large 32 x 384, dropout, ours", "seconds")
    yield Expected(
        "attention of a layer of BERT-large", "attention_kernels", attention, "ms", 0.29,
        "11 ms of 24 layers less 4 ms, since the backward pass reads the mask",
    )  # fmt: skip
    base, llama = "BERT-base, sequence_classification", "Llama 1B, causal_lm"
    for file, case, work in (
        ("graph_work", f"BERT-base, {EAGER}", base),
        ("profile", "BERT-base, CUDA graphs", base),
        ("profile", "Llama 1B, CUDA graphs", llama),
    ):
        kind = "without graphs" if file == "graph_work" else "with graphs"
        yield Expected(
            f"operations of {work.partition(',')[0]} {kind}", file, (case, "operations_a_step"), "operations",
            counted_operations(work), "graphs add no work, and a count on fake tensors has all operations",
        )  # fmt: skip
    for name, kind, num_bytes in (
        ("AdamW", "ours", BYTES_OF_UPDATE),
        ("AdamW by torch", "torch, fused", BYTES_OF_TORCHS_UPDATE),
    ):
        place, each = ("updates", kind, "nanoseconds_per_element"), 1e9 * num_bytes / COPY_RATE
        yield Expected(name, "updates", place, "ns a parameter", each, f"{num_bytes} bytes a parameter at copy speed")


def lines(folder: Path) -> Iterator[str]:
    """Yield a line for each expected figure that the results in a folder have, and the assumptions that were wrong.

    Then each other measured time has a line: beside its planned time, or without an expected one.
    """
    expected, results = list(budget()), {file.stem: _read(file) for file in sorted(folder.glob("*.json"))}
    for one in expected:
        found = one.measured(results.get(one.file, {}))
        begin = f"{one.name}: expected {one.value:.4g} {one.unit}"
        if found is None:
            yield f"{begin}, not measured"
            continue
        ratio = found / one.value
        wrong = f"; wrong assumption: {one.assumption}" if abs(ratio - 1) > TOLERANCE else ""
        yield f"{begin}, measured {found:.4g}, {ratio:.2f} times{wrong}"
    places = {(one.file, *one.place[:-1]) for one in expected}
    for file, part in results.items():
        for group, rows in part.items() if file != "gpu" else ():  # which has the trainings of all parts
            for name, row in rows.items() if isinstance(rows, dict) else ():
                seconds = row.get("step_seconds", row.get("seconds")) if isinstance(row, dict) else None
                if seconds is None or group == "plans" or "error" in row or (file, group, name) in places:
                    continue
                planned = row.get("planned_step_seconds")
                other = f"planned {1e3 * planned:.4g} ms" if planned else "no expected value"
                yield f"{group}, {name}: {other}, measured {1e3 * seconds:.4g} ms"


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
