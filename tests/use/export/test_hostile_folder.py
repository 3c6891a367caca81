"""A run in a folder that someone else has prepared: it changes nothing outside of that folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.tiny_run import write_tiny_run
from trainer.base.errors import ExitCode
from trainer.checkpoint.owner import OWNER_FILE, written_through
from trainer.checkpoint.store import CheckpointStore
from trainer.cli import main

LOGS = 'logging.to=["console", "jsonl", "csv", "html", "tensorboard"]'
SCRATCH = (
    *(f"{mark}{name}" for name in ("model", "best") for mark in (".saving-", ".replaced-", "")),
    *(f".saving-{name}" for name in ("metrics.jsonl", "metrics_training.csv", "metrics_evaluation.csv", "report.html")),
    *(f"checkpoints/.saving-{name}" for name in ("latest", "memory-key", "step-00000001", "step-00000002")),
    "checkpoints/.replaced-step-00000001",
    "checkpoints/.removed-step-00000001",
    "checkpoints/.seen-0",
)
KEYS = [b"", b".", b"..", b"../..", b"/", b"a\nb", b"\xff\xfe", b"0123456789ABCDEF", b"0123456789abcdef\n", b"0" * 17]


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Return a folder with files of the names that a run writes."""
    folder = tmp_path / "outside"
    folder.mkdir()
    for name in ("README.md", "config.json", "model.safetensors", "state.json", "host", "precious"):
        (folder / name).write_text("keep")
    return folder


def start(folder: Path, *words: str) -> int:
    recipe = folder / "recipe.json"
    if not recipe.exists():
        write_tiny_run(folder)
    return main(["run", str(recipe), "training.max_steps=2", LOGS, "checkpoint.keep=1", *words])


@pytest.mark.parametrize("is_file", [False, True])
def test_nothing_is_written_through_a_link_at_a_scratch_name(tmp_path: Path, outside: Path, is_file: bool):
    before = contents(outside)
    for name in SCRATCH:
        link = tmp_path / "run" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(outside / "precious" if is_file else outside)
    assert start(tmp_path, "checkpoint.every=1 step", "evaluation.every=1 step") == ExitCode.DONE
    assert contents(outside) == before
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_symlink()]
    assert (tmp_path / "run" / "model" / "README.md").exists()


@pytest.mark.parametrize("name", [OWNER_FILE, *written_through()])
def test_a_link_where_a_run_writes_is_refused(tmp_path: Path, outside: Path, name: str, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(outside / "precious" if "." in name else outside)
    before = contents(outside)
    assert start(tmp_path) == ExitCode.USER
    assert contents(outside) == before
    assert "link" in capsys.readouterr().err


def test_every_entry_of_a_run_is_replaced_or_refused_as_a_link(tmp_path: Path):
    assert start(tmp_path, "evaluation.every=1 step") == ExitCode.DONE
    made = {path.name for path in (tmp_path / "run").iterdir()}
    replaced = {name for name in SCRATCH if "/" not in name} | {name.removeprefix(".saving-") for name in SCRATCH}
    assert made <= replaced | set(written_through())


@pytest.mark.parametrize("content", KEYS)
def test_a_key_of_memory_is_no_path(tmp_path: Path, content: bytes):
    store = CheckpointStore(tmp_path, keep=1)
    store.open()
    (store.folder / "memory-key").write_bytes(content)
    key, notes = store.memory_key()
    assert len(key) == 16
    assert int(key, 16) >= 0
    assert "must hold 16 hexadecimal digits" in notes[0]
    assert store.memory_key() == (key, [])


def test_a_run_with_an_edited_key_gets_a_new_key(tmp_path: Path, outside: Path, capsys):
    memory = tmp_path / "memory"
    memory.mkdir()
    words = ("checkpoint.memory.every=1 step", f"checkpoint.memory.folder={memory}", "checkpoint.every=2 steps")
    assert start(tmp_path, *words, "training.stop_at_step=1") == ExitCode.STOPPED
    (tmp_path / "run" / "checkpoints" / "memory-key").write_text(os.path.relpath(outside, memory / "trainer-0"))
    before = contents(outside)
    capsys.readouterr()
    assert start(tmp_path, *words) == ExitCode.DONE
    assert "the run creates a new key" in " ".join(capsys.readouterr().out.split())
    assert contents(outside) == before


def test_files_that_a_resumed_run_reads_are_refused_in_words(tmp_path: Path, capsys):
    assert start(tmp_path, "training.stop_at_step=1") == ExitCode.STOPPED
    for name, wrong in (("metrics.jsonl", "[" * 100_000), ("metrics.jsonl", None)):
        file = tmp_path / "run" / name
        text = file.read_text()
        file.unlink()
        if wrong is None:
            os.mkfifo(file)  # a read would wait
        else:
            start_line, rest = text.split("\n", 1)
            file.write_text("\n".join([start_line, wrong, rest]))
        assert start(tmp_path) == ExitCode.USER
        assert name in capsys.readouterr().err
        file.unlink()
        file.write_text(text)
