"""What a container starts with: advice on what is missing, then `trainer` in its place, for any user."""

from __future__ import annotations

import resource
import signal
import sys
from pathlib import Path

import pytest

from tests.docker.isolation import DOCKER, UID, as_any_user, in_own_mounts, read_only_root
from tests.helpers.processes import finish, run, start

ENTRYPOINT = DOCKER / "entrypoint.sh"

TELLS = 'echo "$$ $(basename "$0") $*"\necho "HOME=$HOME LOGNAME=${LOGNAME:-} CACHE=${XDG_CACHE_HOME:-}"'
WAITS = "trap 'exit 75' TERM\necho ready\nwhile :; do sleep 0.05; done"
DEVICES = """
mkdir -p {dev}/shm
touch {dev}/null
mount --bind /dev/null {dev}/null
mount -t tmpfs -o size={shm} tmpfs {dev}/shm
mount --rbind {dev} /dev
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder of programs that stand in for the real ones."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("trainer", "torchrun"):
        program(folder, name, TELLS)
    return folder


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def path_with(folder: Path) -> str:
    return f"{folder}:/usr/sbin:/usr/bin:/sbin:/bin"


def devices(tmp_path: Path, *names: str, shm: str = "2g") -> str:
    """The setup of a machine with these devices and shared memory of that size."""
    dev = tmp_path / "dev"
    dev.mkdir()
    for name in names:
        (dev / name).touch()
    return DEVICES.format(dev=dev, shm=shm)


@pytest.mark.parametrize(
    ("words", "becomes"),
    [
        (["run", "bert_sample", "name=a b"], "trainer run bert_sample name=a b"),
        (["--help"], "trainer --help"),
        (["torchrun", "-m", "trainer"], "torchrun -m trainer"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_it_becomes_the_program(words: list[str], becomes: str, programs: Path):
    started = start([ENTRYPOINT, *words], PATH=path_with(programs))
    ended = finish(started)
    assert ended.stdout.splitlines()[0] == f"{started.pid} {becomes}", "the same process, no shell in between"


def test_a_signal_reaches_the_program_and_its_exit_code_comes_back(programs: Path):
    program(programs, "trainer", WAITS)
    started = start([ENTRYPOINT, "check", "bert_sample"], PATH=path_with(programs))
    assert started.stdout is not None
    assert started.stdout.readline() == "ready\n"
    started.send_signal(signal.SIGTERM)
    assert finish(started).returncode == 75


def test_any_user_has_a_home_and_a_name(programs: Path):
    ended = run(as_any_user(ENTRYPOINT, "recipes"), PATH=path_with(programs), TMPDIR="/tmp", XDG_CACHE_HOME="/tmp")
    assert f"HOME=/tmp LOGNAME=uid{UID} CACHE=/tmp" in ended.stdout
    assert ended.stderr == ""


def test_a_home_that_may_be_written_is_kept(programs: Path, tmp_path: Path):
    ended = run([ENTRYPOINT, "recipes"], PATH=path_with(programs), HOME=str(tmp_path))
    assert f"HOME={tmp_path} " in ended.stdout


def test_a_read_only_root_is_reported_and_worked_around(programs: Path, tmp_path: Path):
    writable = tmp_path / "writable"
    writable.mkdir()
    command = in_own_mounts(read_only_root(writable), *as_any_user(ENTRYPOINT, "run", "bert_sample"))
    ended = run(command, PATH=path_with(programs), TMPDIR=str(writable), XDG_CACHE_HOME="/cache")
    assert f"HOME={writable} LOGNAME=uid{UID} CACHE={writable}/cache" in ended.stdout
    assert "/cache is not writable" in ended.stderr
    assert "runs are saved below it" in ended.stderr


def test_a_missing_temporary_folder_is_reported(programs: Path, tmp_path: Path):
    ended = run([ENTRYPOINT, "run", "r"], PATH=path_with(programs), TMPDIR=f"{tmp_path}/none", HOME=str(tmp_path))
    assert "add --tmpfs /tmp" in ended.stderr


@pytest.mark.parametrize(("size", "is_told"), [("64m", True), ("1g", False)])
def test_small_shared_memory_is_reported(size: str, is_told: bool, programs: Path, tmp_path: Path):
    command = in_own_mounts(devices(tmp_path, shm=size), ENTRYPOINT, "run", "bert_sample")
    ended = run(command, PATH=path_with(programs))
    assert ("/dev/shm has 64 MiB" in ended.stderr) == is_told
    assert ended.stdout.splitlines()[0].endswith("trainer run bert_sample")


@pytest.mark.parametrize("names", [[], ["nvidiactl"]], ids=["nothing", "a-driver-alone"])
def test_the_cuda_image_misses_gpus(names: list[str], programs: Path, tmp_path: Path):
    command = in_own_mounts(devices(tmp_path, *names), ENTRYPOINT, "run", "bert_sample")
    ended = run(command, PATH=path_with(programs), TRAINER_IMAGE="cuda")
    assert "no GPU is visible" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    on_cpu = run(command, PATH=path_with(programs), TRAINER_IMAGE="cpu")
    assert on_cpu.stderr == ""


@pytest.mark.parametrize("lockable", ["64", "unlimited"])
def test_little_lockable_memory_is_reported_beside_a_gpu(lockable: str, programs: Path, tmp_path: Path):
    if lockable == "unlimited" and resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] != resource.RLIM_INFINITY:
        pytest.skip("lockable memory is limited here")
    setup = f"ulimit -l {lockable}\n{devices(tmp_path, 'nvidia0')}"
    command = in_own_mounts(setup, ENTRYPOINT, "run", "bert_sample")
    ended = run(command, PATH=path_with(programs), TRAINER_IMAGE="cuda")
    assert ("only 64 KiB of memory may be locked" in ended.stderr) == (lockable == "64")
    assert "no GPU" not in ended.stderr
    assert len(ended.stderr.splitlines()) == (lockable == "64")


def test_commands_that_do_not_train_get_no_advice(programs: Path, tmp_path: Path):
    command = in_own_mounts(devices(tmp_path, shm="64m"), ENTRYPOINT, "schema")
    ended = run(command, PATH=path_with(programs), TRAINER_IMAGE="cuda")
    assert ended.stderr == ""


@pytest.mark.slow
def test_any_user_trains_on_a_read_only_root(programs: Path, tmp_path: Path):
    program(programs, "trainer", f'exec {sys.executable} -m trainer "$@"')
    writable = tmp_path / "writable"
    writable.mkdir()
    words = ["run", "bert_sample", "training.max_steps=1", "evaluation.every=null", f"checkpoint.folder={writable}/run"]
    script = ["sh", "-c", f'"$@" && cat {writable}/run/metrics.jsonl', "sh", ENTRYPOINT, *words]
    command = in_own_mounts(read_only_root(writable), *as_any_user(*script))
    ended = run(command, PATH=path_with(programs), TMPDIR=str(writable), XDG_CACHE_HOME="/cache")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert '"step": 1' in ended.stdout
