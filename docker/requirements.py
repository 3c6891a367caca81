"""Print the dependencies in `pyproject.toml` with those of the named extras, for installation before the source.

    python docker/requirements.py [--hashes FILE] [EXTRA ...]

With `--hashes`, print the lines of that file for them: pinned packages with their SHA-256 sums.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path

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
    """Return the lines of the file's parts for trainer and `extras`, each package once.

    Raises:
        SystemExit: an extra has no part.
    """
    part, parts = "", dict[str, list[str]]()
    for entry in re.split(r"\n(?! )", file.read_text(encoding="utf-8").strip()):
        if entry.startswith("# "):
            part = entry[2:]
        parts.setdefault(part, []).append(entry)
    if missing := [extra for extra in extras if extra not in parts]:
        raise SystemExit(f"{file} must hold sums for EXTRAS, but has none for {', '.join(missing)}; set HASHES=none")
    chosen = [entry for name in ("trainer", *extras) for entry in parts.get(name, ()) if not entry.startswith("#")]
    return list(dict.fromkeys(chosen))


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
