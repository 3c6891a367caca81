"""Folders that can be deleted: a run needs no tool and no feature."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.helpers.processes import ROOT, finish, start
from tests.house import reaches_up, switches
from trainer.base import extensions
from trainer.base.errors import UsageError
from trainer.base.extensions import Kind


def test_the_trunk_names_no_tool_and_no_feature():
    assert reaches_up() == []


def test_tasks_alone_know_their_types():
    assert switches() == []


def test_the_kinds_of_rows_are_those_that_folders_register():
    files = (ROOT / "trainer").glob("**/extension.json")
    assert {kind for file in files for kind in json.loads(file.read_text())} == set(get_args(Kind))


def test_no_two_folders_register_the_same_name():
    files = (ROOT / "trainer").glob("**/extension.json")
    names = [(kind, name) for file in files for kind, rows in json.loads(file.read_text()).items() for name in rows]
    assert len(names) == len(set(names))


def test_two_folders_with_the_same_name_are_refused(tmp_path, monkeypatch):
    for name in ("first", "second"):
        (tmp_path / "features" / name).mkdir(parents=True)
        (tmp_path / "features" / name / "extension.json").write_text('{"rule": {"task.text": "m:f"}}')
    monkeypatch.setattr(extensions, "__file__", str(tmp_path / "base" / "extensions.py"))
    with pytest.raises(UsageError, match=r"the rule 'task.text' must be registered by one folder, but .*second"):
        extensions._of_folders()


def test_folders_with_the_same_name_are_an_error_of_the_command_line(whole: Path):
    folder = whole / "features" / "second"
    folder.mkdir()
    try:
        (folder / "extension.json").write_text('{"launcher": {"slurm": {}}}')
        for verb in ("recipes", "run"):
            shown = run(whole.parent, verb, "bert_sample", code=2)
            assert shown.startswith("error: the launcher 'slurm' must be registered by one folder, but ")
            assert shown.count("\n") == 1
    finally:
        shutil.rmtree(folder)


def test_recipes_and_keys_of_features_that_are_not_here_are_named(whole: Path, tmp_path: Path):
    names = ("chats", "embedding_noise")
    for name in names:
        (whole / "features" / name).rename(tmp_path / name)
    try:
        listed = {line.split()[0]: line for line in run(whole.parent, "recipes").splitlines()}
        assert "(unavailable) it extends 'llama_8b_lora', which is not installed" in listed["llama_8b_qlora"]
        assert "llama_8b_lora" not in listed
        assert sum("(unavailable)" in line for line in listed.values()) == 1
        arguments = tmp_path / "arguments.json"
        arguments.write_text('{"learning_rate": 1e-4, "per_device_train_batch_size": 8, "neftune_noise_alpha": 5.0}')
        refused = run(whole.parent, "convert", str(arguments), code=2)
        assert "`model.neftune_alpha` is a key of a feature that is not installed; remove it" in refused
        arguments.write_text('{"learning_rate": 1e-4, "per_device_train_batch_size": 8, "neftune_noise_alpha": null}')
        assert "neftune" not in run(whole.parent, "convert", str(arguments))
    finally:
        for name in names:
            (tmp_path / name).rename(whole / "features" / name)


FEATURES = sorted(file.parent.name for file in (ROOT / "trainer" / "features").glob("*/extension.json"))


def copied(folder: Path) -> Path:
    """Copy the package and its recipes; return the package."""
    for name in ("trainer", "recipes"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "trainer"


def run(folder: Path, *words: str, code: int = 0) -> str:
    ended = finish(start([sys.executable, "-m", "trainer", *words], folder, PYTHONPATH=str(folder)), 300)
    assert ended.returncode == code, ended.stderr
    return ended.stderr if code else ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("deleted", [("tools",), tuple(f"features/{name}" for name in FEATURES)], ids=" ".join)
def test_the_sample_trains_without(tmp_path: Path, deleted: tuple[str, ...]):
    package = copied(tmp_path)
    for name in deleted:
        shutil.rmtree(package / name)
    run(tmp_path, "run", "bert_sample", "training.max_steps=2", "--processes", "1")
    assert list(tmp_path.glob("runs/*/model/model.safetensors"))


@pytest.mark.slow
def test_layouts_train_alike_without_features(tmp_path: Path):
    package = copied(tmp_path)
    for name in FEATURES:
        shutil.rmtree(package / "features" / name)
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__", "features"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    rows = ["tests/parity/test_parity.py", "-k", "any_layout and 2ranks-fp32 and (fsdp or tensor2)"]
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-m", "not slow and not nightly", *rows]
    ended = finish(start(command, tmp_path, PYTHONPATH=str(tmp_path)), 300)
    assert ended.returncode == 0, ended.stdout
    assert re.search(r"\b2 passed", ended.stdout)


def keys_of(schema: dict[str, Any]) -> set[str]:
    """Return the keys of a recipe, those of sections with the name of the section before a dot."""
    keys = set(schema["properties"])
    for section, field in schema["properties"].items():
        for kind in re.findall(r"#/\$defs/(\w+)", json.dumps(field)):
            keys |= {f"{section}.{key}" for key in schema["$defs"][kind].get("properties", ())}
    return keys


_OTHER_KINDS = {
    "precision", "casts", "logging", "kernel", "observer", "callbacks", "recipe_format", "export", "warnings",
    "launcher", "run", "model", "resumption", "format", "metric", "rotation", "splits",
}  # fmt: skip
"""Kinds of registrations of a feature without keys."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, from which a test takes a feature."""
    return copied(tmp_path_factory.mktemp("whole"))


def test_the_schema_has_a_definition_for_most_features(whole: Path):
    assert len(json.loads(run(whole.parent, "schema"))["$defs"]) > len(FEATURES) / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
def test_each_feature_can_be_deleted(whole: Path, tmp_path: Path, name: str):
    away, folder = whole / "features" / name, whole.parent
    rows = json.loads((away / "extension.json").read_text())
    away.rename(tmp_path / name)
    try:
        check_without(folder, rows)
    finally:
        (tmp_path / name).rename(away)


def check_without(folder: Path, rows: dict[str, Any]) -> None:
    """Check that nothing knows the names that a deleted feature had registered."""
    schema = run(folder, "schema")
    keys = rows.get("keys", {}).keys()
    targets = json.loads(schema)["$defs"]["Logging"]["properties"]["to"]["items"]["enum"]
    kinds = ("strategy", "optimizer", "schedule", "task", "format")
    # A target of logs may have the name of a format.
    names = [f'"{word}"' for kind in kinds for word in rows.get(kind, ()) if word not in targets]
    precisions = json.loads(schema)["properties"]["precision"]["enum"]  # a type of sent gradients has the same name
    assert names or keys or rows.keys() & _OTHER_KINDS
    assert not any(word in schema for word in names)
    assert keys.isdisjoint(keys_of(json.loads(schema)))
    assert rows.get("logging", {}).keys().isdisjoint(targets)
    assert rows.get("precision", {}).keys().isdisjoint(precisions)
    for task in rows.get("task", ()):
        refused = run(folder, "check", "bert_sample", f"task.type={task}", code=2)
        assert '`task.type` must be one of "sequence_classification"' in refused
        assert f'but is "{task}"' in " ".join(refused.split())
    for end in rows.get("recipe_format", ()):
        (folder / f"r{end}").write_text("extends: bert_sample\n")
        refused = " ".join(run(folder, "check", f"r{end}", code=2).split())
        assert f"a file with the ending {end} is read as JSON; recipes end with .json" in refused
    for word in rows.get("export", ()):
        refused = run(folder, "export", "run", "folder", "--to", word, code=2)
        assert f"`--to` must be a registered format, safetensors, but is '{word}'" in " ".join(refused.split())
