"""The reports of failed ranks: the first failure stands first, and a lost peer is no first failure."""

from __future__ import annotations

import os

import pytest

from trainer.base.errors import LostPeerError, TrainerError, UsageError, error_to_values
from trainer.ranks.report import Report, read_reports

ERROR = Report(0, UsageError("the first"), time_ns=30)
LATER = Report(1, TrainerError("a later one"), is_of_all=True, time_ns=40)
CONSEQUENCE = Report(2, LostPeerError("a lost peer"), time_ns=20)


def facts(report: Report) -> tuple[object, ...]:
    return report.rank, error_to_values(report.error), report.is_of_all, report.time_ns


@pytest.mark.parametrize("written", [(ERROR, LATER, CONSEQUENCE), (CONSEQUENCE, LATER, ERROR)])
def test_a_lost_peer_is_read_after_every_failure(tmp_path, written):
    for report in written:
        report.write(tmp_path / f"error-{report.rank}.json")
    assert list(map(facts, read_reports(tmp_path))) == list(map(facts, (ERROR, LATER, CONSEQUENCE)))


def test_a_rank_that_is_killed_while_it_writes_leaves_no_report(tmp_path, monkeypatch):
    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    ERROR.write(tmp_path / "error-0.json")
    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        LATER.write(tmp_path / "error-1.json")
    assert list(map(facts, read_reports(tmp_path))) == [facts(ERROR)]
