"""Print a recipe for conda-forge: `python docker/conda.py dist/*.tar.gz`.

The requirements are those of `pyproject.toml`. The release workflow stores the recipe. For the first release it goes
into a pull request to conda-forge/staged-recipes; conda-forge's bot opens later ones. The format is version 1
(https://rattler.build/latest/reference/recipe_file).
"""

from __future__ import annotations

import hashlib
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
_NAMES = {"torch": "pytorch"}
"""The packages of conda-forge with other names than on PyPI."""


def recipe(sdist: Path) -> dict[str, Any]:
    """Return the recipe that builds a source distribution of PyPI.

    Raises:
        OSError: `sdist` cannot be read.
        ValueError: `sdist` is none of this package.
    """
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project, built_by = table["project"], table["build-system"]["requires"]
    name = re.fullmatch(r"(.+)-([^-]+)\.tar\.gz", sdist.name)
    if not name or name[1] != project["name"].replace("-", "_"):
        raise ValueError(f"`{sdist}` is no source distribution of {project['name']}; build one by `make dist`")
    python = f"python {project['requires-python']}"
    folder = f"https://pypi.org/packages/source/{project['name'][0]}/{project['name']}"
    return {
        "schema_version": 1,
        "context": {"version": name[2]},
        "package": {"name": project["name"], "version": "${{ version }}"},
        "source": {
            "url": f"{folder}/{name[1]}-${{{{ version }}}}.tar.gz",
            "sha256": hashlib.sha256(sdist.read_bytes()).hexdigest(),
        },
        "build": {
            "number": 0,
            "noarch": "python",
            "script": "${{ PYTHON }} -m pip install . --no-deps --no-build-isolation",
            "python": {"entry_points": [f"{command} = {place}" for command, place in project["scripts"].items()]},
        },
        "requirements": {
            "host": [python, "pip", *map(_requirement, built_by)],
            "run": [python, *map(_requirement, project["dependencies"])],
        },
        "tests": [
            {"python": {"imports": ["trainer"], "pip_check": True}},
            {"script": ["trainer run bert_sample training.max_steps=2"]},
        ],
        "about": {
            "summary": project["description"],
            "license": project["license"],
            "license_file": project["license-files"],
        },
        "extra": {"recipe-maintainers": []},
    }


def _requirement(line: str) -> str:
    name, versions = re.fullmatch(r"([\w.-]+)(.*)", line).groups()  # type: ignore[union-attr]  # a valid line
    return f"{_NAMES.get(name, name)} {versions}".strip()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("name the source distribution: python docker/conda.py dist/*.tar.gz")
    try:
        yaml.safe_dump(recipe(Path(sys.argv[1])), sys.stdout, sort_keys=False, width=120)
    except (OSError, ValueError) as error:
        sys.exit(f"no recipe: {error}")
