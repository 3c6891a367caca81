"""The keys of `parallel.deepspeed`: those that a recipe may set, and the reasons against the others.

Unknown keys are errors, because DeepSpeed ignores unknown top-level keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from trainer.recipe.reading.other_tools import counterpart

_ZERO = "zero_optimization"
_ROWS = json.loads(Path(__file__).with_name("formats.json").read_text(encoding="utf-8"))["deepspeed"]
_PASSED_ON = [key for keys in _ROWS for key in keys.split()]

FREE_KEYS = sorted([*(key for key in _PASSED_ON if "." not in key), "steps_per_print", "wall_clock_breakdown", _ZERO])
"""Top-level keys that a recipe may set. DeepSpeed's other keys enable other engines, optimizers or tools."""

FREE_ZERO_KEYS = [key.partition(".")[2] for key in _PASSED_ON if "." in key]
"""Keys of `zero_optimization` that a recipe may set. DeepSpeed validates them itself; the list finds typos before."""


def refused_keys(extra: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the path of each invalid key of `parallel.deepspeed`, and the reason."""
    zero = extra.get(_ZERO, {})
    inner = zero if isinstance(zero, Mapping) else {}
    paths: list[tuple[str, ...]] = [*((key,) for key in extra), *((_ZERO, key) for key in inner)]
    for path in paths:
        free = FREE_KEYS if len(path) == 1 else FREE_ZERO_KEYS
        if path[-1] not in free:
            yield path, _reason(path, free)
    if not isinstance(zero, Mapping):
        yield (_ZERO,), "must be an object"


def _reason(path: tuple[str, ...], free: list[str]) -> str:
    row = counterpart(".".join(path), "DeepSpeed")
    if row is not None:
        return f"is set from `{row.key}`; change it there" if row.key else f"is refused: {row.note}; remove it"
    near = get_close_matches(path[-1], free, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"valid keys are {', '.join(free)}"
    return f"is not a DeepSpeed key that can be set here; {hint}"
