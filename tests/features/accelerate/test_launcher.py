"""Variables of accelerate launch: its ranks, and flags that contradict a recipe."""

from __future__ import annotations

import sys

import pytest

from tests.helpers import processes
from tests.helpers.processes import ROOT
from tests.launch.test_local import program
from tests.ranks.test_environment import RANKS, TORCHRUN, assert_is_a_rank, assert_is_no_rank
from trainer.base.errors import LaunchError, UsageError
from trainer.ranks.environment import detect

ACCELERATE = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}
MPI = {f"OMPI_COMM_WORLD_{name}": RANKS[name] for name in ("RANK", "LOCAL_RANK")} | {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "ACCELERATE_USE_CPU": "True",
}


@pytest.mark.parametrize(("launcher", "variables"), [("accelerate", TORCHRUN | ACCELERATE), ("mpirun", MPI)])
def test_its_ranks_are_those_of_torchrun_or_mpirun(launcher, variables):
    assert_is_a_rank(launcher, variables)


def test_a_single_process_is_no_rank():
    assert_is_no_rank("accelerate-single", ACCELERATE | {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1"})


def test_garbage_is_refused_by_name():
    with pytest.raises(LaunchError, match="OMPI_COMM_WORLD_RANK must be below OMPI_COMM_WORLD_SIZE"):
        detect(MPI | {"OMPI_COMM_WORLD_SIZE": "3"})


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, ["`precision` is bf16", "--mixed_precision fp16"]),
        ({"ACCELERATE_USE_FSDP": "true"}, ["`parallel.strategy` is ddp", "--use_fsdp"]),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, ["`parallel.strategy` is ddp", "--use_deepspeed"]),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, ["--use_megatron_lm"]),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, ["--dynamo_backend inductor"]),
    ],
)
def test_a_launcher_that_contradicts_the_recipe_is_refused(variables, words):
    environment = detect(TORCHRUN | ACCELERATE | variables)
    with pytest.raises(UsageError) as error:
        environment.feature.check("bf16", "ddp", {})
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("variables", "strategy"),
    [({}, "ddp"), ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "ddp"), ({"ACCELERATE_USE_FSDP": "true"}, "hsdp")],
)
def test_defaults_and_agreement_are_no_contradiction(variables, strategy):
    detect(TORCHRUN | ACCELERATE | variables).feature.check("bf16", strategy, {})


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"ACCELERATE_USE_CPU": "True"}, ["number is unknown", "--processes"]),
        ({"ACCELERATE_USE_CPU": "True", "ACCELERATE_MIXED_PRECISION": "bf16"}, ["`precision` is fp32", "bf16"]),
    ],
)
def test_contradictions_are_refused_before_any_start(variables, words):
    ended = program("report", **variables)
    assert ended.returncode == 2
    assert ended.stdout == ""
    for word in words:
        assert word in ended.stderr


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        (["--num_processes", "2"], 2),
        pytest.param(["--num-processes=2"], 2, marks=pytest.mark.nightly),
        pytest.param(["--num_processes", "1"], 1, marks=pytest.mark.nightly),
        ([], 1),
    ],
)
@pytest.mark.slow
def test_accelerate_on_cpu_gets_the_ranks_it_was_asked_for(flags, ranks):
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", *flags]
    ended = processes.run([*launch, ROOT / "tests" / "launch" / "program.py", "report"])
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count(f" of {ranks}, started by") == ranks
    assert ("starting them here" in ended.stderr) == (ranks == 2)


@pytest.mark.slow
def test_accelerate_on_several_machines_without_ranks_is_refused():
    flags = ["--cpu", "--num_machines", "2", "--num_processes", "2", "--machine_rank", "0"]
    meeting = ["--main_process_ip", "127.0.0.1", "--main_process_port", "29511"]
    launch = [sys.executable, "-m", "accelerate.commands.launch", *flags, *meeting]
    ended = processes.run([*launch, ROOT / "tests" / "launch" / "program.py", "report"])
    assert ended.returncode != 0
    assert "several machines; add --multi_gpu" in ended.stderr
