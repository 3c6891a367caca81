"""Copies of checkpoints at another place: whole or not at all, resumed from, and pruned as the run's folder is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from tests.helpers.tiny_run import write_tiny_run
from trainer.base.errors import ExitCode, UsageError
from trainer.checkpoint.files import SUMS, verify
from trainer.checkpoint.mirror import Mirror, open_place
from trainer.cli import main

EVERY_STEP = (
    "checkpoint.every=1 step",
    "checkpoint.keep=2",
    "evaluation.every=null",
    "logging.every=1 step",
    'logging.to=["console", "jsonl"]',
)


def run(folder: Path, *words: str, place: str | None = None) -> int:
    recipe = folder / "recipe.json"
    if not recipe.exists():
        write_tiny_run(folder)
    place = place or f"file://{folder}/copies"
    return main(["run", str(recipe), "training.max_steps=4", f"checkpoint.mirror={place}", *EVERY_STEP, *words])


def steps_of(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def losses(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each upload end before the next step, so that none takes the place of another."""
    send = Mirror.send

    def send_and_wait(self: Mirror, step: int) -> None:
        send(self, step)
        self._thread.join()

    monkeypatch.setattr(Mirror, "send", send_and_wait)


def test_a_lost_folder_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    whole.mkdir()
    lost.mkdir()
    assert run(whole) == ExitCode.DONE
    assert steps_of(whole / "copies") == steps_of(whole / "run") == ["step-00000003", "step-00000004"]
    for copy in (whole / "copies" / "checkpoints").iterdir():
        verify(copy)
    exported = {path.name: path.read_bytes() for path in (whole / "run" / "model").iterdir() if path.is_file()}
    copied = {path.name: path.read_bytes() for path in (whole / "copies" / "model").iterdir() if path.is_file()}
    assert copied == exported

    assert run(lost, "training.stop_at_step=2") == ExitCode.STOPPED
    shutil.rmtree(lost / "run")
    (lost / "copies" / "checkpoints" / "step-00000007").mkdir()  # an upload that was killed
    capsys.readouterr()
    assert run(lost) == ExitCode.DONE
    assert "the checkpoint of step 2 was downloaded" in " ".join(capsys.readouterr().out.split())
    expected = losses(whole)
    assert losses(lost) == {step: expected[step] for step in (3, 4)}


def test_a_damaged_copy_is_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(tmp_path, "training.stop_at_step=3") == ExitCode.STOPPED
    shutil.rmtree(tmp_path / "run")
    copy = tmp_path / "copies" / "checkpoints" / "step-00000003"
    (copy / "state.json").write_text("{}")
    assert run(tmp_path) == ExitCode.DONE
    shown = " ".join(capsys.readouterr().out.split())
    assert "passed over the checkpoint" in shown
    assert "the checkpoint of step 2 was downloaded" in shown


def test_never_resuming_refuses_copies_of_an_earlier_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(tmp_path, "training.stop_at_step=2") == ExitCode.STOPPED
    shutil.rmtree(tmp_path / "run")
    assert run(tmp_path, "checkpoint.resume=never") == ExitCode.USER
    assert "has a checkpoint of step 2; name another `checkpoint.mirror`" in " ".join(capsys.readouterr().err.split())
    assert steps_of(tmp_path / "copies") == ["step-00000001", "step-00000002"]


class Broken(LocalFileSystem):
    """A place that takes small files of models only, but for the first checkpoint."""

    def put_file(self, lpath: str, rpath: str, *args: Any, **options: Any) -> Any:
        if "step-00000001" not in rpath and not rpath.endswith(("config.json", "special_tokens_map.json")):
            raise OSError("no route to the store")
        return super().put_file(lpath, rpath, *args, **options)


def test_an_upload_that_fails_is_noted_and_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from trainer.checkpoint import mirror

    monkeypatch.setattr(mirror, "open_place", lambda url: (Broken(), url.removeprefix("file://")))
    assert run(tmp_path) == ExitCode.FAILED
    shown = " ".join("".join(capsys.readouterr()).split())
    assert "could not be uploaded: no route to the store; the training goes on" in shown
    assert "Mend the access" in shown
    assert steps_of(tmp_path / "run") == ["step-00000003", "step-00000004"]
    whole = [path.parent.name for path in (tmp_path / "copies" / "checkpoints").glob(f"*/{SUMS}")]
    assert whole in ([], ["step-00000001"])

    monkeypatch.setattr(mirror, "open_place", open_place)
    assert run(tmp_path) == ExitCode.DONE  # the training is over; the missing copies are uploaded
    assert steps_of(tmp_path / "copies")[-1] == "step-00000004"
    assert (tmp_path / "copies" / "model" / "config.json").exists()


def test_an_unknown_protocol_is_refused():
    with pytest.raises(UsageError, match="must be a place that fsspec can open, but is nowhere://bucket"):
        open_place("nowhere://bucket/run")


def test_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    server = pytest.importorskip("moto.server", reason="needs moto[server]")
    pytest.importorskip("s3fs", reason="needs s3fs")
    store = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    store.start()
    try:
        host, port = store.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        place = "s3://bucket/run"
        files, _ = open_place("s3://bucket/run")
        files.mkdir("bucket")
        assert run(tmp_path, "training.stop_at_step=3", place=place) == ExitCode.STOPPED
        shutil.rmtree(tmp_path / "run")
        assert run(tmp_path, place=place) == ExitCode.DONE
        assert list(losses(tmp_path)) == [4]
        files.invalidate_cache()
        names = {path.partition("run/")[2] for path in files.find("bucket/run")}
        assert {f"checkpoints/step-0000000{step}/{SUMS}" for step in (3, 4)} < names
        assert "model/config.json" in names
        assert not any("step-00000001" in name for name in names)
    finally:
        store.stop()
