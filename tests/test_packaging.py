"""What leaves the house: the wheel holds the shipped recipes, and the pinned versions fit what is declared."""

from __future__ import annotations

import sys
import zipfile
from itertools import chain
from pathlib import Path

import pytest
import yaml

from tests.helpers.processes import ROOT, run
from trainer import __version__


@pytest.mark.slow
def test_the_wheel_holds_the_recipes_with_their_data(tmp_path):
    pytest.importorskip("hatchling")
    ended = run([sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", tmp_path])
    assert ended.returncode == 0, ended.stderr
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    recipes = {path.relative_to(ROOT / "recipes") for path in (ROOT / "recipes").rglob("*") if path.is_file()}
    shipped = {f"trainer/shipped_recipes/{path}" for path in recipes if path.suffix in (".json", ".jsonl", ".parquet")}
    assert len(shipped) > 5
    assert shipped <= held
    own = {path.relative_to(ROOT) for path in (ROOT / "trainer").rglob("*") if path.is_file()}
    own = {path.as_posix() for path in own if "__pycache__" not in path.parts}
    assert {"trainer/py.typed", "trainer/recipe/exclusions.json", "trainer/training/run.py"} < own <= held
    assert {path.removeprefix("trainer/shipped_launchers/") for path in held} >= {
        *("ranks.sh", "slurm.sbatch", "templates/jobset.yaml.j2", "templates/pod.yaml.j2"),
    }
    assert not {path for path in held if path.startswith("tests/")}


def test_a_release_runs_what_make_dist_runs():
    """The workflow sends only what `make dist` has trained with, for a tag that is the version."""
    build, publish = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"].values()
    assert "make dist" in [step.get("run") for step in build["steps"]]
    assert publish["needs"] == "build"
    (check,) = [step["run"] for step in build["steps"] if "GITHUB_REF_NAME" in step.get("run", "")]
    for tag, code in ((f"v{__version__}", 0), ("v99.0", 1)):
        ended = run(["bash", "-c", check], GITHUB_REF_NAME=tag)
        assert ended.returncode == code
    assert run([Path(sys.executable).parent / "shellcheck", ROOT / ".ci" / "dist"]).returncode == 0


def test_every_dependency_is_pinned():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    requirements = pytest.importorskip("packaging.requirements")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = [
        requirements.Requirement(line)
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    declared = list(chain(project["dependencies"], *project["optional-dependencies"].values()))
    for version in ("3.10", "3.11"):
        pinned = {
            pin.name.lower(): next(iter(pin.specifier)).version
            for pin in pins
            if pin.marker is None or pin.marker.evaluate({"python_version": version})
        }
        for requirement in map(requirements.Requirement, declared):
            if requirement.marker is not None and not requirement.marker.evaluate({"python_version": version}):
                continue
            assert requirement.specifier.contains(pinned[requirement.name.lower()]), (requirement, version)
