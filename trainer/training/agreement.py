"""Ranks that would not train the same thing find out before the first step: recipe, layout, versions, source.

It knows the plan and the launcher's facts, and no model or data; the ranks have met, and have no process group yet.
"""

from __future__ import annotations

import hashlib
import json
import platform
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import trainer
from trainer.base.errors import UsageError
from trainer.recipe.plan import RunPlan

_PACKAGES = ("torch", "transformers", "datasets", "tokenizers", "safetensors")
_SHOWN_DIFFERENCES = 10
_ABSENT = "missing"


def run_facts(values: Mapping[str, Any], plan: RunPlan, device_type: str) -> dict[str, str]:
    """What must be the same on every rank, by a name that a user knows.

    Args:
        values: the resolved recipe by dotted key paths.
        plan: as this rank resolved it.
        device_type: of this rank, cpu or cuda.
    """
    facts = {f"`{key}`": json.dumps(value, sort_keys=True, ensure_ascii=False) for key, value in values.items()}
    facts |= {"the layout": str(plan.layout), "the batch": str(plan.batch), "the type of device": device_type}
    facts |= {"trainer": trainer.__version__, "trainer's source": _source_digest(), "python": platform.python_version()}
    packages = (*_PACKAGES, "deepspeed") if plan.strategy.zero_stage else _PACKAGES
    return facts | {package: _version(package) for package in packages}


def check_agreement(facts: Mapping[str, str], gather: Callable[[Any], list[Any]]) -> None:
    """Refuses ranks whose facts differ; all ranks must call it, and all refuse alike.

    Args:
        facts: of this rank.
        gather: gives the value of every rank, on every rank.

    Raises:
        UsageError: what differs, on which ranks and hosts.
    """
    digest = hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()
    if len(set(gather(digest))) == 1:
        return
    ranks: list[tuple[str, Mapping[str, str]]] = gather((socket.gethostname(), dict(facts)))
    found = list(_differences(ranks))
    more = f"\n  and {len(found) - _SHOWN_DIFFERENCES} more" if len(found) > _SHOWN_DIFFERENCES else ""
    raise UsageError(
        "all ranks must run the same recipe with the same versions, but these differ:\n  "
        + "\n  ".join(found[:_SHOWN_DIFFERENCES])
        + f"{more}\nstart every rank with the same recipe, overrides and installation"
    )


def _differences(ranks: Sequence[tuple[str, Mapping[str, str]]]) -> Iterator[str]:
    """One line for each fact that is not the same everywhere, with the ranks of each of its values."""
    names = dict.fromkeys(name for _, facts in ranks for name in facts)
    for name in names:
        holders: dict[str, list[int]] = {}
        for rank, (_, facts) in enumerate(ranks):
            holders.setdefault(facts.get(name, _ABSENT), []).append(rank)
        if len(holders) > 1:
            texts = (f"{value} on {_named(members, ranks)}" for value, members in holders.items())
            yield f"{name} is {', '.join(texts)}"


def _named(members: Sequence[int], ranks: Sequence[tuple[str, Mapping[str, str]]]) -> str:
    hosts = dict.fromkeys(ranks[rank][0] for rank in members)
    shown = ", ".join(map(str, members[:8])) + (f" and {len(members) - 8} more" if len(members) > 8 else "")
    return f"rank{'s' if len(members) > 1 else ''} {shown} ({', '.join([*hosts][:8])})"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return _ABSENT


def _source_digest() -> str:
    """Of our own source files, since a version number stays the same while somebody works on them."""
    root = Path(trainer.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]
