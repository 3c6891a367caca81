"""Telling launchers apart by the variables that they really set, and refusing variables that make no sense."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from trainer.base import extensions
from trainer.base.errors import LaunchError, UsageError
from trainer.ranks.environment import (
    LaunchEnvironment,
    cache_folder,
    detect,
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


def place(environment: LaunchEnvironment) -> tuple[int, int, int, int]:
    return environment.rank, environment.local_rank, environment.world_size, environment.local_world_size


def assert_is_a_rank(launcher: str, variables: Mapping[str, str]) -> None:
    """Detect local rank 1 of 2, rank 3 of 4."""
    environment = detect(variables)
    assert environment.launcher == launcher
    assert place(environment) == (3, 1, 4, 2)
    assert environment.has_ranks


def assert_is_no_rank(launcher: str, variables: Mapping[str, str]) -> None:
    environment = detect(variables)
    assert environment.launcher == launcher
    assert environment.rank == 0
    assert not environment.has_ranks


def assert_refused(variables: Mapping[str, str], words: Iterable[str]) -> None:
    with pytest.raises(LaunchError) as error:
        detect(variables)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("launcher", "variables"),
    [
        ("torchrun", TORCHRUN),
        ("deepspeed", DEEPSPEED),
        ("variables", RANKS),
    ],
)
def test_each_launcher_is_known_by_its_variables(launcher, variables):
    assert_is_a_rank(launcher, variables)


@pytest.mark.parametrize(
    ("launcher", "variables"),
    [
        ("none", {}),
        ("none", {"MASTER_ADDR": "node0"}),
    ],
)
def test_a_process_without_a_rank_is_no_rank(launcher, variables):
    assert_is_no_rank(launcher, variables)


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
    ],
)
def test_garbage_is_refused_by_name(variables, words):
    assert_refused(variables, words)


OTHER_TASKS = [
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
]


@pytest.mark.parametrize(("size", "task"), OTHER_TASKS)
def test_tasks_of_a_launcher_that_no_feature_reads_are_refused(monkeypatch, size, task):
    for key in [key for key in extensions._registered if key[0] == "launcher"]:
        monkeypatch.delitem(extensions._registered, key)
    assert_refused({size: "4", task: "1"}, [f"one of 4 tasks ({size})", f"reads {task};", f"unset {size} to train"])
    assert_refused({size: "four", task: "1"}, [size, "'four'"])
    assert_is_no_rank("none", {size: "1", task: "0"})
    assert_is_no_rank("none", {size: "4"})
    assert_is_a_rank("torchrun", TORCHRUN | {size: "4", task: "3"})


def test_threads_are_divided_unless_set(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    four = LaunchEnvironment("trainer", world_size=4, local_world_size=4)
    assert threads_per_rank(four, {}) == 4
    assert threads_per_rank(replace(four, world_size=32, local_world_size=32), {}) == 1
    assert threads_per_rank(four, {"OMP_NUM_THREADS": "2"}) is None


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
