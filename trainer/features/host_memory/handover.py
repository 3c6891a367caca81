"""Shares in memory that move from the hosts of spare ranks to those that train, before these resume."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer.base.waiting import wait_until
from trainer.checkpoint.format import share_name
from trainer.checkpoint.store import CheckpointStore
from trainer.features.host_memory.folder import (
    HOST,
    KEPT,
    begin_share,
    complete_in,
    folder_of_run,
    held_in,
    host_name,
    is_used,
    place_of,
    remove_unused,
)
from trainer.features.host_memory.peers import Peers
from trainer.ranks.environment import LaunchEnvironment
from trainer.ranks.joining import Rendezvous

_USED_SECONDS = 10.0  # for processes of an earlier start to end: data workers outlive a killed rank, with its lock
_Move = tuple[int, int, int]  # the rank of a share, its sender and its receiver


@dataclass(frozen=True)
class _Inspection:
    """The memory of a host: name, steps by place, whether another process uses it, and why it cannot be read.

    The name is empty if it is unknown.
    """

    host: str
    held: dict[str, list[int]]
    is_used: bool = False
    problem: str = ""


@dataclass(frozen=True)
class _Plan:
    """The shares of the newest complete checkpoint that move, and the spare ranks that free their host."""

    is_used: bool  # another process uses a host
    problem: str  # the first one of a host
    step: int
    size: int
    moves: Sequence[_Move]
    freed: Sequence[int]


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
        num_training: the number of ranks that train, the first ones.

    Returns:
        Notes for the user, on all ranks.

    Raises:
        TrainerError: a rank has gone.
    """
    own, rank = folder_of_run(folder, run_folder), environment.rank
    own_key = CheckpointStore(run_folder, KEPT).read_memory_key() if rank == 0 else ""
    key = rendezvous.share(own_key, timeout_seconds)
    root = own / key if key else None
    own_look = astuple(_inspect(root)) if environment.local_rank == 0 else None
    looks = rendezvous.gather(own_look, timeout_seconds)  # rank 0 alone reads those of all hosts
    plan = _Plan(*rendezvous.share(looks and astuple(_plan(looks, num_training)), timeout_seconds))
    if plan.is_used:
        return [
            f"shares in memory on hosts of spare ranks were not read, because another process still uses {own};"
            " end that process, or resume from the disk"
        ]
    notes = [f"shares in memory on a host were not read: {plan.problem}"] if plan.problem else []
    if plan.moves and root is not None:
        problems = rendezvous.gather(_move(root, plan, rendezvous, environment, timeout_seconds), timeout_seconds)
        problem = rendezvous.share(next(filter(None, problems or []), ""), timeout_seconds)
        shares = f"{len(plan.moves)} share{'s' * (len(plan.moves) > 1)}"
        result = (
            f"the shares on hosts of spare ranks could not be moved: {problem}"
            if problem
            else f"{shares} came from hosts of spare ranks"
        )
        notes.append(f"the checkpoint of step {plan.step} in memory: {result}")
    if rank in plan.freed:
        free(folder, run_folder)
    return notes


def free(folder: Path, run_folder: Path) -> None:
    """Remove the shares of a run on this host that no process uses, as far as this user may."""
    with suppress(OSError):  # a rank that raises would leave the others waiting; `hand_over` notes what it cannot read
        remove_unused(folder_of_run(folder, run_folder))


def _inspect(root: Path | None) -> _Inspection:
    """Look at the memory of this host, once no process of an earlier start uses it."""
    host = ""
    try:
        if root is None or not (root / HOST).exists():
            return _Inspection(secrets.token_hex(8), {})
        if not wait_until(lambda: not is_used(root), time.monotonic() + _USED_SECONDS):
            return _Inspection(host, {}, is_used=True)
        host = host_name(root)
        return _Inspection(host, held_in(root))
    except (OSError, ValueError) as error:
        return _Inspection(host, {}, problem=str(error))


def _plan(looks: list[Any], num_training: int) -> _Plan:
    found = {rank: _Inspection(*look) for rank, look in enumerate(looks) if look is not None}
    problems = [f"rank {rank}: {look.problem}" for rank, look in found.items() if look.problem]
    leaders = sorted(found.keys() & range(num_training))
    training = {found[rank].host for rank in leaders}
    complete = complete_in((rank, look.held) for rank, look in found.items())
    # The largest step; of equal ones, that of the most ranks.
    step, size = newest = max(complete, default=(0, 0))
    moves: list[_Move] = []
    for part, ranks in sorted(complete.get(newest, {}).items()):
        # A share that a training host holds stays there.
        if training.isdisjoint(found[rank].host for rank in ranks):
            # The receivers take turns, so that the memory of their hosts fills evenly.
            moves.append((part, ranks[0], leaders[len(moves) % len(leaders)]))
    return _Plan(
        is_used=any(look.is_used for look in found.values()),
        problem=next(iter(problems), ""),
        step=step,
        size=size,
        moves=moves,
        freed=[rank for rank, look in found.items() if look.host not in {"", *training}],  # no training rank is there
    )


def _move(
    root: Path, plan: _Plan, rendezvous: Rendezvous, environment: LaunchEnvironment, timeout_seconds: float
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
        # There is no mesh yet, so the shares need a group of their own, which is not registered with torch.
        group: Any = dist.ProcessGroupGloo(store, environment.rank, environment.world_size, limit)
        peers, sent = Peers(group), []
        # All ranks go through the moves in one order; sends begin without a wait, so no two ranks wait for each other.
        for part, sender, receiver in plan.moves:
            place = CheckpointStore(root / place_of(part, plan.size), KEPT)
            name = share_name(part, plan.size)
            with noted():
                if sender == environment.rank:
                    sent += peers.begin_send_share(place.path(plan.step), name, receiver)
                elif receiver == environment.rank:
                    begin = partial(begin_share, root.parent, place, plan.step)
                    peers.take_share(begin, place, plan.step, name, sender)
        for work in sent:
            with noted():
                work.wait()
    return next(iter(problems), "")
