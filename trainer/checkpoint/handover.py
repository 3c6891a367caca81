"""Shares in memory that move from the hosts of spare ranks to those that train, before these resume."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer.checkpoint.format import FACTS, SUMS, share_name, verify
from trainer.checkpoint.memory_folder import (
    HOST,
    KEPT,
    claim,
    complete_in,
    folder_of_run,
    held_in,
    host_name,
    is_used,
    place_of,
    remove_unused,
)
from trainer.checkpoint.peers import Peers
from trainer.checkpoint.store import CheckpointStore
from trainer.ranks.environment import LaunchEnvironment
from trainer.ranks.joining import Rendezvous
from trainer.ranks.roll_call import wait_until

_USED_SECONDS = 10.0  # for processes of an earlier start to end: data workers outlive a killed rank, with its lock


@dataclass(frozen=True)
class _Look:
    """The memory of a host: name, steps by place, whether another process uses it, and why it cannot be read.

    The name is empty if it is unknown.
    """

    host: str
    held: dict[str, list[int]]
    is_used: bool = False
    problem: str = ""


def hand_over(
    folder: Path,
    run_folder: Path,
    rendezvous: Rendezvous,
    environment: LaunchEnvironment,
    num_training: int,
    timeout_seconds: float,
) -> list[str]:
    """Move the shares that the newest complete checkpoint lacks on hosts that train, and free the hosts of spares.

    The first rank of each host acts. A share that stayed on a spare's host could be mixed with later ones. All ranks
    must call this.

    Args:
        folder: a folder of each host, on a memory file system.
        run_folder: the folder of the run.
        rendezvous: all ranks, with the spare ones.
        environment: of this rank among all.
        num_training: the number of ranks that train, the first ones.
        timeout_seconds: limit for other ranks.

    Returns:
        Notes for the user, on all ranks.

    Raises:
        TrainerError: a rank has gone.
    """
    own, acts, rank = folder_of_run(folder, run_folder), environment.local_rank == 0, environment.rank
    own_key = CheckpointStore(run_folder, KEPT).read_memory_key() if rank == 0 else ""
    key = rendezvous.share(own_key, timeout_seconds)
    root = own / key if key else None
    look = astuple(_look(root)) if acts else None
    looks = rendezvous.gather(look, timeout_seconds)
    # Rank 0 alone reads the looks of all hosts.
    is_used, problem, step, size, moves, freed = rendezvous.share(looks and _plan(looks, num_training), timeout_seconds)
    if is_used:
        return [
            f"shares in memory on hosts of spare ranks were not read, because another process still uses {own};"
            " end that process, or resume from the disk"
        ]
    notes = [f"shares in memory on a host were not read: {problem}"] if problem else []
    if moves and root is not None:
        problems = rendezvous.gather(
            _move(root, step, size, moves, rendezvous, environment, timeout_seconds), timeout_seconds
        )
        problem = rendezvous.share(next(filter(None, problems or []), ""), timeout_seconds)
        name = f"the checkpoint of step {step} in memory"
        shares = f"{len(moves)} share{'s' * (len(moves) > 1)}"
        notes.append(
            f"{name}: the shares on hosts of spare ranks could not be moved: {problem}"
            if problem
            else f"{name}: {shares} came from hosts of spare ranks"
        )
    if rank in freed:
        free(folder, run_folder)
    return notes


def free(folder: Path, run_folder: Path) -> None:
    """Remove the shares of a run on this host that no process uses, as far as this user may."""
    with suppress(OSError):  # a rank that raises would leave the others waiting; `hand_over` notes what it cannot read
        remove_unused(folder_of_run(folder, run_folder))


def _look(root: Path | None) -> _Look:
    """Look at the memory of this host, once no process of an earlier start uses it."""
    host = ""
    try:
        if root is None or not (root / HOST).exists():
            return _Look(secrets.token_hex(8), {})
        if not wait_until(lambda: not is_used(root), time.monotonic() + _USED_SECONDS):
            return _Look(host, {}, is_used=True)
        host = host_name(root)
        return _Look(host, held_in(root))
    except (OSError, ValueError) as error:
        return _Look(host, {}, problem=str(error))


_Move = tuple[int, int, int]  # the rank of a share, its sender and its receiver


def _plan(looks: list[Any], num_training: int) -> tuple[bool, str, int, int, list[_Move], list[int]]:
    """Plan from the looks of all ranks, None for one that does not act.

    Returns:
        Whether a host is used, the first problem, step and size of the newest complete checkpoint, its missing shares,
        and the spare ranks that free their host.
    """
    found = {rank: _Look(*look) for rank, look in enumerate(looks) if look is not None}
    problems = [f"rank {rank}: {look.problem}" for rank, look in found.items() if look.problem]
    leaders = [rank for rank in found if rank < num_training]
    training = {found[rank].host for rank in leaders}
    freed = [rank for rank, look in found.items() if rank >= num_training and look.host not in {"", *training}]
    is_used = any(look.is_used for look in found.values())
    return is_used, next(iter(problems), ""), *_moves(found, leaders), freed


def _moves(found: dict[int, _Look], leaders: list[int]) -> tuple[int, int, list[_Move]]:
    """Return step and size of the newest complete checkpoint, and its missing shares."""
    training = {found[rank].host for rank in leaders}
    complete = complete_in((rank, look.held) for rank, look in found.items())
    if not complete:
        return 0, 0, []
    newest = max(complete)
    lacking = {
        part: ranks
        for part, ranks in sorted(complete[newest].items())
        if not any(found[rank].host in training for rank in ranks)
    }
    moves = [(part, ranks[0], leaders[index % len(leaders)]) for index, (part, ranks) in enumerate(lacking.items())]
    return *newest, moves


def _move(
    root: Path,
    step: int,
    size: int,
    moves: list[_Move],
    rendezvous: Rendezvous,
    environment: LaunchEnvironment,
    timeout_seconds: float,
) -> str:
    """Send and take the shares of this rank, all of them also after an error; return the first problem."""
    problems: list[str] = []

    @contextmanager
    def noted() -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            problems.append(f"rank {environment.rank}: {error}")

    with noted():
        store: Any = dist.PrefixStore("shares", rendezvous.store)  # type: ignore[attr-defined]
        limit = timedelta(seconds=timeout_seconds)
        group: Any = dist.ProcessGroupGloo(store, environment.rank, environment.world_size, limit)
        peers, sent = Peers(group), []
        for part, sender, receiver in moves:
            place = CheckpointStore(root / place_of(part, size), KEPT)
            files = (FACTS, SUMS, share_name(part, size))
            with noted():
                if sender == environment.rank:
                    sent += peers.begin_send([place.path(step) / file for file in files], receiver)
                elif receiver == environment.rank:
                    _take(peers, root.parent, place, step, files, sender)
        for work in sent:
            with noted():
                work.wait()
    return next(iter(problems), "")


def _take(peers: Peers, own: Path, place: CheckpointStore, step: int, files: tuple[str, ...], sender: int) -> None:
    """Take a share; if its folder cannot be written, drop the files, which the sender sends all the same."""
    refusal: OSError | None = None
    try:
        claim(own)
        place.folder.mkdir(parents=True, exist_ok=True)
        place.begin(step)
    except OSError as error:
        refusal = error
    unfinished = place.unfinished_path(step)
    try:
        peers.take([unfinished / file for file in files], sender, refusal)
        verify(unfinished)
        place.adopt(step)
    except (OSError, ValueError, RuntimeError):
        place.discard(step)
        raise
