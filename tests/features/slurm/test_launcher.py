"""Variables of Slurm: the rank of a task, and processes that are none."""

from __future__ import annotations

import pytest

from tests.launch.test_local import program
from tests.ranks.test_environment import TORCHRUN, assert_is_a_rank, assert_is_no_rank, assert_refused
from trainer.base.errors import LaunchError
from trainer.features.slurm.launcher import first_host
from trainer.ranks.environment import LaunchEnvironment, detect, threads_per_rank

JOB = {"SLURM_JOB_ID": "200505", "SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}
TASK = JOB | {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
STEP = TASK | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASK_PID": "9",
}


@pytest.mark.parametrize(
    ("launcher", "variables"),
    [
        ("srun", STEP),
        ("srun", TASK),  # set by hand, without a step
        ("torchrun", TORCHRUN | STEP),  # one torchrun per node, started by srun
    ],
)
def test_a_task_is_a_rank_unless_another_launcher_runs_in_it(launcher, variables):
    assert_is_a_rank(launcher, variables)


@pytest.mark.parametrize(
    ("launcher", "variables"),
    [
        ("none", JOB),  # the shell of salloc
        ("none", STEP | {"SLURM_STEP_ID": "4294967290"}),  # its interactive step
        ("none", STEP | {"SLURM_PTY_PORT": "34889"}),  # srun --pty bash
        ("none", STEP | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}),
        ("sbatch", TASK | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_TASK_PID": "9"}),
        ("none", TASK | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_TASK_PID": "9"}),
    ],
)
def test_a_process_without_a_rank_is_no_rank(launcher, variables):
    assert_is_no_rank(launcher, variables)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({name: value for name, value in STEP.items() if name != "SLURM_LOCALID"}, ["SLURM_LOCALID"]),
        ({name: value for name, value in TASK.items() if name != "SLURM_JOB_NODELIST"}, ["SLURM_JOB_NODELIST"]),
        (STEP | {"SLURM_PROCID": "4"}, ["SLURM_PROCID must be below SLURM_STEP_NUM_TASKS"]),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "two"}, ["SLURM_STEP_TASKS_PER_NODE", "two"]),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, ["must add up to SLURM_STEP_NUM_TASKS, which is 4", "2(x3)"]),
        (STEP | {"SLURM_NODEID": "2"}, ["SLURM_NODEID"]),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "3,1"}, ["SLURM_LOCALID must be below", "which is 1"]),
    ],
)
def test_garbage_is_refused_by_name(variables, words):
    assert_refused(variables, words)


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


def test_a_batch_script_with_several_tasks_needs_srun():
    ended = program("report", SLURM_PROCID="0", SLURM_NTASKS="4", SLURM_TASK_PID="7")
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert "the batch job has 4 tasks, but no srun started this process" in ended.stderr
    assert "--processes" in ended.stderr
