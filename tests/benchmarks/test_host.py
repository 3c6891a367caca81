"""The host's time of each strategy, measured in small."""

from __future__ import annotations

import pytest

from tests.benchmarks.choices import CHOICES, SHARE, counted, rows, timed
from tests.benchmarks.host import OURS, PLAIN, compete, profile, table
from tests.helpers.ranks import RankPools
from tests.tools.plan.measured import SHALLOW_BERT


@pytest.mark.nightly
def test_each_strategy_has_its_time(ranks: RankPools):
    found = ranks(2).run(compete, (*PLAIN, *OURS), 2, "bf16", 2, 1, {})[0]
    assert found.keys() == {*PLAIN, *OURS}
    assert all(len(numbers) == 2 and min(numbers) > 0 for numbers in found.values())
    shown = [row.split("|") for row in table(found)][2:]
    assert [row[1].strip() for row in shown] == [f"`{name}`" for name in OURS]
    assert all(float(cell) > 0 for row in shown for cell in row[2:5])


@pytest.mark.nightly
def test_a_profile_names_functions(ranks: RankPools):
    assert "begin_step" in ranks(2).run(profile, "zero3", 2, "fp32", 1, 40, {})[0]


def counts(strategy: str, label: str) -> tuple[int, int, int, int]:
    (choice,) = (one for one in CHOICES if one.strategy == strategy and label in one.label)
    found = counted(choice, SHALLOW_BERT, ranks=2, length=8, share=SHARE)
    return found.messages, found.sent, found.largest, found.peak


@pytest.mark.slow
def test_a_choice_changes_the_messages_of_a_step():
    messages, sent, _, peak = counts("zero3", "ours")
    more, same, *_ = counts("zero3", "stage3_param_persistence_threshold")
    assert more > messages
    assert same >= sent
    more, sent_again, _, less = counts("zero3", "stage3_max_live_parameters")
    assert more > messages
    assert (sent_again > sent, less < peak) == (True, True)
    messages, sent, *_ = counts("zero2", "ours")
    more, less, *_ = counts("zero2", "use_multi_rank_bucket_allreduce")
    assert (more > messages, less < sent) == (True, True)


@pytest.mark.slow
def test_larger_buckets_of_ddp_are_fewer():
    found = {one.label: counted(one, {**SHALLOW_BERT, "hidden_size": 512}, 2, 8, share=10) for one in CHOICES[:3]}
    ours, smaller, larger = found.values()
    assert smaller.messages > ours.messages > larger.messages
    assert smaller.sent == ours.sent == larger.sent


@pytest.mark.nightly
def test_choices_have_host_times(ranks: RankPools):
    times = ranks(2).run(timed, ["fsdp"], 2, 2, 1)[0]
    assert [len(numbers) for numbers in times.values()] == [2, 2, 2]
    assert [row.count("|") for row in rows(["fsdp"], times)] == [8] * 5
