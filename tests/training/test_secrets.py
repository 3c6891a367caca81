"""No file, message or copy of a run holds a secret."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.config import conf
from fsspec.implementations.local import LocalFileSystem

from tests.helpers.checkpoints import ORIGIN
from tests.helpers.tiny_run import write_tiny_run
from trainer.base.errors import ExitCode
from trainer.checkpoint.counters import Progress
from trainer.cli import main
from trainer.training.model_card import complete_folder

SECRET = "s3cr3t"


def texts_below(folder: Path) -> str:
    return "".join(f"{path} {path.read_bytes()!r}" for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "override",
    [
        f"checkpoint.mirror=ftp://me:{SECRET}@host/run",
        f"checkpoint.mirror=s3://bucket/run?X-Amz-Signature={SECRET}",
        f"checkpoint.mirorr=ftp://me:{SECRET}@host/run",
        f"data.train=ftp://me:{SECRET}@host/rows.jsonl",
        f'data.validation=["https://{SECRET}@host/rows.jsonl"]',
        f"model.tokenizer=https://host/a?token={SECRET}",
        f"logging.to=ftp://me:{SECRET}@host/run",
        f"name=ftp://me:{SECRET}@host/run",
    ],
)
@pytest.mark.parametrize("verb", [["check", "--quick"], ["run"]])
def test_an_address_with_a_secret_is_refused_without_repeating_it(tmp_path: Path, override: str, verb, capfd):
    recipe = write_tiny_run(tmp_path)
    assert main([*verb, str(recipe), override]) == ExitCode.USER
    shown = capfd.readouterr()
    assert override.partition("=")[0] in shown.err
    assert SECRET not in f"{shown}{texts_below(tmp_path)}"


class Vault(LocalFileSystem):
    """A file system with a password, which its errors repeat."""

    protocol = "vault"

    def __init__(self, password: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.password = password

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(str(path).removeprefix("vault://"))

    def put_file(self, *_: object, **__: object) -> None:
        assert self.password == SECRET, "it comes from the configuration"
        raise PermissionError(f"530 Login incorrect: {self.password}")


def test_a_run_with_a_password_from_the_configuration_keeps_it_to_itself(tmp_path: Path, monkeypatch, capfd):
    fsspec.register_implementation("vault", Vault, clobber=True)
    monkeypatch.setitem(conf, "vault", {"password": SECRET})
    recipe = write_tiny_run(tmp_path)
    words = [f"checkpoint.mirror=vault://{tmp_path}/copies", "training.max_steps=2", "checkpoint.every=1 step"]
    logs = 'logging.to=["console", "jsonl", "csv", "html", "tensorboard"]'
    assert main(["run", str(recipe), *words, logs]) != ExitCode.DONE
    shown = capfd.readouterr()
    assert "530 Login incorrect: ***" in shown.err
    assert (tmp_path / "run" / "model" / "README.md").exists()
    assert SECRET not in f"{shown}{texts_below(tmp_path)}"


def test_the_recipe_of_an_older_checkpoint_is_masked_in_an_exported_folder(tmp_path: Path):
    origin = json.loads(json.dumps(ORIGIN))
    origin["recipe"]["checkpoint"] = {"mirror": f"ftp://me:{SECRET}@host/run"}
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.json").write_text('{"architectures": ["BertForMaskedLM"], "dtype": "float32"}')
    complete_folder(tmp_path / "new", tmp_path / "model", origin, Progress())
    assert "ftp://host/run" in (tmp_path / "model" / "README.md").read_text()
    assert SECRET not in texts_below(tmp_path)
