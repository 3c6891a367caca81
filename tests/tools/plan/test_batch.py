"""The bytes of a batch in a plan of a GPU, against those of copies ahead in a training on this CPU."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from tests.helpers.training import TINY_DECODERS, TINY_TASKS
from tests.tools.plan.measured import LENGTH, recipe_of
from trainer.parallel.microbatch import Microbatch, copied_ahead
from trainer.recipe.plan import plan_run
from trainer.tools.plan.ledger import BATCH, Ledger
from trainer.tools.plan.reference import engine_and_batch
from trainer.tools.plan.simulated_step import plan_step


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """A ledger of copies of microbatches to a device, which this CPU stands for."""
    ledger, mapped = Ledger(), Microbatch.map

    def copied(microbatch: Microbatch, _: Any) -> Microbatch:
        with ledger.creating(BATCH):
            return mapped(microbatch, torch.clone)

    monkeypatch.setattr(Microbatch, "map", copied)
    for name in ("Stream", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)
    return ledger


CAUSAL = {"task": TINY_TASKS["causal_lm"].keys, "model": {"config": TINY_DECODERS["llama"], "tokenizer": "none"}}


@pytest.mark.parametrize(
    ("rows", "keys"),
    [
        pytest.param(4, {}, id="one a step", marks=pytest.mark.nightly),
        pytest.param(11, {}, id="three a step"),
        pytest.param(7, CAUSAL, id="labels of tokens", marks=pytest.mark.slow),
    ],
)
def test_a_gpu_holds_two_microbatches(ledger: Ledger, monkeypatch: pytest.MonkeyPatch, rows: int, keys: dict[str, Any]):
    sizes = {"max_steps": 4, "global_batch_size": rows, "micro_batch_size": 4}
    plan = plan_run(recipe_of({**keys, "training": sizes}), 1)
    engine, batch = engine_and_batch(plan, LENGTH, 4)
    with ledger:
        steps = copied_ahead([batch] * 4, torch.device("cpu"))
        for _ in range(2):
            ledger.restart()
            engine.train_step(next(steps))
    monkeypatch.undo()
    # This CPU has no kernel of the loss of tokens, so the plan has none: the moment of the peak depends on it.
    planned = plan_step(plan, 0, LENGTH, fused=False)
    assert planned.resident[BATCH] == ledger.alive[BATCH]
    assert planned.peak.by_component[BATCH] == ledger.peak.by_component[BATCH]
