"""Shares in memory that move from the hosts of spare ranks to those that train, before these resume."""

from __future__ import annotations

import secrets
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer.checkpoint.files import FACTS, SUMS, share_name, verify
from trainer.checkpoint.memory import (
    HOST,
    KEPT,
    claim,
    folder_of_run,
    held_in,
    is_used,
    numbers_of,
    place_of,
    remove_unused,
)
from trainer.checkpoint.peers import Peers
from trainer.checkpoint.store import CheckpointStore
from trainer.ranks.environment import LaunchEnvironment
from trainer.ranks.joining import Rendezvous


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
    own, acts = folder_of_run(folder, run_folder), environment.local_rank == 0
    key = rendezvous.share(_key(run_folder) if environment.rank == 0 else "", timeout_seconds)
    root = own / key if key else None
    host, held, used = _look(root) if acts else ("", {}, False)

    def gather(value: Any) -> list[Any]:
        values: list[Any] = rendezvous.share(rendezvous.gather(value, timeout_seconds), timeout_seconds)
        return values

    looks = gather((acts, host, held, used))
    hosts = [host for _, host, _, _ in looks]
    if any(used for _, _, _, used in looks):
        return [
            f"shares in memory on hosts of spare ranks were not read, because another process still uses {own};"
            " end that process, or resume from the disk"
        ]
    leaders = [rank for rank in range(num_training) if looks[rank][0]]
    step, size, moves = _moves([(hosts[rank], looks[rank][2]) for rank in range(len(looks))], leaders)
    notes = []
    if moves and root is not None:
        problem = _move(root, step, size, moves, rendezvous, environment, timeout_seconds)
        problems = [text for text in gather(problem) if text]
        name = f"the checkpoint of step {step} in memory"
        shares = f"{len(moves)} share{'s' * (len(moves) > 1)}"
        notes.append(
            f"{name}: the shares on hosts of spare ranks could not be moved: {problems[0]}"
            if problems
            else f"{name}: {shares} came from hosts of spare ranks"
        )
    if acts and environment.rank >= num_training and host not in {hosts[rank] for rank in leaders}:
        remove_unused(own)
    return notes


def _key(run_folder: Path) -> str:
    try:
        return CheckpointStore(run_folder, KEPT).read_memory_key()
    except OSError:
        return ""  # there is no earlier start, or the folder cannot be read, which the saver will report


def _look(root: Path | None) -> tuple[str, dict[str, list[int]], bool]:
    """Return the name of this host, the steps in its memory by place, and whether a run uses them."""
    if root is None or not (root / HOST).exists():
        return secrets.token_hex(8), {}, False
    if is_used(root):
        return "", {}, True
    return (root / HOST).read_text(), held_in(root), False


def _moves(
    holdings: list[tuple[str, dict[str, list[int]]]], leaders: list[int]
) -> tuple[int, int, list[tuple[int, int, int]]]:
    """Return step and size of the newest complete checkpoint, and its missing shares: rank, sender, receiver."""
    training = {holdings[rank][0] for rank in leaders}
    holders: dict[tuple[int, int], dict[int, list[int]]] = {}
    for rank, (_, held) in enumerate(holdings):
        for place, steps in held.items():
            part, size = numbers_of(place)
            for step in steps:
                holders.setdefault((step, size), {}).setdefault(part, []).append(rank)
    complete = [key for key, parts in holders.items() if len(parts) == key[1]]
    if not complete:
        return 0, 0, []
    newest = max(complete)
    lacking = {
        part: ranks
        for part, ranks in sorted(holders[newest].items())
        if not any(holdings[rank][0] in training for rank in ranks)
    }
    moves = [(part, ranks[0], leaders[index % len(leaders)]) for index, (part, ranks) in enumerate(lacking.items())]
    return *newest, moves


def _move(
    root: Path,
    step: int,
    size: int,
    moves: list[tuple[int, int, int]],
    rendezvous: Rendezvous,
    environment: LaunchEnvironment,
    timeout_seconds: float,
) -> str:
    """Send and take the shares of this rank; return the first problem."""
    store: Any = dist.PrefixStore("shares", rendezvous.store)  # type: ignore[attr-defined]
    limit = timedelta(seconds=timeout_seconds)
    group: Any = dist.ProcessGroupGloo(store, environment.rank, environment.world_size, limit)
    peers, sent, problem = Peers(group), [], ""
    for part, sender, receiver in moves:
        place = CheckpointStore(root / place_of(part, size), KEPT)
        files = (FACTS, SUMS, share_name(part, size))
        try:
            if sender == environment.rank:
                sent += peers.begin_send([place.path(step) / file for file in files], receiver)
            elif receiver == environment.rank:
                claim(root.parent)
                place.folder.mkdir(parents=True, exist_ok=True)
                unfinished = place.begin(step)
                peers.take([unfinished / file for file in files], sender)
                verify(unfinished)
                place.adopt(step)
        except (OSError, ValueError, RuntimeError) as error:
            problem = problem or f"rank {environment.rank}: {error}"
            place.discard(step)
    for work in sent:
        work.wait()
    return problem
