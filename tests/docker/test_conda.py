from __future__ import annotations

import hashlib
import sys
import tomllib

import yaml

from tests.docker.isolation import DOCKER
from tests.helpers.processes import ROOT, run
from trainer import __version__


def test_the_recipe_of_conda_forge_has_the_requirements_of_the_package(tmp_path):
    sdist = tmp_path / f"recipe_trainer-{__version__}.tar.gz"
    sdist.write_bytes(b"an archive")
    written = run([sys.executable, DOCKER / "conda.py", sdist], 60)
    assert written.returncode == 0, written.stderr
    recipe = yaml.safe_load(written.stdout)
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    # Conda's packages of some names are others, with the same versions.
    needed = [line.replace("pytorch ", "torch ").replace(" ", "") for line in recipe["requirements"]["run"]]
    assert needed == ["python>=3.11", *lines]
    assert recipe["source"]["sha256"] == hashlib.sha256(b"an archive").hexdigest()
    assert recipe["source"]["url"].replace("${{ version }}", __version__).endswith(sdist.name)


def test_another_archive_is_refused(tmp_path):
    other = tmp_path / "trainer-0.1.tar.gz"
    other.touch()
    refused = run([sys.executable, DOCKER / "conda.py", other], 60)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "is no source distribution of recipe-trainer" in refused.stderr
