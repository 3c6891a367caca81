from __future__ import annotations

from trainer.base.errors import TrainerError
from trainer.launch.attempts import _first_error
from trainer.ranks.report import Report


def report(rank: int, message: str) -> Report:
    return Report(rank, TrainerError(message))


def test_an_error_that_ranks_share_names_the_rank_of_its_message_only():
    """All ranks raise the error of a save; any of them may report it first."""
    message = "the checkpoint of step 3 could not be written: rank 2: No space left on device"
    reports = [report(rank, message) for rank in (1, 0, 2)]
    assert str(_first_error(reports, {}, 3)) == message


def test_an_error_of_one_rank_names_it():
    reports = [report(1, "out of memory"), report(0, "another rank failed")]
    assert str(_first_error(reports, {}, 2)) == "rank 1 failed:\nout of memory"
