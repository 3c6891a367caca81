"""Messages between ranks cannot wait for each other in a circle.

With a bound device, NCCL sends all messages of a group through one communicator. A rank then finishes its messages in
the order in which it posts them, and a message is sent when both of its ranks have reached it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.pipelining import schedules

from tests.helpers.training import TINY_DECODERS, TINY_TASKS
from tests.tools.plan.measured import SMALL_BERT, recipe_of
from trainer.parallel.pipeline.stage_schedule import PipelineDriver
from trainer.recipe.plan import plan_run
from trainer.tools.plan.simulated_step import plan_step

Message = tuple[int, int, tuple[int, ...]]  # the rank that sends it, the one that receives it, and its shape
Batch = list[tuple[bool, Message]]  # whether this rank sends a message; those that it starts together

BERT = {
    **SMALL_BERT,
    "hidden_size": 16,
    "intermediate_size": 16,
}
PIPELINES = [
    ("1f1b", 3),
    pytest.param("1f1b", 4, marks=pytest.mark.nightly),
    pytest.param("interleaved_1f1b", 3, marks=pytest.mark.slow),
    pytest.param("zero_bubble", 3, marks=pytest.mark.slow),
    pytest.param("gpipe", 3, marks=pytest.mark.nightly),
]


def unsent(batches: Sequence[Sequence[Batch]]) -> list[list[Batch]]:
    """Return the batches of each rank that never end; a batch ends when all its messages are sent."""
    left = [[list(batch) for batch in own] for own in batches]
    while True:
        now = [own[0] if own else [] for own in left]
        moved = False
        for rank, own in enumerate(now):
            for sends, (source, target, shape) in list(own):
                other = now[target if sends else source]
                # Messages of a pair arrive in their order, so the first one of the pair decides.
                mate = next((one for one in other if one[0] != sends and one[1][:2] == (source, target)), None)
                if mate is not None:
                    assert mate[1][2] == shape, f"rank {rank} expects another tensor of {source} to {target}"
                    own.remove((sends, (source, target, shape)))
                    other.remove(mate)
                    moved = True
        for queue in left:
            while queue and not queue[0]:
                queue.pop(0)
                moved = True
        if not moved:
            return left


def posted(monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], ranks: int, length: int) -> list[list[Batch]]:
    """Return the batches of messages that each rank posts in a step, or in its last pass through a pipeline."""
    found: list[list[Batch]] = []
    begin, one_kind, train = dist.batch_isend_irecv, schedules._batch_p2p, PipelineDriver.train

    def batch_of(operations: list[dist.P2POp], rank: int) -> Batch:
        pairs = [(one.op is dist.isend, one.peer, tuple(one.tensor.shape)) for one in operations]
        return [(sends, (rank, peer, shape) if sends else (peer, rank, shape)) for sends, peer, shape in pairs]

    for rank in range(ranks):
        own: list[Batch] = []

        def together(operations: list[dist.P2POp], own: list[Batch] = own, rank: int = rank) -> Any:
            own.append(batch_of(operations, rank))
            return begin(operations)

        def each(operations: Any, desc: Any = None, own: list[Batch] = own, rank: int = rank) -> Any:
            if len({one.op for one in operations}) == 1:  # torch posts such messages one by one
                own.extend([one] for one in batch_of(operations, rank))
            return one_kind(operations, desc)

        def begin_pass(*arguments: Any, own: list[Batch] = own) -> Any:
            own.clear()
            return train(*arguments)

        monkeypatch.setattr(dist, "batch_isend_irecv", together)
        monkeypatch.setattr(schedules, "_batch_p2p", each)
        monkeypatch.setattr(PipelineDriver, "train", begin_pass)
        plan_step(plan_run(recipe_of(keys), ranks), rank, length, cuda=False)
        found.append(own)
    return found


def test_two_ranks_that_both_send_first_wait_for_ever():
    there, back = (0, 1, (2,)), (1, 0, (2,))
    crossed = [[[(True, there)], [(False, back)]], [[(True, back)], [(False, there)]]]
    assert unsent(crossed) == crossed
    assert unsent([[one[0] + one[1]] for one in crossed]) == [[], []]
    assert unsent([crossed[0], crossed[1][::-1]]) == [[], []]


@pytest.mark.parametrize(("schedule", "ranks"), PIPELINES)
def test_the_stages_of_a_pipeline(monkeypatch: pytest.MonkeyPatch, schedule: str, ranks: int):
    num_stages = ranks * (2 if schedule in ("interleaved_1f1b", "zero_bubble") else 1)
    keys = {
        "model": {"config": {**BERT, "num_hidden_layers": num_stages}, "tokenizer": "none"},
        "training": {"max_steps": 4, "global_batch_size": 6, "micro_batch_size": 1},
        "parallel": {"pipeline": {"stages": ranks, "schedule": schedule}},
    }
    batches = posted(monkeypatch, keys, ranks, 8)
    sent = sum(sends for own in batches for batch in own for sends, _ in batch)
    assert sent == 2 * 6 * (num_stages - 1)
    assert unsent(batches) == [[]] * ranks


def test_the_ring_of_context_ranks(monkeypatch: pytest.MonkeyPatch):
    decoder = {**TINY_DECODERS["llama"], "num_key_value_heads": 1, "num_hidden_layers": 1}
    keys = {
        "task": TINY_TASKS["causal_lm"].keys,
        "model": {"config": decoder, "tokenizer": "none"},
        "parallel": {"strategy": "ddp", "context": 3},
    }
    batches = posted(monkeypatch, keys, 3, 12)
    assert all(batches)
    assert {target for _, (source, target, _) in batches[0][0] if source == 0} == {1}  # around, to the next rank
    assert unsent(batches) == [[]] * 3
