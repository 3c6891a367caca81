"""The check that all ranks run the same recipe with the same layout, versions and source.

It runs before the first step, when the ranks have met but have no process group yet.
"""

from __future__ import annotations

import hashlib
import json
import platform
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import trainer
from trainer.base import extensions
from trainer.base.digests import source_digest
from trainer.base.distribution import COMPARED, installed
from trainer.base.errors import UsageError
from trainer.base.text import listed
from trainer.recipe.plan import RunPlan

if TYPE_CHECKING:
    from trainer.ranks.joining import Rendezvous

_SHOWN_DIFFERENCES = 10
_ABSENT = "missing"


def run_facts(values: Mapping[str, Any], plan: RunPlan, device_type: str) -> dict[str, str]:
    """Return the facts that must be the same on every rank, by names that a user knows.

    Args:
        values: The resolved recipe by dotted key paths.
    """
    facts = {f"`{key}`": json.dumps(value, sort_keys=True, ensure_ascii=False) for key, value in values.items()}
    facts |= {"the layout": str(plan.layout), "the batch": str(plan.batch), "the type of device": device_type}
    facts |= {"trainer": trainer.__version__, "trainer's source": source_digest(), "python": platform.python_version()}
    facts |= {f"the extension {name}": package for name, package in extensions.packages().items()}
    packages = (*COMPARED, *filter(None, [plan.strategy.package]))
    return facts | {package: installed(package) or _ABSENT for package in packages}


def require_agreement(facts: Mapping[str, str], meeting: Rendezvous, timeout_seconds: float) -> None:
    """Compare the facts of all ranks. All ranks must call it.

    If they differ, each rank sends only the facts that differ from those of rank 0.

    Raises:
        UsageError: Facts differ; the message names them with their ranks and hosts. Every rank raises it.
    """
    # Usually all agree, so a digest is enough, and no rank sends its facts.
    digest = hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()
    if meeting.all_same(digest, timeout_seconds):
        return
    first: dict[str, str] = meeting.share(dict(facts), timeout_seconds)
    # Both sides: a fact that one rank lacks is a difference, too.
    names = dict.fromkeys((*first, *facts))
    differing = {name: value for name in names if (value := facts.get(name, _ABSENT)) != first.get(name, _ABSENT)}
    ranks = meeting.gather((socket.gethostname(), differing), timeout_seconds)
    raise UsageError.of_lines(meeting.share(_text(ranks, first) if ranks else None, timeout_seconds))


def _text(ranks: Sequence[tuple[str, Mapping[str, str]]], first: Mapping[str, str]) -> str:
    """Return the message on differing facts, given the host of each rank and its facts that are not rank 0's."""
    differences = list(_differences(ranks, first))
    more = f"\n  and {len(differences) - _SHOWN_DIFFERENCES} more" if len(differences) > _SHOWN_DIFFERENCES else ""
    return (
        "all ranks must run the same recipe with the same versions, but these differ:\n  "
        + "\n  ".join(differences[:_SHOWN_DIFFERENCES])
        + f"{more}\nstart every rank with the same recipe, overrides and installation"
    )


def _differences(ranks: Sequence[tuple[str, Mapping[str, str]]], first: Mapping[str, str]) -> Iterator[str]:
    """Iterate over the facts that differ: one line for each, with the ranks of each value."""
    different = {name for _, facts in ranks for name in facts}
    for name in sorted(different, key=[*first, *sorted(different - first.keys())].index):
        holders: dict[str, list[int]] = {}
        for rank, (_, facts) in enumerate(ranks):
            holders.setdefault(facts.get(name, first.get(name, _ABSENT)), []).append(rank)
        texts = (f"{value} on {_named(members, ranks)}" for value, members in holders.items())
        yield f"{name} is {', '.join(texts)}"


def _named(members: Sequence[int], ranks: Sequence[tuple[str, Mapping[str, str]]]) -> str:
    hosts = dict.fromkeys(ranks[rank][0] for rank in members)
    return f"rank{'s' if len(members) > 1 else ''} {listed(members, 8)} ({', '.join([*hosts][:8])})"
