"""Print a software bill of materials (CycloneDX 1.6, JSON): of this image, or with `wheel` of the package.

The versions of system packages follow the base image, since Debian's archive drops old ones. The bill records them.

The wheel holds the package, and the texts of the sample. Its dependencies are listed with the versions that the tests
use; pip chooses those of an installation. `.ci/sbom.cdx.json` is this bill, and each wheel holds it (PEP 770):

    python docker/sbom.py wheel > .ci/sbom.cdx.json
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def bill() -> dict[str, Any]:
    """Return the packages of this Python and, on Debian and Ubuntu, those of the system."""
    python = {(found.name.lower().replace("_", "-"), found.version) for found in distributions()}
    components = [_component("pypi", name, version) for name, version in sorted(python)]
    if shutil.which("dpkg-query"):
        listed = subprocess.run(
            ["dpkg-query", "--show", "--showformat=${Package} ${Version}\n"], capture_output=True, text=True, check=True
        )
        components += [_component("deb", *line.split()) for line in sorted(listed.stdout.splitlines())]
    return {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "components": components}


def bill_of_wheel() -> dict[str, Any]:
    """Return the package with the texts that its wheel holds, and its dependencies without those of extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (version,) = re.findall(r'^__version__ = "(.*)"$', (ROOT / "trainer/__init__.py").read_text(), re.MULTILINE)
    pins = dict(re.findall(r"^([\w.-]+)==([\w.+]+)", (ROOT / "constraints.txt").read_text().lower(), re.MULTILINE))
    names = [re.split(r"[<>=!~ ;\[]", line)[0] for line in project["dependencies"]]
    package = _component("pypi", project["name"], version) | {"licenses": [{"license": {"id": project["license"]}}]}
    sample = {"type": "data", "name": "docstrings of CPython", "licenses": [{"license": {"id": "PSF-2.0"}}]}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": package | {"bom-ref": project["name"]}},
        "components": [sample, *(_component("pypi", name, pins[name]) | {"bom-ref": name} for name in names)],
        "dependencies": [{"ref": project["name"], "dependsOn": names}],
    }


def _component(kind: str, name: str, version: str) -> dict[str, str]:
    return {"type": "library", "name": name, "version": version, "purl": f"pkg:{kind}/{name}@{version}"}


if __name__ == "__main__":
    json.dump(bill_of_wheel() if sys.argv[1:] == ["wheel"] else bill(), sys.stdout, indent=1)
    sys.stdout.write("\n")
