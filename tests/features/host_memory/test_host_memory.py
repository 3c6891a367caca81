"""Checkpoints in the memory of the hosts. A host of a test is a folder: its ranks see no other."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.checkpoint.samples import changed
from tests.helpers.ranks import RankPools
from tests.helpers.training import tiny_recipe
from trainer.base.digests import file_digest
from trainer.base.disk import remove
from trainer.base.errors import ExitCode, RecipeError, UsageError
from trainer.checkpoint import format as format_
from trainer.checkpoint.counters import Progress
from trainer.checkpoint.disk import Disk
from trainer.checkpoint.format import WrittenFile, share_name, write_share
from trainer.checkpoint.identity import identity
from trainer.checkpoint.saving import Saved, Saver
from trainer.checkpoint.store import CheckpointStore
from trainer.checkpoint.tier import FAILED
from trainer.engine.state import EngineState, StateSource
from trainer.features.host_memory import folder as memory_folder
from trainer.features.host_memory import handover
from trainer.features.host_memory import tier as host_memory
from trainer.features.host_memory.folder import complete_in, folder_of_run
from trainer.features.host_memory.handover import hand_over
from trainer.features.host_memory.tier import HostMemory
from trainer.features.mirror.tier import Mirror
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.placement import ParameterPlacement
from trainer.parallel.shards.boxes import Box, TensorPart, whole_part
from trainer.ranks.environment import LaunchEnvironment
from trainer.ranks.joining import Rendezvous

ROWS = 12
NOT_MOVED = "the shares on hosts of spare ranks could not be moved:"


class ShardedEngine:
    """An engine with a weight whose rows are sharded over the ranks, and a replicated one. Elements tell their step."""

    def __init__(self, mesh: ParallelMesh, step: int = 0) -> None:
        self.mesh = mesh
        self.placements = {
            "sharded": ParameterPlacement("sharded", (ROWS, 2)),
            "whole": ParameterPlacement("whole", (3,)),
        }
        self.rows = ROWS // mesh.world_size
        self.sharded = torch.full((self.rows, 2), float(step)) + self._offset()
        self.whole = torch.full((3,), float(step))
        self.loaded_step: int | None = None

    def _offset(self) -> Tensor:
        return (torch.arange(self.rows) + self.rows * self.mesh.rank)[:, None] / 16

    def state(self) -> EngineState:
        box = Box((self.rows * self.mesh.rank, 0), self.sharded)
        sharded = TensorPart("model.sharded", (ROWS, 2), (box,))
        return EngineState((sharded, whole_part("model.whole", self.whole, self.mesh)), {"scale": 2.0})

    def keeps_state(self) -> bool:
        return False

    def load_state(self, source: StateSource, step: int) -> None:
        source.fill(self.state().parts)
        self.loaded_step = step

    def is_of(self, step: int) -> bool:
        expected = torch.full((self.rows, 2), float(step)) + self._offset()
        return torch.equal(self.sharded, expected) and torch.equal(self.whole, torch.full((3,), float(step)))


def saver(folder: Path, per_host: int, step: int = 0, mirrored: bool = False, **recipe: Any) -> Saver:
    """Return a saver; `per_host` ranks share a host."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    mesh = ParallelMesh(torch.device("cpu"), dp_replicate=world_size)
    host = folder / f"host{mesh.rank // per_host}"
    host.mkdir(exist_ok=True)
    # An epoch has one step.
    saved = Saved(identity(tiny_recipe(**recipe), "data"), total_steps=lambda epochs, max_steps: max_steps or epochs)
    store = CheckpointStore(folder / "run", 2, seconds=2.0)
    notes = []
    memory, disk = HostMemory(host, store, mesh, notes.append), Disk(store, mesh)
    mirror = [Mirror(str(folder / "copies"), disk, mesh)] if mirrored else []
    run = Saver([memory, disk, *mirror], ShardedEngine(mesh, step), mesh, saved)
    run.notes = notes
    return run


def memory_of(folder: Path) -> HostMemory:
    return HostMemory(folder, CheckpointStore(folder / "run", 2), ParallelMesh(torch.device("cpu")))


def save(folder: Path, steps: list[int], per_host: int = 1, on_disk: int | None = None, failing: int | None = None):
    """Save steps in memory, and perhaps one on the disk. Return the notes and where each rank's share lies."""
    run = saver(folder, per_host)
    run.resume("auto")
    for step in steps:
        run._engine = ShardedEngine(run._mesh, step)
        run.progress = Progress(step, 12 * step)
        if step == on_disk:
            run.save()
            continue
        host_memory.write_share = _no_room if failing == run._mesh.rank and step == steps[-1] else write_share
        try:
            run.save_in_memory()
            run.finish()
        finally:
            host_memory.write_share = write_share
    run.finish()
    return run.notes, [path.name for path in run.tiers[0]._store(run._mesh.rank).folder.glob("step-*")]


def _no_room(folder: Path, name: str, tensors: Any) -> WrittenFile:
    raise OSError(28, "No space left on device")


def resume(folder: Path, per_host: int = 1, **recipe: Any) -> tuple[int | None, bool, list[str]]:
    """Return the step from which a run resumes, whether all elements are those of that step, and the notes."""
    run = saver(folder, per_host, **recipe)
    notes = run.resume("auto")
    engine = run._engine
    return engine.loaded_step, engine.loaded_step is not None and engine.is_of(engine.loaded_step), notes


def share_of(folder: Path, host: int, rank: int, size: int, step: int) -> Path:
    """Return the file of a rank's share on a host."""
    (place,) = (folder / f"host{host}").glob(f"trainer-*/*/rank-{rank:05d}-of-{size:05d}")
    return place / "checkpoints" / f"step-{step:08d}" / share_name(rank, size)


def damage(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


class TestOneHost:
    def test_a_run_resumes_from_memory_where_it_is_newer_than_the_disk(self, tmp_path):
        save(tmp_path, [3, 6, 9], on_disk=6)
        step, is_whole, notes = resume(tmp_path)
        assert (step, is_whole) == (9, True)
        assert notes == ["resumed from the checkpoint of step 9 in memory; the newest on the disk is that of step 6"]

    def test_a_newer_one_on_the_disk_is_preferred(self, tmp_path):
        save(tmp_path, [3, 6], on_disk=6)
        step, is_whole, notes = resume(tmp_path)
        assert (step, is_whole) == (6, True)
        assert "on the disk; memory holds no newer one" in notes[0]

    def test_a_run_of_the_same_path_in_another_container_is_left_alone(self, tmp_path):
        one, other = (memory_of(tmp_path) for _ in range(2))
        one.enter("key-1")
        other.enter("key-2")
        assert {path.name for path in one.folder.iterdir()} == {"key-1", "key-2"}
        other.close()
        assert {path.name for path in one.folder.iterdir()} == {"key-1"}
        one._lock.close()  # as its process ends
        other.enter("key-2")
        assert {path.name for path in one.folder.iterdir()} == {"key-2"}
        other.close()
        assert not one.folder.exists()

    def test_a_failed_write_is_settled_after_the_writers_of_all_ranks(self, tmp_path):
        run = saver(tmp_path, 1)
        run.resume("auto")
        run.progress = Progress(2, 24)
        gate = threading.Event()
        with patch.object(host_memory, "write_share", lambda *args: gate.wait(10) and write_share(*args)):
            run.save_in_memory()
            threading.Timer(0.3, gate.set).start()
            run.tiers[0]._settle(FAILED)  # as after the failure of another rank
        assert gate.is_set(), "two threads would write"

    def test_a_run_that_stops_before_its_first_step_has_its_state_on_the_disk(self, tmp_path):
        save(tmp_path, [3])
        run = saver(tmp_path, 1)
        assert not run.has_checkpoint
        run.resume("auto")
        assert run.has_checkpoint
        run.close()
        assert not any(tmp_path.glob("host0/trainer-*"))
        step, is_whole, notes = resume(tmp_path)
        assert (step, is_whole) == (3, True)
        assert "on the disk" in notes[0]

    def test_a_mirror_gets_a_checkpoint_that_it_missed_if_the_run_goes_on_from_memory(self, tmp_path):
        save(tmp_path, [3, 6], on_disk=3)
        run = saver(tmp_path, 1, mirrored=True)
        run.resume("auto")
        assert run.progress.step == 6
        run.deliver(None)
        assert run.tiers[2].steps() == [3]

    def test_a_mirror_gets_an_older_checkpoint_if_the_newest_on_the_disk_is_damaged(self, tmp_path):
        save(tmp_path, [2], on_disk=2)
        save(tmp_path, [4, 6], on_disk=4)
        run = saver(tmp_path, 1, mirrored=True)
        disk, mirror = run.tiers[1:]
        damage(disk.store.path(4) / share_name(0, 1))
        notes = run.resume("auto")
        assert run.progress.step == 6
        assert f"the checkpoint {disk.store.path(4)} is not uploaded: it is damaged" in notes[-1]
        run.deliver(None)
        assert mirror.steps() == [2]

    def test_failed_writes_are_one_note_and_their_number(self, tmp_path, monkeypatch):
        monkeypatch.setattr(host_memory, "write_share", _no_room)
        run = saver(tmp_path, 1)
        run.resume("auto")
        for step in (2, 4, 6):
            run.progress = Progress(step, 12 * step)
            run.save_in_memory()
        run.close()
        first, last = run.notes
        assert "the checkpoint of step 2 could not be written to the memory" in first
        assert last == "3 checkpoints in total could not be written to the memory of the hosts"

    def test_a_folder_that_others_may_write_to_is_passed_over(self, tmp_path):
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        first = folder_of_run(tmp_path, tmp_path / "run")
        first.mkdir()
        first.chmod(0o777)
        first.with_name(f"{first.name}-1").symlink_to(tmp_path / "elsewhere")
        for _ in range(2):
            one = memory_of(tmp_path)
            one.enter("key")
            assert one.folder == first.with_name(f"{first.name}-2")
            one._lock.close()
        first.rmdir()  # a free name does not hide the folder with the checkpoints
        assert folder_of_run(tmp_path, tmp_path / "run") == one.folder
        assert list((tmp_path / "elsewhere").iterdir()) == []
        one.folder.chmod(0o777)
        with pytest.raises(PermissionError, match="others may write to it"):
            one._begin(one._store(0), 1)

    def test_a_damaged_name_of_the_host_is_refused_in_words(self, tmp_path):
        one = memory_of(tmp_path)
        one.enter("key")
        (one.folder / "key" / "host").write_bytes(b"\xff")
        with pytest.raises(UsageError, match="it is damaged; remove its folder"):
            memory_of(tmp_path).enter("key")

    @pytest.mark.parametrize(
        "places",
        [
            ["rank-00001-of-00001"],
            ["rank-00000-of-00002", "rank-00002-of-00002"],
            ["rank-000000000-of-999999999"],  # a range of so many would fill the memory
        ],
    )
    def test_shares_of_ranks_that_cannot_be_are_no_checkpoint(self, places):
        assert complete_in([(0, {place: [3] for place in places})]) == {}

    def test_the_control_group_limits_the_room(self, tmp_path, monkeypatch):
        monkeypatch.setattr(memory_folder, "is_in_memory", lambda folder: True)
        monkeypatch.setattr(memory_folder.cgroup, "free_memory_bytes", lambda: 5)
        assert memory_folder.room_in(tmp_path) == (5, "in the control group")

    def test_a_look_waits_for_processes_of_an_earlier_start_that_hold_the_lock(self, tmp_path, monkeypatch):
        one = memory_of(tmp_path)
        one.enter("key")
        child = subprocess.Popen(["sleep", "60"], pass_fds=[one._lock.fileno()])
        try:
            one._lock.close()  # as its process ends
            monkeypatch.setattr(handover, "_USED_SECONDS", 0.1)
            assert handover._inspect(one.folder / "key").is_used
            handover.free(tmp_path, tmp_path / "run")
            assert (one.folder / "key").exists()
            monkeypatch.setattr(handover, "_USED_SECONDS", 30.0)
            threading.Timer(0.3, child.kill).start()
            look = handover._inspect(one.folder / "key")
        finally:
            child.kill()
            child.wait()
        assert (look.is_used, look.problem) == (False, "")
        handover.free(tmp_path, tmp_path / "run")
        assert not one.folder.exists()

    def test_the_two_newest_are_kept(self, tmp_path):
        _, names = save(tmp_path, [1, 2, 3])
        assert sorted(names) == ["step-00000002", "step-00000003"]

    def test_damage_is_passed_over_for_the_one_before_and_then_the_disk(self, tmp_path):
        save(tmp_path, [2, 4, 6], on_disk=2)
        damage(share_of(tmp_path, 0, 0, 1, 6))
        step, is_whole, notes = resume(tmp_path)
        assert (step, is_whole) == (4, True)
        assert "skipped the checkpoint of step 6 in memory: the share of rank 0 on" in notes[0]
        assert "does not match its checksum" in notes[0]
        damage(share_of(tmp_path, 0, 0, 1, 4))
        step, is_whole, notes = resume(tmp_path)
        assert (step, is_whole) == (2, True)
        assert "skipped the checkpoint of step 4 in memory" in notes[0]

    @pytest.mark.slow
    def test_shares_damaged_in_many_ways_are_passed_over(self, tmp_path, monkeypatch):
        monkeypatch.setattr(format_, "sync", lambda path: None)
        save(tmp_path, [4, 6])
        place = share_of(tmp_path, 0, 0, 1, 6).parents[2]
        shutil.copytree(place, tmp_path / "whole")

        def resumed() -> int | None:
            step, is_whole, _ = resume(tmp_path)
            assert is_whole == (step is not None)
            remove(place)
            shutil.copytree(tmp_path / "whole", place)
            return step

        def put(file: Path, make: Callable[[Path], object]) -> None:
            remove(file)
            make(file)

        assert resumed() == 6
        newest = place / "checkpoints" / "step-00000006"
        for file in [path for path in newest.iterdir() if path.is_file()]:
            for change in range(40):
                file.write_bytes(changed(file.read_bytes(), change))
                assert resumed() == 4, (file, change)
            for make in (os.mkfifo, Path.mkdir, lambda path: path.symlink_to("nowhere"), lambda path: None):
                put(file, make)
                assert resumed() == 4, file
        stale = place / "checkpoints" / "step-00000004"
        remove(newest)
        shutil.copytree(stale, newest)  # a share of an earlier step
        assert resumed() == 4
        for make in (Path.touch, os.mkfifo, lambda path: path.symlink_to("nowhere"), lambda path: None):
            for folder in (place, place / "checkpoints"):
                put(folder, make)
                assert resumed() is None, folder

    def test_another_training_is_passed_over(self, tmp_path):
        save(tmp_path, [2])
        step, _, notes = resume(tmp_path, training={"seed": 1})
        assert step is None
        assert "it belongs to another training: `training.seed` was 42 and is 1" in notes[0]

    @pytest.mark.parametrize(("schedule", "found"), [("constant", 2), ("linear", None)])
    def test_a_raised_number_of_steps_keeps_them_if_the_rates_are_the_same(self, tmp_path, schedule, found):
        keys = {"schedule": {"name": schedule, "warmup": 0}}
        run = saver(tmp_path, 1, step=2, **keys)
        run.resume("auto")
        run.progress = Progress(2, 24)
        run.save_in_memory()
        run.finish()
        step, is_whole, notes = resume(tmp_path, training={"max_steps": 30}, **keys)
        assert (step, is_whole) == (found, found is not None)
        text = "ends at step 30 instead of 20" if found else "another training: `training.max_steps` was 20 and is 30"
        assert text in notes[0]

    def test_a_run_in_a_new_folder_at_the_same_place_finds_nothing(self, tmp_path):
        save(tmp_path, [2])
        shutil.rmtree(tmp_path / "run")
        assert resume(tmp_path) == (None, False, [])
        assert not list(tmp_path.glob("host0/*/*/rank*/checkpoints/step*"))

    def test_never_refuses_one_in_memory(self, tmp_path):
        save(tmp_path, [2])
        with pytest.raises(
            UsageError, match=r"`checkpoint.resume` is never, but the checkpoint of step 2 in memory exists"
        ):
            saver(tmp_path, 1).resume("never")

    def test_the_end_frees_the_memory(self, tmp_path):
        run = saver(tmp_path, 1)
        run.resume("auto")
        run.progress = Progress(2)
        run.save_in_memory()
        run.close()
        assert list((tmp_path / "host0").iterdir()) == []

    def test_too_little_room_is_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr(memory_folder.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(100, 90, 10))
        with pytest.raises(
            UsageError, match=r"needs 0.0 MiB in .* two checkpoints of its ranks \(1\), but only .* free in the folder"
        ):
            saver(tmp_path, 1).resume("auto")

    def test_a_folder_that_is_not_there_is_refused(self, tmp_path):
        run = saver(tmp_path, 1)
        (tmp_path / "host0").rmdir()
        with pytest.raises(UsageError, match=r"`checkpoint.memory.folder` must be a folder of each host .* but is"):
            run.resume("auto")

    def test_a_fault_of_its_disk_may_pass(self, tmp_path, monkeypatch):
        def enter(root: Path) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(host_memory, "enter", enter)
        with pytest.raises(UsageError, match=r"must be a folder of each host .* Input/output error") as caught:
            saver(tmp_path, 1).resume("auto")
        assert caught.value.exit_code == ExitCode.FAILED

    def test_a_failed_write_is_a_note_and_the_one_before_stays(self, tmp_path):
        notes, names = save(tmp_path, [2, 4], failing=0)
        assert names == ["step-00000002"]
        assert "step 4 could not be written to the memory" in notes[0]
        assert "No space left on device; training continues" in notes[0]
        assert resume(tmp_path)[0] == 2

    def test_rarer_than_on_the_disk_is_a_contradiction(self):
        with pytest.raises(RecipeError, match=r"`checkpoint.memory.every` must be more often than `checkpoint.every`"):
            resolved_tiny({"every": "10 steps", "memory": {"every": "10 steps"}})


def resolved_tiny(checkpoint: dict[str, Any]) -> None:
    from trainer.recipe.reading.rules import contradictions, message

    recipe = tiny_recipe(checkpoint=checkpoint)
    found = [message(one) for one in contradictions(dict(recipe))]
    if found:
        raise RecipeError(*found)


class TestSeveralHosts:
    @pytest.mark.parametrize("per_host", [1, pytest.param(2, marks=pytest.mark.slow)])
    def test_the_loss_of_a_host_loses_nothing(self, ranks: RankPools, tmp_path, per_host):
        ranks(4).run(save, tmp_path, [2, 4], per_host)
        shutil.rmtree(tmp_path / "host1")
        for step, is_whole, notes in ranks(4).run(resume, tmp_path, per_host):
            assert (step, is_whole) == (4, True)
            assert "resumed from the checkpoint of step 4 in memory" in notes[0]

    def test_the_loss_of_neighbours_falls_back_to_the_disk(self, ranks: RankPools, tmp_path):
        ranks(4).run(save, tmp_path, [2, 4], 1, 2)
        for host in (1, 2):
            shutil.rmtree(tmp_path / f"host{host}")
        for step, is_whole, notes in ranks(4).run(resume, tmp_path):
            assert (step, is_whole) == (2, True)
            assert "on the disk; memory holds no newer one that is complete" in notes[0]

    def test_a_damaged_share_is_read_from_its_copy(self, ranks: RankPools, tmp_path):
        ranks(2).run(save, tmp_path, [2, 4])
        damage(share_of(tmp_path, 0, 0, 2, 4))
        for step, is_whole, notes in ranks(2).run(resume, tmp_path):
            assert (step, is_whole) == (4, True)
            assert "skipped a part of the checkpoint of step 4 in memory: the share of rank 0" in notes[0]

    def test_damage_of_share_and_copy_is_passed_over(self, ranks: RankPools, tmp_path):
        ranks(2).run(save, tmp_path, [2, 4])
        damage(share_of(tmp_path, 0, 0, 2, 4))
        damage(share_of(tmp_path, 1, 0, 2, 4))
        assert [found[:2] for found in ranks(2).run(resume, tmp_path)] == [(2, True)] * 2

    def test_fewer_ranks_resume_after_the_loss_of_a_host(self, ranks: RankPools, tmp_path):
        ranks(4).run(save, tmp_path, [2, 4], 2)
        shutil.rmtree(tmp_path / "host1")
        assert [found[:2] for found in ranks(2).run(resume, tmp_path, 2)] == [(4, True)] * 2

    @pytest.mark.parametrize(
        ("change", "step", "note"),
        [
            ("nothing", 4, "1 share came from hosts of spare ranks"),
            ("new host", 4, "3 shares came from hosts of spare ranks"),
            ("damage", 2, f"{NOT_MOVED} rank 0: it is damaged"),
            ("host without the folder", 2, f"{NOT_MOVED} rank 0: [Errno 2] No such file or directory"),
            ("unreadable share", 2, f"{NOT_MOVED} rank 0: rank 1 has no part to send"),
            ("unreadable host", 4, "1 share came from hosts of spare ranks"),
        ],
        ids=["nothing", "new host", "damage", "host without the folder", "unreadable share", "unreadable host"],
    )
    def test_shares_of_spare_hosts_move_to_those_that_train(self, change, step, note, ranks: RankPools, tmp_path):
        ranks(3).run(save, tmp_path, [2, 4], 1, 2)
        if change == "damage":
            damage(share_of(tmp_path, 1, 1, 3, 4))
        elif change.startswith("unreadable"):
            (name,) = (tmp_path / "host2").glob("trainer-*/*/host")
            file = name if change == "unreadable host" else share_of(tmp_path, 1, 1, 3, 4)
            file.unlink()
            file.mkdir()
        elif change != "nothing":
            shutil.rmtree(tmp_path / "host0")  # rank 1 then sends two shares
            if change == "new host":
                (tmp_path / "host0").mkdir()
        store, notes = dist.HashStore(), {}

        def start(rank: int) -> None:
            place = LaunchEnvironment("torchrun", rank=rank, world_size=3, local_world_size=1)
            folders = tmp_path / f"host{rank}", tmp_path / "run"
            notes[rank] = hand_over(*folders, Rendezvous(store, place), place, 1, 20.0)

        starts = [threading.Thread(target=start, args=(rank,)) for rank in range(3)]
        for thread in starts:
            thread.start()
        for thread in starts:
            thread.join()
        assert set(notes) == {0, 1, 2}
        *unread, shown = notes[0]
        assert notes[1] == notes[2] == notes[0]
        assert f"the checkpoint of step 4 in memory: {note}" in shown
        kept = {spare for spare in (1, 2) if list((tmp_path / f"host{spare}").iterdir())}
        if change == "unreadable host":
            assert (
                "shares in memory on a host were not read: rank 2: [Errno 40] it is a link or no regular file"
                in unread[0]
            )
            assert kept == {2}
        else:
            assert (unread, kept) == ([], set()), "spare hosts are freed"
        assert resume(tmp_path)[:2] == (step, True)

    @pytest.mark.parametrize("failing", [0, pytest.param(1, marks=pytest.mark.slow)])
    def test_a_failed_write_of_one_rank_waits_for_nothing(self, ranks: RankPools, tmp_path, failing):
        (notes, names), (others, names_of_other) = ranks(2).run(save, tmp_path, [2, 4], 1, None, failing)
        assert names == names_of_other == ["step-00000002"]
        (note,) = notes
        assert "the checkpoint of step 4 could not be written to the memory" in note
        assert f"rank {failing} on" in note
        assert "No space left on device; training continues" in note
        assert others == []
        assert [found[:2] for found in ranks(2).run(resume, tmp_path)] == [(2, True)] * 2

    def test_shares_of_two_trainings_are_no_checkpoint(self, ranks: RankPools, tmp_path):
        ranks(2).run(save, tmp_path, [2, 4], 2)
        facts = share_of(tmp_path, 0, 1, 2, 4).with_name("state.json")
        facts.write_text(facts.read_text().replace('"seed": 42', '"seed": 41'))
        sums = facts.with_name("SHA256SUMS")
        lines = [line for line in sums.read_text().splitlines(keepends=True) if "state.json" not in line]
        sums.write_text("".join([*lines, f"{file_digest(facts)}  state.json\n"]))
        for step, is_whole, notes in ranks(2).run(resume, tmp_path, 2):
            assert (step, is_whole) == (2, True)
            assert notes[0] == "skipped the checkpoint of step 4 in memory: its shares belong to different trainings"

    def test_a_share_of_an_incomplete_checkpoint_is_not_used(self, ranks: RankPools, tmp_path):
        ranks(2).run(save, tmp_path, [2, 4], 2)
        shutil.rmtree(share_of(tmp_path, 0, 1, 2, 4).parent)
        for step, is_whole, notes in ranks(2).run(resume, tmp_path, 2):
            assert (step, is_whole) == (2, True)
            assert "resumed from the checkpoint of step 2 in memory" in notes[0], "an incomplete one is not tried"
        assert not share_of(tmp_path, 0, 0, 2, 4).exists(), "it must not be mixed with a later one"


def test_a_link_and_a_relative_path_lead_to_memory(tmp_path, monkeypatch):
    mounts = [
        SimpleNamespace(mountpoint="/", fstype="ext4"),
        SimpleNamespace(mountpoint=str(tmp_path / "shm"), fstype="tmpfs"),
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shm").mkdir()
    (tmp_path / "disk").mkdir()
    (tmp_path / "shm" / "out").symlink_to(tmp_path / "disk")
    (tmp_path / "in").symlink_to(tmp_path / "shm")
    found = {name: memory_folder.is_in_memory(Path(name)) for name in ("shm", "in", "disk", "shm/out")}
    assert found == {"shm": True, "in": True, "disk": False, "shm/out": False}
