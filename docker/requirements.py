"""Print the dependencies in `pyproject.toml` with those of the named extras, for installation before the source.

    python docker/requirements.py [--hashes FILE] [EXTRA ...]

With `--hashes`, print the lines of that file for them: pinned packages with their SHA-256 sums.
"""

from __future__ import annotations

import argparse
import re
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


def hashed(file: Path, extras: list[str]) -> list[str]:
    """Return the lines of the file's parts for trainer and `extras`, each package once."""
    kept, entries = False, dict[str, None]()
    for entry in re.split(r"\n(?! )", file.read_text(encoding="utf-8").strip()):
        if entry.startswith("# "):
            kept = entry[2:] in ("trainer", *extras)
        elif kept:
            entries[entry] = None
    return list(entries)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hashes", type=Path)
    parser.add_argument("extras", nargs="*")
    options = parser.parse_args()
    plain = requirements(options.extras)  # refuses unknown extras
    lines = hashed(options.hashes, options.extras) if options.hashes else plain
    sys.stdout.writelines(f"{line}\n" for line in lines)


if __name__ == "__main__":
    main()
