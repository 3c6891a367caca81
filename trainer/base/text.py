"""Text helpers: partial lists, tables, nested values by their dotted keys, and text that is safe to show."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

# C0 except tab and newline, DEL, C1, line and paragraph separators, marks that change the direction of text, and halves
# of surrogate pairs, which have no encoding.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_ASSIGNED_SECRET = re.compile(
    r"""(['"])?(\b\w*_(?:API_KEY|TOKEN|PASSWORD)=)(?(1)(?:(?!\1).)*|(?:'[^']*'|"[^"]*"|[^\s&]+))"""
)
_SECRET_NAME = (
    r"[\w.-]*(?:key|token|secret|passw|signature|credential)[\w.-]*|(?:(?:access|auth|authorization)[_.-]?)?code"
    r"|sig|auth|pass|pwd|api|jwt|sas|sid|session(?:[_.-]?id)?|bearer|ticket|otp"
)
_QUERY_SECRET = re.compile(rf"""([?&;#](?:{_SECRET_NAME})=)[^&;#\s'"]+""", re.IGNORECASE)
# A password may hold any character; a path that was normalised has one slash.
_WITH_PASSWORD = r":/{1,2}[^/?#\s:@]*:(?!\d+[/?#])\S*@"
_PASSWORD = re.compile(rf"{_WITH_PASSWORD}|(?:(?<=http)|(?<=https)):/{{1,2}}[^/?#\s]*@")
_USER = re.compile(rf"://[^/?#\s]*@|{_PASSWORD.pattern}")
_NUMBER = re.compile(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*")
LITERAL = re.compile(r"""\s*(\[\s*(['"\[{\d-].*)?\]|\{\s*(['"].*)?\})\s*""", re.DOTALL)
"""Lists and objects in the notation of JSON or Python, as spreadsheets and CSV files hold them."""
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{30,}")


def listed(values: Sequence[object], most: int, separator: str = ", ") -> str:
    """Return the first `most` values and the number of those left out: "1, 2 and 3 more"."""
    shown = separator.join(map(str, values[:most]))
    return f"{shown} and {len(values) - most:,} more" if len(values) > most else shown


def blanks_hint(name: str, names: Iterable[str]) -> str:
    """Return a further sentence part if one of the names is `name` with blanks around it; else nothing."""
    near = next((other for other in names if other != name and other.strip() == name.strip()), None)
    return f"; write {json.dumps(near, ensure_ascii=False)}, with its blanks" if near else ""


def number_in(text: str) -> int | float | None:
    """Return the number that a text is, with a decimal point; None: it is none, as "n/a", "1,5" and "nan"."""
    if not _NUMBER.fullmatch(text):
        return None
    try:
        # Not at once as a float, which would round integers beyond 2**53.
        return int(text)
    except ValueError:
        return float(text)


def size(num_bytes: float) -> str:
    """Return a size in GiB, or in MiB below 1 GiB."""
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, of rows with equally many cells; columns are as wide as their widest cell."""
    rows = [[one_line(cell) for cell in row] for row in rows]  # the widths are those that are shown
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Iterate over the values of nested mappings with the keys that lead to them.

    Lists and empty mappings count as values.
    """
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    else:
        yield path, value


def is_shallow(value: Any, most: int = 50) -> bool:
    """Return whether lists and mappings are nested at most this deep, so that a function may descend into them."""
    level = [value]
    # Level by level, because a recursion into a deep value would exceed Python's limit.
    for _ in range(most):
        level = [
            inner
            for member in level
            if isinstance(member, Mapping | list)
            for inner in (member.values() if isinstance(member, Mapping) else member)
        ]
        if not level:
            return True
    return False


def dotted_leaves(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of nested mappings by their dotted keys, "training.epochs", without empty mappings."""
    return {".".join(path): leaf for path, leaf in leaves(value) if not isinstance(leaf, Mapping)}


def for_terminal(text: str) -> str:
    """Escape control characters, with which a value in a message could change the terminal or the shown text."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Escape control characters and line breaks, with which a value could show a line that is not the program's."""
    return for_terminal(text).replace("\n", "\\n")


def json_for_terminal(text: str) -> str:
    """Escape the control characters of a JSON text, which keeps its values."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def without_secrets(text: str) -> str:
    """Remove user and password of URLs, and mask the values of secret variables (`HF_TOKEN=`) and query keys."""
    text = _USER.sub("://", text)
    text = _HUB_TOKEN.sub("***", text)
    text = _ASSIGNED_SECRET.sub(lambda match: f"{match[1] or ''}{match[2]}***", text)
    return _QUERY_SECRET.sub(r"\1***", text)


def is_secret_name(name: str) -> bool:
    """Return whether an option of this name, such as `password`, holds a secret."""
    return re.fullmatch(_SECRET_NAME, name, re.IGNORECASE) is not None


def has_secret(text: str) -> bool:
    """Return whether a value of a recipe is an address with a password, a signature or a token, or a hub token.

    A user alone is no secret: `abfs://container@account` has one.
    """
    secrets = (_PASSWORD, _QUERY_SECRET) if ":/" in text else ()
    return any(pattern.search(text) for pattern in (*secrets, _HUB_TOKEN))


def masked(value: Any) -> Any:
    """Return nested JSON values without the secrets of addresses in them."""
    if isinstance(value, Mapping):
        return {key: masked(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [masked(inner) for inner in value]
    return without_secrets(value) if isinstance(value, str) and has_secret(value) else value
