"""What leaves the house: the wheel holds the shipped recipes, and the pinned versions fit what is declared."""

from __future__ import annotations

import re
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tests.helpers.bounds import declared, false_bounds
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
    own = {path.as_posix() for path in own if "__pycache__" not in path.parts and path.name != "page.md"}
    assert {"trainer/py.typed", "trainer/recipe/exclusions.json", "trainer/training/run.py"} < own <= held
    assert {path.removeprefix("trainer/shipped_launchers/") for path in held} >= {
        *("ranks.sh", "slurm.sbatch", "templates/jobset.yaml.j2", "templates/pod.yaml.j2"),
    }
    assert not {path for path in held if path.startswith("tests/") or path.endswith("/page.md")}
    assert f"recipe_trainer-{__version__}.dist-info/sboms/sbom.cdx.json" in held


def test_a_release_runs_what_make_dist_runs():
    """The workflow sends only what `make dist` has trained with, for a tag that is the version."""
    build, publish, images = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"].values()
    assert "make dist" in [step.get("run") for step in build["steps"]]
    assert (publish["needs"], images["needs"]) == ("build", "publish")
    (check,) = [step["run"] for step in build["steps"] if "GITHUB_REF_NAME" in step.get("run", "")]
    for tag, code in ((f"v{__version__}", 0), ("v99.0", 1)):
        ended = run(["bash", "-c", check], GITHUB_REF_NAME=tag)
        assert ended.returncode == code
    assert run([Path(sys.executable).parent / "shellcheck", ROOT / ".ci" / "dist"]).returncode == 0


def test_every_dependency_is_pinned():
    pins = [
        Requirement(line)
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    pinned = {pin.name.lower(): next(iter(pin.specifier)).version for pin in pins}
    assert len(pinned) == len(pins), "one version of each, on every Python"
    for requirement in declared():
        assert requirement.specifier.contains(pinned[requirement.name.lower()]), requirement


def test_a_lower_bound_that_cannot_be_installed_is_named():
    bounds = {one.name: next(part.version for part in one.specifier if part.operator == ">=") for one in declared()}
    assert not list(false_bounds("\n".join(f"{name}=={bound}" for name, bound in bounds.items())))
    bounds |= {"torch": "99.1+cpu", "trl": bounds["trl"] + ".0"}
    pins = "\n".join(f"{name}=={bound}" for name, bound in bounds.items())
    assert not list(false_bounds(pins, "torch"))
    (line,) = false_bounds(pins)
    assert line.startswith("torch>=")
    assert line.endswith(" is false: the lowest version that can be installed is 99.1")


def test_the_nightly_workflow_tries_both_ends_of_the_bounds():
    (job,) = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())["jobs"].values()
    assert [one["versions"] for one in job["strategy"]["matrix"]["include"]] == ["lowest", "newest"]
    assert "make test-bounds VERSIONS=${{ matrix.versions }}" in [step.get("run") for step in job["steps"]]
    assert run([Path(sys.executable).parent / "shellcheck", ROOT / ".ci" / "bounds"]).returncode == 0


def test_workflows_pin_actions_by_commit():
    workflows = [path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml")]
    used = [line for text in workflows for line in text.splitlines() if "uses:" in line]
    assert len(used) > 5
    for line in used:
        assert re.search(r"@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line


def test_each_push_runs_the_checks_and_the_quick_tests():
    (job,) = yaml.safe_load((ROOT / ".github/workflows/push.yml").read_text())["jobs"].values()
    assert {"make check", "make test"} <= {step.get("run") for step in job["steps"]}
    assert "3.11" in job["strategy"]["matrix"]["python"], "the oldest that pyproject.toml allows"


def test_make_names_the_oldest_python(tmp_path):
    ended = run(["make", "-C", ROOT, "train", "PYTHON=false", f"VENV={tmp_path / 'none'}"])
    assert ended.returncode == 2
    bound = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    message = f"false is missing or older than Python {bound}; name a newer one: make PYTHON=python3.12 train"
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
