"""The verb `plan`: devices, verdicts, changes that fit, and refusals."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.utils.checkpoint import checkpoint

import trainer
from tests.helpers.training import tiny_recipe
from tests.tools.plan import measured
from tests.tools.plan.measured import LENGTH, SHALLOW_BERT, Measured
from trainer.base import cgroup
from trainer.base.errors import UsageError
from trainer.cli import main
from trainer.models.describe import ModelDescription
from trainer.models.fill import build_model
from trainer.models.place import ModelCut, StageChoice
from trainer.recipe.plan import plan_run
from trainer.recipe.schema import Recipe
from trainer.recipe.strategies import STRATEGIES
from trainer.tools.plan import hardware, reachable, recipe_plan, simulated_step
from trainer.tools.plan.hardware import device_named, known_devices, parse_devices
from trainer.tools.plan.ledger import ACTIVATIONS, CASTS, GRADIENTS, LOSS, MASTER, OPTIMIZER, PARAMETERS
from trainer.tools.plan.recipe_plan import HOST_RESERVED, RESERVED, traffic_by_axis
from trainer.tools.plan.simulated_rank import shapes_only
from trainer.tools.plan.simulated_step import plan_step, planned_model

RANK_VARIABLES = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


SMALL = {"training": {"max_steps": 4, "global_batch_size": 8, "micro_batch_size": 4}}
"""Two microbatches. Plans of more take longer, and `test_truth.py` compares these with measurements."""


def recipe_of(keys: Mapping[str, Any]) -> Recipe:
    return measured.recipe_of({**SMALL, **keys})


def planned(keys: Mapping[str, Any], world_size: int) -> Measured:
    return measured.planned({**SMALL, **keys}, world_size, 0)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file, rows = tmp_path / "recipe.json", tmp_path / "rows.csv"
    rows.write_text("text,label\ngood,1\n")
    keys = {"data": {"source": "files", "train": str(rows), "max_length": LENGTH}}
    file.write_text(recipe_of(keys).model_dump_json(exclude_defaults=True))
    return file


class TestDevices:
    def test_a_number_and_a_memory(self):
        found = parse_devices("8x80GiB")
        assert (found.number, found.memory_bytes) == (8, 80 * 2**30)
        assert parse_devices("12.5GB").memory_bytes == 12_500_000_000

    @pytest.mark.parametrize(
        ("name", "gigabytes", "known"),
        [
            ("NVIDIA H100 80GB HBM3", None, "H100"),
            ("NVIDIA A100-SXM4-80GB", None, "A100-80"),
            ("NVIDIA A100-PCIE-40GB", 42, "A100-40"),
            ("NVIDIA A100", 84, "A100-80"),
            ("NVIDIA A100", None, None),
            ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 10, None),
            ("NVIDIA GeForce RTX 4090", 25, "RTX-4090"),
            ("NVIDIA GeForce RTX 4090 Laptop GPU", 17, None),
            ("NVIDIA GeForce RTX 4090 D", 25, None),
            ("NVIDIA GeForce RTX 3090", 25, "RTX-3090"),
            ("NVIDIA GeForce RTX 3090 Ti", 25, None),
            ("NVIDIA RTX 6000 Ada Generation", 51, "RTX-6000-Ada"),
            ("AMD Instinct MI300X", 206, "MI300X"),
            ("NVIDIA H100 PCIe", 85, "H100-PCIE"),
            ("NVIDIA H100 NVL", 100, "H100-NVL"),
            ("cpu", None, "CPU"),
        ],
    )
    def test_torchs_name_finds_a_file(self, name: str, gigabytes: int | None, known: str | None):
        assert device_named(name, gigabytes and gigabytes * 10**9) == known

    @pytest.mark.parametrize(
        ("written", "known"),
        [
            ("RTX4090", "RTX-4090"),
            ("rtx 4090", "RTX-4090"),
            ("4090", "RTX-4090"),
            ("a100_80", "A100-80"),
            ("NVIDIA H100 80GB HBM3", "H100"),
            ("l40s", "L40S"),
            ("h100", "H100"),
            (" H100 pcie ", "H100-PCIE"),
            ("6000 ada", "RTX-6000-Ada"),
            ("mi300", "MI300X"),
            ("a100 80gb", "A100-80"),
        ],
    )
    def test_a_name_may_be_written_as_people_do(self, written: str, known: str):
        assert parse_devices(f"8x{written}").name == known

    def test_every_file_has_a_memory_and_a_source(self):
        assert len(known_devices()) > 33
        for name in known_devices():
            devices = parse_devices(f"2x{name.lower()}")
            assert devices.is_shared or devices.memory_bytes > 10 * 10**9
            assert devices.machine
            figures = devices.machine.figures
            assert {*figures["sources"]} == {*figures} - {"sources", "device"}

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("8xA1000", "did you mean A100-80 or"),
            ("8xA100", "did you mean A100-40 or A100-80. Known"),
            ("8 x v100", "did you mean V100-16 or V100-32. Known"),
            ("2x6000", "did you mean RTX-6000-Ada or RTX-PRO-6000. Known"),
            ("8xcuda", "known as 'cuda'; known devices are"),
            ("0x80GiB", "write a number"),
            ("", "write a number"),
            ("4xToaster", "known devices are"),
        ],
    )
    def test_others_are_refused(self, text: str, message: str):
        with pytest.raises(UsageError, match=message):
            parse_devices(text)


def test_it_fits(recipe: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", str(recipe), "--gpus", "1x12GB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (rank,) = found["ranks"]
    assert found["fits"]
    assert not found["changes"]
    assert rank["resident"][OPTIMIZER] == pytest.approx(2 * rank["resident"][PARAMETERS], rel=5e-3)  # and tables
    assert rank["peak_module"].startswith("bert.encoder.layer.1")


@pytest.mark.slow
def test_the_host_has_a_verdict(recipe: Path, capsys: pytest.CaptureFixture[str]):
    words = ["plan", str(recipe), "--gpus", "2x12GB", "--host-memory"]
    assert main([*words, "5GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (rank,) = found["ranks"]
    state = 3 * rank["resident"][PARAMETERS]  # with two moments; both ranks copy half of it to save it
    assert found["host_needed_bytes"] - 2 * HOST_RESERVED == pytest.approx(state, rel=1e-3)
    assert state > 2 * rank["host_bytes_at_start"]
    assert found["fits"]
    assert main([*words, "4GiB", "--changes", "0"]) == 0  # the next test shows changes
    shown = capsys.readouterr().out
    assert "start fewer ranks on each machine" in shown
    assert "It does not fit the host; a device has enough: " in shown
    assert main([*words, "5"]) == 2
    assert "`--host-memory` is '5'" in capsys.readouterr().err


def test_ranks_of_a_cpu_share_one_memory_with_their_python(recipe: Path, capsys: pytest.CaptureFixture[str]):
    words = ["plan", str(recipe), "--gpus", "2xCPU", "--changes", "0", "--host-memory"]
    assert main([*words, "5GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (rank,) = found["ranks"]
    held = sum(rank["resident"].values())
    saving = held + (rank["resident"][PARAMETERS] + rank["resident"][OPTIMIZER]) / 2
    assert found["needed_bytes"] - HOST_RESERVED == pytest.approx(max(rank["peak_bytes"], saving), rel=1e-3)
    assert (found["fits"], found["memory_bytes"], found["host_memory_bytes"]) == (True, 5 * 2**29, None)
    assert main([*words, "4GiB"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("fit") == shown.count("It does not fit: ") == 1
    assert "too much (2.00 GiB for the Python of each rank are included)" in shown


@pytest.mark.slow
def test_a_model_that_is_loaded_whole_counts_whole_on_the_host(monkeypatch: pytest.MonkeyPatch):
    plan = plan_run(recipe_of({"parallel": {"pipeline": {"stages": 2}}}), 2)
    loaded, instantiate = plan_step(plan, 0, LENGTH).loaded, ModelDescription.instantiate

    def with_a_tensor(described: ModelDescription) -> nn.Module:
        model = instantiate(described)
        model.whole = torch.zeros(1)
        return model

    monkeypatch.setattr(ModelDescription, "instantiate", with_a_tensor)
    built = build_model(planned_model(plan), ModelCut(choice=StageChoice(0, 2)))
    assert any("every rank held the whole model" in note for note in built.notes)
    whole = sum(4 * parameter.numel() for parameter in planned_model(plan).on_meta().parameters())
    assert plan_step(plan, 0, LENGTH).loaded == whole > loaded


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.nightly)])
@pytest.mark.slow
def test_checkpoints_in_memory_count_on_the_host(strategy: str, recipe: Path, capsys: pytest.CaptureFixture[str]):
    keys = [f"parallel.strategy={strategy}", "model.config.num_hidden_layers=8", "--gpus", "2x12GB", "--nodes", "2"]
    words = ["plan", str(recipe), *keys, 'checkpoint.memory={"every": "3 steps"}', "--host-memory"]
    assert main([*words, "5GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (rank,) = found["ranks"]
    state = 3 * rank["resident"][PARAMETERS]  # with two moments; of 4 ranks under ddp, of this one under fsdp
    share = state / 4 if strategy == "ddp" else state
    kept = found["host_bytes_of_checkpoints_in_memory"]
    assert kept == pytest.approx(2 * 4 * share, rel=1e-3), "two checkpoints, of two ranks and two copies"
    copies = found["host_needed_bytes"] - 2 * HOST_RESERVED - kept
    assert copies >= 0.999 * 2 * 2 * share, "two copies of a share to write"
    assert main([*words, f"{int(1.9 * kept) / 2**20:.1f}MiB", "--changes", "0"]) == 0
    shown = capsys.readouterr().out
    assert "on each host for 2 checkpoints in memory, with the copies of another host's shares" in shown
    assert "/dev/shm needs" in shown
    assert "half of the host's memory" in shown


def test_the_ranks_of_a_measured_machine_share_its_memory(tmp_path: Path):
    file = tmp_path / "here.json"
    figures = json.loads((Path(hardware.__file__).parent / "hardware" / "CPU.json").read_text())
    file.write_text(json.dumps(figures | {"measured": {}}))
    assert parse_devices(f"4x{file}").memory_bytes * 4 == parse_devices(f"1x{file}").memory_bytes


@pytest.mark.parametrize(("limit", "gibibytes"), [("max", 24), (str(6 * 2**30), 6)])
def test_a_cpu_has_the_memory_of_this_machine(limit: str, gibibytes: int, monkeypatch: pytest.MonkeyPatch):
    files = {"/proc/self/cgroup": "0::/box", "/sys/fs/cgroup/box/memory.max": limit}
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=24 * 2**30))
    monkeypatch.setattr(hardware, "machine_memory_bytes", lambda: cgroup.machine_memory_bytes(files.get))
    two = parse_devices("2xCPU")
    assert two.memory_bytes == gibibytes * 2**30 // 2
    assert (two.numbered(8).number, two.numbered(8).memory_bytes) == (8, gibibytes * 2**30 // 8)
    assert parse_devices("2xA10").numbered(8).memory_bytes == parse_devices("A10").memory_bytes


@pytest.mark.slow
def test_files_of_rows_need_not_exist(recipe: Path, capsys: pytest.CaptureFixture[str]):
    (recipe.parent / "rows.csv").unlink()
    assert main(["plan", str(recipe), "--gpus", "1xA100-80"]) == 0
    assert "fp32: A100-80 multiplies matrices faster with precision=bf16 up to 16 times and tf32=true" in (
        capsys.readouterr().out
    )
    assert main(["check", str(recipe), "--quick"]) == 2
    keys = json.loads(recipe.read_text())
    del keys["data"]
    recipe.write_text(json.dumps(keys))
    assert main(["plan", str(recipe), "--gpus", "1xA100-80", "data.max_length=64"]) == 0
    assert "64 tokens a text" in capsys.readouterr().out
    assert main(["check", str(recipe), "--quick"]) == 2
    assert "`data` is missing" in capsys.readouterr().err


def test_a_configuration_that_cannot_be_reached_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def wait(*_: object) -> None:
        time.sleep(3)

    monkeypatch.setattr(reachable.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(reachable, "getproxies", dict)
    monkeypatch.setattr(reachable.socket, "create_connection", wait)
    begun = time.monotonic()
    assert main(["plan", "bert_base_mrpc", "model.name_or_path=owner/unknown", "--gpus", "1xT4"]) == 2
    assert time.monotonic() - begun < 2.5
    assert "describe the model in `model.config`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("precision=bf16", "`precision` is bf16, which T4 does not compute in; use fp16 or fp32"),
        ("data.max_length=65", "at most the 64 tokens that the model has positions for, but is 65"),
    ],
)
def test_a_plan_is_refused_if_the_run_would_be(recipe: Path, capsys: pytest.CaptureFixture[str], word, message):
    assert main(["plan", str(recipe), "--gpus", "1xT4", word]) == 2
    assert message in capsys.readouterr().err


def test_no_change_is_proposed_twice_or_is_set_already():
    settings = {"precision": "bf16", "activation_checkpointing": "full", "training": {"micro_batch_size": 1}}
    found = list(recipe_plan.candidates(plan_run(recipe_of(settings), 2)))
    assert len(found) == len(set(found))
    assert not any(word in ("precision=bf16", "activation_checkpointing=full") for words in found for word in words)


@pytest.mark.slow
def test_changes_that_fit_are_shown(recipe: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["plan", str(recipe), "--length", "64", "training.micro_batch_size=8", "--gpus"]
    assert main([*arguments, "1x12GB", "--json"]) == 0
    needed = json.loads(capsys.readouterr().out)["needed_bytes"]
    assert main([*arguments, f"1x{(needed - 2**20) / 2**20:.1f}MiB"]) == 0
    shown = capsys.readouterr().out
    assert "It does not fit" in shown
    assert main([*arguments, f"1x{(needed - 2**20) / 2**20:.1f}MiB", "--changes", "0"]) == 0
    assert "change" not in capsys.readouterr().out
    below = shown.split("These changes make it fit")[1].splitlines()[1:]
    changes = list(takewhile(lambda line: line.startswith("  "), below))
    overrides = [line.split("  ")[1] for line in changes]
    assert 1 <= len(overrides) <= 3
    # it replaces the user's own override of the key
    assert any(override.startswith("training.micro_batch_size=") for override in overrides)
    own = arguments.pop(arguments.index("training.micro_batch_size=8"))
    for override in overrides:
        words = override.split() if own.split("=")[0] in override else [own, *override.split()]
        assert main([*arguments, f"1x{(needed - 2**20) / 2**20:.1f}MiB", *words]) == 0
        assert "It fits" in capsys.readouterr().out


@pytest.mark.slow
def test_many_microbatches_cost_no_more_time_but_all_count():
    few, many = (
        plan_step(plan_run(recipe_of({"training": {"global_batch_size": rows, "micro_batch_size": 2}}), 1), 0, LENGTH)
        for rows in (6, 40)
    )
    kind = torch.float32
    assert many.totals.flops[kind] * 6 == few.totals.flops[kind] * 40
    assert many.peak.num_bytes == pytest.approx(few.peak.num_bytes, rel=0.01)


WEIGHTS = {"no": 0.5, "yes": 2.0, "perhaps": 1.0}


@pytest.mark.parametrize(
    ("task", "similar"),
    [
        ({"class_weights": WEIGHTS}, {"labels": [*WEIGHTS]}),
        pytest.param({"class_weights": "balanced"}, {}, marks=pytest.mark.slow),
        pytest.param(
            {"class_weights": WEIGHTS, "labels": [*WEIGHTS]}, {"labels": [*WEIGHTS]}, marks=pytest.mark.nightly
        ),
        pytest.param({"type": "embedding", "mask_duplicates": True}, {"type": "embedding"}, marks=pytest.mark.slow),
    ],
)
def test_values_of_the_data_are_not_needed(task: dict[str, Any], similar: dict[str, Any]):
    """Weights of classes and numbers of equal texts take little beside the same training without them."""
    found, other = (plan_step(plan_run(recipe_of({"task": keys}), 1), 0, LENGTH) for keys in (task, similar))
    assert found.resident[PARAMETERS] == other.resident[PARAMETERS]
    assert 0 <= found.peak.num_bytes - other.peak.num_bytes < 4096


@pytest.mark.parametrize(("cuda", "kind"), [(True, torch.float32), (False, torch.bfloat16)])
def test_autocast_has_the_types_of_the_device(cuda: bool, kind: torch.dtype):
    with shapes_only(cuda), torch.autocast("cpu", dtype=torch.bfloat16):
        scores = F.linear(torch.empty(2, 3), torch.empty(4, 3))
        assert scores.dtype == torch.bfloat16
        assert F.softmax(scores, dim=-1).dtype == F.layer_norm(scores, (4,)).dtype == kind


def test_an_operation_on_values_is_refused_by_name():
    with pytest.raises(UsageError, match=r"its operation aten\.nonzero"), shapes_only(cuda=True):
        torch.ones(3).nonzero()


def test_recomputed_operations_have_the_types_of_the_device():
    seen = []

    class Scores(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            scores = F.softmax(F.linear(inputs, inputs), dim=-1)
            seen.append(scores.dtype)
            return scores * scores

    with shapes_only(cuda=True), torch.autocast("cpu", dtype=torch.bfloat16):
        checkpoint(Scores(), torch.empty(2, 3, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen == [torch.float32, torch.float32]


@pytest.mark.parametrize(
    "strategy",
    [
        "fsdp",
        pytest.param("zero2", marks=pytest.mark.nightly),
        pytest.param("zero3", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.slow
def test_one_rank_shards_nothing(strategy: str):
    alone, sharded = (planned({"parallel": {"strategy": name}}, 1) for name in ("ddp", strategy))
    assert sharded.resident > 0.95 * alone.resident


def test_a_share_of_a_checkpoint_is_no_work_of_a_step():
    plan = plan_run(recipe_of({}), 2)
    found = plan_step(plan, 0, LENGTH).totals.work
    with mock.patch.object(simulated_step, "_share", return_value=0):
        assert plan_step(plan, 0, LENGTH).totals.work == found


def test_fsdp_shards_the_state_of_ddp():
    keys = {"training": {"global_batch_size": 64, "micro_batch_size": 4}}
    ddp, fsdp = (
        plan_step(plan_run(recipe_of({**keys, "parallel": {"strategy": strategy}}), 16), 3, LENGTH).resident
        for strategy in ("ddp", "fsdp")
    )
    assert fsdp[OPTIMIZER] == pytest.approx(ddp[OPTIMIZER] / 16, rel=0.05)
    assert ddp[GRADIENTS] == ddp[PARAMETERS]  # the buckets of DDP stay
    assert fsdp.get(GRADIENTS, 0) < fsdp[PARAMETERS] / 100


@pytest.mark.parametrize(
    ("strategy", "offload", "moved"),
    [
        ("fsdp", "parameters", (PARAMETERS, OPTIMIZER)),
        pytest.param("zero2", "optimizer", (MASTER, OPTIMIZER), marks=pytest.mark.nightly),
        pytest.param("zero3", "parameters", (PARAMETERS, MASTER, OPTIMIZER)),
    ],
)
@pytest.mark.slow
def test_offload_moves_memory_to_the_host(strategy: str, offload: str, moved: Sequence[str]):
    on_device, split = (
        plan_step(plan_run(recipe_of({"parallel": {"strategy": strategy, "offload": where}}), 2), 0, LENGTH)
        for where in ("none", offload)
    )
    assert not on_device.host
    for component in moved:
        assert split.host[component] == on_device.resident[component]
        assert component not in split.resident
    # The host holds the sharded gradients too: all of them at the end of the backward pass.
    assert split.host[GRADIENTS] >= on_device.resident.get(MASTER, on_device.resident.get(PARAMETERS, 0)) * 0.99
    assert split.peak.num_bytes < on_device.peak.num_bytes
    assert any("gather" in operation for operation, _ in traffic_by_axis(on_device)), "a skipped step gathers nothing"


def sent(operation: str, axis: str, world_size: int = 2, **keys: Any) -> int:
    """Return the bytes of one kind of collective in a step of the first rank."""
    return planned(keys, world_size).traffic[operation, axis][1]


@pytest.mark.parametrize(
    ("parallel", "operation", "axis"),
    [
        pytest.param({"strategy": "ddp"}, "allreduce", "dp", marks=pytest.mark.nightly),
        ({"strategy": "fsdp"}, "reduce_scatter_base", "dp"),
        pytest.param({"strategy": "ddp", "pipeline": {"stages": 2}}, "allreduce", "dp", marks=pytest.mark.nightly),
    ],
    ids=["ddp", "fsdp", "pipeline"],
)
@pytest.mark.slow
def test_gradients_in_16_bits_take_half_of_the_bytes(parallel: dict[str, Any], operation: str, axis: str):
    ranks = 4 if "pipeline" in parallel else 2
    whole, halved = (
        sent(operation, axis, ranks, parallel={**parallel, "communication": {"gradients": kind}})
        for kind in ("fp32", "bf16")
    )
    assert halved == pytest.approx(whole / 2, rel=0.03)  # loss and norm are summed in fp64


@pytest.mark.slow
def test_gradients_of_tied_weights_are_summed_over_stages():
    keys = {"task": {"type": "masked_lm", "text": "text"}, "parallel": {"pipeline": {"stages": 2}}}
    assert sent("allreduce", "all", **keys) == SHALLOW_BERT["vocab_size"] * SHALLOW_BERT["hidden_size"] * 4


@pytest.mark.slow
def test_partial_gradients_of_tensor_ranks_take_half_of_the_bytes():
    whole, halved = (
        sent("allreduce", "tp", parallel={"tensor": 2, "sequence": True, "communication": {"gradients": kind}})
        for kind in ("fp32", "bf16")
    )
    # Each layer has two norms with weight and bias, and two biases of row-parallel layers.
    number = SHALLOW_BERT["num_hidden_layers"] * 6 * SHALLOW_BERT["hidden_size"]
    assert whole - halved == 2 * number


@pytest.mark.parametrize(
    ("parallel", "operation", "axis"),
    [
        ({"strategy": "ddp", "pipeline": {"stages": 2}}, "send", "pp"),
        ({"strategy": "ddp", "tensor": 2, "sequence": True}, "reduce_scatter_base", "tp"),
    ],
    ids=["stages", "positions"],
)
@pytest.mark.slow
def test_hidden_states_in_16_bits_take_half_of_the_bytes(parallel: dict[str, Any], operation: str, axis: str):
    whole, halved = (sent(operation, axis, parallel=parallel, precision=kind) for kind in ("fp32", "bf16"))
    assert halved * 2 == whole


def test_python_gives_the_plan_of_the_command(recipe: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", str(recipe), "--gpus", "2xA100-40", "--length", "12", "--link", "pcie", "--json"]) == 0
    made = trainer.plan(recipe, "2xA100-40", length=12, link="pcie")
    assert json.loads(capsys.readouterr().out)["needed_bytes"] == made.needed
    with pytest.raises(trainer.LaunchError, match="is a rank"), mock.patch.dict(os.environ, RANK_VARIABLES):
        trainer.plan(recipe, "2xA100-40")


LLAMA_7B = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


@pytest.mark.slow
def test_llama_7b_in_4_bits_fits_24_gb():
    """2,048 tokens, a microbatch of one row, LoRA of rank 16, all layers recomputed."""
    model = {"config": LLAMA_7B, "adapter": {"type": "lora", "rank": 16}, "quantization": "nf4"}
    training = {"global_batch_size": 1, "micro_batch_size": 1, "max_steps": 1}
    task = {"type": "causal_lm", "text": "text"}
    how = {"precision": "bf16", "activation_checkpointing": "full"}
    recipe = tiny_recipe(task=task, model=model, training=training, schedule={"warmup": 0}, **how)
    peak = plan_step(plan_run(recipe, 1, 1), 0, length=2048).peak
    quantized = 32 * (4 * 4096**2 + 3 * 4096 * 11_008)  # weights of the layers
    adapters = 32 * 16 * (8 * 4096 + 3 * (4096 + 11_008))
    head, others = 32_000 * 4096, 32_000 * 4096 + 65 * 4096  # the head in 16 bits; the embedding and norms
    stored = quantized // 2 + quantized // 64 + quantized // 64 // 256 * 4 + 2 * head + 4 * (adapters + others)
    found = peak.by_component
    assert found[PARAMETERS] == pytest.approx(stored, rel=1e-3)
    assert found[OPTIMIZER] == pytest.approx(8 * adapters, rel=1e-3)
    assert found[CASTS] >= 2 * 4096 * 11_008  # a dequantised weight
    assert found[ACTIVATIONS] >= 32 * 2048 * 4096 * 2  # the inputs of the layers
    assert found[LOSS] < 2048 * 32_000 * 2 / 8  # blocks of the vocabulary
    assert peak.num_bytes + RESERVED < 24e9


def test_torch_logs_no_traceback_before_the_error(monkeypatch: pytest.MonkeyPatch):
    described = SimpleNamespace(config=SimpleNamespace(model_type="other"))
    monkeypatch.setattr(simulated_step, "planned_model", lambda plan: described)
    records: list[logging.LogRecord] = []
    monkeypatch.setattr(fake_tensor.log, "handle", records.append)
    plan = plan_run(recipe_of({}), 1)
    with (
        pytest.raises(UsageError, match="cannot simulate a model of type 'other': Expected"),
        simulated_step._explained(plan),
        fake_tensor.FakeTensorMode(),
    ):
        torch._grouped_mm(torch.ones(2, 8), torch.ones(1, 8, 8), torch.tensor([2], dtype=torch.int32))
    assert not records


@pytest.mark.parametrize("change", [{"package": "apex"}, {"builder": lambda *_: SimpleNamespace()}], ids=" ".join)
def test_an_engine_of_another_package_is_refused_by_name(
    change: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STRATEGIES, "ddp", replace(STRATEGIES["ddp"], **change))
    with pytest.raises(UsageError, match=r"engines of trainer and DeepSpeed, but `parallel.strategy` ddp has another"):
        planned({}, 2)
