"""Key paths, and keys and values as messages show them."""

from __future__ import annotations

import json

KeyPath = tuple[str | int, ...]
"""Path from the recipe to a value: keys of objects and indices of lists."""


def is_url(place: str) -> bool:
    """Return whether a place is a URL, such as `s3://bucket/part.parquet`, and no path of this machine."""
    return "://" in place


def dotted(path: KeyPath) -> str:
    """Return the path as users write it: `task.metrics[1]`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{shown_key(part)}" if text else shown_key(part)
    return text


def shown_key(key: str) -> str:
    """Return a key for messages; as JSON if it is empty or has control characters."""
    return shortened(key if key and key.isprintable() else json.dumps(key))


def shown_value(value: object) -> str:
    """Return a value for messages: JSON of at most 80 printable characters."""
    text = json.dumps(value, ensure_ascii=False)
    return shortened(text if text.isprintable() else json.dumps(value), most=80)


def shortened(text: str, most: int = 40) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
