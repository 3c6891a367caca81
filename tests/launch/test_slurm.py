"""The script of `trainer launch-script --on slurm` under a real Slurm: two nodes on this machine.

Debian's packages `slurmctld`, `slurmd`, `slurm-client` and `munge` are enough, as root. Without them the test is
skipped.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.processes import ROOT, environment
from tests.helpers.tiny_run import write_tiny_run
from trainer.cli import main
from trainer.observe.heartbeat import Status, read_statuses

NODES = ("n1", "n2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmctldParameters=enable_configless
SlurmdParameters=config_overrides
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
KillWait=5
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 Gres=gpu:1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 Gres=gpu:1
PartitionName=all Nodes=n1,n2 Default=YES State=UP
"""
PROGRAM = """
import os, sys, time
from pathlib import Path
from trainer.cli import main
from trainer.engine.native import NativeEngine

begin_step, gate = NativeEngine.begin_step, Path({folder!r}) / f"gate{{os.environ.get('SLURM_RESTART_COUNT', '0')}}"

def held(self, *args):
    while self._step == 5 and gate.exists():
        time.sleep(0.05)
    return begin_step(self, *args)

NativeEngine.begin_step = held
sys.exit(main())
"""


@pytest.fixture
def slurm() -> Iterator[dict[str, str]]:
    """The environment of a shell of a cluster of two nodes with a GPU each, which no program looks for."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing or os.geteuid():
        pytest.skip(f"Slurm's programs {', '.join(missing)} are not here" if missing else "slurmd needs root")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # a short path, for munge's socket
    folder.chmod(0o755)
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    *ports, master_port = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    file = folder / "slurm.conf"
    file.write_text(CONFIGURATION.format(host=socket.gethostname().partition(".")[0], folder=folder, ports=ports))
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o600)
    munge = {"key-file": "key", "socket": "munge.sock", "pid-file": "munge.pid", "log-file": "log", "seed-file": "seed"}
    daemons = [
        ["munged", "--foreground", "--force", *(f"--{option}={folder / name}" for option, name in munge.items())],
        ["slurmctld", "-D", "-f", file],
        *(["slurmd", "-D", "-N", node, "-f", file] for node in NODES),
    ]
    path = f"{folder}:{os.environ['PATH']}:/usr/sbin"
    shell = environment(SLURM_CONF=str(file), PATH=path, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(master_port))
    started = []
    try:
        for words in daemons:
            with (folder / f"{len(started)}.log").open("w") as log:
                command = [str(word) for word in words]
                started.append(
                    subprocess.Popen(command, env=shell, stdout=log, stderr=log, cwd=folder, start_new_session=True)
                )
            if words[0] == "munged":
                wait_for((folder / "munge.sock").exists, 10)
        try:
            wait_for(lambda: said(shell, "sinfo", "--noheader", "--format=%T %D") == "idle 2", 30)
        except TimeoutError:
            reasons = "\n".join(log.read_text()[-500:] for log in sorted(folder.glob("*.log")))
            pytest.skip(f"no Slurm can be started here: {reasons}")
        yield shell
    finally:
        said(shell, "scancel", "--full", "--signal=KILL", "--user=root")
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
        for process in started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def said(shell: dict[str, str], *command: str | Path) -> str:
    done = subprocess.run(command, env=shell, capture_output=True, text=True, timeout=60, check=False)
    return (done.stdout + done.stderr).strip()


def wait_for(condition: Callable[[], object], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.alone
def test_a_job_goes_on_after_a_killed_rank_and_after_a_signal(slurm, tmp_path, monkeypatch):
    """A SIGKILL of a rank and Slurm's warning each queue the job again, and the third start ends it."""
    recipe, folder = write_tiny_run(tmp_path, checkpoint={"every": "2 steps"}), tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    program = Path(slurm["PATH"].partition(":")[0]) / "trainer"
    (tmp_path / "program.py").write_text(PROGRAM.format(folder=str(tmp_path)))
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} {tmp_path}/program.py "$@"\n')
    program.chmod(0o755)
    for start in range(2):
        (tmp_path / f"gate{start}").touch()
    words = [str(recipe), "--on", "slurm", "--nodes", "2", "--gpus", "1", "--cpus", "1", "--time", "10"]
    assert main(["launch-script", *words, "--restarts", "1", "-o", "job.sbatch"]) == 0

    def at_the_gate() -> dict[int, Status]:
        statuses = read_statuses(folder)
        return statuses if [one.doing for one in statuses.values()] == ["in step 6"] * 2 else {}

    job = said(slurm, "sbatch", "--parsable", "job.sbatch")
    assert job.isdecimal(), job
    log = tmp_path / f"tiny-{job}.log"
    try:
        wait_for(at_the_gate, 120)
        killed = at_the_gate()[1]
        os.kill(killed.pid, signal.SIGKILL)
        (tmp_path / "gate0").unlink()
        wait_for(lambda: "restart 1 of 1" in log.read_text(), 120)
        shutil.rmtree(folder / "ranks")
        wait_for(at_the_gate, 120)
        said(slurm, "scancel", "--signal=USR1", job)  # to the ranks alone, as --signal=USR1@180
        (tmp_path / "gate1").unlink()
        wait_for((folder / "model").exists, 120)
        wait_for(lambda: "JobState=COMPLETED" in said(slurm, "scontrol", "show", "job", job), 30)
    except TimeoutError:
        pytest.fail(f"{said(slurm, 'scontrol', 'show', 'job', job)}\n{log.read_text() if log.exists() else ''}")
    told = log.read_text()
    assert f"error: rank 1 (process {killed.pid} on {killed.host}), after step 5, in step 6, was killed" in told
    assert "a rank was killed by SIGKILL; srun names its task and host above" in told
    assert "n2: task 1: Killed" in told
    assert "SIGUSR1: saving a checkpoint after this step, then stopping" in told
    assert "restart 2" not in told
    assert "Traceback" not in told
