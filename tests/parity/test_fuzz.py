"""A fixed part of the fuzz, and a mistake that it must find."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.ranks import RankPools
from tests.helpers.training import RANK_STRATEGIES
from tests.parity import fuzz
from tests.parity.draws import TASKS, draw
from tests.parity.fuzz import LIMITS, Fuzz

SEED = 0
# Numbers and attempts of short cases, which hold every task, strategy and precision. `make test` runs the first, and
# `make test-all` two.
QUICK = [(510, 0), (149, 0)]
CASES = [
    *QUICK,
    (136, 1),
    (507, 1),
    (8, 1),
    (12, 0),
    (13, 1),
    (15, 0),
    (186, 0),
    (1, 1),
    (512, 1),
    (514, 3),
    (116, 0),
    (71, 0),
    (126, 0),
    (25, 0),
]


@pytest.mark.parametrize(
    ("number", "attempt"),
    [
        QUICK[0],
        *(pytest.param(*case, marks=pytest.mark.slow if case in QUICK else pytest.mark.nightly) for case in CASES[1:]),
    ],
)
def test_a_drawn_case_is_one_process(ranks: RankPools, tmp_path: Path, number: int, attempt: int):
    result, refusal = Fuzz(SEED, tmp_path, ranks).try_case(draw(SEED, number, attempt), number)
    assert not refusal
    assert not result.failure, result.failure


def test_the_cases_hold_every_task_and_strategy():
    traits = {trait for case in CASES for trait in draw(SEED, *case).traits}
    assert {f"task {task}" for task in TASKS} <= traits
    assert {f"strategy {strategy}" for strategy in RANK_STRATEGIES} <= traits
    assert {"precision fp32", "precision bf16", "precision fp16", "adapter", "stopped and resumed"} <= traits
    assert {"data duplicates", "added tokens", "end token </s>", "special tokens last", "no separator"} <= traits
    assert {"chat marked without its end", "without padding", "other evaluation batches"} <= traits
    assert {"offload", "DeepSpeed keys", "sequence", "recompute selective", "recompute full"} <= traits
    assert {"tensor and context", "stages and context"} <= traits


@pytest.mark.slow
def test_fp64_leaves_no_rounding(ranks: RankPools, tmp_path: Path):
    in_fp64 = Fuzz(SEED, tmp_path, ranks, finer="fp64")
    assert {part.sections["parallel"]["strategy"] for part in in_fp64.drawn(12, 0).parts} == {"ddp", "hsdp"}
    result, refusal = in_fp64.try_case(in_fp64.drawn(*QUICK[0]), 0)
    assert (refusal, result.failure) == ("", "")
    assert 0 < max(result.worst[name] for name in ("loss", "norm", "evaluation")) < 1e-12


@pytest.mark.slow
def test_rounding_is_distinguished_from_a_fault(ranks: RankPools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(LIMITS, "fp32", (1e-12, 1e-12, 1e-4))
    with monkeypatch.context() as stable:
        stable.setitem(fuzz.ROUNDING, "fp32", 0.0)  # as if one process did not differ from itself
        assert Fuzz(SEED, tmp_path, ranks).run(*QUICK[0]).failure
    result = Fuzz(SEED, tmp_path, ranks).run(*QUICK[0])
    assert not result.failure
    assert result.rounding.startswith("differences beyond the limits: loss")
    monkeypatch.setitem(LIMITS, "fp64", (1e-20, 1e-20, 1e-20))  # as if fp64 did not help
    result = Fuzz(SEED, tmp_path, ranks).run(*QUICK[0])
    assert result.failure
    assert not result.rounding


@pytest.mark.slow
def test_another_seed_is_detected(ranks: RankPools, tmp_path: Path):
    drawn = draw(SEED, *CASES[0])
    (part,) = drawn.parts
    other = replace(part, sections={**part.sections, "training": {**part.sections["training"], "seed": 1}})
    result, refusal = Fuzz(SEED, tmp_path, ranks).try_case(replace(drawn, parts=(other,)), 0)
    assert not refusal
    assert result.failure.startswith("differences beyond the limits: loss")
    assert '"seed": 1' in result.failure
    assert not result.is_own
