"""Private members of other packages, which any new version may drop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from inspect import unwrap
from pkgutil import resolve_name
from types import CodeType, FunctionType
from typing import Any

from trainer.base.errors import UsageError


@dataclass(frozen=True)
class Internals:
    """The private members of a package that one module of this project reads, calls or replaces.

    Args:
        package: the distribution.
        versions: the versions that the members were read in, as in a sentence.
        members: the names by their owner, such as `package.module:Class`. A module or a class owns the names in its
            functions' code too, because many attributes are set there only.
    """

    package: str
    versions: str
    members: Mapping[str, Sequence[str]]

    def lacking(self) -> list[str]:
        """Return the members that the installed version lacks; the import of their modules takes seconds."""
        return [
            f"{owner.replace(':', '.')}.{name}"
            for owner, names in self.members.items()
            for name in sorted({*names} - _names_of(owner))
        ]

    def require(self, purpose: str, instead: str) -> None:
        """Refuse a version that lacks a member.

        Raises:
            UsageError: names the members, the `purpose` that needs them, and `instead`, which needs none.
        """
        if lacking := self.lacking():
            raise UsageError(
                f"{purpose} needs {', '.join(lacking)}, which {self.package} {version(self.package)} lacks; install"
                f" {self.package} {self.versions}, or {instead}"
            )


def _names_of(owner: str) -> set[str]:
    try:
        value: Any = resolve_name(owner)
    except (ImportError, AttributeError):
        return set()
    # Decorators such as `torch.no_grad` hide the code of the function that they wrap.
    functions = [unwrap(member) for member in vars(value).values() if isinstance(member, FunctionType)]
    used = {name for function in functions for name in _names_in(function.__code__)}
    return {*dir(value), *getattr(value, "__annotations__", ()), *used}


def _names_in(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names, *(name for part in inner for name in _names_in(part))}
