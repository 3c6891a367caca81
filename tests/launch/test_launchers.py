"""One recipe with every launcher and every file of `launchers/`: two ranks give the losses of one process."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers import warm
from tests.helpers.nodes import Node
from tests.helpers.processes import ROOT, finish, run, start
from tests.helpers.turns import once
from trainer.cli import main
from trainer.tools.script import KINDS

BIN = Path(sys.executable).parent
FILES = ROOT / "launchers"
RECIPE = ROOT / "recipes" / "bert_sample.json"
TRAINER = [sys.executable, BIN / "trainer", "run"]
PROGRAM = ["--no_python", "trainer", "run"]
ACCELERATE = [BIN / "accelerate", "launch"]
PORT = "<a free port>"
LOSS_TOLERANCE = 1e-5  # relative; guaranteed for any layout compared with one process

SRUN = """#!/bin/sh
# Stands in for srun: two tasks on this machine, with the variables that Slurm sets in a step.
while case "$1" in --*) true;; *) false;; esac; do shift; done
export SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2 SLURM_NODEID=0
SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_TASK_PID=2 "$@" & other=$!
SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_TASK_PID=1 "$@"; code=$?
wait $other; other=$?
[ $code -ge $other ] && exit $code
exit $other
"""
RAY = """
# Stands in for Ray Train: a worker is a thread.
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace as Module

place, shared, meeting = threading.local(), {}, threading.Barrier(2)


def broadcast_from_rank_zero(value):
    if place.number == 0:
        shared["value"] = value
    meeting.wait(60)
    return shared["value"]


class DataParallelTrainer:
    def __init__(self, function, scaling_config, run_config):
        assert scaling_config == Module(
            num_workers=2, use_gpu=True, resources_per_worker={"CPU": 1, "GPU": 1}, placement_strategy="STRICT_SPREAD"
        )
        assert run_config.failure_config == Module(max_failures=0)
        self.function = function

    def work(self, number):
        place.number = number
        return self.function()

    def fit(self):
        with ThreadPoolExecutor() as workers:
            return Module(return_value=[*workers.map(self.work, range(2))][0])


def get_runtime_context():
    return Module(get_job_id=lambda: "job", get_node_id=lambda: str(place.number))


util = Module(get_node_ip_address=lambda: "127.0.0.1")
train = Module(FailureConfig=Module, RunConfig=Module, ScalingConfig=Module)
train.get_context = lambda: Module(get_world_rank=lambda: place.number)
sys.modules["ray.train"] = train
sys.modules["ray.train.collective"] = Module(broadcast_from_rank_zero=broadcast_from_rank_zero)
sys.modules["ray.train.v2.api.data_parallel_trainer"] = Module(DataParallelTrainer=DataParallelTrainer)
"""
SCONTROL = """#!/bin/sh
echo "$@" >> "$PROGRAM_FOLDER/requeued"
"""


@dataclass(frozen=True)
class Case:
    """One way to start two ranks: one command per machine, followed by the recipe and its overrides."""

    launcher: str  # the name that the run must report
    commands: list[list[str | Path]]
    variables: list[dict[str, str]] = field(default_factory=lambda: [{}])
    after: tuple[str, ...] = ()  # arguments after the overrides


MULTI_NODE = [BIN / "accelerate", "launch", "--config_file", FILES / "accelerate_multi_node.yaml"]
MULTI_NODE += ["--num_processes", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", PORT, "--machine_rank"]
TORCHRUN_NODE = {"NODES": "2", "PROCESSES": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
DEEPSPEED_NODE = {"HOSTFILE": str(FILES / "deepspeed_hostfile"), "PROCESSES": "1", "MASTER_ADDR": "127.0.0.1"}
DEEPSPEED_NODE |= {"MASTER_PORT": PORT}
RANK = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
SLURM_TASK = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "1234", "SLURM_JOB_NODELIST": "localhost", "MASTER_PORT": PORT}

CASES = {
    "trainer": Case("trainer", [TRAINER], after=("--processes", "2")),
    "torchrun": Case(
        "torchrun", [[BIN / "torchrun", "--standalone", "--nproc-per-node", "2", "--no-python", "trainer", "run"]]
    ),
    "torchrun_single_node.sh": Case("torchrun", [[FILES / "torchrun_single_node.sh"]], [{"PROCESSES": "2"}]),
    "torchrun_multi_node.sh": Case(
        "torchrun",
        [[FILES / "torchrun_multi_node.sh"]] * 2,
        [TORCHRUN_NODE | {"NODE_RANK": node} for node in "01"],
    ),
    "accelerate": Case(
        "accelerate",
        [[*ACCELERATE, "--multi_gpu", "--num_processes", "2", "--main_process_port", PORT, *PROGRAM]],
    ),
    "accelerate --cpu": Case("trainer", [[*ACCELERATE, "--cpu", "--num_processes", "2", *PROGRAM]]),
    "accelerate_cpu.yaml": Case("trainer", [[*ACCELERATE, "--config_file", FILES / "accelerate_cpu.yaml", *PROGRAM]]),
    "accelerate_multi_gpu.yaml": Case(
        "accelerate",
        [[*ACCELERATE, "--config_file", FILES / "accelerate_multi_gpu.yaml", "--main_process_port", PORT, *PROGRAM]],
    ),
    "accelerate_multi_node.yaml": Case(
        "accelerate", [[*MULTI_NODE, "0", *PROGRAM], [*MULTI_NODE, "1", *PROGRAM]], [{}, {}]
    ),
    "accelerate_multi_node.sh": Case(
        "accelerate",
        [[FILES / "accelerate_multi_node.sh"]] * 2,
        [TORCHRUN_NODE | {"NODE_RANK": node} for node in "01"],
    ),
    "deepspeed --no_python": Case(
        "deepspeed",
        [[BIN / "deepspeed", "--num_accelerators", "2", "--master_port", PORT, *PROGRAM]],
    ),
    "train.py": Case(
        "deepspeed", [[BIN / "deepspeed", "--num_accelerators", "2", "--master_port", PORT, FILES / "train.py"]]
    ),
    "deepspeed.sh": Case(
        "deepspeed", [[FILES / "deepspeed.sh"]] * 2, [DEEPSPEED_NODE | {"NODE_RANK": n} for n in "01"]
    ),
    "srun": Case(
        "srun",
        [TRAINER] * 2,
        [SLURM_TASK | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"],
    ),
    "slurm.sbatch": Case("srun", [["bash", FILES / "slurm.sbatch"]], [SLURM_TASK | {"SLURM_TASK_PID": "1"}]),
}
BARE = ("torchrun", "accelerate", "accelerate --cpu", "deepspeed --no_python", "srun")
"""Cases that a file of `launchers/` starts in the same way."""
UNDER_ZERO3 = ("accelerate_multi_gpu.yaml", "deepspeed.sh", "slurm.sbatch")
"""Cases that run the recipe with DeepSpeed's engine, which reads its own variables. The others use DDP."""
NIGHTLY = ("accelerate_cpu.yaml", "accelerate_multi_node.yaml", "accelerate_multi_node.sh", "train.py")
"""Cases that differ from another one in a file only, and not in the variables that the ranks get."""
TORCH_NODE = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "{}"}
OF_CLUSTERS = {  # the variables that each cluster sets on a node, with {} for its number
    "kubernetes": {"JOB_COMPLETION_INDEX": "{}"},
    "jobset": {"JOB_COMPLETION_INDEX": "{}"},
    "trainjob": TORCH_NODE | {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": "29500"},
    "pytorchjob": TORCH_NODE | {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "RANK": "{}"},
    "skypilot": {
        **{"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "1", "SKYPILOT_NODE_RANK": "{}"},
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
    },
}


def overrides(folder: Path, *more: str, steps: int = 3) -> list[str]:
    return [
        f"training.max_steps={steps}",
        "logging.every=1 step",
        "evaluation.every=null",
        "evaluation.best=null",
        "evaluation.verify_export=0",
        f"checkpoint.folder={folder}",
        *more,
    ]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@contextmanager
def programs(folder: Path, node: Node | None = None) -> Iterator[str]:
    """Yield a PATH with the stand-ins for Slurm's programs, and a `trainer` that starts warm, on a node if given."""
    folder.mkdir()
    with warm.door(node) as warmed:
        trainer = f'#!/bin/sh\nexec {warmed["trainer"]} "$@"\n'
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("trainer", trainer)):
            (folder / name).write_text(text)
            (folder / name).chmod(stat.S_IRWXU)
        yield os.pathsep.join([str(folder), str(BIN), os.environ["PATH"]])


def shadowing(folder: Path) -> Path:
    """Return a current folder with files that `python -m` would import in place of the packages of their names."""
    here = folder / "here"
    here.mkdir()
    for name in ("trainer.py", "datasets.py"):
        (here / name).write_text("raise SystemExit(0)\n")
    return here


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder) if "loss" in line]


@pytest.fixture(scope="session")
def one_process(tmp_path_factory) -> list[float]:
    """The losses of the recipe on one process."""

    def train() -> list[float]:
        folder = tmp_path_factory.mktemp("one") / "run"
        ended = finish(warm.start(["run", RECIPE, *overrides(folder)]))
        assert ended.returncode == 0, ended.stderr
        assert metrics(folder)[0]["run"]["world_size"] == 1
        assert len(losses(folder)) == 3
        return losses(folder)

    return once("launchers: one process", train)


def launch(case: Case, folder: Path, *more: str, path: str, recipe: Path = RECIPE, steps: int = 3) -> list[int]:
    """Start the commands of all machines at once, print their output, and return their exit codes."""
    port, arguments = free_port(), overrides(folder, *more, steps=steps)
    here = shadowing(folder.parent)
    started = [
        start(
            [port if word == PORT else word for word in [*command, recipe, *arguments, *case.after]],
            **{name: port if value == PORT else value for name, value in variables.items()},
            cwd=here,
            PATH=path,
            PROGRAM_FOLDER=str(folder.parent),
        )
        for command, variables in zip(case.commands, case.variables, strict=True)
    ]
    ended = [finish(process) for process in started]
    for process in ended:
        print(process.stdout, process.stderr, sep="\n")
    return [process.returncode for process in ended]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.nightly if n in NIGHTLY else pytest.mark.slow) for n in CASES if n not in BARE],
)
def test_two_ranks_train_as_one_process(name, one_process, tmp_path):
    case, folder, strategy = CASES[name], tmp_path / "run", "zero3" if name in UNDER_ZERO3 else "ddp"
    with programs(tmp_path / "bin") as warm_path:
        # A forked `trainer` has other ancestors, and the number of ranks is read from the command of accelerate.
        path = os.pathsep.join([str(BIN), os.environ["PATH"]]) if name == "accelerate_cpu.yaml" else warm_path
        assert set(launch(case, folder, f"parallel.strategy={strategy}", path=path)) == {0}
    header = metrics(folder)[0]["run"]
    assert header["world_size"] == 2
    assert header["recipe"]["parallel"]["strategy"] == strategy
    assert header["launcher"] == case.launcher
    assert losses(folder) == pytest.approx(one_process, rel=LOSS_TOLERANCE)
    assert (folder / "model" / "config.json").exists()
    assert (folder / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        ("2", ["parallel.tensor=2"]),
        pytest.param("4", ["parallel.tensor=2", "parallel.strategy=zero2"], marks=pytest.mark.nightly),
    ],
)
def test_tensor_ranks_run_the_sample(processes, words, one_process, tmp_path):
    folder = tmp_path / "run"
    ended = finish(warm.start(["run", RECIPE, *overrides(folder, *words), "--processes", processes]))
    assert ended.returncode == 0, ended.stderr
    assert losses(folder) == pytest.approx(one_process, rel=LOSS_TOLERANCE)
    placements = {group["placement"] for group in metrics(folder)[0]["run"]["parameters"]}
    assert placements == {"split", "replicated"}
    assert (folder / "model" / "model.safetensors").exists()


def test_every_file_of_launchers_is_started_by_a_test():
    files = {file.name for file in FILES.iterdir() if file.is_file() and not file.name.startswith((".", "__"))}
    of_clusters = {
        "ranks.sh",
        "cluster_training_runtime.yaml",
    }  # parts of others, and equal to trainjob's
    assert {name for name in files if f"/{name}'" not in repr(CASES)} == of_clusters
    assert {name for name, kind in KINDS.items() if kind.file.endswith(".j2")} == {*OF_CLUSTERS, "ray", "hf-jobs"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", [pytest.param(n, marks=pytest.mark.nightly if n == "jobset" else ()) for n in (*OF_CLUSTERS, "ray")]
)
def test_nodes_of_a_cluster_train_as_one_process(target, one_process, tmp_path):
    """Start the file of `trainer launch-script` here, on each node with the variables that the cluster would set."""
    file, more = tmp_path / "job.py", {"skypilot": ["--accelerator", "H100"], "ray": ["--cpus", "1"]}
    words = [*overrides(Path("/runs/run")), "--on", target, "--nodes", "2", "--gpus", "1", *more.get(target, ())]
    assert main(["launch-script", "bert_sample", *words, "-o", str(file)]) == 0
    text = file.read_text().replace("/runs", str(tmp_path)).replace("/recipe/", f"{tmp_path}/")
    file.write_text(text)
    (tmp_path / "recipe.json").write_text('{"extends": "bert_sample"}')
    (tmp_path / "ray.py").write_text(RAY)
    if target == "ray":
        command, variables, places = [sys.executable, file], {"PYTHONPATH": str(tmp_path)}, [{}]
    elif target == "skypilot":
        task = yaml.safe_load(text)
        command, variables, places = ["bash", "-c", task["run"]], task["envs"], [OF_CLUSTERS[target]] * 2
    else:
        (container,) = next(containers(list(yaml.safe_load_all(text))))
        program, script, rest = container["command"][:2], container["command"][2], container["command"][3:]
        script = re.sub(r"MASTER_ADDR=\S+-0\.\S+", "MASTER_ADDR=127.0.0.1", script)
        command, variables, places = [*program, script, *rest, *container["args"]], {}, [OF_CLUSTERS[target]] * 2
    port = free_port()
    with programs(tmp_path / "bin") as path:
        nodes = [
            start(
                command,
                **{"MASTER_PORT": port, **variables},
                **{name: value.format(number) for name, value in place.items()},
                PATH=path,
            )
            for number, place in enumerate(places)
        ]
        assert [(node.returncode, node.stderr) for node in map(finish, nodes)] == [(0, "")] * len(places)
    assert metrics(tmp_path / "run")[0]["run"]["world_size"] == 2
    assert losses(tmp_path / "run") == pytest.approx(one_process, rel=LOSS_TOLERANCE)


def containers(value: Any) -> Iterator[list[dict[str, Any]]]:
    """Yield the lists of containers in a manifest."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value["containers"]
        for inner in value.values():
            yield from containers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from containers(inner)


@pytest.mark.slow
def test_a_batch_job_that_was_stopped_is_queued_again(tmp_path):
    """Use the script that `trainer launch-script` writes."""
    file, folder = tmp_path / "job's script", tmp_path / "the run"
    words = [str(RECIPE), *overrides(folder), "training.stop_at_step=2"]
    assert main(["launch-script", *words, "--on", "slurm", "--nodes", "1", "--gpus", "2", "-o", str(file)]) == 0
    variables = SLURM_TASK | {"MASTER_PORT": free_port(), "SLURM_TASK_PID": "1", "PROGRAM_FOLDER": str(tmp_path)}
    with programs(tmp_path / "bin") as path:
        assert run(["bash", file], PATH=path, SLURM_CPUS_PER_TASK="1", **variables).returncode == 75
    assert (tmp_path / "requeued").read_text() == "requeue 1234\n"
    assert [line["step"] for line in metrics(folder) if "loss" in line] == [1, 2]


@pytest.mark.slow
def test_a_flag_of_accelerate_that_contradicts_the_recipe_is_refused(tmp_path):
    flags = ["--use_fsdp", "--fsdp_version", "2", "--num_processes", "2", "--main_process_port", free_port()]
    with programs(tmp_path / "bin") as path:
        ended = run([*ACCELERATE, *flags, *PROGRAM, RECIPE, *overrides(tmp_path / "run")], PATH=path)
    assert ended.returncode != 0
    assert "`parallel.strategy` is ddp" in ended.stderr
    assert "--use_fsdp" in ended.stderr
    assert not (tmp_path / "run").exists()


def test_a_batch_that_does_not_divide_is_refused_before_ranks_start(tmp_path):
    ended = run([*TRAINER, RECIPE, *overrides(tmp_path / "run"), "--processes", "5"])
    assert ended.returncode == 2
    assert "`training.global_batch_size` must be divisible by the data-parallel size 5" in ended.stderr
    assert "rank" not in ended.stdout


@pytest.mark.slow
@pytest.mark.nightly
def test_bare_ranks_end_without_a_crash(tmp_path):
    """Gloo used to abort one in five interpreters at exit (SIGABRT), after the run had finished."""
    case = Case("variables", [TRAINER] * 2, [RANK | {"RANK": r, "LOCAL_RANK": r} for r in "01"])
    assert launch(case, tmp_path / "run", path=os.environ["PATH"]) == [0, 0]


@pytest.mark.slow
def test_python_m_does_not_import_a_file_of_the_current_folder(tmp_path):
    here = shadowing(tmp_path)
    (here / "trainer.py").unlink()
    recipe = ["check", str(RECIPE), "--json"]
    ended = finish(start([sys.executable, "-m", "trainer", *recipe], here, PYTHONPATH=str(ROOT)))
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["problems"] == []


@pytest.mark.slow
def test_doctor_does_not_run_a_file_of_the_current_folder(tmp_path):
    ended = finish(start([BIN / "trainer", "doctor", "--json"], shadowing(tmp_path)))
    assert json.loads(ended.stdout)["problems"] == 0, ended.stdout + ended.stderr
