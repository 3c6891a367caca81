"""Saving and resuming: the checkpoints from which a run may resume, and those that it must refuse."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.memory import needs_peak, peak_growth
from tests.helpers.ranks import RankPools
from tests.helpers.training import TINY_BERT, tiny_recipe, tiny_training
from trainer.base.errors import TrainerError, UsageError
from trainer.checkpoint import disk
from trainer.checkpoint.counters import Progress
from trainer.checkpoint.disk import Disk
from trainer.checkpoint.format import WrittenFile, share_name, snapshot, write_share
from trainer.checkpoint.identity import identity
from trainer.checkpoint.saving import Saved, Saver
from trainer.checkpoint.store import CheckpointStore
from trainer.engine.state import EngineState, StateSource
from trainer.parallel.mesh import ParallelMesh
from trainer.parallel.placement import ParameterPlacement
from trainer.parallel.shards.boxes import Box, TensorPart, whole_part
from trainer.recipe.schema import Recipe


class FakeEngine:
    """An engine with one replicated parameter, which records the step of a loaded state."""

    def __init__(self, shape: tuple[int, ...] = (2, 3), name: str = "weight", world_size: int = 1) -> None:
        self.mesh = ParallelMesh(torch.device("cpu"), dp_replicate=world_size)
        self.placements = {name: ParameterPlacement(name, shape)}
        self.tensors = {f"model.{name}": torch.ones(shape), f"optimizer.{name}.step": torch.tensor(1.0)}
        self.loaded_step: int | None = None
        self.keeps = True
        self.scalars = {"scale": 2.0}

    def keeps_state(self) -> bool:
        return self.keeps

    def state(self) -> EngineState:
        return EngineState(tuple(whole_part(name, t, self.mesh) for name, t in self.tensors.items()), self.scalars)

    def load_state(self, source: StateSource, step: int) -> None:
        source.fill(self.state().parts)
        self.loaded_step = step


def saver(
    folder: Path,
    engine: FakeEngine | None = None,
    content: str = "data",
    world_size: int = 1,
    asynchronous: bool = True,
    **recipe: Any,
) -> Saver:
    engine = engine or FakeEngine(world_size=world_size)
    saved = Saved(identity(tiny_recipe(**recipe), content))
    store = CheckpointStore(folder, 2, seconds=2.0)
    engine.mesh.on_rank_zero(store.open)
    tier = Disk(store, engine.mesh, {"config.json": b"{}"}, asynchronous)
    return Saver([tier], engine, engine.mesh, saved)


def saved(folder: Path, step: int = 4, **recipe: Any) -> None:
    run = saver(folder, **recipe)
    run.progress = Progress(step, step * 12)
    run.save()
    run.finish()


class TestResume:
    def test_from_nothing(self, tmp_path):
        run = saver(tmp_path)
        assert run.resume("auto") == run.resume("never") == []
        assert run.progress == Progress()

    def test_from_the_newest(self, tmp_path):
        saved(tmp_path, 3)
        saved(tmp_path, 4)
        engine = FakeEngine()
        run = saver(tmp_path, engine)
        assert run.resume("auto") == []
        assert run.progress == Progress(4, 48)
        assert engine.loaded_step == 4
        assert (tmp_path / "checkpoints" / "step-00000004" / "model" / "config.json").read_bytes() == b"{}"

    def test_a_damaged_one_is_noted(self, tmp_path):
        saved(tmp_path, 3)
        saved(tmp_path, 4)
        (tmp_path / "checkpoints" / "step-00000004" / "state.json").write_text("{")
        run = saver(tmp_path)
        (note,) = run.resume("auto")
        assert "skipped" in note
        assert run.progress.step == 3

    def test_never_refuses_a_folder_that_holds_one(self, tmp_path):
        saved(tmp_path)
        with pytest.raises(UsageError, match=r"`checkpoint.resume` is never, but .*step-00000004 exists; name another"):
            saver(tmp_path).resume("never")


class TestIdentity:
    @pytest.mark.parametrize(
        "recipe",
        [
            {"name": "other"},
            {"training": {"micro_batch_size": 3}},
            {"training": {"stop_at_step": 9}},
            {"training": {"check_replicas": "1 step"}},
            {"activation_checkpointing": "full"},
            {"evaluation": {"every": "2 steps", "best": "loss"}},
            {"checkpoint": {"every": "1 step", "keep": 7}},
            {"logging": {"every": "1 step"}},
            {"task": {"metrics": ["accuracy", "f1_macro"]}},
            {"model": {"tokenizer": "elsewhere"}},
            {"data": {"num_workers": 2, "cache": "elsewhere"}},
        ],
        ids=str,
    )
    def test_how_may_change(self, tmp_path, recipe):
        saved(tmp_path)
        run = saver(tmp_path, **recipe)
        run.resume("auto")
        assert run.progress.step == 4

    @pytest.mark.parametrize(
        ("recipe", "words"),
        [
            ({"optimizer": {"learning_rate": 2e-3}}, "`optimizer.learning_rate` was 0.001 and is 0.002"),
            ({"training": {"seed": 1}}, "`training.seed` was 42 and is 1"),
            ({"training": {"global_batch_size": 24}}, "`training.global_batch_size` was 12 and is 24"),
            ({"schedule": {"name": "cosine"}}, "`schedule.name` was 'linear' and is 'cosine'"),
            ({"precision": "bf16"}, "`precision` was 'fp32' and is 'bf16'"),
            ({"model": {"dropout": 0.3}}, "`model.dropout` was None and is 0.3"),
            ({"model": {"config": {**TINY_BERT, "hidden_size": 64}}}, "`model.config.hidden_size` was 32 and is 64"),
            ({"data": {"group_by_length": False}}, "`data.group_by_length` was True and is False"),
            ({"content": "other"}, "the prepared training rows differ (data, tokenizer or `data.max_length`)"),
        ],
        ids=str,
    )
    def test_keys_of_the_training_may_not_change(self, tmp_path, recipe, words):
        saved(tmp_path)
        engine = FakeEngine()
        with pytest.raises(UsageError) as error:
            saver(tmp_path, engine, **recipe).resume("auto")
        assert words in str(error.value)
        assert "belongs to another training" in str(error.value)
        assert "Give the run another `name` or `checkpoint.folder`, or restore" in str(error.value)
        assert engine.loaded_step is None

    def test_mixture_weights_may_not_change(self):
        files = {"source": "files", "train": ["a.jsonl", "b.jsonl"]}
        found = [
            identity(tiny_recipe(data={**files, **more}), "data")
            for more in ({}, {"mixture": [1, 2]}, {"mixture": [2, 1]})
        ]
        assert found[0] != found[1] != found[2] != found[0]
        assert "mixture" not in found[0]["data"]

    def test_files_of_the_model_beside_its_weights_may_not_change(self):
        recipe = tiny_recipe()
        assert identity(recipe, "data", {"buffers": None}) == identity(recipe, "data")
        assert identity(recipe, "data", {"buffers": "a"})["model"]["buffers"] == "a"

    def test_another_kind_of_optimizer_names_every_key(self, tmp_path):
        saved(tmp_path)
        recipe = {"optimizer": {"name": "sgd", "learning_rate": 1e-3, "weight_decay": 0.01}}
        with pytest.raises(UsageError, match=r"`optimizer.betas` was \[0.9, 0.999\] and is None.*`optimizer.name` was"):
            saver(tmp_path, **recipe).resume("auto")

    @pytest.mark.parametrize(
        ("engine", "words"),
        [
            ({"shape": (2, 4)}, r"weight has the shape \(2, 3\) there and \(2, 4\) here"),
            ({"shape": (1, 3)}, r"weight has the shape \(2, 3\) there and \(1, 3\) here"),
            ({"name": "bias"}, r"bias has the shape None there and \(2, 3\) here"),
        ],
        ids=["shape", "broadcastable", "name"],
    )
    def test_weights_of_another_model_are_refused(self, tmp_path, engine, words):
        """`model.name_or_path` is not part of the identity, because the weights come from the checkpoint."""
        saved(tmp_path)
        engine = FakeEngine(**engine)
        with pytest.raises(UsageError, match=f"another model than `model` describes: {words}"):
            saver(tmp_path, engine).resume("auto")
        assert engine.loaded_step is None


class TestChanged:
    """Checkpoints that another program wrote, with right checksums."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.complex64])
    def test_a_tensor_of_another_type_is_refused(self, tmp_path, dtype):
        engine = FakeEngine()
        engine.tensors["optimizer.weight.step"] = engine.tensors["optimizer.weight.step"].to(dtype)
        run = saver(tmp_path, engine)
        run.save()
        run.finish()
        with pytest.raises(UsageError, match=r"step-00000000 was changed .*weight\.step@ in .* has the type torch\."):
            saver(tmp_path).resume("auto")

    def test_a_parameter_without_state_is_noted(self, tmp_path):
        engine = FakeEngine()
        engine.placements["bias"] = ParameterPlacement("bias", ())
        engine.tensors["model.bias"] = torch.ones(())
        run = saver(tmp_path, engine)
        run.save()
        run.finish()
        assert saver(tmp_path, engine).resume("auto") == [
            "bias had no gradient before step 0: the checkpoint has no state of the optimizer for it"
        ]

    @pytest.mark.parametrize("keeps", [True, False])
    def test_a_lost_state_of_all_parameters_is_noted(self, tmp_path, keeps):
        engine = FakeEngine()
        engine.keeps = keeps
        del engine.tensors["optimizer.weight.step"]
        run = saver(tmp_path, engine)
        run.progress = Progress(4)
        run.save()
        run.finish()
        notes = ["weight had no gradient before step 4: the checkpoint has no state of the optimizer for it"]
        assert saver(tmp_path, engine).resume("auto") == notes * keeps

    @pytest.mark.parametrize(("bad", "skipped", "noted"), [(4, 0, 0), (1, 4, 0), (1, 3, 1), (3, 0, 1)])
    def test_steps_that_were_not_taken_leave_no_state(self, tmp_path, bad, skipped, noted):
        engine = FakeEngine()
        engine.scalars["loss_scaler.skipped_steps"] = skipped
        del engine.tensors["optimizer.weight.step"]
        run = saver(tmp_path, engine)
        run.progress = Progress(4, bad_steps=bad)
        run.save()
        run.finish()
        assert len(saver(tmp_path, engine).resume("auto")) == noted

    def test_a_state_of_another_parameter_is_refused(self, tmp_path):
        engine = FakeEngine()
        engine.tensors["optimizer.bias.step"] = torch.ones(())
        run = saver(tmp_path, engine)
        run.save()
        run.finish()
        with pytest.raises(UsageError, match=r"was changed by another program: .* optimizer for bias, which is not"):
            saver(tmp_path).resume("auto")


class TestAsynchronous:
    def test_later_steps_do_not_change_the_saved_tensors(self, tmp_path, slow_writes):
        engine = FakeEngine()
        run = saver(tmp_path, engine)
        run.progress = Progress(1)
        run.save()
        engine.tensors["model.weight"].fill_(7.0)
        run.progress.step = 2
        slow_writes.set()
        run.finish()
        other = FakeEngine()
        found = saver(tmp_path, other)
        found.resume("auto")
        assert found.progress.step == 1
        assert torch.equal(other.tensors["model.weight"], torch.ones(2, 3))

    def test_is_complete_at_the_first_step_after_it_is_written(self, tmp_path, slow_writes):
        run = saver(tmp_path)
        run.progress = Progress(1)
        run.save()
        run.begin_poll()()
        assert run.tiers[0].store.steps() == []
        slow_writes.set()
        run.tiers[0]._writing[1].wait()
        run.begin_poll()()
        assert run.tiers[0].store.steps() == [1]

    def test_the_next_save_waits_for_the_one_before(self, tmp_path):
        run = saver(tmp_path)
        for step in (1, 2, 3):
            run.progress = Progress(step)
            run.save()
        assert run.tiers[0].store.steps() == [1, 2]
        run.finish()
        assert run.tiers[0].store.steps() == [2, 3]

    def test_not_asynchronous_is_complete_at_once(self, tmp_path):
        run = saver(tmp_path, asynchronous=False)
        run.progress = Progress(1)
        run.save()
        assert run.tiers[0].store.steps() == [1]

    def test_a_failure_comes_with_the_next_step(self, tmp_path, monkeypatch):
        saved(tmp_path, 3)
        run = saver(tmp_path)
        run.progress = Progress(4)
        monkeypatch.setattr("trainer.checkpoint.disk.write_share", _no_room)
        run.save()
        run.tiers[0]._writing[1].wait()
        with pytest.raises(
            TrainerError, match=r"step 4 could not be written .*No space.*last complete one is that of step 3"
        ):
            run.begin_poll()()
        assert sorted(path.name for path in run.tiers[0].store.folder.iterdir()) == ["latest", "step-00000003"]


@pytest.fixture
def slow_writes(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that delays the writing of files until it is set."""
    may_write = threading.Event()

    def wait_and_write(*args: Any) -> WrittenFile:
        assert may_write.wait(30)
        return write_share(*args)

    monkeypatch.setattr("trainer.checkpoint.disk.write_share", wait_and_write)
    return may_write


def _no_room(folder: Path, name: str, tensors: Any) -> WrittenFile:
    raise OSError(28, "No space left on device")


def save_on_ranks(folder: Path, failing_rank: int | None = None, delete: bool = False) -> str:
    run = saver(folder, world_size=2)
    run.progress = Progress(2, 24)
    disk.write_share = _no_room if run._mesh.rank == failing_rank else write_share
    if delete:
        run._mesh.on_rank_zero(lambda: shutil.rmtree(folder))
    try:
        run.save()
        run.finish()
    except TrainerError as error:
        return str(error)
    finally:
        disk.write_share = write_share
    return f"steps {CheckpointStore(folder, 1).steps()}"


def resume_on_ranks(own: Path, shared: Path) -> str:
    """Resume on this rank. Rank 1 uses another folder, like a node without the shared file system."""
    import torch.distributed as dist

    run = saver(shared if dist.get_rank() == 0 else own, world_size=2)
    try:
        run.resume("auto")
    except UsageError as error:
        return str(error)
    return f"step {run.progress.step}"


class TestRanks:
    def test_every_rank_writes_a_file(self, ranks: RankPools, tmp_path):
        assert ranks(2).run(save_on_ranks, tmp_path) == ["steps [2]"] * 2
        names = {path.name for path in (tmp_path / "checkpoints" / "step-00000002").iterdir()}
        assert {share_name(0, 2), share_name(1, 2)} <= names

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_failed_write_of_one_rank_is_reported_on_every_rank(self, ranks: RankPools, tmp_path, rank):
        for message in ranks(2).run(save_on_ranks, tmp_path, rank):
            assert f"could not be written to {tmp_path / 'checkpoints'}: rank {rank}: [Errno 28] No space" in message

    def test_a_deleted_folder_is_reported_on_every_rank(self, ranks: RankPools, tmp_path):
        for message in ranks(2).run(save_on_ranks, tmp_path / "run", None, True):
            assert "could not be written" in message
            assert "restore the folder" in message
        assert not (tmp_path / "run").exists()

    def test_all_go_on_from_the_same_step(self, ranks: RankPools, tmp_path):
        saved(tmp_path)
        assert ranks(2).run(resume_on_ranks, tmp_path, tmp_path) == ["step 4"] * 2

    def test_damage_that_one_rank_finds_is_passed_over_by_all(self, ranks: RankPools, tmp_path):
        saved(tmp_path, step=2)
        saved(tmp_path, step=4)
        newest = tmp_path / "checkpoints" / "step-00000004"
        second = sorted(json.loads((newest / "state.json").read_text())["files"])[1]  # rank 1 of 2 reads it
        content = (newest / second).read_bytes()
        (newest / second).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert ranks(2).run(resume_on_ranks, tmp_path, tmp_path) == ["step 2"] * 2

    def test_a_folder_that_is_not_shared_is_refused_on_every_rank(self, ranks: RankPools, tmp_path):
        saved(tmp_path / "shared")
        for message in ranks(2).run(resume_on_ranks, tmp_path / "own", tmp_path / "shared"):
            assert "`checkpoint.folder` must be one folder for all ranks" in message


LARGER_BERT = {
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": 64,
}
STATE_BYTES = 132.7e6  # weights and two moments in fp32
MEMORY_LAYOUTS: list[dict[str, Any]] = [
    {"strategy": "fsdp", "tensor": 2},
    {"strategy": "ddp"},
]


def save_or_resume(recipe: Recipe, folder: Path, resume: bool) -> int:
    """Save or resume. Return by how many bytes the memory of this rank grew at its peak."""
    with tiny_training(recipe) as training:
        tier = Disk(CheckpointStore(folder, 1), training.mesh, asynchronous=False)
        run = Saver([tier], training.engine, training.mesh, Saved({}))
        if not resume:
            training.steps(1)
            training.mesh.on_rank_zero(tier.store.open)
            run.progress = Progress(1, 12)
        return peak_growth(lambda: run.resume("auto") if resume else run.save())


@pytest.mark.slow
@needs_peak
@pytest.mark.parametrize("parallel", MEMORY_LAYOUTS, ids=str)
def test_each_rank_writes_and_reads_its_share(ranks: RankPools, tmp_path, parallel):
    """No rank holds the full state. `SHOW_MEMORY=1 python -m pytest -s` prints the peaks."""
    recipe = tiny_recipe(model={"config": LARGER_BERT}, parallel=parallel, training={"micro_batch_size": 3})
    saving = ranks(4).run(save_or_resume, recipe, tmp_path, False)
    sizes = [file.stat().st_size for file in sorted(tmp_path.rglob("*.safetensors"))]
    resuming = ranks(4).run(save_or_resume, recipe, tmp_path, True)
    if os.environ.get("SHOW_MEMORY"):
        for what, values in (("files", sizes), ("peak of saving", saving), ("peak of resuming", resuming)):
            print(f"{parallel} {what}: {', '.join(f'{value / 1e6:.1f}' for value in values)} MB")
    assert sum(sizes) == pytest.approx(STATE_BYTES, rel=0.01)
    assert max(sizes) < 1.02 * STATE_BYTES / 4
    assert max(saving) < 0.5 * STATE_BYTES
    # With ddp, each rank needs all moments (two thirds of the state), and reads them one file at a time.
    assert max(resuming) < (2 / 3 + 0.28 if parallel["strategy"] == "ddp" else 0.5) * STATE_BYTES


def test_a_snapshot_copies_one_box_after_the_other():
    """A device needs no memory beside a box that is not contiguous, and the host holds one copy of each."""
    weight = torch.arange(24.0).view(4, 6)
    views = {"rows": weight[1:3], "columns": weight[:, 2:4], "step": torch.tensor(3.0)}
    parts = [TensorPart(name, tuple(view.shape), (Box((0,) * view.dim(), view),)) for name, view in views.items()]
    with _Copies() as copies:
        saved = snapshot(parts)
    assert copies.shapes == [view.shape for view in views.values()]
    expected = {name: view.clone() for name, view in views.items()}
    weight.zero_()  # the next step
    assert [tensor.is_contiguous() for tensor in saved.values()] == [True] * 3
    assert all(torch.equal(copy, view) for copy, view in zip(saved.values(), expected.values(), strict=True))


class _Copies(TorchDispatchMode):
    """The shapes of all tensors that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if not function.is_view:
            self.shapes.append(made.shape)
        return made
