"""Process groups of ranks, in which None stands for one rank; and stand-ins for them in plans."""

from __future__ import annotations

import torch.distributed as dist

Group = dist.ProcessGroup | None


def group_size(group: Group) -> int:
    """Return the number of ranks in `group`; 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def index_in_group(group: Group) -> int:
    """Return the index of this rank in `group`; 0 for None."""
    return 0 if group is None else group.rank()


def planned_group(size: int) -> dist.ProcessGroup:
    """Return a stand-in for a group of ranks, as its first rank sees it; it has a size and cannot communicate."""
    return dist.ProcessGroup(0, size)  # type: ignore[call-arg]  # the store is for those that communicate
