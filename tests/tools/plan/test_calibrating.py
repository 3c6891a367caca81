"""A run beside its plan: the factor on the times of its device, and where it is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.observe.samples import run_info, step_record
from trainer.base.errors import UsageError
from trainer.cli import main
from trainer.observe.metrics_file import MetricsFile
from trainer.tools.plan.hardware import parse_devices
from trainer.tools.plan.rates import corrected
from trainer.tools.report.report import write_report

RECIPE: dict[str, Any] = {
    "name": "small",
    "task": {"type": "masked_lm", "text": "text"},
    "model": {
        "config": {
            "model_type": "bert", "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "intermediate_size": 64,
        },
        "tokenizer": "owner/tokenizer",
    },
    "data": {"max_length": 128},
    "training": {"max_steps": 40, "global_batch_size": 4},
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run on an H200 whose steps 20 and 30 take 80 ms, after slow ones, with rows of 64 tokens."""
    folder = tmp_path / "run"
    folder.mkdir()
    file = MetricsFile()
    file.start(run_info(folder, device="NVIDIA H200", world_size=1, recipe=RECIPE))
    for step, seconds in ((10, 9.0), (20, 0.08), (30, 0.08)):
        speed = {"samples_per_second": 10.0, "tokens_per_second": 640.0}
        file.step(step_record(step, step_seconds=seconds, peak_memory_bytes=50 << 20, **speed))
    file.close()
    return folder


def test_the_next_plan_takes_the_measured_time_and_says_so(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rates = tmp_path / "cache" / "trainer" / "rates.json"
    assert main(["plan", "--calibrate", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "80.0 ms" in shown
    assert str(rates) in shown
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps(RECIPE))
    words = ["plan", str(recipe), "--gpus", "1xH200", "--length", "64", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["time"]["seconds"]["likely"] == pytest.approx(0.08)
    assert sum(found["time"]["parts"].values()) == pytest.approx(0.08)
    assert found["time"]["samples_per_second"] == pytest.approx(4 / 0.08)
    assert any(str(rates) in note and str(run) in note for note in found["notes"])
    assert main([*words, "--rates", "none"]) == 0
    plain = json.loads(capsys.readouterr().out)
    factor = json.loads(rates.read_text())["H200"]["factor"]
    assert plain["time"]["seconds"]["likely"] * factor == pytest.approx(0.08)
    assert not plain["notes"]
    page = write_report([run], None).read_text()
    assert "Plan and measurement of run" in page
    assert "80.0 ms" in page
    # Without that file, the report plans the run itself, and shows the same table.
    table = page[page.index("Plan and measurement of run") :].split("</table>")[0]
    (run / "planned.json").unlink()
    assert "Plan and measurement" not in write_report([run], None).read_text()
    assert main(["report", str(run)]) == 0
    assert table in (run / "report.html").read_text()


def test_wrong_runs_and_files_are_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lines = (run / "metrics.jsonl").read_text().replace("NVIDIA H200", "Toaster")
    (run / "metrics.jsonl").write_text(lines)
    assert main(["plan", "--rates", "none", "--calibrate", str(run)]) == 2
    assert main(["plan", "--calibrate", str(run), "--rates", "none"]) == 2  # in any order
    assert main(["plan", "--rates", str(tmp_path / "r.json"), "--calibrate", str(run)]) == 2
    assert "ran on 'Toaster', which is no device with known rates" in capsys.readouterr().err
    (run / "metrics.jsonl").write_text("\n".join(lines.replace("Toaster", "NVIDIA H200").splitlines()[:2]) + "\n")
    assert main(["plan", "--rates", str(tmp_path / "r.json"), "--calibrate", str(run)]) == 2
    assert "must have logged steps from step 20 on" in capsys.readouterr().err
    devices = parse_devices("1xH200")
    with pytest.raises(UsageError, match="which is no file"):
        corrected(devices, str(tmp_path / "r.json"))
    for text in ("[]", "{", '{"H200": {"factor": -1}}', '{"H200": 2}'):
        (tmp_path / "r.json").write_text(text)
        with pytest.raises(UsageError, match=r"r\.json"):
            corrected(devices, str(tmp_path / "r.json"))
