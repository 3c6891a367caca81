"""Digests of objects, files and source code, for the keys of results that are kept."""

from __future__ import annotations

import copyreg
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import trainer

Replacements = Mapping[type, Callable[[Any], Any]]

_BLOCK_BYTES = 1 << 20


def digest_of(value: Any, replaced: Replacements | None = None) -> str:
    """Return a digest of everything that a pickle of a value holds, which is the same in every process.

    A pickle itself depends on the order of sets, and on objects that it holds twice.

    Args:
        value: plain values, containers, and objects that can be pickled.
        replaced: by type, functions that return another value in place of an object.

    Raises:
        TypeError: an object cannot be pickled.
    """
    text = json.dumps(_plain(value, replaced or {}, ()))
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any, replaced: Replacements, within: tuple[int, ...]) -> Any:
    """Return a value for JSON; `within` are the ids of the objects around this one."""
    kind = type(value)
    if kind in (type(None), str, int, float, bool):
        return value
    if kind is bytes:
        return ["bytes", hashlib.sha256(value).hexdigest()]
    if kind in replaced:
        return _plain(replaced[kind](value), replaced, within)
    # A pickle holds only the names of functions and classes too.
    if inspect.isroutine(value) or isinstance(value, type):
        return ["name", value.__module__, value.__qualname__]
    # The depth of the object stands for it, because ids differ between processes.
    if id(value) in within:
        return ["circle", within.index(id(value))]

    def each(values: Iterable[Any]) -> list[Any]:
        return [_plain(item, replaced, (*within, id(value))) for item in values]

    if kind in (list, tuple):
        return [kind.__name__, *each(value)]
    if kind in (set, frozenset, dict):
        # The order of a set differs between processes, and that of a dict does not change its value.
        return [kind.__name__, *sorted(each(value.items() if kind is dict else value), key=json.dumps)]
    # As in pickle, a registered function comes before the method of the class.
    reduce = copyreg.dispatch_table.get(kind)
    reduced = reduce(value) if reduce else value.__reduce_ex__(4)
    if isinstance(reduced, str):
        return ["name", kind.__module__, reduced]
    # The protocol of pickle has two to five values; absent ones are None.
    function, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    return ["object", *each((function, arguments, state, list(items or ()), list(pairs or ())))]


def file_digest(path: Path) -> str:
    """Return the digest of the content of a file."""
    with path.open("rb") as file:
        return content_digest(file)


def content_digest(file: BinaryIO) -> str:
    """Return the digest of the whole content of an open file."""
    digest = hashlib.sha256()
    # The caller may have read a part of the file.
    file.seek(0)
    while block := file.read(_BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()


@cache
def source_digest() -> str:
    """Return a digest of trainer's source files, since a version number stays the same during development."""
    root = Path(trainer.__file__).parent
    return digest_of([(file.relative_to(root).as_posix(), file_digest(file)) for file in sorted(root.rglob("*.py"))])[
        :12
    ]


def code_digest(kind: type) -> str:
    """Return a digest of trainer's source files, and of the files of a class and its bases from other packages."""
    names = {base.__module__ for base in kind.__mro__ if base.__module__.partition(".")[0] != "trainer"}
    # A module of a notebook has no file, and is left out.
    files = [getattr(sys.modules.get(name), "__file__", None) for name in sorted(names)]
    return digest_of([source_digest(), *(file_digest(Path(file)) for file in files if file)])
