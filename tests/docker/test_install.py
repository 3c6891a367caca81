"""Installing into a fresh prefix, with wheels that hold nothing where the real ones weigh gigabytes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
import zipfile
from pathlib import Path

import pytest

from tests.docker.isolation import DOCKER
from tests.helpers.processes import ROOT, run

INSTALL = DOCKER / "install.sh"


def empty_wheel(folder: Path, name: str, version: str, requires: str | None = None) -> Path:
    information = f"{name.replace('-', '_')}-{version}.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    files = {
        f"{information}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{information}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{information}/RECORD": "",
    }
    path = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for place, text in files.items():
            wheel.writestr(place, text)
    return path


def pins() -> dict[str, str]:
    """The pinned versions by package, for the Python that runs this."""
    requirements = pytest.importorskip("packaging.requirements")
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    parsed = [requirements.Requirement(line) for line in lines if line and not line.startswith("#")]
    return {
        pin.name: next(iter(pin.specifier)).version for pin in parsed if pin.marker is None or pin.marker.evaluate()
    }


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def link_tools(folder: Path) -> None:
    """Puts pip and hatchling where a fresh environment finds them; to install pip anew takes longest of all."""
    for name in ("pip", "hatchling", "packaging", "pathspec", "pluggy", "tomlkit", "trove-classifiers"):
        distribution = importlib.metadata.distribution(name)
        for top in {Path(file).parts[0] for file in distribution.files or () if ".." not in Path(file).parts}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(distribution.locate_file(top))))


@pytest.mark.slow
def test_a_fresh_prefix_holds_the_pinned_versions_and_the_recipes(tmp_path: Path):
    pytest.importorskip("hatchling")
    everything, torch_index, tools = (tmp_path / name for name in ("wheels", "index", "tools"))
    for folder in (everything, torch_index / "torch", tools):
        folder.mkdir(parents=True)
    for name, version in pins().items():
        empty_wheel(everything, name, version)
        if name != "torch":
            empty_wheel(everything, name, "999")  # newer, and not to be taken
    rich = everything / f"rich-{pins()['rich']}-py3-none-any.whl"
    sums = tmp_path / "hashes.txt"
    # The last part is not chosen: pip would refuse its sum.
    sums.write_text(
        f"# deepspeed\n# tensorboard\n# trainer\nrich=={pins()['rich']} \\\n    --hash=sha256:{sha256(rich)}\n"
        f"# wandb\nnumpy=={pins()['numpy']} \\\n    --hash=sha256:{'0' * 64}\n"
    )
    empty_wheel(everything, "extra", "3.1")
    torch = empty_wheel(torch_index / "torch", "torch", f"{pins()['torch']}+index", requires="networkx")
    (torch_index / "torch" / "index.html").write_text(f'<a href="{torch.name}#sha256={sha256(torch)}">{torch.name}</a>')
    link_tools(tools)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@" --without-pip\n')
    python.chmod(0o755)
    variables = {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_FIND_LINKS": str(everything),
        "PIP_INDEX_URL": (tmp_path / "nowhere").as_uri(),
        "PIP_EXTRA_INDEX_URL": "",
        "TORCH_INDEX_URL": torch_index.as_uri(),
        "EXTRA_PACKAGES": "extra==3.1 einops",
        "HASHES": str(sums),
        "PYTHON": str(python),
        "PYTHONPATH": str(tools),
        "PIP_NO_COMPILE": "1",
    }
    prefix = tmp_path / "prefix"
    wrong = tmp_path / "wrong.txt"
    wrong.write_text(sums.read_text().replace(sha256(rich), "0" * 64))
    refused = run([INSTALL, "dependencies", tmp_path / "refused"], 100, **{**variables, "HASHES": str(wrong)})
    assert refused.returncode == 1
    assert "DO NOT MATCH THE HASHES" in refused.stderr
    first = run([INSTALL, "dependencies", prefix], 100, **variables)
    assert first.returncode == 0, first.stdout + first.stderr
    second = run([INSTALL, "program", prefix], 100, PIP_NO_BUILD_ISOLATION="0", **variables)
    assert second.returncode == 0, second.stdout + second.stderr

    listed = run([prefix / "bin" / "python", "-m", "pip", "list", "--format", "json"], 60, **variables)
    versions = {row["name"]: row["version"] for row in json.loads(listed.stdout)}
    assert versions.pop("torch") == f"{pins()['torch']}+index"
    assert versions.pop("extra") == "3.1"
    assert {"deepspeed", "tensorboard", "transformers", "networkx", "einops", "recipe-trainer"} <= versions.keys()
    assert "pytest" not in versions
    assert {name: version for name, version in versions.items() if version != pins().get(name, version)} == {}
    (package,) = prefix.glob("lib/python*/site-packages/trainer")
    assert (package / "shipped_recipes" / "bert_sample.json").exists()
    assert (package / "shipped_launchers" / "slurm.sbatch").exists()
    assert (prefix / "bin" / "trainer").exists()


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (["everything"], {}, "usage:"),
        (["wrong", "PREFIX"], {}, "usage:"),
        (["dependencies", "PREFIX"], {"DEVICE": "tpu"}, "DEVICE must be cpu or cuda, but is tpu"),
    ],
    ids=["one-word", "unknown-step", "unknown-device"],
)
def test_wrong_words_are_refused(words: list[str], variables: dict[str, str], message: str, tmp_path: Path):
    ended = run([INSTALL, *(word.replace("PREFIX", f"{tmp_path}/prefix") for word in words)], 10, **variables)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert not (tmp_path / "prefix").exists()


@pytest.mark.slow
def test_the_file_of_sums_holds_the_pins_of_the_images():
    """If it fails, run `python docker/hashes.py`."""
    pytest.importorskip("packaging")
    program = "import hashes\nfor _, part in hashes.parts():\n    print(*part, sep='\\n')"
    ended = run([sys.executable, "-c", program], 60, PYTHONPATH=str(DOCKER))
    assert ended.returncode == 0, ended.stderr
    pinned = [line for line in (DOCKER / "hashes.txt").read_text().splitlines() if line[0] not in " #"]
    assert [line.removesuffix(" \\").replace(" ;", ";") for line in pinned] == ended.stdout.splitlines()


def test_an_unknown_extra_is_refused():
    ended = run([sys.executable, DOCKER / "requirements.py", "deepspeed", "tensorbord"], 10)
    assert ended.returncode == 1
    assert "EXTRAS must name some of deepspeed, " in ended.stderr
    assert ", but has tensorbord" in ended.stderr
    ended = run([sys.executable, DOCKER / "requirements.py", "--hashes", DOCKER / "hashes.txt", "docs"], 10)
    assert ended.returncode == 1
    assert "must hold sums for EXTRAS, but has none for docs" in ended.stderr
