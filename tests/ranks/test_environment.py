"""Telling launchers apart by the variables that they really set, and refusing variables that make no sense."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from trainer.base.errors import LaunchError, UsageError
from trainer.ranks.environment import (
    LaunchEnvironment,
    cache_folder,
    check_agrees,
    detect,
    first_host,
    threads_per_rank,
)

RANKS = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
TORCHRUN = RANKS | {"TORCHELASTIC_RUN_ID": "none", "ROLE_NAME": "default", "GROUP_RANK": "1"}
DEEPSPEED = {name: value for name, value in RANKS.items() if name != "LOCAL_WORLD_SIZE"} | {
    "LOCAL_SIZE": "2",
    "CROSS_RANK": "1",
    "CROSS_SIZE": "2",
}
ACCELERATE = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}
JOB = {"SLURM_JOB_ID": "200505", "SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}
TASK = JOB | {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
STEP = TASK | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASK_PID": "9",
}
MPI = {f"OMPI_COMM_WORLD_{name}": RANKS[name] for name in ("RANK", "LOCAL_RANK")} | {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "ACCELERATE_USE_CPU": "True",
}


def place(environment: LaunchEnvironment) -> tuple[int, int, int, int]:
    return environment.rank, environment.local_rank, environment.world_size, environment.local_world_size


@pytest.mark.parametrize(
    ("launcher", "variables"),
    [
        ("torchrun", TORCHRUN),
        ("accelerate", TORCHRUN | ACCELERATE),
        ("deepspeed", DEEPSPEED),
        ("variables", RANKS),
        ("srun", STEP),
        ("srun", TASK),  # set by hand, without a step
        ("mpirun", MPI),
        ("torchrun", TORCHRUN | STEP),  # one torchrun per node, started by srun
    ],
)
def test_each_launcher_is_known_by_its_variables(launcher, variables):
    environment = detect(variables)
    assert environment.launcher == launcher
    assert place(environment) == (3, 1, 4, 2)
    assert environment.has_ranks


@pytest.mark.parametrize(
    ("launcher", "variables"),
    [
        ("none", {}),
        ("none", {"MASTER_ADDR": "node0"}),
        ("none", JOB),  # the shell of salloc
        ("none", STEP | {"SLURM_STEP_ID": "4294967290"}),  # its interactive step
        ("none", STEP | {"SLURM_PTY_PORT": "34889"}),  # srun --pty bash
        ("none", STEP | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}),
        ("accelerate-single", ACCELERATE | {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1"}),
        ("sbatch", TASK | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_TASK_PID": "9"}),
        ("none", TASK | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_TASK_PID": "9"}),
    ],
)
def test_a_process_without_a_rank_is_no_rank(launcher, variables):
    environment = detect(variables)
    assert environment.launcher == launcher
    assert environment.rank == 0
    assert not environment.has_ranks


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (TORCHRUN | {"RANK": "x"}, ["RANK", "'x'"]),
        (TORCHRUN | {"RANK": "-1"}, ["RANK", "'-1'"]),
        (TORCHRUN | {"RANK": ""}, ["RANK", "''"]),
        (TORCHRUN | {"WORLD_SIZE": "2.0"}, ["WORLD_SIZE", "'2.0'"]),
        (TORCHRUN | {"RANK": "4"}, ["RANK must be below WORLD_SIZE", "4"]),
        (TORCHRUN | {"LOCAL_RANK": "2"}, ["LOCAL_RANK must be below LOCAL_WORLD_SIZE"]),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, ["LOCAL_WORLD_SIZE must be at most WORLD_SIZE, which is 4, but is 8"]),
        (TORCHRUN | {"MASTER_PORT": "0"}, ["MASTER_PORT", "65535"]),
        ({"RANK": "0"}, ["RANK set", "WORLD_SIZE"]),
        ({"LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, ["LOCAL_RANK set", "WORLD_SIZE"]),
        ({name: value for name, value in RANKS.items() if name != "MASTER_ADDR"}, ["MASTER_ADDR not set"]),
        ({name: value for name, value in STEP.items() if name != "SLURM_LOCALID"}, ["SLURM_LOCALID"]),
        ({name: value for name, value in TASK.items() if name != "SLURM_JOB_NODELIST"}, ["SLURM_JOB_NODELIST"]),
        (STEP | {"SLURM_PROCID": "4"}, ["SLURM_PROCID must be below SLURM_STEP_NUM_TASKS"]),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "two"}, ["SLURM_STEP_TASKS_PER_NODE", "two"]),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, ["must add up to SLURM_STEP_NUM_TASKS, which is 4", "2(x3)"]),
        (STEP | {"SLURM_NODEID": "2"}, ["SLURM_NODEID"]),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "3,1"}, ["SLURM_LOCALID must be below", "which is 1"]),
        (MPI | {"OMPI_COMM_WORLD_SIZE": "3"}, ["OMPI_COMM_WORLD_RANK must be below OMPI_COMM_WORLD_SIZE"]),
    ],
)
def test_garbage_is_refused_by_name(variables, words):
    with pytest.raises(LaunchError) as error:
        detect(variables)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[01-03,07]", "node01"),
        ("node[07,01-03]", "node07"),
        ("login,node[01-03]", "login"),
        ("gpu-a[3-4]-ib,gpu-b1", "gpu-a3-ib"),
        ("10.0.0.1", "10.0.0.1"),
    ],
)
def test_the_first_host_of_a_node_list(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize("nodes", ["", "node[01-03", "[01-03]", "node]", ","])
def test_a_broken_node_list_is_refused(nodes):
    with pytest.raises(LaunchError, match="SLURM_JOB_NODELIST"):
        first_host(nodes)


def test_slurm_ranks_meet_where_all_can_derive_it():
    environment = detect(STEP)
    assert environment.master_addr == "gpu07"
    assert 15000 <= environment.master_port < 30000
    assert detect(STEP | {"SLURM_PROCID": "2", "SLURM_LOCALID": "0"}).master_port == environment.master_port
    assert detect(STEP | {"SLURM_STEP_ID": "1"}).master_port != environment.master_port
    assert detect(STEP | {"MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "4000"}).master_port == 4000
    assert detect(STEP | {"SLURM_JOB_NODELIST": "gpu07"}).master_addr == "127.0.0.1"


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
        check_agrees(environment, precision="bf16", strategy="ddp")
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("variables", "strategy"),
    [({}, "ddp"), ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "ddp"), ({"ACCELERATE_USE_FSDP": "true"}, "hsdp")],
)
def test_defaults_and_agreement_are_no_contradiction(variables, strategy):
    check_agrees(detect(TORCHRUN | ACCELERATE | variables), precision="bf16", strategy=strategy)


def test_threads_are_divided_unless_set(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    four = LaunchEnvironment("trainer", world_size=4, local_world_size=4)
    assert threads_per_rank(four, {}) == 4
    assert threads_per_rank(replace(four, world_size=32, local_world_size=32), {}) == 1
    assert threads_per_rank(four, {"OMP_NUM_THREADS": "2"}) is None


def test_a_task_of_slurm_is_one_rank_or_a_launcher_of_several(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    one_task = {"SLURM_CPUS_PER_TASK": "16", "SLURM_NTASKS": "1"}
    for launcher in ("trainer", "torchrun"):
        assert threads_per_rank(LaunchEnvironment(launcher, world_size=4, local_world_size=4), one_task) == 4
    # two nodes, one task on each
    tasks = {"SLURM_CPUS_PER_TASK": "16", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "2"}
    assert threads_per_rank(LaunchEnvironment("torchrun", world_size=8, local_world_size=4), tasks) == 4
    tasks = {"SLURM_CPUS_PER_TASK": "8", "SLURM_STEP_NUM_TASKS": "4"}
    assert threads_per_rank(LaunchEnvironment("srun", world_size=4, local_world_size=4), tasks) == 8


def test_the_cache_lies_where_the_user_keeps_caches():
    assert cache_folder({"XDG_CACHE_HOME": "/scratch/me"}) == Path("/scratch/me/trainer")
    assert cache_folder({}) == cache_folder({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "trainer"
    assert cache_folder({"HOME": "/users/me"}) == Path("/users/me/.cache/trainer")


def test_a_missing_home_names_the_variable_to_set(monkeypatch):
    def without_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", without_home)
    with pytest.raises(UsageError, match="set XDG_CACHE_HOME or HOME"):
        cache_folder({})


class TestNodesThatJoinAndLeave:
    @pytest.mark.parametrize(
        ("words", "variable", "nodes"),
        [
            (["--nnodes", "1:4"], "", (1, 4)),
            (["--nnodes=2:8"], "1:4", (2, 8)),
            (["--nnodes", "3"], "1:4", None),
            (["--nnodes", "4:4"], "", None),
            ([], "1:4", (1, 4)),
            ([], "", None),
        ],
    )
    def test_the_range_is_that_of_torchrun(self, monkeypatch, words, variable, nodes):
        def refused() -> list[str]:
            raise psutil.AccessDenied

        of_root = SimpleNamespace(cmdline=refused, parent=lambda: None)
        command = ["python", "torchrun", *words, "-m", "trainer", "run", "R"]
        torchrun = SimpleNamespace(cmdline=lambda: command, parent=lambda: of_root)
        between = SimpleNamespace(cmdline=refused, parent=lambda: torchrun)
        monkeypatch.setattr(psutil.Process, "parent", lambda process: between)
        assert detect(TORCHRUN | {"PET_NNODES": variable}).elastic_nodes == nodes

    def test_another_launcher_has_a_fixed_number(self):
        assert detect(RANKS | {"PET_NNODES": "1:4"}).elastic_nodes is None
