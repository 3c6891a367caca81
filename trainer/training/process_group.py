"""The ranks of a run: how they meet, agree and join a process group, and how they leave it."""

from __future__ import annotations

import gc
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

from trainer.base.errors import LaunchError, LostPeerError
from trainer.base.extensions import resolved
from trainer.base.heap import keep_freed_memory
from trainer.base.text import listed
from trainer.engine.precision import set_precision
from trainer.observe.heartbeat import killed_ranks
from trainer.observe.observer import NO_CALLBACKS, Callbacks, Observer
from trainer.parallel.mesh import ParallelMesh, collectives_within, init_process_group
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.plan import Layout, RunPlan
from trainer.recipe.schema import Recipe

if TYPE_CHECKING:
    from trainer.ranks.joining import Rendezvous
    from trainer.recipe.reading.loading import ResolvedRecipe

Result = TypeVar("Result")

_LEAST_COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # before the first step, ranks may wait for one that still reads
_AFTER_WATCHDOG = timedelta(minutes=1)  # the watchdog reports more than a collective does, so it goes first
_ABORT_SECONDS = 10.0


def meet_ranks(
    resolved: ResolvedRecipe,
    plan: RunPlan,
    environment: LaunchEnvironment,
    observer: Observer | None = None,
    callbacks: Callbacks = NO_CALLBACKS,
) -> Rendezvous | None:
    """Meet the other ranks, and check that all run the same and reach each other; None without others.

    This stands before everything slow, so that a mistake in the cluster shows at once.

    Raises:
        UsageError: recipes, versions or sources differ between ranks.
        TrainerError: ranks are missing, or cannot reach each other.
    """
    if environment.world_size == 1:
        return None
    if observer is not None:
        observer.preparing(f"waiting for {environment.world_size} ranks")
    timeout = plan.recipe.parallel.join_timeout.seconds
    from trainer.ranks.joining import join_ranks
    from trainer.training.agreement import require_agreement, run_facts

    rendezvous = join_ranks(environment, timeout)
    # Callbacks too: agreements on their answers are collectives, which all ranks must have.
    facts = run_facts(resolved.values, plan, device_type()) | {"the list of callbacks": str(callbacks)}
    require_agreement(facts, rendezvous, timeout)
    rendezvous.require_network(timeout)
    return rendezvous


def together(rendezvous: Rendezvous | None, recipe: Recipe, action: Callable[[], Result]) -> Result:
    """Return the result of `action`, which all ranks run; an error on one rank ends all of them.

    Raises:
        TrainerError: the error of any rank, on every rank.
    """
    return action() if rendezvous is None else rendezvous.together(action, collective_timeout(recipe).total_seconds())


def device_type() -> str:
    """Return "cuda" on a machine with GPUs, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def open_device(environment: LaunchEnvironment, tf32: bool) -> torch.device:
    """Return the device of this rank, and make it torch's current one, with or without TF32.

    A batch system may show each rank only its own GPU, which is then number 0.

    Raises:
        UsageError: TF32 is requested on a device without it.
    """
    device = torch.device("cpu")
    if device_type() == "cuda":
        # A rank that sees one GPU only has it as number 0, whatever its local rank.
        device = torch.device("cuda", environment.local_rank if torch.cuda.device_count() > 1 else 0)
        # Triton launches its kernels on the current device.
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    set_precision(tf32, device)
    return device


def open_mesh(layout: Layout, device: torch.device) -> ParallelMesh:
    """Return the mesh of a layout. All ranks of the process group must call it."""
    return ParallelMesh(device, **layout.sizes)


def collective_timeout(recipe: Recipe) -> timedelta:
    """Return the limit of a collective: longer than that of the watchdog, and than a rank that still reads data."""
    stall = timedelta(seconds=recipe.parallel.stall_timeout.seconds)
    return max(stall, _LEAST_COLLECTIVE_TIMEOUT) + _AFTER_WATCHDOG


@contextmanager
def process_group(
    plan: RunPlan, environment: LaunchEnvironment, device: torch.device, rendezvous: Rendezvous | None
) -> Iterator[None]:
    """Join the other ranks inside the block, with the packages of the strategy ready.

    Raises:
        UsageError: the package of the strategy cannot be used.
        LaunchError: ranks have the same GPU.
        LostPeerError: another rank has exited.
    """
    # Before NCCL meets, which hangs with two ranks on one GPU.
    if rendezvous is not None and device.type == "cuda":
        _require_gpus(rendezvous, environment, device, collective_timeout(plan.recipe).total_seconds())
    ready: AbstractContextManager[None] = nullcontext()
    if name := plan.strategy.ready:
        # Together, and before the group: a rank without the package would leave the others waiting.
        ready = together(rendezvous, plan.recipe, lambda: resolved(name)(environment.local_rank))
    if rendezvous is None and not plan.strategy.cuts_anything:
        yield
        return
    # One process alone may need a group too, because FSDP and other engines call collectives; its store is in memory.
    store = dist.HashStore() if rendezvous is None else rendezvous.store  # type: ignore[attr-defined]
    timeout = collective_timeout(plan.recipe)
    init_process_group(device, environment.rank, environment.world_size, store, timeout)
    try:
        with ready, collectives_within(timeout):
            yield
        gc.collect()  # frees all that holds the process group: with gloo, the interpreter would abort at exit
        dist.barrier()  # a rank that leaves early breaks the connections of the others
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # their variables hold model and engine
        gc.collect()
        _abort()
        if _is_lost_peer(error):
            raise LostPeerError(_lost_peer(Path(plan.recipe.checkpoint.folder))) from error
        raise
    dist.destroy_process_group()


@contextmanager
def joined_ranks(
    resolved: ResolvedRecipe, plan: RunPlan, environment: LaunchEnvironment, prepare: Callable[[], Result]
) -> Iterator[tuple[torch.device, Result]]:
    """Meet the other ranks, prepare on all of them, and join them inside the block; give the device and the result.

    Raises:
        TrainerError: ranks are missing, or the error of any rank.
    """
    rendezvous = meet_ranks(resolved, plan, environment)
    prepared = together(rendezvous, plan.recipe, prepare)
    device = open_device(environment, plan.recipe.tf32)
    with process_group(plan, environment, device, rendezvous):
        yield device, prepared


def _require_gpus(
    rendezvous: Rendezvous, environment: LaunchEnvironment, device: torch.device, timeout_seconds: float
) -> None:
    """Refuse ranks on the same GPU, which would wait for each other. All ranks must call it."""
    # By UUID, because each rank that sees one GPU only has it as number 0.
    holder = (str(torch.cuda.get_device_properties(device).uuid), f"rank {environment.rank} on {socket.gethostname()}")
    holders: dict[str, list[str]] = {}
    for uuid, rank in rendezvous.gather(holder, timeout_seconds) or ():
        holders.setdefault(uuid, []).append(rank)
    shared = next(((uuid, ranks) for uuid, ranks in holders.items() if len(ranks) > 1), None)
    if conflict := rendezvous.share(shared, timeout_seconds):
        uuid, ranks = conflict
        raise LaunchError(
            f"each rank must have a GPU of its own, but GPU {uuid} is that of {listed(ranks, 8)}; start one rank for"
            " each GPU (Slurm: --gpus-per-task=1, or --gpus-per-node without --gpu-bind)"
        )


def _abort() -> None:
    """Leave the process group without the other ranks, which may wait in a collective.

    NCCL's shutdown can wait for them, and its abort for a kernel. The error of this rank must show in any case, so the
    wait is bounded.
    """
    thread = threading.Thread(target=_abort_process_group, name="abort", daemon=True)
    thread.start()
    # A daemon thread: if the abort hangs, the process exits without it.
    thread.join(_ABORT_SECONDS)


def _is_lost_peer(error: BaseException) -> bool:
    """Return whether another rank made a collective fail; gloo raises a plain `RuntimeError` of its transport."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def _lost_peer(run_folder: Path) -> str:
    """Return the message of a rank that lost another; it names the ranks of this machine that were killed."""
    killed = [f"rank {peer.rank} (process {peer.pid} on {peer.host}), {peer}," for peer in killed_ranks(run_folder)]
    if killed:
        were = "were" if len(killed) > 1 else "was"
        return f"{' and '.join(killed)} {were} killed or crashed; the system kills processes when memory runs out"
    return "another rank failed or was killed, so this one cannot continue; the error of that rank names the cause"
