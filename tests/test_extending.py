"""The packages and the task of `docs/extending.md` train as they stand."""

from __future__ import annotations

import importlib
import json
import math
import re
import socket
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.processes import ROOT, finish, start
from tests.helpers.tiny_run import write_tiny_run
from trainer.cli import main
from trainer.engine.optimizers.parameters import RATE

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
COMMANDS = """
import sys

import counts

from trainer.cli import main

recipe, model, rows = sys.argv[1:]
assert main(["run", recipe]) == 0
assert main(["evaluate", model, "--json"]) == 0
assert main(["predict", model, "--input", rows, "--output", rows.replace("in.", "out.")]) == 0
"""


def write_blocks(folder: Path, prefix: str) -> None:
    """Write the files of the page with a name that begins so."""
    for name, source in re.findall(r"^```python\n# ([\w/]+\.py)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
        if name.startswith(prefix):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(source)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_the_task_of_the_page(tmp_path: Path):
    write_blocks(tmp_path, "counts.py")
    (tmp_path / "commands.py").write_text(COMMANDS)
    recipe = write_tiny_run(tmp_path)
    content = json.loads(recipe.read_text())
    content["task"] = {"type": "counts", "text": "text", "metrics": ["mse"]}
    recipe.write_text(json.dumps(content))
    for split in ("train", "validation"):
        file = tmp_path / f"{split}.jsonl"
        texts = [json.loads(line)["text"] for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps({"text": text, "label": len(text.split())}) + "\n" for text in texts))
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    arguments = [recipe, tmp_path / "run" / "model", tmp_path / "in.jsonl"]
    process = start([sys.executable, tmp_path / "commands.py", *arguments], PYTHONPATH=f"{tmp_path}:{ROOT}")
    ended = finish(process)
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(line)["count"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    lengths = [len(text.split()) for text in texts]
    error = sum((count - length) ** 2 for count, length in zip(found, lengths, strict=True)) / len(texts)
    shown = json.loads(ended.stdout.splitlines()[-1])["metrics"]["mse"]
    assert math.isclose(error, shown, rel_tol=1e-4)


def install(folder: Path, name: str) -> None:
    """Install the package of the page with this name."""
    write_blocks(folder, f"{name}/")
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[trainer.extensions]\n{name} = {name}:register\n")


def losses_of(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.slow
def test_the_strategy_of_the_page(tmp_path: Path):
    install(tmp_path, "sums")
    assert main(["run", str(write_tiny_run(tmp_path / "ddp")), "--processes", "1"]) == 0
    recipe = write_tiny_run(tmp_path / "sums", parallel={"strategy": "sums"})
    command = [sys.executable, "-m", "trainer", "run", recipe, "--processes", "2"]
    ended = finish(start(command, PYTHONPATH=f"{tmp_path}:{ROOT}"), 300)
    assert ended.returncode == 0, ended.stderr
    assert losses_of(tmp_path / "ddp") == pytest.approx(losses_of(tmp_path / "sums"), rel=1e-5)
    refused = [*command[:3], "check", recipe, "parallel.shard=2"]
    ended = finish(start(refused, PYTHONPATH=f"{tmp_path}:{ROOT}"), 120)
    assert "`parallel.shard` applies only to hsdp, but `parallel.strategy` is sums" in ended.stderr


@pytest.mark.slow
def test_the_optimizer_of_the_page(tmp_path: Path):
    install(tmp_path, "lion")
    keys = {"name": "lion", "learning_rate": 1e-3, "weight_decay": 0.1}
    results = []
    for name, ranks in (("one", "1"), ("two", "2")):
        recipe = write_tiny_run(
            tmp_path / name, optimizer=keys, parallel={"strategy": "fsdp" if ranks == "2" else "ddp"}
        )
        command = [sys.executable, "-m", "trainer", "run", recipe, "--processes", ranks]
        ended = finish(start(command, PYTHONPATH=f"{tmp_path}:{ROOT}"), 300)
        assert ended.returncode == 0, ended.stderr
        results.append(losses_of(tmp_path / name))
    assert len(results[0]) == 8
    assert results[0] == pytest.approx(results[1], rel=1e-5)
    refused = [*command[:3], "check", recipe, "parallel.strategy=zero1"]
    ended = finish(start(refused, PYTHONPATH=f"{tmp_path}:{ROOT}"), 120)
    assert "which does not combine with `parallel.strategy`" in ended.stderr


def test_the_update_of_the_page_equals_the_published_algorithm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Chen et al. 2023, algorithm 2, in fp64."""
    write_blocks(tmp_path, "lion/")
    (tmp_path / "lion" / "__init__.py").write_text("")  # the keys would need a registration
    monkeypatch.syspath_prepend(str(tmp_path))
    Lion = importlib.import_module("lion.optimizer").Lion  # noqa: N806
    weight = torch.nn.Parameter(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    expected, average = weight.detach().double(), torch.zeros(4, 3, dtype=torch.float64)
    optimizer = Lion([{"params": [weight], "weight_decay": 0.1, RATE: 1.0}], {"lr": 0.01, "betas": (0.9, 0.99)})
    for step in range(3):
        weight.grad = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        optimizer.begin(0.01, step)
        optimizer.step()
        gradient = weight.grad.double()
        expected -= 0.01 * ((0.9 * average + 0.1 * gradient).sign() + 0.1 * expected)
        average = 0.99 * average + 0.01 * gradient
    torch.testing.assert_close(weight.detach().double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.slow
def test_the_schedule_of_the_page(tmp_path: Path):
    install(tmp_path, "stairs")
    recipe = write_tiny_run(tmp_path, schedule={"name": "stairs", "warmup": 2, "stairs": 2})
    command = [sys.executable, "-m", "trainer", "run", recipe, "--processes", "1", "logging.every=1 step"]
    ended = finish(start(command, PYTHONPATH=f"{tmp_path}:{ROOT}"), 300)
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rates = [line["learning_rate"] for line in lines if "learning_rate" in line]
    assert [rate / rates[2] for rate in rates] == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 0.5, 0.5, 0.5])


@pytest.mark.slow
def test_the_format_of_the_page(tmp_path: Path):
    install(tmp_path, "plainlines")
    task = {"type": "masked_lm", "text": "text", "metrics": ["perplexity"]}
    recipe = write_tiny_run(tmp_path, task=task, evaluation={"every": None}, data={"validation": None})
    rows = [json.loads(line)["text"] for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    (tmp_path / "train.txt").write_text("".join(f"{text}\n" for text in rows))
    results = []
    for name in ("jsonl", "txt"):
        overrides = [f"data.train={tmp_path}/train.{name}", f"checkpoint.folder={tmp_path}/{name}/run"]
        if name == "jsonl":
            assert main(["run", str(recipe), "--processes", "1", *overrides]) == 0
            results.append(losses_of(tmp_path / name))
            continue
        command = [sys.executable, "-m", "trainer", "run", recipe, "--processes", "1", *overrides]
        ended = finish(start(command, PYTHONPATH=f"{tmp_path}:{ROOT}"), 300)
        assert ended.returncode == 0, ended.stderr
        results.append(losses_of(tmp_path / name))
    assert results[0] == results[1]
    (tmp_path / "in.txt").write_text("word1 [MASK]\n")
    words = [tmp_path / "txt" / "run", "--input", tmp_path / "in.txt", "--output", tmp_path / "out.txt"]
    ended = finish(start([*command[:3], "predict", *words], PYTHONPATH=f"{tmp_path}:{ROOT}"), 300)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "out.txt").read_text() == "word1 [MASK]\n"


@pytest.mark.slow
def test_the_logging_target_of_the_page(tmp_path: Path):
    install(tmp_path, "statsd")
    recipe = write_tiny_run(tmp_path, logging={"every": "4 steps", "to": ["statsd"], "project": "tiny"})
    command = [sys.executable, "-m", "trainer", "run", recipe, "--processes", "1"]
    with socket.socket(type=socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(5)
        variables = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "STATSD_PORT": str(server.getsockname()[1])}
        ended = finish(start(command, **variables), 300)
        assert ended.returncode == 0, ended.stderr
        sent = []
        while len(sent) < 2:
            text = server.recv(1000).decode()
            sent += [float(value) for value in re.findall(r"^tiny\.train/loss:(.*)\|g$", text)]
    assert sent == losses_of(tmp_path)
    ended = finish(start([*command, 'logging.to=["csv"]'], **variables), 120)
    assert '`logging.project` applies only to "wandb", "mlflow", "trackio", "statsd", but' in ended.stderr
