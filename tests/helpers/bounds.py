"""`python -m tests.helpers.bounds FILE [PACKAGE]`: the lower bounds of `pyproject.toml` that the pins in FILE exceed.

FILE is a resolution with the lowest versions, except that of PACKAGE, which was chosen by hand. A package with a later
version there cannot be installed at its bound, because another package needs the later one.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def declared() -> list[Requirement]:
    """Return the dependencies of the package and of its extras, on this machine."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    lines = chain(project["dependencies"], *project["optional-dependencies"].values())
    found = map(Requirement, lines)
    return [one for one in found if one.marker is None or one.marker.evaluate()]


def false_bounds(pins: str, chosen: str = "") -> Iterator[str]:
    """Yield a line for each bound that the pins of a resolution exceed, except that of a package chosen by hand."""
    found = [Requirement(line) for line in pins.splitlines() if "==" in line]
    versions = {canonicalize_name(pin.name): Version(next(iter(pin.specifier)).version) for pin in found}
    for requirement in declared():
        version = versions[canonicalize_name(requirement.name)]
        (bound,) = [Version(one.version) for one in requirement.specifier if one.operator == ">="]
        if Version(version.public) > bound and requirement.name != chosen:
            yield f"{requirement.name}>={bound} is false: the lowest version that can be installed is {version.public}"


if __name__ == "__main__":
    found = list(false_bounds(Path(sys.argv[1]).read_text(encoding="utf-8"), *sys.argv[2:]))
    print(*found, sep="\n")
    sys.exit(bool(found))
