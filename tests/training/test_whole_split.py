"""Every row counts exactly once, wherever it was computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import RankPools
from tests.helpers.reads import NoReads
from tests.helpers.training import tiny_masking, tiny_recipe, tiny_split, tiny_task, tiny_training
from trainer.data.collate import Padding
from trainer.data.loader import EvalLoader
from trainer.data.split import EncodedSplit
from trainer.engine.results import EvalResult
from trainer.observe.observer import Observer
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.microbatch import Microbatch
from trainer.training.whole_split import Evaluator


class FakeEngine:
    """The loss of a row is its number, and what it predicts is the number too."""

    def begin_eval(self, microbatch: Microbatch) -> Callable[[], EvalResult]:
        return partial(self.eval_step, microbatch)

    def eval_step(self, microbatch: Microbatch) -> EvalResult:
        if microbatch.filler:
            return EvalResult(0.0, 0, {})
        rows = microbatch.rows
        return EvalResult(
            float(rows.sum()), len(rows), {"row": rows, "length": microbatch.inputs["attention_mask"].sum(1)}
        )


class FakeTask:
    """The metrics hold the rows themselves, as digits, so that one that is lost or doubled shows."""

    def metrics(self, predictions: dict[str, torch.Tensor]) -> dict[str, float]:
        rows = predictions["row"].tolist()
        order = torch.argsort(predictions["row"])
        lengths = predictions["length"][order].tolist()
        return {"count": float(len(rows)), "distinct": float(len(set(rows))), "lengths": float(hash(tuple(lengths)))}

    def picture(self, predictions: dict[str, torch.Tensor], split: object) -> None:
        return None


class Progress(Observer):
    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def evaluation_progress(self, done: int, total: int) -> None:
        self.seen.append((done, total))


def evaluate(num_rows: int, batch_size: int, task: Any = None, engine: Any = None) -> tuple[dict[str, float], Any]:
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    mesh = ParallelMesh(torch.device("cpu"), dp_replicate=world_size)
    split: EncodedSplit = tiny_split(num_rows)
    loader = EvalLoader(split, batch_size, mesh.index("dp"), world_size, Padding(0))
    progress = Progress()
    evaluator = Evaluator(engine or FakeEngine(), loader, num_rows, task or FakeTask(), mesh, progress)
    return evaluator.evaluate().metrics, progress.seen


@pytest.mark.parametrize("world_size", [0, 2, 3], ids=["no group", "2", "3"])
@pytest.mark.parametrize(("num_rows", "batch_size"), [(12, 2), (13, 4), (2, 4), (1, 1), (7, 100), (50, 3)])
def test_every_row_once(ranks: RankPools, world_size, num_rows, batch_size):
    answers = ranks(world_size).run(evaluate, num_rows, batch_size) if world_size else [evaluate(num_rows, batch_size)]
    for metrics, _ in answers:
        assert metrics == {
            "loss": (num_rows - 1) / 2,
            "count": num_rows,
            "distinct": num_rows,
            "lengths": float(hash(tuple(tiny_split(num_rows).lengths.tolist()))),
        }


def test_the_rows_of_a_filler_do_not_count():
    with tiny_training(tiny_recipe()) as training:
        batch = next(iter(EvalLoader(tiny_split(3), 4, 0, 1, Padding(0))))
        assert training.engine.eval_step(batch).num_valid == 3
        filler = replace(batch, filler=True)
        assert training.engine.eval_step(filler) == EvalResult(0.0, 0, {})
        assert training.engine.answer(filler) == {}


def test_progress_of_an_evaluation(ranks: RankPools):
    for _, seen in ranks(2).run(evaluate, 13, 4):
        assert seen == [(1, 2), (2, 2)]


class Ignoring(FakeEngine):
    """Only the rows from `first` on have a valid label."""

    def __init__(self, first: int) -> None:
        self._first = first

    def eval_step(self, microbatch: Microbatch) -> EvalResult:
        result = super().eval_step(microbatch)
        valid = microbatch.rows[microbatch.rows >= self._first]
        return EvalResult(float(valid.sum()), len(valid), result.predictions)


def test_the_loss_is_the_mean_over_valid_labels():
    assert evaluate(5, 2, engine=Ignoring(first=2))[0]["loss"] == (2 + 3 + 4) / 3


def test_without_a_valid_label_the_loss_is_zero():
    assert evaluate(5, 2, engine=Ignoring(first=5))[0]["loss"] == 0.0


class Recording(FakeEngine):
    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def begin_eval(self, microbatch: Microbatch) -> Callable[[], EvalResult]:
        self.events.append(("begin", int(microbatch.rows[0])))
        return super().begin_eval(microbatch)

    def eval_step(self, microbatch: Microbatch) -> EvalResult:
        self.events.append(("read", int(microbatch.rows[0])))
        return super().eval_step(microbatch)


def test_a_microbatch_begins_before_the_one_before_is_read():
    """A GPU would else wait for the host."""
    evaluate(6, 2, engine=(engine := Recording()))
    assert [kind for kind, _ in engine.events] == ["begin", "begin", "read", "begin", "read", "read"]
    order = [[row for kind, row in engine.events if kind == wanted] for wanted in ("begin", "read")]
    assert order[0] == order[1]


def test_the_host_reads_no_value_before_the_result_is_wanted():
    with tiny_training(tiny_recipe()) as training:
        batch = next(iter(EvalLoader(tiny_split(3), 4, 0, 1, Padding(0))))
        expected = training.engine.eval_step(batch)
        with NoReads():
            read = training.engine.begin_eval(batch)
        found = read()
    assert (found.loss_sum, found.num_valid) == (expected.loss_sum, 3)
    assert torch.equal(found.predictions["predictions"], expected.predictions["predictions"])


class Doubling(FakeEngine):
    def eval_step(self, microbatch: Microbatch) -> EvalResult:
        result = super().eval_step(microbatch)
        return EvalResult(0.0, 1, {name: torch.cat([tensor, tensor]) for name, tensor in result.predictions.items()})


def test_a_row_that_counts_twice_is_our_own_bug():
    with pytest.raises(AssertionError, match="exactly once"):
        evaluate(5, 2, engine=Doubling())


def evaluate_masked_lm(**parallel: Any) -> list[dict[str, float]]:
    """Before and after some steps, on this rank."""
    recipe = tiny_recipe(
        task={"type": "masked_lm", "mask_probability": 0.5, "metrics": ["accuracy", "perplexity"]},
        optimizer={"learning_rate": 0.1},
        parallel=parallel,
    )
    with tiny_training(recipe) as training:
        mesh, split = training.mesh, tiny_split(300, has_classes=False)
        loader = EvalLoader(split, 32, mesh.index("dp"), mesh.size("dp"), Padding(0), masking=tiny_masking(recipe))
        evaluator = Evaluator(training.engine, loader, len(split), tiny_task(recipe), mesh, Observer())
        before = evaluator.evaluate().metrics
        training.steps(3)
        return [before, evaluator.evaluate().metrics]


def test_a_sharded_vocabulary_is_evaluated_as_a_whole_vocabulary(ranks: RankPools):
    """The same tokens are hidden, at each evaluation, on one process and on ranks that hold parts of the logits."""
    expected = evaluate_masked_lm()
    assert expected[0] != expected[1]
    assert all(0 < metrics["accuracy"] < 0.1 for metrics in expected), "a few random tokens are guessed right"
    for found in ranks(2).run(evaluate_masked_lm, tensor=2, sequence=True):
        for metrics, of_one in zip(found, expected, strict=True):
            assert metrics == pytest.approx(of_one, rel=1e-5)
            assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]), rel=1e-6)
