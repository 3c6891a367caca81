from __future__ import annotations

import json
import shutil
import sys

import pytest

from tests.docker.isolation import DOCKER
from tests.helpers.processes import ROOT, run


def test_the_bill_names_packages_of_python_and_of_the_system():
    written = run([sys.executable, DOCKER / "sbom.py"], 60)
    assert written.returncode == 0, written.stderr
    names = {one["purl"].partition("@")[0] for one in json.loads(written.stdout)["components"]}
    assert {"pkg:pypi/torch", "pkg:pypi/deepspeed"} <= names
    if shutil.which("dpkg-query") is None:
        pytest.skip("no Debian packages here")
    assert "pkg:deb/dpkg" in names


def test_the_bill_of_the_wheel_is_stored():
    written = run([sys.executable, DOCKER / "sbom.py", "wheel"], 60)
    assert written.returncode == 0, written.stderr
    assert written.stdout == (ROOT / ".ci/sbom.cdx.json").read_text(), "python docker/sbom.py wheel > .ci/sbom.cdx.json"
