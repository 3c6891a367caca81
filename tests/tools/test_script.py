"""`trainer launch-script`: the values that it fills in, its errors, and the validity of its scripts."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.helpers.processes import ROOT, finish, kill, run, start
from trainer.base.errors import ExitCode
from trainer.cli import main
from trainer.cli.launch_script import Target
from trainer.recipe.reading.loading import load_recipe
from trainer.tools.script import _HF_FLAVORS, KINDS, Options, write_launch_script

LAUNCHERS = ROOT / "launchers"
SCHEMAS = Path(__file__).parent / "schemas"
SHELLCHECK = Path(sys.executable).parent / "shellcheck"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a recipe for a CSV file. A shell needs quotes around its name."""
    folder = tmp_path / "my 'runs'"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "train.csv").write_text("review,verdict\ngood,yes\n")
    recipe = {
        "extends": "bert_base.json",
        "name": "my-reviews",
        "task": {"type": "sequence_classification", "text": "review", "label": "verdict"},
        "model": {"name_or_path": "google-bert/bert-base-uncased"},
        "data": {"source": "files", "train": ["train.csv"], "validation": "train.csv"},
        "training": {"global_batch_size": 64},
    }
    (folder / "reviews.json").write_text(json.dumps(recipe))
    return folder


def written(*arguments: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    """Return the stdout of `trainer launch-script`, or its stderr if `code` is not 0."""
    assert main(["launch-script", *arguments]) == code, capsys.readouterr().err
    shown = capsys.readouterr()
    return shown.err if code else shown.out


def options_of(target: str) -> list[str]:
    hosts = ["--hosts", "node0,node1,node2,node3"] if "hosts" in KINDS[target].options else []
    mapped = ["--map", ".=/runs/data"] if "map" in KINDS[target].options else []
    if target == "hf-jobs":
        place = ["--accelerator", "A100", "--time", "4h", "--claim", "me/runs", "--container", "registry/trainer:1"]
        return ["--on", target, "--nodes", "1", "--gpus", "8", *mapped, *place]
    accelerator = ["--accelerator", "H100"] if "accelerator" in KINDS[target].options else []
    return ["--on", target, "--nodes", "4", "--gpus", "8", *hosts, *mapped, *accelerator]


def checked_shell(file: Path) -> None:
    for command in (["bash", "-n", file], [SHELLCHECK, file]):
        ended = run(command)
        assert ended.returncode == 0, ended.stdout + ended.stderr


def manifests(text: str) -> dict[str, dict[str, Any]]:
    """Return the documents by kind, validated with their own schemas, jobs and pods with those of Kubernetes."""
    documents = {document.get("kind", "SkyPilot"): document for document in yaml.safe_load_all(text)}
    for kind, document in documents.items():
        own = SCHEMAS / f"{kind}.json"
        if own.exists():
            jsonschema.validate(document, json.loads(own.read_text()))
        else:
            kubernetes_validate.validate(document, "1.31", strict=True)
        for job in jobs(document):
            named = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": job}
            kubernetes_validate.validate(named, "1.31", strict=True)
        for pod in pods(document):
            named = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod}
            kubernetes_validate.validate(named, "1.31", strict=True)
    return documents


def test_the_command_line_names_the_kinds():
    assert set(get_args(Target)) == set(KINDS)


@pytest.mark.parametrize("file", sorted([*LAUNCHERS.glob("*.sh"), *LAUNCHERS.glob("*.sbatch")]), ids=lambda f: f.name)
def test_shell_files_are_sound(file):
    checked_shell(file)
    assert file.stat().st_mode & stat.S_IXUSR or file.suffix == ".sbatch"


@pytest.mark.parametrize("target", [target for target, kind in KINDS.items() if "queue" in kind.options])
def test_manifests_are_sound(target, capsys):
    text = written("bert_base_mrpc", *options_of(target), "--queue", "team", capsys=capsys)
    documents = manifests(text)
    found = [pod for document in documents.values() for pod in pods(document)]
    assert found
    for pod in found:
        check_pod(pod)
    labels = [document["metadata"].get("labels", {}) for document in documents.values()]
    assert [label.get("kueue.x-k8s.io/queue-name") for label in labels].count("team") == 1
    assert "kueue" not in written("bert_base_mrpc", *options_of(target), capsys=capsys)


def jobs(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the specifications of the jobs of a JobSet, or of a runtime that has one."""
    spec = document.get("spec", {})
    spec = spec.get("template", {}).get("spec", spec) if document.get("kind") == "TrainingRuntime" else spec
    return [replicated["template"]["spec"] for replicated in spec.get("replicatedJobs", [])]


def pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    if document.get("kind") == "Job":
        return [document["spec"]["template"]["spec"]]
    replicas = document.get("spec", {}).get("pytorchReplicaSpecs", {}).values()
    return [spec["template"]["spec"] for spec in [*replicas, *jobs(document)]]


def check_pod(pod: dict[str, Any]) -> None:
    """Check that a pod has time to save, shared memory, no root user, and writable folders."""
    (container,) = pod["containers"]
    assert pod["terminationGracePeriodSeconds"] > 60
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert set(mounts.values()) == set(volumes)
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert "persistentVolumeClaim" in volumes[mounts["/runs"]]
    assert "emptyDir" in volumes[mounts["/tmp"]]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    written_to = [environment[name] for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME")]
    assert all(place.startswith(("/tmp", "/runs/")) for place in written_to)


@pytest.mark.parametrize("target", KINDS)
def test_written_scripts_are_valid(target, here, capsys):
    words = ["optimizer.learning_rate=2e-5", 'logging.to=["console", "jsonl"]', "evaluation.every=10 steps"]
    file = here / "script"
    assert main(["launch-script", "reviews.json", *options_of(target), *words, "-o", str(file)]) == 0
    assert f"{shlex.quote(str(file))}" in capsys.readouterr().err
    text = file.read_text()
    if target == "ray":
        compile(text, file, "exec")
        assert f"ARGUMENTS = {[str(here / 'reviews.json'), *words]!r}\n" in text
        return
    if not text.startswith("#!"):
        assert len(manifests(text)) >= 2 - (target == "skypilot")
        return
    checked_shell(file)
    assert os.access(file, os.X_OK)
    if target == "hf-jobs":
        return
    (arguments,) = re.findall(r"^ARGUMENTS=.*$", text, re.MULTILINE)
    read = subprocess.run(
        ["bash", "-c", f'{arguments}; printf "%s\\0" "${{ARGUMENTS[@]}}"', "x", "a b"], text=True, capture_output=True
    )
    assert read.stdout.split("\0")[:-1] == [str(here / "reviews.json"), *words, "a b"]
    (folder,) = re.findall(r"^FOLDER=.*$", text, re.MULTILINE)
    assert subprocess.run(
        ["bash", "-c", f'{folder}; printf %s "$FOLDER"'], text=True, capture_output=True
    ).stdout == str(here)


def test_slurm(here, capsys):
    options = shlex.split("--time 1-00:00:00 --partition gpu --account lab --container image.sif --name try-1 --cpus 6")
    options += ["--restarts", "3"]
    text = written("reviews.json", *options_of("slurm"), *options, capsys=capsys)
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.MULTILINE))
    expected = {"job-name": "try-1", "nodes": "4", "ntasks-per-node": "8", "gpus-per-node": "8", "cpus-per-task": "6"}
    expected |= {
        "time": "1-00:00:00",
        "partition": "gpu",
        "account": "lab",
        "signal": "USR1@180",
        "open-mode": "append",
    }
    assert expected.items() <= directives.items()
    assert "requeue" in directives
    assert text.index("#SBATCH --signal") < text.index("set -uo")
    assert "\nRESTARTS=3\n" in text
    assert "\nCONTAINER=image.sif\n" in text
    assert f"\nMOUNTS={shlex.quote(str(here))}\n" in text


def test_hosts(capsys):
    text = written("bert_base_mrpc", *options_of("deepspeed"), capsys=capsys)
    assert "\nHOSTS=(node0 node1 node2 node3)\nPROCESSES=8\nMASTER_ADDR=${MASTER_ADDR:-node0}\n" in text
    text = written("bert_base_mrpc", "--on", "torchrun", "--nodes", "2", "--gpus", "4", capsys=capsys)
    assert "\nNODES=2\nPROCESSES=4\nMASTER_ADDR=${MASTER_ADDR:?address of machine 0}\n" in text


def test_nodes_that_join_and_leave(here, capsys):
    options = ["--on", "torchrun", "--nodes", "1:4", "--gpus", "2", "--hosts", "node0", "parallel.elastic=data"]
    text = written("reviews.json", *options, capsys=capsys)
    assert "\nNODES=1:4\nPROCESSES=2\nMASTER_ADDR=${MASTER_ADDR:-node0}\n" in text
    assert "\nRENDEZVOUS=c10d\nRESTARTS=${RESTARTS:-10}\n" in text
    assert "\nRESTARTS=${RESTARTS:-3}\n" in written("reviews.json", *options, "--restarts", "3", capsys=capsys)


@pytest.mark.parametrize(
    ("nodes", "restarts", "start"),
    [("2", None, "NODE_RANK=0 bash"), ("2", 3, "bash {file}  # on each node"), ("1:4", None, "now or later")],
)
def test_the_start_of_a_torchrun_script(here, nodes, restarts, start):
    elastic = ["parallel.elastic=data"] * (":" in nodes)
    _, command = write_launch_script("reviews.json", elastic, "torchrun", nodes, 2, Options(restarts=restarts))
    assert start in command
    assert ("NODE_RANK" in command) == (restarts is None and ":" not in nodes), "c10d numbers the nodes"


def test_kubernetes(here, capsys):
    options = ["--name", "try-1", "--claim", "disk", "--container", "registry/trainer:1", "--cpus", "4"]
    text = written("reviews.json", *options_of("kubernetes"), *options, "training.seed=7", capsys=capsys)
    documents = manifests(text)
    assert {document["metadata"]["name"] for document in documents.values()} == {"try-1"}
    job = documents["Job"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (4, 4, "Indexed")
    (pod,) = pods(documents["Job"])
    (container,) = pod["containers"]
    place = "NODES=4 GPUS=8 NODE_RANK=$JOB_COMPLETION_INDEX MASTER_ADDR=try-1-0.try-1"
    assert container["command"][2].startswith(f"{place}\nset -u\n")
    assert pod["subdomain"] == documents["Service"]["metadata"]["name"]
    assert documents["Service"]["spec"]["selector"].items() <= job["template"]["metadata"]["labels"].items()
    assert container["image"] == "registry/trainer:1"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert container["resources"]["requests"] == {"cpu": "32", "memory": "256Gi"}
    assert pod["volumes"][1]["persistentVolumeClaim"]["claimName"] == "disk"
    recipe = documents["ConfigMap"]["data"]["recipe.json"]
    (here / "of_pod.json").write_text(recipe.replace("/runs/data", "."))
    there, own = load_recipe("of_pod.json", container["args"][1:]), load_recipe("reviews.json", ["training.seed=7"])
    assert json.loads(recipe)["data"]["train"] == ["/runs/data/train.csv"]
    assert there.recipe.checkpoint.folder == "/runs/my-reviews"
    same = {"checkpoint.folder", "parallel.join_timeout"}
    assert {k: v for k, v in there.values.items() if k not in same} == {
        k: v for k, v in own.values.items() if k not in same
    }


def test_the_parts_of_other_clusters(here, capsys):
    """The nodes of JobSet and TrainJob, and the resources of SkyPilot's nodes."""
    words = ["--name", "try-1", "--container", "registry/trainer:1"]
    jobset = manifests(written("reviews.json", *options_of("jobset"), *words, capsys=capsys))["JobSet"]["spec"]
    (replicated,) = jobset["replicatedJobs"]
    (job,) = jobs({"spec": jobset})
    name = f"try-1-{replicated['name']}-0-0.{jobset['network']['subdomain']}"  # of the first pod, see the API of JobSet
    assert f"MASTER_ADDR={name}\n" in job["template"]["spec"]["containers"][0]["command"][2]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (4, 4, "Indexed")

    documents = manifests(written("reviews.json", *options_of("trainjob"), *words, capsys=capsys))
    (job,) = jobs(documents["TrainingRuntime"])
    assert [container["name"] for container in job["template"]["spec"]["containers"]] == ["node"]
    assert documents["TrainJob"]["spec"] == {
        "runtimeRef": {"kind": "TrainingRuntime", "name": "try-1"},
        "trainer": {"numNodes": 4, "numProcPerNode": 8},
    }

    words += ["--claim", "disk", "--restarts", "3", "--cpus", "4"]
    task = manifests(written("reviews.json", *options_of("skypilot"), *words, capsys=capsys))["SkyPilot"]
    assert (task["num_nodes"], task["volumes"]) == (4, {"/runs": "disk"})
    assert task["resources"] == {
        "accelerators": "H100:8",
        "cpus": "32+",
        "memory": "256+",
        "image_id": "docker:registry/trainer:1",
        "job_recovery": {"max_restarts_on_errors": 3, "recover_on_exit_codes": [75]},
    }
    assert json.loads(task["envs"]["RECIPE"])["data"]["train"] == ["/runs/data/train.csv"]


def test_the_runtime_of_a_whole_cluster_starts_the_pods_of_a_trainjob(here, capsys, tmp_path):
    """It lacks the parts that belong to one job."""
    runtime = yaml.safe_load((LAUNCHERS / "cluster_training_runtime.yaml").read_text()) | {"kind": "TrainingRuntime"}
    manifests(yaml.safe_dump(runtime))
    of_job = manifests(written("reviews.json", *options_of("trainjob"), capsys=capsys))["TrainingRuntime"]
    own, other = (one["spec"]["template"]["spec"] for one in (runtime, of_job))
    del other["network"]["subdomain"], other["replicatedJobs"][0]["template"]["spec"]["template"]["metadata"]
    (job,), (job_of_one,) = jobs(runtime), jobs(of_job)
    del job_of_one["completions"], job_of_one["parallelism"]
    pod, pod_of_one = job["template"]["spec"], job_of_one["template"]["spec"]
    check_pod(pod)
    (container,), (of_one,) = pod["containers"], pod_of_one["containers"]
    container["resources"], container["args"] = of_one["resources"], of_one["args"]
    count = '[ "$GPUS" != auto ] || GPUS=$(nvidia-smi --list-gpus | wc -l)\n'
    script = container["command"][2]
    container["command"][2] = script.replace(count, "")
    del pod_of_one["affinity"], of_one["volumeMounts"][0], pod_of_one["volumes"][0]
    assert own == other

    (tmp_path / "trainer").write_text('#!/bin/sh\necho "$RANK of $WORLD_SIZE at $MASTER_ADDR: $*"\n')
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nseq 2\n")
    for name in ("trainer", "nvidia-smi"):
        (tmp_path / name).chmod(0o755)
    place = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "first"}
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    ended = run(["bash", "-c", script, "trainer", "recipe", "a b"], PATH=path, **place)
    assert set(ended.stdout.splitlines()) == {f"{rank} of 4 at first: run recipe a b" for rank in (2, 3)}


def test_the_program_of_the_hub_takes_a_job(here, capsys):
    """Its dry run checks the options, and shows the job without sending it."""
    words = ["--restarts", "2", "model.tokenizer=.", "task.text=größe $(id) 'x\\"]
    (here / "job").write_text(written("reviews.json", *options_of("hf-jobs"), *words, capsys=capsys))
    checked_shell(here / "job")
    for name in ("hf", "trainer"):
        (here / name).write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
        (here / name).chmod(0o755)
    path = f"{here}{os.pathsep}{os.environ['PATH']}"
    sent = run(["bash", here / "job", "--detach"], PATH=path).stdout.split("\0")[:-1]
    shown = run([Path(sys.executable).parent / "hf", *sent, "--dry-run"], HF_TOKEN="hf_secret")
    assert (shown.returncode, "(dry run) Job not submitted." in shown.stdout) == (0, True), shown
    assert "hf_secret" not in shown.stdout
    at = sent.index("registry/trainer:1")
    options, (program, _, script, _, *arguments) = dict(zip(sent[2:at:2], sent[3:at:2], strict=False)), sent[at + 1 :]
    expected = {"--name": "my-reviews", "--flavor": "a100x8", "--timeout": "4h", "--secrets": "HF_TOKEN"}
    assert expected.items() <= options.items()
    assert "hf://buckets/me/runs:/runs" in sent[:at]

    (recipe,) = (word.removeprefix("RECIPE=") for word in sent[:at] if word.startswith("RECIPE="))
    own = script.replace("/tmp/recipe.json", "of_job.json")
    ended = run([program, "-c", own, "trainer", *arguments], cwd=here, PATH=path, RECIPE=recipe)
    expected = ["run", "of_job.json", *arguments, "--processes", "8", "--max-restarts", "2"]
    assert ended.stdout.split("\0")[:-1] == expected
    assert json.loads((here / "of_job.json").read_text())["task"]["text"] == "größe $(id) 'x\\"
    (here / "of_job.json").write_text(recipe.replace("/runs/data", "."))
    there = load_recipe("of_job.json", arguments).recipe.checkpoint
    assert (there.folder, there.mirror) == ("/tmp/runs/my-reviews", "/runs/my-reviews")


def test_the_flavors_are_those_of_the_hub():
    from huggingface_hub import JobHardware

    assert {one.value for one in JobHardware if not one.value.startswith("cpu")} == set(_HF_FLAVORS)
    numbers = {name: int(match[1]) for name in _HF_FLAVORS if (match := re.search(r"x(\d+)$", name))}
    assert {name: _HF_FLAVORS[name][1] for name in numbers} == numbers
    assert {number for name, (_, number) in _HF_FLAVORS.items() if name not in numbers} == {1}


def test_skypilot_chooses_among_several_gpus(capsys):
    words = ["--on", "skypilot", "--nodes", "2", "--gpus", "8", "--accelerator", "L40S,H100"]
    resources = manifests(written("bert_base_mrpc", *words, capsys=capsys))["SkyPilot"]["resources"]
    assert resources["any_of"] == [{"accelerators": "L40S:8"}, {"accelerators": "H100:8"}]
    assert "accelerators" not in resources


def test_a_shipped_recipe_goes_to_pods_by_its_name(here, capsys):
    text = written(
        "bert_sample",
        *options_of("pytorchjob"),
        "training.global_batch_size=64",
        "model.tokenizer=.",
        "training.seed=3",
        capsys=capsys,
    )
    documents = manifests(text)
    assert documents["ConfigMap"]["data"]["recipe.json"] == '{"extends": "bert_sample"}\n'
    spec = documents["PyTorchJob"]["spec"]
    assert (spec["nprocPerNode"], spec["pytorchReplicaSpecs"]["Worker"]["replicas"]) == ("8", 3)
    for pod in pods(documents["PyTorchJob"]):
        arguments = pod["containers"][0]["args"]
        assert arguments[:4] == [
            "/recipe/recipe.json",
            "training.global_batch_size=64",
            "model.tokenizer=/runs/data",
            "training.seed=3",
        ]


SLURM, TORCHRUN, JOB = (f"--on {target} --nodes 2 --gpus 8" for target in ("slurm", "torchrun", "kubernetes"))
POD = f"{JOB} --map .=/runs/d"
HUB = "--on hf-jobs --map .=/runs/d --claim me/runs"
REFUSED = {
    "a batch that does not divide": ("--on slurm --nodes 3 --gpus 5", "`training.global_batch_size` must be divisible"),
    "a degree that does not fit": (f"{SLURM} parallel.tensor=5", "`parallel.tensor` must divide the 16"),
    "a container and a venv": (f"{SLURM} --venv v --container i", "drop one"),
    "an image without its registry": (
        f"{POD} --container /trainer:cuda",
        "--container must be an image such as",
    ),
    "an image without its tag": (
        f"{POD} --container registry/trainer:",
        "such as registry/trainer:cuda, but is regis",
    ),
    "such an image for slurm": (f"{SLURM} --container /trainer:cuda", "set the variable, or write the whole name"),
    "a time": (f"{SLURM} --time soon", "--time must be a time of Slurm"),
    "a partition of two lines": (f"{SLURM} --partition 'a\nb'", "--partition must be one word"),
    "an option of another": (
        f"{TORCHRUN} --account x",
        "--account has no effect with --on torchrun",
    ),
    "too few hosts": (f"{TORCHRUN} --hosts a", "--hosts must name 2 machines"),
    "hosts that are none": (f"{TORCHRUN} --hosts 'a,$(id)'", "--hosts must name 2 machines"),
    "a range for slurm": ("--on slurm --nodes 1:2 --gpus 8", "--nodes must be one number with --on slurm, but is 1:2"),
    "a range from above": ("--on torchrun --nodes 4:2 --gpus 8", "--nodes must be a number or MIN:MAX"),
    "a range without an axis": (
        "--on torchrun --nodes 1:2 --gpus 8",
        "`parallel.elastic` must name the axis that follows the nodes under torchrun's --nnodes 1:2, but is none",
    ),
    "no hosts": ("--on deepspeed --nodes 2 --gpus 8", "--on deepspeed needs the names"),
    "a name": (f"{JOB} --name 'My Job'", "--name must be at most 40 lowercase letters"),
    "a queue": (f"{JOB} --queue a/b", "--queue must be at most 40 lowercase letters"),
    "no accelerator": ("--on skypilot --nodes 2 --gpus 8 --map .=/runs/d", "--on skypilot needs the name of the GPU"),
    "one accelerator twice": ("--on skypilot --nodes 2 --gpus 8 --accelerator H100,H100", "several different ones"),
    "two machines of the hub": (f"{HUB} --nodes 2 --gpus 8 --time 4h", "--nodes must be 1 with --on hf-jobs, but is 2"),
    "a time of Slurm": (f"{HUB} --nodes 1 --gpus 8 --time 4:00:00", "needs a time limit such as --time 4h"),
    "no time": (f"{HUB} --nodes 1 --gpus 8", "needs a time limit such as --time 4h, in s, m, h or d, but has none"),
    "no bucket": ("--on hf-jobs --nodes 1 --gpus 8 --time 4h --claim runs", "--claim OWNER/BUCKET, but has runs"),
    "no flavor": (f"{HUB} --nodes 1 --gpus 2 --time 4h --accelerator L4", "those with their GPUs: l4x1 (1), l4x4 (4)"),
    "two flavors": (f"{HUB} --nodes 1 --gpus 1 --time 4h --accelerator T4", "GPUs: t4-small (1), t4-medium (1)"),
    "a GPU that the hub lacks": (
        f"{HUB} --nodes 1 --gpus 1 --time 4h --accelerator B200",
        "is B200; flavors: t4-small",
    ),
    "data that pods lack": (JOB, "which pods do not have; copy it"),
    "a map": (f"{JOB} --map .=/data", "--map must be HERE=THERE"),
    "a folder of this machine": (f"{JOB} --map .=/runs/d checkpoint.folder=x", "`checkpoint.folder` must lie in /runs"),
    "one pod": ("--on pytorchjob --nodes 1 --gpus 8 --map .=/runs/d", "--nodes must be at least 2"),
    "a key": (f"{SLURM} training.batch=1", "`training.batch`"),
    "a place": (f"{SLURM} -o /nowhere/x", "--output /nowhere/x cannot be written: No such file"),
    "a file that is there": (f"{SLURM} -o reviews.json", "--output must name a new file, but reviews.json exists"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_impossible_requests_are_refused(what, here, capsys):
    arguments, message = REFUSED[what]
    assert message in written("reviews.json", *shlex.split(arguments), capsys=capsys, code=ExitCode.USER)


POD = """#!/bin/sh
# Stands in for `trainer` in a pod: says who it is, and ends as FATE tells the rank of this number.
echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $*" >>"$SAID"
trap 'exit 75' TERM
eval "$(printf %s "$FATE" | cut -d/ -f$((LOCAL_RANK + 1)))"
"""


@pytest.mark.parametrize(
    ("fate", "signals", "code"),
    [
        ("exit 0/exit 0", 0, 0),
        ("exit 0/exit 2", 0, 2),
        ("sleep 1; exit 1/exit 3", 0, 3),  # the first exit decides
        ("while :; do sleep 0.1; done/while :; do sleep 0.1; done", 1, 75),
    ],
)
def test_the_script_of_a_pod_hands_signals_and_exit_codes_on(fate, signals, code, tmp_path):
    """A stand-in replaces `trainer`. `test_launchers.py` tests a training with this script."""
    (tmp_path / "trainer").write_text(POD)
    (tmp_path / "trainer").chmod(0o755)
    said = tmp_path / "said"
    variables = {"NODES": "3", "GPUS": "2", "MASTER_ADDR": "m", "NODE_RANK": "2", "FATE": fate}
    pod = start(
        [LAUNCHERS / "ranks.sh", "recipe", "a b"],
        **variables,
        SAID=str(said),
        PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
    )
    for _ in range(signals):
        until = time.monotonic() + 10
        while time.monotonic() < until and (not said.exists() or len(said.read_text().splitlines()) < 2):
            time.sleep(0.05)
        time.sleep(0.1)  # time for the second process to set its trap
        pod.send_signal(signal.SIGTERM)
    try:
        assert finish(pod).returncode == code
    finally:
        kill(pod)  # a container ends remaining processes itself
    expected = {f"{4 + local} {local} 6 2 m:29500 run recipe a b" for local in (0, 1)}
    assert set(said.read_text().splitlines()) == expected


def test_an_unreachable_first_machine_is_reported_before_torchrun_waits(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        port = str(unused.getsockname()[1])
        variables = {"NODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ended = run([LAUNCHERS / "torchrun_multi_node.sh", "bert_sample"], 30, **variables, JOIN_SECONDS="1")
    assert ended.returncode == 1
    assert f"cannot reach 127.0.0.1:{port} yet (127.0.0.1: connect: Connection refused); see" in ended.stderr


def test_a_label_with_a_line_break_of_yaml_stays_one_value(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """YAML breaks lines at U+0085 and U+2028, JSON does not."""
    recipe = json.loads((here / "reviews.json").read_text())
    recipe["task"]["labels"] = ["a\u2028b", "c\u0085d"]
    (here / "reviews.json").write_text(json.dumps(recipe))
    found = manifests(written("reviews.json", *options_of("kubernetes"), capsys=capsys))
    assert json.loads(found["ConfigMap"]["data"]["recipe.json"])["task"]["labels"] == ["a\u2028b", "c\u0085d"]


@pytest.mark.parametrize("file", ["torchrun_single_node.sh", "torchrun_multi_node.sh"])
@pytest.mark.parametrize(
    ("variables", "threads"),
    [({}, "3"), ({"PROCESSES": "2"}, "6"), ({"PROCESSES": "16"}, "1"), ({"OMP_NUM_THREADS": "5"}, "5")],
)
def test_torchruns_ranks_share_the_cores(file, variables, threads, tmp_path):
    """Stand-ins show 12 cores and 4 GPUs. Without a number, torchrun gives each rank one thread."""
    for name, text in {"nproc": "echo 12", "nvidia-smi": "seq 4", "torchrun": "echo $OMP_NUM_THREADS"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    place = {"NODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "m", "MASTER_PORT": "1"}
    known = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        ["bash", LAUNCHERS / file], env={**known, **place, **variables, "PATH": path}, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == (f"{threads}\n", "")
