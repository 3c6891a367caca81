"""Copies of checkpoints at another place: whole or not at all, resumed from, and pruned as the run's folder is."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from tests.checkpoint.samples import changed
from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.webhdfs import WebHdfs, webhdfs
from trainer.base.errors import ExitCode, TrainerError, UsageError
from trainer.checkpoint.disk import Disk
from trainer.checkpoint.format import SUMS
from trainer.checkpoint.reading import verify
from trainer.checkpoint.store import CheckpointStore
from trainer.cli import main
from trainer.features.mirror import tier as mirror
from trainer.features.mirror.tier import Mirror, open_place
from trainer.parallel.mesh import ParallelMesh

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


def mirror_of(folder: Path, store: CheckpointStore) -> Mirror:
    mesh = ParallelMesh(torch.device("cpu"))
    return Mirror(str(folder / "copies"), Disk(store, mesh), mesh)


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join("".join(capsys.readouterr()).split())


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
    text = shown(capsys)
    assert "skipped the checkpoint" in text
    assert "the checkpoint of step 2 was downloaded" in text


@pytest.mark.parametrize("damage", ["lost", "half", "all"])
def test_copies_that_lack_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str):
    assert run(tmp_path, "training.stop_at_step=3") == ExitCode.STOPPED
    shutil.rmtree(tmp_path / "run")
    copies = tmp_path / "copies" / "checkpoints"
    lost = {"lost": ["model/config.json"], "half": [SUMS, "state.json"], "all": ["state.json"]}[damage]
    for folder in ["step-00000002", "step-00000003"][damage != "all" :]:
        for name in lost:
            (copies / folder / name).unlink()
    code = run(tmp_path)
    text = shown(capsys)
    if damage == "all":  # a training from the start would replace them
        assert code == ExitCode.FAILED
        assert "step-00000003: it is damaged: state.json is missing" in text
        assert "No copy can be used; restore one, remove them all" in text
        assert steps_of(tmp_path / "copies") == ["step-00000002", "step-00000003"]
    else:
        assert code == ExitCode.DONE
        assert ("it is damaged: model/config.json is missing" in text) == (damage == "lost")
        assert "the checkpoint of step 2 was downloaded" in text


@pytest.mark.parametrize("changes", [8, pytest.param(40, marks=pytest.mark.nightly)])
def test_damaged_copies_are_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: int):
    """Each file of the newest copy is damaged in many ways; the run takes the copy before it."""
    monkeypatch.setattr(mirror, "sync", lambda path: None)
    assert run(tmp_path, "training.stop_at_step=2") == ExitCode.STOPPED
    copies = tmp_path / "copies" / "checkpoints"
    newest = copies / "step-00000002"
    files = [path for path in newest.rglob("*") if path.is_file()]
    whole = {path: path.read_bytes() for path in files}

    def fetched() -> list[int]:
        store = CheckpointStore(tmp_path / "elsewhere", keep=1)
        store.open()
        mirror_of(tmp_path, store).fetch()
        steps = store.steps()
        shutil.rmtree(tmp_path / "elsewhere")
        return steps

    assert fetched() == [2]
    for file, content in whole.items():
        for change in range(changes):
            file.write_bytes(changed(content, change))
            assert fetched() == [1], (file, change)
        for make in (os.mkfifo, os.mkdir, lambda path: path.symlink_to("nowhere")):
            file.unlink()
            make(file)
            assert fetched() == [1], file
            file.rmdir() if file.is_dir() else file.unlink()
            file.write_bytes(content)
    newest.rename(copies / "step-00000009")  # a whole copy, of another step
    assert fetched() == [1]


def test_a_copy_with_cut_or_other_sums_is_uploaded_again(tmp_path: Path):
    assert run(tmp_path) == ExitCode.DONE
    copies = tmp_path / "copies" / "checkpoints"
    sums = copies / "step-00000004" / SUMS
    whole = sums.read_bytes()
    for content in (whole[: len(whole) // 2], b"", (copies / "step-00000003" / SUMS).read_bytes()):
        sums.write_bytes(content)
        assert run(tmp_path) == ExitCode.DONE
        assert sums.read_bytes() == whole


@pytest.mark.parametrize("name", ["../../escaped", "model/../../escaped", "/escaped", "model/.hidden"])
def test_a_copy_with_a_file_elsewhere_is_refused(tmp_path: Path, name: str):
    store = CheckpointStore(tmp_path / "run", keep=1)
    store.open()
    place = tmp_path / "copies" / "checkpoints" / "step-00000001"
    place.mkdir(parents=True)
    (place / SUMS).write_text(f"{'0' * 64}  {name}\n")
    (place / "state.json").write_text(json.dumps({"format": 2, "files": {name: 1}}))
    with pytest.raises(TrainerError, match="it is damaged: SHA256SUMS holds a line that is not a checksum"):
        mirror_of(tmp_path, store).fetch()
    assert store.steps() == []


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
    monkeypatch.setattr(mirror, "open_place", lambda url: (Broken(), url.removeprefix("file://")))
    assert run(tmp_path) == ExitCode.FAILED
    text = shown(capsys)
    assert "could not be uploaded: no route to the store; training continues" in text
    assert "Restore the access" in text
    assert steps_of(tmp_path / "run") == ["step-00000003", "step-00000004"]
    whole = [path.parent.name for path in (tmp_path / "copies" / "checkpoints").glob(f"*/{SUMS}")]
    assert whole in ([], ["step-00000001"])

    monkeypatch.setattr(mirror, "open_place", open_place)
    assert run(tmp_path) == ExitCode.DONE  # the training is over; the missing copies are uploaded
    assert steps_of(tmp_path / "copies")[-1] == "step-00000004"
    assert (tmp_path / "copies" / "model" / "config.json").exists()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WebHdfs]:
    with webhdfs(tmp_path / "copies") as server:
        yield server


def test_a_server_that_goes_away_in_a_download_has_no_damaged_copies(
    tmp_path: Path, server: WebHdfs, capsys: pytest.CaptureFixture[str]
):
    place = server.url("")
    assert run(tmp_path, "training.stop_at_step=3", place=place) == ExitCode.STOPPED
    shutil.rmtree(tmp_path / "run")

    def go_away(operation: str, path: str) -> None:
        if "/model" in path:  # a folder in the copy
            server.state = "away"

    server.heard = go_away
    assert run(tmp_path, place=place) == ExitCode.FAILED
    text = shown(capsys)
    assert "could not be downloaded: 503 Server Error" in text
    assert "skipped" not in text


@pytest.mark.parametrize("resume", [pytest.param("auto", marks=pytest.mark.slow), "never"])
def test_a_server_that_is_away_at_the_start_is_not_an_empty_place(
    tmp_path: Path, server: WebHdfs, capsys: pytest.CaptureFixture[str], resume: str
):
    place = server.url("")
    assert run(tmp_path, "training.stop_at_step=3", place=place) == ExitCode.STOPPED
    copies = ["step-00000002", "step-00000003"]
    assert steps_of(tmp_path / "copies") == copies
    shutil.rmtree(tmp_path / "run")
    server.state = "away"
    assert run(tmp_path, f"checkpoint.resume={resume}", place=place) == ExitCode.FAILED
    assert "its checkpoints could not be listed: 503 Server Error" in shown(capsys)
    assert steps_of(tmp_path / "run") == []
    assert steps_of(tmp_path / "copies") == copies
    if resume == "auto":
        server.state = "well"
        assert run(tmp_path, place=place) == ExitCode.DONE
        assert list(losses(tmp_path)) == [4]


def test_a_silent_server_has_a_time_limit_at_the_start(
    tmp_path: Path, server: WebHdfs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(mirror, "SILENT_SECONDS", 0.3)
    server.state = "silent"
    assert run(tmp_path, place=server.url("run")) == ExitCode.FAILED
    assert "its checkpoints could not be listed: it did not answer within 0.3 seconds; restore" in shown(capsys)


def test_a_stop_is_obeyed_while_a_server_is_silent(tmp_path: Path, server: WebHdfs, capsys: pytest.CaptureFixture[str]):
    server.state = "silent"
    server.heard = lambda operation, path: os.kill(os.getpid(), signal.SIGTERM)
    assert run(tmp_path, place=server.url("run")) == ExitCode.STOPPED
    assert "stopped by a signal" in shown(capsys)


@pytest.mark.slow
def test_a_server_that_falls_silent_at_the_end_is_waited_for_no_longer(
    tmp_path: Path, server: WebHdfs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fall_silent(operation: str, path: str) -> None:
        if "step-00000004" in path:
            server.state = "silent"

    monkeypatch.setattr(mirror, "SILENT_SECONDS", 0.3)
    server.heard = fall_silent
    assert run(tmp_path, place=server.url("")) == ExitCode.FAILED
    assert "it did not answer within 0.3 seconds. Restore the access, then start the run again" in shown(capsys)
    assert steps_of(tmp_path / "run") == ["step-00000003", "step-00000004"]

    monkeypatch.undo()
    server.heard, server.state = (lambda operation, path: None), "well"
    assert run(tmp_path, place=server.url("")) == ExitCode.DONE
    verify(tmp_path / "copies" / "checkpoints" / "step-00000004")
    assert (tmp_path / "copies" / "model" / "config.json").exists()


def test_a_silent_ftp_server_is_an_error_for_users(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mirror, "SILENT_SECONDS", 0.3)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(TrainerError, match=r"it did not answer within 0\.3 seconds; restore the access") as error,
    ):
        open_place(f"ftp://127.0.0.1:{silent.getsockname()[1]}/run")
    assert error.value.exit_code == ExitCode.FAILED


def test_runs_of_other_names_have_other_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    place = f"{tmp_path}/copies/{{name}}"
    assert [run(tmp_path, f"name={name}", place=place) for name in ("a", "b")] == [0, 0]
    assert "was downloaded" not in shown(capsys)
    assert sorted(folder.name for folder in (tmp_path / "copies").iterdir()) == ["a", "b"]


def test_a_misspelt_placeholder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(tmp_path, place=f"{tmp_path}/copies/{{nmae}}") == ExitCode.USER
    assert '`checkpoint.mirror` has "{nmae}"; the only placeholder is {name}' in shown(capsys)


@pytest.mark.parametrize("folder", ["", "/a"])
def test_a_whole_bucket_is_noted(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mirror, "open_place", lambda _: (LocalFileSystem(), f"bucket{folder}"))
    assert run(tmp_path, place=f"s3://bucket{folder}/") == ExitCode.DONE
    noted = "`checkpoint.mirror` is s3://bucket, a whole bucket or server, which another run would share"
    assert (noted in shown(capsys)) == (not folder)


def test_memory_is_no_place_for_copies():
    with pytest.raises(UsageError, match="must be a place that outlives the run, but is memory://run"):
        open_place("memory://run")


def test_a_place_that_takes_no_files_is_refused_at_the_start(tmp_path: Path):
    class ReadOnly(LocalFileSystem):
        def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
            raise NotImplementedError("only reads")

    store = CheckpointStore(tmp_path / "run", keep=2)
    store.open()
    copies = mirror_of(tmp_path, store)
    copies._files = ReadOnly()
    with pytest.raises(UsageError, match="a file could not be written there: only reads"):
        copies.fetch()


def test_pruning_spares_newer_copies_and_removes_half_ones(tmp_path: Path):
    store = CheckpointStore(tmp_path / "run", keep=2)
    for folder, step, is_whole in (("run", 5, True), ("copies", 1, False), ("copies", 3, True), ("copies", 15, True)):
        place = tmp_path / folder / "checkpoints" / f"step-{step:08d}"
        place.mkdir(parents=True)
        (place / "state.json").touch()
        if is_whole:
            (place / SUMS).touch()
    copies = mirror_of(tmp_path, store)
    copies.send(5)
    copies.deliver(None)
    assert steps_of(tmp_path / "copies") == ["step-00000005", "step-00000015"]


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
