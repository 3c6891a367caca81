"""Characters that stand out: scripts of few rows, texts that were decoded wrongly, and control characters."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from functools import cache

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
# A first byte of UTF-8 as a character, and then further bytes, both as Windows-1252 or Latin-1 show them.
_SUSPECT = re.compile(
    "[\u00c2-\u00f4][\u0080-\u00bf\u0152\u0153\u0160\u0161\u0178\u017d\u017e\u0192\u02c6\u02dc\u2013-\u203a\u20ac\u2122]{1,3}"
)


def damage(text: str) -> str:
    """Return how a text is damaged, in words; empty: it is not."""
    if text.isascii() and text.isprintable():
        return ""
    if "\ufffd" in text:
        return "replacement character"
    if _is_decoded_wrongly(text):
        return "UTF-8 read as another encoding"
    return "control character" if _CONTROL.search(text) else ""


def script(text: str) -> str:
    """Return the script of most letters of a text, by the first word of their Unicode names; empty without letters."""
    if text.isascii():
        return "LATIN" if any(map(str.isalpha, text)) else ""
    counts: Counter[str] = Counter()
    for character, number in Counter(text).items():
        if name := _script_of(character):
            counts[name] += number
    return counts.most_common(1)[0][0] if counts else ""


@cache
def _script_of(character: str) -> str:
    return unicodedata.name(character, "").split(" ")[0].split("-")[0] if character.isalpha() else ""


def _is_decoded_wrongly(text: str) -> bool:
    for match in _SUSPECT.finditer(text):
        for encoding in ("cp1252", "latin-1"):
            try:
                match[0].encode(encoding).decode("utf-8")
            except UnicodeError:
                continue
            return True
    return False
