"""A program like `trainer run` with a run of a few lines, which the tests of local ranks start.

`python program.py BEHAVIOUR [--processes N] [--spawn] [--starts N] [--max-restarts N] [--hung]`. Importing this
file replaces `trainer.training.run` by its own run, also in spawned ranks, which import it too.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch

from trainer.base.errors import DataError, NonFiniteError, TrainerError, UsageError
from trainer.launch import attempts, local
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.schema import Recipe


def recipe(batch_size: int) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "program",
            "task": {"type": "sequence_classification", "text": "text"},
            "model": {"config": {"model_type": "bert"}},
            "data": {"source": "files", "train": "train.jsonl"},
            "training": {"global_batch_size": batch_size},
        }
    )


def stop_when_told(folder: Path, rank: int) -> int:
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: told.append(number))
    (folder / f"ready{rank}").touch()
    while not told:
        time.sleep(0.05)
    time.sleep(0.5)  # the rest of the step
    (folder / f"saved{rank}").touch()
    return 75


def ignore_signals(folder: Path, rank: int) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / f"ready{rank}").write_text(str(os.getpid()))
    time.sleep(600)
    return 0


def end_as(endings: str, folder: Path, error_file: Path) -> int:
    """End with the exit code of this attempt, or by a signal; `1,kill,75` are those of three attempts.

    The ranks of an attempt have a scratch folder of its own: one may be killed before it has begun.
    """
    (folder / error_file.parent.name).mkdir(exist_ok=True)
    ending = endings.split(",")[len(list(folder.iterdir())) - 1]
    if ending == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    errors = {"1": RuntimeError("a bug"), "2": UsageError("a wrong key"), "3": NonFiniteError("the loss is nan")}
    if ending in errors:
        raise errors[ending]
    return int(ending)


def run(resolved: SimpleNamespace, environment: LaunchEnvironment, callbacks: Sequence[object] = ()) -> int:
    rank, behaviour, folder = environment.rank, resolved.behaviour, Path(os.environ.get("PROGRAM_FOLDER", "."))
    if behaviour == "report":
        print(f"{environment} on a terminal: {sys.stdout.isatty()} threads: {torch.get_num_threads()}")
    elif behaviour == "raise":
        time.sleep(0 if rank == 1 else 0.2)
        raise ValueError(f"rank {rank} cannot divide")
    elif behaviour == "same":
        raise DataError("`task.label` must be a column of the data, but is mood; use label")
    elif behaviour == "infinite":
        raise NonFiniteError("the loss is not finite at step 3")
    elif behaviour == "return":
        return 75
    elif behaviour == "die" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    elif behaviour == "die":
        time.sleep(1)
        raise RuntimeError("connection closed by peer")
    elif behaviour == "meet":
        from trainer.ranks.joining import join_ranks

        found = join_ranks(environment, 60).gather(rank, 60)
        assert found == (None if rank else list(range(environment.world_size)))
    elif behaviour == "prepare":
        (folder / f"ready{rank}").touch()
        time.sleep(600)
    elif behaviour.startswith("end="):
        return end_as(behaviour.removeprefix("end="), folder, environment.error_file)
    elif behaviour == "stop":
        return stop_when_told(folder, rank)
    elif behaviour == "deaf":
        return ignore_signals(folder, rank)
    return 0


sys.modules["trainer.training.run"] = types.ModuleType("trainer.training.run")
sys.modules["trainer.training.run"].run = run  # type: ignore[attr-defined]


def main(argv: list[str]) -> int:
    if "--hung" in argv:  # the file server of the run folder
        attempts.read_statuses = lambda folder: time.sleep(600)
        attempts._DISK_SECONDS = 0.5
    if "--spawn" in argv:
        local._start_method = lambda: "spawn"
    processes = int(argv[argv.index("--processes") + 1]) if "--processes" in argv else None
    restarts = int(argv[argv.index("--max-restarts") + 1]) if "--max-restarts" in argv else 0
    threads: list[int] = []
    os.register_at_fork(before=lambda: threads.append(len(os.listdir("/proc/self/task"))))
    try:
        for _ in range(int(argv[argv.index("--starts") + 1]) if "--starts" in argv else 1):
            resolved = SimpleNamespace(recipe=recipe(32), behaviour=argv[0], chain=None)
            code = local.run_or_join(resolved, processes, restarts)
        if "--starts" in argv:
            print(f"threads at the forks: {threads}")
        return code
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
