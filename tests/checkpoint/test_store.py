"""Checkpoints survive kills, damage and full disks: a run always finds a whole one, or is told."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.helpers import processes
from trainer.checkpoint.progress import Progress
from trainer.checkpoint.store import Checkpoint, CheckpointStore
from trainer.errors import TrainerError
from trainer.observe.records import BestMetric

FILES = ["SHA256SUMS", "state.json", "state.safetensors"]


def checkpoint(step: int) -> Checkpoint:
    tensors = {"model.weight": torch.full((3, 4), float(step)), "optimizer.weight.step": torch.tensor(float(step))}
    best = BestMetric("accuracy", 0.1 + 0.2, 2)
    return Checkpoint(tensors, Progress(step, step * 8, step * 77, best, 1), {"seed": 1, "betas": [0.9, 0.999]})


def assert_is(found: Checkpoint | None, step: int) -> None:
    assert found is not None
    expected = checkpoint(step)
    assert found.progress == expected.progress
    assert found.identity == expected.identity
    assert found.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.tensors.items())


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path, keep=3)


def saved(store: CheckpointStore, *steps: int) -> CheckpointStore:
    for step in steps:
        store.save(checkpoint(step))
    return store


class TestSave:
    def test_comes_back_whole(self, store):
        saved(store, 5)
        found, notes = store.newest()
        assert_is(found, 5)
        assert notes == []
        assert sorted(path.name for path in store.path(5).iterdir()) == FILES

    def test_sums_can_be_checked_by_hand(self, store):
        saved(store, 5)
        checked = subprocess.run(
            ["sha256sum", "--check", "SHA256SUMS"], cwd=store.path(5), capture_output=True, text=True, timeout=60
        )
        assert checked.stdout == "state.safetensors: OK\nstate.json: OK\n"

    def test_the_newest_wins_also_beyond_eight_digits(self, store):
        saved(store, 9, 10, 10**9)
        assert_is(store.newest()[0], 10**9)

    def test_keeps_so_many_and_the_oldest_go(self, store):
        assert saved(store, 1, 2, 3, 4, 5).steps() == [3, 4, 5]
        assert sorted(os.listdir(store.folder)) == [f"step-{step:08d}" for step in (3, 4, 5)]

    def test_keeps_one_also_where_newer_ones_are_damaged(self, tmp_path):
        """The run went on from step 1, because step 2 and 3 were damaged: what it saves must stay."""
        store = saved(CheckpointStore(tmp_path, keep=3), 1, 2, 3)
        for step in (2, 3):
            (store.path(step) / "state.json").unlink()
        store = CheckpointStore(tmp_path, keep=1)
        assert_is(store.newest()[0], 1)
        saved(store, 2)
        assert store.steps() == [2]
        assert_is(store.newest()[0], 2)

    def test_the_same_step_again_replaces_it(self, store):
        saved(store, 4)
        (store.path(4) / "state.safetensors").write_bytes(b"damaged")
        saved(store, 4)
        assert_is(store.newest()[0], 4)

    def test_leftovers_of_a_kill_go_with_the_next_save(self, store):
        saved(store, 1)
        leftover = store.folder / ".saving-step-00000002"
        leftover.mkdir()
        (leftover / "state.safetensors").write_bytes(b"half")
        assert_is(store.newest()[0], 1)
        saved(store, 3)
        assert not leftover.exists()

    def test_tensors_that_are_views_are_saved_as_they_look(self, store):
        base = torch.arange(12.0).view(3, 4)
        store.save(Checkpoint({"transposed": base.T, "row": base[1]}, Progress(1), {}))
        found, _ = store.newest()
        assert torch.equal(found.tensors["transposed"], base.T)
        assert torch.equal(found.tensors["row"], base[1])


class TestNewest:
    def test_of_a_new_folder_is_none(self, store):
        assert store.newest() == (None, [])

    def test_what_only_looks_like_one_is_left_alone(self, store):
        saved(store, 5)
        for name in ("step-old", "step-00000009.bak", "step-9", "step-"):
            (store.folder / name).mkdir()
        (store.folder / "step-00000012").write_text("a file")
        assert store.steps() == [5]
        saved(store, 6, 7, 8)
        assert (store.folder / "step-00000009.bak").exists()

    @pytest.mark.parametrize("file", FILES)
    def test_a_missing_file_is_passed_over(self, store, file):
        saved(store, 1, 2)
        (store.path(2) / file).unlink()
        found, (note,) = store.newest()
        assert_is(found, 1)
        assert note.startswith(f"passed over the checkpoint {store.path(2)}: ")
        assert file in note

    @pytest.mark.parametrize("file", FILES)
    @pytest.mark.parametrize("length", [0, 1, 0.5, -1])
    def test_a_file_that_is_cut_short_is_passed_over(self, store, file, length):
        saved(store, 1, 2)
        path = store.path(2) / file
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * length) if length == 0.5 else length])
        found, (note,) = store.newest()
        assert_is(found, 1)
        assert "damaged" in note

    @pytest.mark.parametrize("file", FILES)
    def test_a_flipped_bit_anywhere_is_passed_over(self, store, file):
        saved(store, 1, 2)
        path = store.path(2) / file
        content = path.read_bytes()
        draw = random.Random(0)
        for position in {0, len(content) - 1, *(draw.randrange(len(content)) for _ in range(40))}:
            path.write_bytes(
                content[:position] + bytes([content[position] ^ 1 << draw.randrange(8)]) + content[position + 1 :]
            )
            found, (note,) = store.newest()
            assert_is(found, 1)
            assert "damaged" in note

    def test_where_all_are_damaged_there_is_none_and_a_note_on_each(self, store):
        saved(store, 1, 2)
        for step in (1, 2):
            (store.path(step) / "state.json").write_text("{}")
        found, notes = store.newest()
        assert found is None
        assert [str(store.path(2)) in notes[0], str(store.path(1)) in notes[1]] == [True, True]

    def test_another_format_is_passed_over_in_words(self, store, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr("trainer.checkpoint.store._FORMAT", 99)
            saved(store, 1)
        found, (note,) = store.newest()
        assert found is None
        assert "its format is 99, this version reads 1" in note

    def test_nothing_is_pickled(self, store):
        saved(store, 1)
        assert json.loads((store.path(1) / "state.json").read_text())["progress"]["samples"] == 8
        assert not any(b"\x80\x04" in (store.path(1) / file).read_bytes()[:2] for file in FILES)


class TestCannotWrite:
    def test_a_file_in_the_way(self, tmp_path):
        (tmp_path / "checkpoints").write_text("in the way")
        with pytest.raises(TrainerError, match=r"step 1 could not be written to .*the last whole one is none"):
            saved(CheckpointStore(tmp_path, keep=1), 1)

    def test_a_full_disk_leaves_the_earlier_ones(self, tmp_path):
        """A limit on the size of files fails as a full disk does: in the middle of a write."""
        program = (
            "import resource, sys, torch\n"
            "from pathlib import Path\n"
            "from trainer.checkpoint.progress import Progress\n"
            "from trainer.checkpoint.store import Checkpoint, CheckpointStore\n"
            "store = CheckpointStore(Path(sys.argv[1]), keep=1)\n"
            "tensors = {'weight': torch.ones(50_000)}\n"
            "save = lambda step: store.save(Checkpoint(tensors, Progress(step), {}))\n"
            "save(1)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
            "try: save(2)\n"
            "except Exception as error: print(type(error).__name__, error)\n"
        )
        found = processes.run([sys.executable, "-c", program, tmp_path])
        assert found.stdout.startswith("TrainerError the checkpoint of step 2 could not be written"), found.stderr
        assert "the last whole one is that of step 1" in found.stdout
        store = CheckpointStore(tmp_path, keep=1)
        newest, notes = store.newest()
        assert (newest.progress.step, notes) == (1, [])
        assert os.listdir(store.folder) == ["step-00000001"], "nothing is left of the half that was written"


@pytest.mark.parametrize("rounds", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_leaves_a_whole_one(tmp_path, rounds):
    """Kill -9 in the middle of saves: what is found is whole, no file of another step is mixed in, and none is lost."""
    draw, last = random.Random(0), 0
    saver = Path(__file__).with_name("endless_saver.py")
    for _ in range(rounds):
        process = processes.start([sys.executable, saver, tmp_path, "2"])
        try:
            assert process.stdout.readline() == "ready\n", process.stderr.read()
            time.sleep(draw.uniform(0.0, 0.15))
        finally:
            processes.kill(process)
            assert processes.finish(process).returncode == -signal.SIGKILL
        found, notes = CheckpointStore(tmp_path, keep=2).newest()
        assert notes == []
        step = found.progress.step if found else 0
        assert step >= last
        assert found is None or all(bool((tensor == step).all()) for tensor in found.tensors.values())
        last = step
    assert last > rounds
