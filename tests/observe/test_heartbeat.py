"""The record that each rank keeps of itself, in one file for each machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.observe.samples import end_record
from trainer.base.errors import TrainerError
from trainer.observe.heartbeat import Heartbeat, forget_statuses, killed_ranks, ranks_folder, read_statuses


def begun(folder: Path, rank: int = 3) -> Heartbeat:
    heartbeat = Heartbeat(folder, rank)
    heartbeat.begin(step=5)
    return heartbeat


def test_names_the_activity_of_the_rank(tmp_path):
    heartbeat = begun(tmp_path)
    heartbeat.doing(6, "in step 7")
    status = read_statuses(tmp_path)[3]
    assert (status.rank, status.pid, status.step, status.doing) == (3, os.getpid(), 6, "in step 7")
    assert abs(status.time - time.time()) < 10
    heartbeat.evaluation_progress(2, 9)
    assert str(read_statuses(tmp_path)[3]) == "after step 6, in an evaluation, 2 of 9 batches done"


def test_all_records_have_one_size(tmp_path):
    first, second, sizes = Heartbeat(tmp_path, 3), Heartbeat(tmp_path, 4, local_rank=1), set()
    second.begin(5)
    first.begin(5)
    for what in ("", "x" * 1000, "\N{SNOWMAN}" * 100, "\N{GRINNING FACE}" * 100, "\0" * 100):
        first.doing(10**12, what)
        sizes.add(first.file.stat().st_size)
        assert [status.step for status in read_statuses(tmp_path).values()] == [10**12, 5]
    assert len(sizes) == 1


def test_a_good_end_removes_it_and_a_bad_one_does_not(tmp_path):
    second, first = Heartbeat(tmp_path, 9, local_rank=1), Heartbeat(tmp_path, 8)
    second.begin(0)
    assert read_statuses(tmp_path).keys() == {9}, "the line of rank 8 is empty"
    first.begin(0)
    assert [file.name for file in ranks_folder(tmp_path).iterdir()] == ["machine-00008.jsonl"]
    first.end(end_record(tmp_path, outcome="failed"))
    assert read_statuses(tmp_path).keys() == {8, 9}
    first.end(end_record(tmp_path, outcome="stopped"))
    assert read_statuses(tmp_path).keys() == {9}
    second.end(end_record(tmp_path))
    assert not ranks_folder(tmp_path).exists()


def test_ranks_that_were_killed_are_found_by_their_processes(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as ended:
        ended.kill()
    own, host = begun(tmp_path, 0), socket.gethostname()
    failed = begun(tmp_path, 1)
    for rank, changed in {2: {"host": "node7"}, 3: {"host": host}}.items():
        status = {"rank": rank, "pid": ended.pid, "step": 7, "doing": "in step 8", "time": 0.0}
        (ranks_folder(tmp_path) / f"machine-{rank:05d}.jsonl").write_text(json.dumps(status | changed))
    assert [status.rank for status in killed_ranks(tmp_path)] == [3]
    (ranks_folder(tmp_path) / "machine-00003.jsonl").unlink()
    failed.end(end_record(tmp_path, outcome="failed"))
    assert read_statuses(tmp_path)[1].left
    assert not read_statuses(tmp_path)[0].left, own
    assert killed_ranks(tmp_path) == []


def test_a_torn_or_foreign_file_is_passed_over(tmp_path):
    begun(tmp_path)
    (ranks_folder(tmp_path) / "machine-00000.jsonl").write_text('{"rank": 0, "ho')
    (ranks_folder(tmp_path) / "machine-00001.jsonl").write_text('{"rank": 1}')
    assert read_statuses(tmp_path).keys() == {3}
    forget_statuses(tmp_path)
    assert read_statuses(tmp_path) == {}


def test_a_folder_that_cannot_be_written(tmp_path):
    ranks_folder(tmp_path).write_text("a file in the way")
    with pytest.raises(TrainerError, match=r"rank 3 on .* cannot write"):
        begun(tmp_path)


def test_before_it_begins_and_after_it_is_closed_it_only_counts(tmp_path):
    heartbeat = Heartbeat(tmp_path, 0)
    heartbeat.doing(0, "nothing")
    heartbeat.begin(0)
    heartbeat.close()
    heartbeat.doing(1, "nothing")
    assert heartbeat.beats == 3
    assert read_statuses(tmp_path)[0].step == 0
