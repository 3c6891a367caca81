"""Print the packages of this image as a software bill of materials (CycloneDX 1.6, JSON).

The versions of system packages follow the base image, since Debian's archive drops old ones. This file records them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from typing import Any


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


def _component(kind: str, name: str, version: str) -> dict[str, str]:
    return {"type": "library", "name": name, "version": version, "purl": f"pkg:{kind}/{name}@{version}"}


if __name__ == "__main__":
    json.dump(bill(), sys.stdout, indent=1)
