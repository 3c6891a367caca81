"""Secrets in files of other tools: they reach neither a recipe nor a report."""

from __future__ import annotations

import re
from dataclasses import replace

from trainer.recipe.reading.parser import Node

_HIDDEN = "(hidden)"
_KEYS = re.compile(
    r"token|.*(?:hub|auth|access|api|bearer|wandb|hf)_token|.*(?:api_?key|secret|password|passwd|webhook(?:_url)?|credentials?)"
)
_VALUES = re.compile(r"hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|AKIA[A-Z0-9]{12,}")
_PASSWORD_OF_URL = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")


def without_secrets(node: Node, key: str = "") -> Node:
    """Return the tree with `(hidden)` in place of tokens, keys of services and passwords.

    Args:
        key: the key of the node; that of a list is also that of its items.
    """
    if isinstance(node.value, dict):
        return replace(node, value={name: without_secrets(inner, name) for name, inner in node.value.items()})
    if isinstance(node.value, list):
        return replace(node, value=[without_secrets(item, key) for item in node.value])
    if not isinstance(node.value, str) or not node.value:
        return node
    if _KEYS.fullmatch(key.lower().replace("-", "_")) and not re.fullmatch(r"<.*>", node.value):
        return replace(node, value=_HIDDEN)
    return replace(node, value=_PASSWORD_OF_URL.sub(_HIDDEN, _VALUES.sub(_HIDDEN, node.value)))
