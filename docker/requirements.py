"""Print the dependencies in `pyproject.toml` with those of the named extras, for installation before the source."""

from __future__ import annotations

import sys
from pathlib import Path

import tomllib

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def requirements(extras: list[str]) -> list[str]:
    """Return the dependencies and those of `extras`.

    Raises:
        SystemExit: an extra does not exist.
    """
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    if unknown := set(extras) - set(optional):
        raise SystemExit(f"EXTRAS must name some of {', '.join(optional)}, but has {', '.join(sorted(unknown))}")
    return [*project["dependencies"], *(line for extra in extras for line in optional[extra])]


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in requirements(sys.argv[1:]))
