"""Folders of models that are damaged, or made to harm: each is refused by name, without a traceback."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny_run import write_tiny_run
from trainer.base.errors import ExitCode
from trainer.cli import main

FIFTY_THOUSAND = 50_000
WHOLE = ("config.json", "tokenizer.json", "tokenizer_config.json")


def train(folder: Path, **sections: Any) -> int:
    once = {"training": {"max_steps": 1}, "evaluation": {"every": "9 steps"}, "checkpoint": {"every": "9 steps"}}
    return main(["run", str(write_tiny_run(folder, **once, **sections))])


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    assert train(folder) == ExitCode.DONE
    return folder / "run" / "model"


def changed(name: str, **keys: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, **keys}))

    return change


def deep(folder: Path, name: str) -> None:
    (folder / name).write_text('{"a":' * FIFTY_THOUSAND + "1" + "}" * FIFTY_THOUSAND)


def large(folder: Path, name: str) -> None:
    with (folder / name).open("ab") as file:
        file.truncate(4 << 30)  # a sparse file


def index(folder: Path, text: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text)


def tensors(folder: Path, header: dict[str, Any], body: bytes = b"1234", size: int | None = None) -> None:
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", size or len(text)) + text + body)


def tensor(shape: list[int], end: int = 4, dtype: str = "F32", name: str = "classifier.bias") -> dict[str, Any]:
    return {name: {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}


def replaces(*lengths: int) -> dict[str, Any]:
    rules = [{"type": "Replace", "pattern": {"String": "w"}, "content": "w" * length} for length in lengths]
    return {"normalizer": {"type": "Sequence", "normalizers": rules}}


split = {"type": "Split", "behavior": "Isolated", "invert": False}
FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "layers": (changed("config.json", num_hidden_layers=10**9), "at most 10,000"),
    "vocabulary": (changed("config.json", vocab_size=10**29), "at most 2,147,483,647"),
    "padding": (changed("config.json", pad_token_id=10**29), "Padding_idx"),
    "a model of texts": (changed("config.json", text_config={"model_type": "evil"}), "a text model"),
    **{f"deep {name}": (partial(deep, name=name), "could not be opened") for name in WHOLE},
    **{f"large {name}": (partial(large, name=name), "at most 268,435,456") for name in WHOLE},
    "ids": (changed("tokenizer.json", model={"type": "WordLevel", "vocab": {"a": 2**40}}), "could not be opened"),
    "model": (changed("tokenizer.json", model={"type": "evil"}), "could not be opened"),
    "pattern": (changed("tokenizer.json", pre_tokenizer={**split, "pattern": {"Regex": "(("}}), "could not be opened"),
    "panic": (
        changed("tokenizer.json", normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "could not be opened",
    ),
    "long text": (changed("tokenizer.json", **replaces(10_000_000)), "replaces one character by"),
    "longer texts": (changed("tokenizer.json", **replaces(100, 100, 100)), "replaces one character by"),
    "longest": (changed("tokenizer_config.json", model_max_length="x"), "`model_max_length` must be a number"),
    "deep index": (partial(index, text='{"weight_map":' * FIFTY_THOUSAND), "no `weight_map`"),
    "bytes as index": (partial(index, text="\0"), "no `weight_map`"),
    "empty index": (partial(index, text='{"weight_map": {}, "metadata": {}}'), ""),
    "other tensors": (partial(tensors, header=tensor([1], name="\x1b[31mX\n")), "hold no weight of"),
    "huge tensor": (partial(tensors, header=tensor([2**40, 2**20])), "could not be opened"),
    "offsets beyond": (partial(tensors, header=tensor([1], 2**50)), "could not be opened"),
    "no type": (partial(tensors, header=tensor([1], dtype="F4096")), "could not be opened"),
    "huge header": (partial(tensors, header={}, size=2**62), "could not be opened"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_hostile_folder_is_refused_by_name(tmp_path: Path, exported: Path, capsys, name: str):
    harm, expected = FOLDERS[name]
    model = tmp_path / "model"
    shutil.copytree(exported, model)
    harm(model)
    capsys.readouterr()
    code = train(tmp_path, model={"config": None, "tokenizer": None, "name_or_path": str(model)})
    shown = capsys.readouterr().err
    assert (code, expected in shown) == (ExitCode.USER, True), shown
    assert "Traceback" not in shown
    assert "\x1b" not in shown


def test_keys_of_transformers_that_are_not_ours_train(tmp_path: Path, exported: Path):
    """transformers writes an infinite number as an object, and checkpoints layers by a key of its own."""
    model = tmp_path / "model"
    shutil.copytree(exported, model)
    changed("config.json", gradient_checkpointing=True, initializer_range={"__float__": "Infinity"})(model)
    assert train(tmp_path, model={"config": None, "tokenizer": None, "name_or_path": str(model)}) == ExitCode.DONE
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["gradient_checkpointing"] is False


@pytest.mark.parametrize("case", ["tokenizer.json", "config.json", "header", "shards"])
def test_a_hostile_repository_in_the_cache_of_the_hub(exported, tmp_path, monkeypatch, capsys, case):
    cached = tmp_path / "hub" / "models--owner--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    snapshot = cached / "snapshots" / ("0" * 40)
    shutil.copytree(exported, snapshot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    weights = snapshot / "model.safetensors"
    if case == "header":
        weights.write_bytes(struct.pack("<Q", 2 << 30))
        large(snapshot, weights.name)
    elif case == "shards":
        weights.unlink()
        shards = {f"layer{number}": f"{number}.safetensors" for number in range(100_000)}
        (snapshot / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    else:
        large(snapshot, case)
    assert train(tmp_path / "run", model={"name_or_path": "owner/name", "config": None, "tokenizer": None}) == (
        ExitCode.USER
    )
    reason = {"header": "header", "shards": "names 100,000 files"}.get(case, "at most 268,435,456")
    error = capsys.readouterr().err
    assert reason in error.lower()
    assert "Traceback" not in error
