"""`trainer push`, against a hub of the tests on the loopback."""

from __future__ import annotations

import base64
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from tests.helpers import processes
from trainer.base.errors import TrainerError, UsageError
from trainer.tools import push as module
from trainer.tools.push import push


class Hub(ThreadingHTTPServer):
    """A hub with one user; `statuses` holds the answers, by the last part of a path, that replace the usual ones."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.private: bool | None = None
        self.commit = "c" * 40
        self.commits: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.blobs: dict[str, bytes] = {}
        self.statuses: dict[str, int] = {}
        self.asked: list[str] = []
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answers(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        files = [{"rfilename": name} for name in self.server.files]
        about = {"private": self.server.private, "siblings": files, "sha": self.server.commit}
        self._answer(200, {"id": "me/model", "modelId": "me/model", **about})

    def do_PUT(self) -> None:
        self.server.blobs[self.path.rsplit("/", 1)[1]] = self._body()
        self._answer(200, {})

    def do_POST(self) -> None:
        hub, body = self.server, self._body()
        last = self.path.split("?")[0].strip("/").split("/")[-2 if "/main" in self.path else -1]
        hub.asked.append(last)
        status = hub.statuses.get(last, 200)
        if status == -1:  # it dies
            self.close_connection = True
            return
        if status == 0:  # silent
            hub.ended.wait(30)
            return
        if status != 200:
            self._answer(status, {"error": "as the test asks", "url": f"{hub.url}/me/model"})
            return
        if last == "create":
            hub.private = json.loads(body)["visibility"] == "private"
            self._answer(200, {"url": f"{hub.url}/me/model", "name": "me/model"})
        elif last == "preupload":
            files = [
                {"path": one["path"], "uploadMode": "lfs" if "safetensors" in one["path"] else "regular"}
                for one in json.loads(body)["files"]
            ]
            self._answer(200, {"files": [{**one, "shouldIgnore": False} for one in files]})
        elif last == "batch":
            objects = [
                {**one, "actions": {"upload": {"href": f"{hub.url}/blobs/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            self._answer(200, {"transfer": "basic", "objects": objects})
        elif last == "commit":
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "header":
                    hub.commits.append(value)
                if line["key"] == "deletedFile":
                    del hub.files[value["path"]]
                if line["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                if line["key"] == "lfsFile":
                    hub.files[value["path"]] = hub.blobs[value["oid"]]
            answer = {"commitUrl": f"{hub.url}/me/model/commit/1", "commitOid": "1", "commitTitle": "t"}
            self._answer(200, {**answer, "success": True})
        else:  # the check of the card's head
            self._answer(200, {"warnings": [], "errors": []})

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)  # between two attempts
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.ended.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "model"
    (folder / "1_Pooling").mkdir(parents=True)
    for name in ("config.json", "1_Pooling/config.json"):
        (folder / name).write_text("{}")
    (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\n")
    (folder / "model.safetensors").write_bytes(b"weights" * 100)
    (tmp_path / "run" / "metrics.jsonl").write_text("{}")
    return tmp_path / "run"


FILES = ("1_Pooling/config.json", "README.md", "config.json", "model.safetensors")


def test_the_folder_and_nothing_else_is_sent_to_a_private_repository(hub: Hub, run: Path):
    done = push(run, "me/model", endpoint=hub.url)
    assert (done.names, done.is_private, hub.private) == (FILES, True, True)
    assert hub.files == {name: (run / "model" / name).read_bytes() for name in FILES}
    assert done.address == f"{hub.url}/me/model/commit/1"


def test_an_existing_repository_must_be_private(hub: Hub, run: Path):
    hub.statuses["create"], hub.private = 409, False
    with pytest.raises(UsageError, match="`NAME` must be a private repository, but everybody can read me/model; add"):
        push(run, "me/model", endpoint=hub.url)
    assert not hub.files
    push(run, "me/model", public=True, endpoint=hub.url)
    assert len(hub.files) == len(FILES)
    hub.private = True
    with pytest.raises(UsageError, match="must be a public repository, but only its members can read me/model; leave"):
        push(run, "me/model", public=True, endpoint=hub.url)


def test_files_of_an_older_push_that_the_folder_lacks_are_deleted_in_the_same_commit(hub: Hub, run: Path):
    hub.statuses["create"], hub.private = 409, True
    kept = {"LICENSE", ".gitattributes", "notes/config.json", "examples/model.safetensors", "logo.png", "README.md"}
    others = {"pytorch_model.bin", "onnx/model.onnx"}
    old = {
        "adapter_config.json", "adapter_model.safetensors", "model-00001-of-00002.safetensors",
        "model.safetensors.index.json", "modules.json", "2_Dense/config.json", "2_Dense/model.safetensors",
        "contrastive_scale/model.safetensors", "spiece.model", "vocab.txt", "merges.txt", "chat_template.jinja",
        "preprocessor_config.json", "generation_config.json", "special_tokens_map.json", "model.onnx",
    }  # fmt: skip
    hub.files = dict.fromkeys({*kept, *old, *others, "config.json"}, b"old")
    done = push(run, "me/model", endpoint=hub.url)
    assert (hub.files.keys(), set(done.deleted)) == ({*kept, *others, *FILES}, old)
    assert set(done.others) == {*others, "examples/model.safetensors"}, "another loader may take them"
    assert hub.files["config.json"] == b"{}"
    (commit,) = hub.commits
    assert commit["parentCommit"] == hub.commit, "a commit between is an error"


@pytest.mark.parametrize(
    ("last", "status", "message"),
    [
        ("commit", 401, r"answered 401 for me/model: .*; log in with `hf auth login`, or set HF_TOKEN"),
        ("commit", 409, r"answered 409 for me/model: .*; push again"),
        ("commit", 412, r"answered 412 for me/model: .*; push again"),
        ("create", 429, r"answered 429 for me/model: .*; push again later"),
        ("preupload", 503, r"answered 503 for me/model: .*; push again later"),
        ("commit", -1, r"cannot be used for me/model: .*; check the network and HF_ENDPOINT, and push again"),
        ("create", 0, r"cannot be used for me/model: it did not answer for 0.2 s; check the network"),
    ],
)
def test_errors_of_the_hub(hub: Hub, run: Path, monkeypatch, last: str, status: int, message: str):
    monkeypatch.setattr(module, "_SECONDS", 0.2 if status == 0 else 30.0)
    hub.statuses[last] = status
    with pytest.raises(TrainerError, match=message) as caught:
        push(run, "me/model", endpoint=hub.url)
    assert "hf_of_the_test" not in str(caught.value)
    assert not hub.files


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (lambda folder: (folder / ".env").write_text(""), r"has .env, hidden; remove it"),
        (lambda folder: (folder / "link").symlink_to("/etc/hostname"), r"has link, a link; remove it"),
        (
            lambda folder: (folder / "trainer_recipe.json").write_text('{"a": "s3://user:secret@host/b"}'),
            r"has trainer_recipe.json, a file with a password or a token; remove it",
        ),
    ],
    ids=["hidden", "link", "secret"],
)
def test_files_outside_of_an_export_are_refused(hub: Hub, run: Path, plant, message: str):
    plant(run / "model")
    with pytest.raises(UsageError, match=message):
        push(run, "me/model", endpoint=hub.url)
    assert not hub.asked


def test_wrong_arguments_and_no_hub(hub: Hub, run: Path, tmp_path: Path, monkeypatch):
    with pytest.raises(UsageError, match=r"`RUN` must be .* does not exist; train it to its end"):
        push(tmp_path / "missing", "me/model")
    with pytest.raises(UsageError, match=r"`NAME` must be owner/name or name, but is 'a/b/c'"):
        push(run, "a/b/c")
    with pytest.raises(TrainerError, match=r"cannot be used for me/model: .*; check the network and HF_ENDPOINT"):
        push(run, "me/model", endpoint="http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match=r"`HF_HUB_OFFLINE` must be 0 to push, but is set; unset it"):
        push(run, "me/model", endpoint=hub.url)


def test_the_verb_sends_to_the_hub_of_the_environment(hub: Hub, run: Path):
    environment = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    ended = processes.run([sys.executable, "-m", "trainer", "push", run, "me/model"], **environment)
    assert ended.returncode == 0, ended.stderr
    assert f"pushed {run}/model: 4 files, 0.0 MB, private: {hub.url}/me/model/commit/1" in ended.stdout
    assert set(hub.files) == set(FILES)
