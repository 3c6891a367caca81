"""The exit code of a training, from its ranks to the spare ranks that wait for it."""

from __future__ import annotations

import time

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from trainer.base.waiting import wait_until
from trainer.ranks.environment import LaunchEnvironment
from trainer.ranks.joining import Rendezvous, lost_store

_POLL_SECONDS = 0.25
_READ_SECONDS = 5.0  # for the spare ranks to read the code, if this process serves the store
_CODE, _KNOWN = "dismissed/code", "dismissed/known"


def meeting_of_first(meeting: Rendezvous, environment: LaunchEnvironment) -> Rendezvous:
    """Return the rendezvous of the first ranks alone."""
    return Rendezvous(PrefixStore("first", meeting.store), environment, meeting.hosts_store)


def dismiss(meeting: Rendezvous, waiting: int, code: int) -> None:
    """Give `waiting` other ranks, which are in `dismissed`, the exit code of the run."""
    meeting.store.set(_CODE, str(int(code)))
    # The store may end with this process, so the others read the code first.
    wait_until(lambda: meeting.store.add(_KNOWN, 0) >= waiting, time.monotonic() + _READ_SECONDS)


def dismissed(meeting: Rendezvous) -> int:
    """Wait until `dismiss` is called on another rank, and return its exit code.

    Raises:
        LostPeerError: the store has ended.
    """
    with lost_store("the training on the other ranks has ended with an error; their messages give the reason"):
        # Polled without a limit: these ranks wait for a whole training.
        while not meeting.store.check([_CODE]):
            time.sleep(_POLL_SECONDS)
        code = int(meeting.store.get(_CODE))
        meeting.store.add(_KNOWN, 1)
    return code
