"""Checkpoints survive kills, damage and full disks: a run finds a complete one or reports the problem."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.checkpoint.endless_saver import save_without_end
from tests.checkpoint.samples import FILES, LARGE, MODEL_FILE, facts_of, is_whole, newest, save, tensors_of
from tests.helpers import processes, warm
from tests.helpers.checkpoints import reseal
from tests.helpers.forking import forking
from tests.helpers.hostile import Trap
from trainer.checkpoint.format import FACTS, SUMS, share_name
from trainer.checkpoint.reading import SavedState, open_verified, verify
from trainer.checkpoint.store import CheckpointStore
from trainer.parallel.shards.boxes import Box, TensorPart

SHARE = share_name(0, 1)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    made = CheckpointStore(tmp_path, keep=3)
    made.open()
    return made


def saved(store: CheckpointStore, *steps: int) -> CheckpointStore:
    for step in steps:
        save(store, step)
    return store


class TestSave:
    def test_comes_back_whole(self, store):
        saved(store, 5)
        state, problems = newest(store)
        assert is_whole(state, 5)
        assert state.facts == facts_of(5, tensors_of(5))
        assert problems == []
        found = sorted(str(path.relative_to(store.path(5))) for path in store.path(5).rglob("*") if path.is_file())
        assert found == sorted(FILES)

    def test_sums_can_be_checked_by_hand(self, store):
        saved(store, 5)
        checked = subprocess.run(
            ["sha256sum", "--check", "SHA256SUMS"], cwd=store.path(5), capture_output=True, text=True, timeout=60
        )
        assert checked.stdout == f"{MODEL_FILE}: OK\n{SHARE}: OK\n{FACTS}: OK\n"

    def test_the_newest_wins_also_beyond_eight_digits(self, store):
        saved(store, 9, 10, 10**9)
        assert is_whole(newest(store)[0], 10**9)

    def test_latest_names_the_newest(self, store):
        saved(store, 9, 10)
        assert (store.folder / "latest").read_text() == "step-00000010\n"

    def test_keeps_so_many_and_the_oldest_go(self, store):
        assert saved(store, 1, 2, 3, 4, 5).steps() == [3, 4, 5]
        assert sorted(os.listdir(store.folder)) == ["latest", *(f"step-{step:08d}" for step in (3, 4, 5))]

    def test_the_checkpoint_of_the_best_evaluation_is_kept(self, store):
        saved(store, 1, 2)
        for step in (3, 4, 5, 6):
            save(store, step, best=2)
        assert store.steps() == [2, 4, 5, 6]

    def test_keeps_an_older_checkpoint_where_newer_are_damaged(self, tmp_path, store):
        """The run resumed from step 1, because steps 2 and 3 were damaged. Its new checkpoint must stay."""
        saved(store, 1, 2, 3)
        for step in (2, 3):
            (store.path(step) / FACTS).unlink()
        store = CheckpointStore(tmp_path, keep=1)
        assert is_whole(newest(store)[0], 1)
        saved(store, 2)
        assert store.steps() == [2]
        assert is_whole(newest(store)[0], 2)

    def test_the_same_step_again_replaces_it(self, store):
        saved(store, 4)
        (store.path(4) / SHARE).write_bytes(b"damaged")
        saved(store, 4)
        assert is_whole(newest(store)[0], 4)

    def test_leftovers_of_a_kill_go_with_the_next_save(self, store):
        saved(store, 1)
        leftover = store.folder / ".saving-step-00000002"
        leftover.mkdir()
        (leftover / SHARE).write_bytes(b"half")
        assert is_whole(newest(store)[0], 1)
        saved(store, 3)
        assert not leftover.exists()

    def test_one_that_was_being_replaced_comes_back(self, store):
        saved(store, 4)
        store.path(4).rename(store.folder / ".replaced-step-00000004")
        store.open()
        assert is_whole(newest(store)[0], 4)

    def test_a_folder_that_has_gone_is_not_made_anew(self, store):
        store.folder.rmdir()
        with pytest.raises(FileNotFoundError):
            store.begin(1)


class TestVerify:
    """Damage is reported, and no file in a checkpoint's place is trusted, waited for or executed."""

    def test_of_a_new_folder_is_none(self, store):
        assert newest(store) == (None, [])

    def test_a_folder_that_resembles_a_checkpoint_is_left_alone(self, store):
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
        state, (problem,) = newest(store)
        assert is_whole(state, 1)
        assert file in problem

    @pytest.mark.parametrize("file", FILES)
    @pytest.mark.parametrize("length", [0, 1, 0.5, -1])
    def test_a_file_that_is_cut_short_is_passed_over(self, store, file, length):
        saved(store, 1, 2)
        path = store.path(2) / file
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * length) if length == 0.5 else length])
        state, (problem,) = newest(store)
        assert is_whole(state, 1)
        assert "damaged" in problem

    def test_files_of_two_checkpoints_are_no_checkpoint(self, store):
        saved(store, 1, 2, 3)
        (store.path(3) / SHARE).write_bytes((store.path(2) / SHARE).read_bytes())
        state, (problem,) = newest(store)
        assert is_whole(state, 2)
        assert f"{SHARE} does not match its checksum" in problem

    def test_random_damage_is_found(self, store):
        """Damage files 240 times: flipped bits, truncations, insertions, and swapped, empty or missing files."""
        saved(store, 1, 2, 3)
        folder, draw = store.path(3), random.Random(0)
        whole = {name: (folder / name).read_bytes() for name in FILES}
        other = {name: (store.path(2) / name).read_bytes() for name in FILES}
        for number in range(240):
            name = draw.choice(FILES)
            content = whole[name]
            place = draw.randrange(len(content))
            kind = number % 6
            damaged = (
                content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :],
                content[:place],
                content[:place] + draw.randbytes(draw.randint(1, 9)) + content[place:],
                whole[draw.choice([file for file in FILES if file != name])],
                other[SHARE] if name == MODEL_FILE else other[name],
                None,
            )[kind]
            if damaged is None:
                (folder / name).unlink()
            else:
                (folder / name).write_bytes(damaged)
            state, problems = newest(store)
            assert is_whole(state, 2), (kind, name, place)
            assert len(problems) == 1
            (folder / name).write_bytes(content)
        assert is_whole(newest(store)[0], 3)

    def test_where_all_are_damaged_there_is_none_and_a_note_on_each(self, store):
        saved(store, 1, 2)
        for step in (1, 2):
            (store.path(step) / FACTS).write_text("{}")
        state, problems = newest(store)
        assert state is None
        assert len(problems) == 2

    def test_another_format_is_passed_over_in_words(self, store, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr("trainer.checkpoint.format.FORMAT", 99)
            saved(store, 1)
        assert newest(store) == (None, ["its format is 99, but this version reads 2"])

    @pytest.mark.parametrize("file", FILES)
    def test_a_pickle_in_place_of_a_file_is_never_run(self, store, file, tmp_path):
        """This includes a pickle with the checksum and the size that the checkpoint records."""
        saved(store, 1, 2)
        place, marker = store.path(2) / file, tmp_path / "marker"
        place.write_bytes(Trap(marker).pickled())
        if file != SUMS:
            reseal(store.path(2))
        assert newest(store)[0] is not None
        assert not marker.exists()

    @pytest.mark.parametrize("file", FILES)
    def test_a_pipe_in_place_of_a_file_is_not_waited_for(self, store, file):
        saved(store, 1, 2)
        (store.path(2) / file).unlink()
        os.mkfifo(store.path(2) / file)
        state, (problem,) = newest(store)
        assert is_whole(state, 1)
        assert "is not a regular file" in problem

    @pytest.mark.parametrize("name", ["../../outside", "/etc/passwd", "model/../../outside", "other.safetensors"])
    def test_a_name_that_leads_elsewhere_is_refused(self, store, name):
        saved(store, 1)
        with (store.path(1) / SUMS).open("a") as sums:
            sums.write(f"{'0' * 64}  {name}\n")
        assert newest(store) == (None, [f"it is damaged: {SUMS} holds a line that is not a checksum"])

    def test_parts_that_are_not_the_whole_are_refused(self, store):
        saved(store, 1)
        facts = json.loads((store.path(1) / FACTS).read_text())
        facts["tensors"]["model.weight"] = [4, 4]
        (store.path(1) / FACTS).write_text(json.dumps(facts))
        reseal(store.path(1))
        assert newest(store) == (None, ["it is damaged: the parts of model.weight do not cover it"])

    @pytest.mark.parametrize(
        ("place", "value"),
        [
            (("progress", "step"), -1),
            (("progress", "step"), 2),  # of another checkpoint
            (("progress", "step"), "1e9"),
            (("progress", "samples"), 10**30),
            (("progress", "samples"), float("nan")),
            (("progress", "tokens"), None),
            (("progress", "best"), {"name": "loss"}),
            (("progress", "best"), {"name": [], "value": 1.0, "step": 1}),
            (("progress", "more"), 1),
            (("progress",), []),
            (("identity",), "x"),
            (("origin",), None),
            (("scalars",), {"scale": "large"}),
            (("tensors", "model.weight"), [-3, -4]),
            (("tensors", "model.weight"), "34"),
            (("tensors",), [[3, 4]]),
            (("identity", "seed"), json.loads("[" * 200 + "]" * 200)),
        ],
    )
    def test_a_wrong_value_is_damage(self, store, place, value):
        saved(store, 1)
        facts = json.loads((store.path(1) / FACTS).read_text())
        group = facts
        for name in place[:-1]:
            group = group[name]
        group[place[-1]] = value
        (store.path(1) / FACTS).write_text(json.dumps(facts))
        reseal(store.path(1))
        with pytest.raises(ValueError, match=r"^it is damaged: "):
            open_verified(store.path(1), step=1)

    def test_ranks_share_the_reading(self, store):
        saved(store, 1)
        (store.path(1) / SHARE).write_bytes(bytes((store.path(1) / SHARE).stat().st_size))
        assert verify(store.path(1), 0, 2), "this one has the other file"
        with pytest.raises(ValueError, match=SHARE):
            verify(store.path(1), 1, 2)


class TestSavedState:
    def test_any_block_can_be_read(self, store):
        saved(store, 7)
        state = SavedState(store.path(7))
        block = torch.zeros(2, 3)
        state.fill([TensorPart("model.weight", (3, 4), (Box((1, 0), block),))])
        assert bool((block == 7).all())

    def test_state_that_was_never_saved_is_reported(self, store):
        saved(store, 7)
        with pytest.raises(ValueError, match=r"lacks elements of model\.bias"):
            SavedState(store.path(7)).fill([TensorPart("model.bias", (2,), (Box((0,), torch.zeros(2)),))])

    def test_nothing_is_pickled(self, store):
        saved(store, 1)
        assert json.loads((store.path(1) / FACTS).read_text())["progress"]["samples"] == 8
        assert not any(b"\x80\x04" in (store.path(1) / file).read_bytes()[:2] for file in FILES)


@pytest.mark.alone
@pytest.mark.parametrize("rounds", [3, pytest.param(8, marks=pytest.mark.nightly)])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path, rounds):
    """SIGKILL during saves: the newest checkpoint is complete, has files of one step only, and is never lost."""
    draw, last = random.Random(0), 0
    for _ in range(rounds):
        ready = forking().Event()
        process = forking().Process(target=save_without_end, args=(tmp_path, 2, ready))
        process.start()
        try:
            assert ready.wait(60)
            time.sleep(draw.uniform(0.0, 0.15))
        finally:
            process.kill()
            process.join(60)
        assert process.exitcode == -signal.SIGKILL
        state, problems = newest(CheckpointStore(tmp_path, keep=2))
        assert problems == []
        step = state.facts.progress.step if state else 0
        assert step >= last
        assert state is None or is_whole(state, step, LARGE)
        last = step
    assert last > rounds


@pytest.mark.parametrize("step", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_kill_before_each_file_system_call_leaves_a_whole_checkpoint(tmp_path, step):
    """In each phase of a save, also of an existing step, the old checkpoint stays or the new one is complete."""
    finished = processes.finish(warm.start([tmp_path, step], program="tests.checkpoint.killed_saver:main"))
    assert finished.returncode == 0, finished.stderr
    *lines, last = finished.stdout.splitlines()
    found = [line.split()[1] for line in lines]
    assert last == "done"
    assert len(found) > 14, "there are so many phases at least"
    assert found == sorted(found), "once complete it stays so"
    assert set(found) == ({"1"} if step == 1 else {"1", "2"})
