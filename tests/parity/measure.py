"""The differences between layouts, measured for the README's table: `python -m tests.parity.measure`.

The figures go to `docs/parity.json`, and `python -m docs.generate` makes the table from it. The training is that of the
parity tests: a tiny BERT with dropout 0.1 and global batches of 12 rows. Each layout is compared with one process that
computes the global batch in one microbatch. Rows with experts are those of a tiny Qwen3-MoE without dropout; the table
of the page on experts has them.

With `--weights`, the differences for each way to store weights are printed, at two learning rates: those of loss and
norm over 5 steps, then over 20.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from typing import Any

import torch

from docs.generate import PARITY, parity, parity_of_experts
from tests.helpers.families import EXPERTS
from tests.helpers.ranks import RankPools
from tests.helpers.training import Curve, tiny_recipe, train_tiny
from trainer.recipe.schema import Recipe

GLOBAL_BATCH_SIZE = 12  # that of `tiny_recipe`
LAYOUTS = [(1, 1), (2, 6), (2, 2), (3, 4), (3, 1)]  # ranks, rows per microbatch
ONE_SGD_STEP: dict[str, Any] = {
    "training": {"max_steps": 1, "max_grad_norm": None},
    "optimizer": {"name": "sgd", "learning_rate": 1.0},
    "schedule": {"name": "constant", "warmup": 0},
}
EXPERT_LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {  # ranks, rows per microbatch, keys of `parallel`
    "2 ranks, ddp, expert 2": (2, 6, {"strategy": "ddp", "expert": 2}),
    "4 ranks, fsdp, expert 2": (4, 1, {"strategy": "fsdp", "expert": 2}),
    "4 ranks, hsdp of 2, expert 2": (4, 3, {"strategy": "hsdp", "shard": 2, "expert": 2}),
    "4 ranks, ddp, expert 2, tensor 2": (4, 6, {"strategy": "ddp", "expert": 2, "tensor": 2}),
    "4 ranks, ddp, expert 2, 2 stages": (4, 3, {"strategy": "ddp", "expert": 2, "pipeline": {"stages": 2}}),
}
OF_EXPERTS: dict[str, Any] = {
    "task": {"type": "causal_lm", "text": "text"},
    "model": {
        "config": {"model_type": "qwen3_moe", **EXPERTS["qwen3_moe"], "initializer_range": 0.2}, "tokenizer": "none"
    },
}  # fmt: skip
COLUMNS = ("loss", "gradient norm", "loss, bf16", "gradient norm, bf16", "weights", "weights, fp64")
WITHOUT = "2 ranks, torch's own dropout"


def label(ranks: int, rows: int) -> str:
    """Return the name of a layout in the table."""
    microbatches = GLOBAL_BATCH_SIZE // ranks // rows
    return f"{ranks} rank{'s' * (ranks > 1)} x {microbatches} microbatch{'es' * (microbatches > 1)}"


class Measured:
    """Differences of layouts from references, which are trained once; `keys` are sections of the recipe."""

    def __init__(self, pools: RankPools, **keys: Any) -> None:
        self._pools = pools
        self._keys = keys
        self._references: dict[str, Curve] = {}

    def differences(
        self, num_ranks: int, micro_batch_size: int, parallel: dict[str, Any] | None = None, **training: Any
    ) -> list[float]:
        """Return the table's columns for one layout. `training` updates that section of the recipe."""
        cells = []
        layout = {"parallel": parallel} if parallel else {}
        for precision in ("fp32", "bf16"):
            sections = {"precision": precision}
            one, other = self._pair(num_ranks, micro_batch_size, training, sections, torch.float32, layout)
            cells += [_relative(one.losses, other.losses), _relative(one.grad_norms, other.grad_norms)]
        for dtype in (torch.float32, torch.float64):
            one, other = self._pair(num_ranks, micro_batch_size, training, ONE_SGD_STEP, dtype, layout)
            cells.append(_absolute(one, other))
        return cells

    def _pair(
        self,
        num_ranks: int,
        micro_batch_size: int,
        training: dict[str, Any],
        sections: dict[str, Any],
        dtype: torch.dtype,
        layout: dict[str, Any],
    ) -> tuple[Curve, Curve]:
        key, sections = repr((sections, dtype)), {**self._keys, **sections}
        if key not in self._references:
            self._references[key] = self._train(1, _recipe(sections, micro_batch_size=GLOBAL_BATCH_SIZE), dtype)
        recipe = _recipe({**sections, **layout}, micro_batch_size=micro_batch_size, **training)
        return self._train(num_ranks, recipe, dtype), self._references[key]

    def _train(self, num_ranks: int, recipe: Recipe, dtype: torch.dtype) -> Curve:
        curve: Curve = self._pools(num_ranks).run(train_tiny, recipe, dtype)[0]
        return curve


def _recipe(sections: dict[str, Any], **training: Any) -> Recipe:
    keys = {"model": {"dropout": 0.1}, **sections}
    return tiny_recipe(**{**keys, "training": {**keys.get("training", {}), **training}})


def _relative(values: list[float], reference: list[float]) -> float:
    """Return the largest relative difference over all steps."""
    return max(abs(one - other) / abs(other) for one, other in zip(values, reference, strict=True))


def _absolute(one: Curve, other: Curve) -> float:
    """Return the largest absolute difference over all weights."""
    return max((one.weights[name] - weight).abs().max().item() for name, weight in other.weights.items())


def measure() -> dict[str, list[float]]:
    """Return the rows of the table by name."""
    pools = RankPools()
    measured = Measured(pools)
    try:
        rows = {label(ranks, rows): measured.differences(ranks, rows) for ranks, rows in LAYOUTS}
        rows[WITHOUT] = measured.differences(2, GLOBAL_BATCH_SIZE // 2, layout_invariant_dropout=False)
    finally:
        pools.close()
    return rows


def measure_experts() -> dict[str, list[float]]:
    """Return the rows with experts by name."""
    pools = RankPools()
    measured = Measured(pools, **OF_EXPERTS)
    try:
        return {label: measured.differences(*layout) for label, layout in EXPERT_LAYOUTS.items()}
    finally:
        pools.close()


def weights_in_bf16(pools: RankPools, weights: str, rate: float, num_seeds: int = 4) -> list[float]:
    """Return the largest differences of loss and norm in bf16, over 5 and over 20 steps, of two `fsdp` ranks."""
    keys: dict[str, Any] = {"precision": "bf16", "weights": weights, "optimizer": {"learning_rate": rate}}
    rows = []
    for seed, micro_batch_size in product(range(num_seeds), (6, 2)):
        recipes = (
            _recipe(keys, micro_batch_size=GLOBAL_BATCH_SIZE, seed=seed),
            _recipe({**keys, "parallel": {"strategy": "fsdp"}}, micro_batch_size=micro_batch_size, seed=seed),
        )
        one, two = (pools(ranks).run(train_tiny, recipe)[0] for ranks, recipe in enumerate(recipes, 1))
        pairs = ((one.losses, two.losses), (one.grad_norms, two.grad_norms))
        rows.append([_relative(its[:steps], ones[:steps]) for steps in (5, 20) for ones, its in pairs])
    return [max(column) for column in zip(*rows, strict=True)]


def show_weights() -> None:
    pools = RankPools()
    try:
        for weights, rate in product(("fp32", "bf16_compensated", "bf16_stochastic"), (1e-3, 1e-2)):
            print(weights, rate, *(f"{figure:.1e}" for figure in weights_in_bf16(pools, weights, rate)), flush=True)
    finally:
        pools.close()


def main() -> None:
    if "--weights" in sys.argv[1:]:
        show_weights()
        return
    rows, experts = (
        [{"layout": layout, "differences": cells} for layout, cells in found.items()]
        for found in (measure(), measure_experts())
    )
    figures = {
        "command": "python -m tests.parity.measure",
        "torch": torch.__version__,
        "columns": COLUMNS,
        "rows": rows,
        "experts": experts,
    }
    PARITY.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(parity(), parity_of_experts(), sep="\n\n")


if __name__ == "__main__":
    main()
