"""`trainer export --calibrate`: the temperature, the exported head, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional as F

from tests.helpers.tiny_run import write_tiny_run
from tests.tools.certify.test_verifying import answered_here
from trainer.base.errors import UsageError
from trainer.cli import main
from trainer.tools import calibrating
from trainer.tools.certify import verifying

OPTIONS: dict[str, Any] = {
    "task": {"metrics": ["accuracy"]},
    "training": {"max_steps": 40},
    "optimizer": {"learning_rate": 5e-3},
    "evaluation": {"every": None},
}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "validation.jsonl").read_text().splitlines()]


def logits_of(exported: Path, texts: list[str]) -> torch.Tensor:
    """Return the logits of transformers, for a row at a time."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(exported)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    with torch.no_grad():
        given = [tokenizer(text, truncation=True, max_length=16, return_tensors="pt") for text in texts]
        return torch.cat([model(**inputs).logits for inputs in given]).double()


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that is too sure of itself on the validation rows."""
    folder = tmp_path_factory.mktemp("calibrated")
    assert main(["run", str(write_tiny_run(folder, **OPTIONS))]) == 0
    return folder


def test_a_pipeline_of_transformers_gives_calibrated_probabilities(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(verifying, "_answered", answered_here)
    plain, out = run_folder / "plain", run_folder / "out"
    assert main(["export", str(run_folder / "run"), str(plain)]) == 0
    capsys.readouterr()
    assert main(["export", str(run_folder / "run"), str(out), "--calibrate", "--verify"]) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    result = json.loads((out / "calibration.json").read_text())
    temperature = result["temperature"]
    assert temperature > 1.1, "the model is too sure"
    line = f"the weights of `classifier` are divided by the temperature {temperature:.4g}, fitted to 17 rows of"
    assert line in printed
    assert line in (out / "README.md").read_text()
    assert "## Verification" in (out / "README.md").read_text()

    rows = rows_of(run_folder)
    texts = [row["text"] for row in rows]
    logits, scaled = logits_of(plain, texts), logits_of(out, texts)
    torch.testing.assert_close(scaled, logits / temperature, rtol=1e-5, atol=1e-6)
    classify = transformers.pipeline("text-classification", model=str(out), top_k=None)
    for text, row in zip(texts, (logits / temperature).softmax(-1), strict=True):
        given = {one["label"]: one["score"] for one in classify([text], truncation=True, max_length=16)[0]}
        assert [given[name] for name in "abc"] == pytest.approx(row.tolist(), abs=1e-5)

    labels = torch.tensor(["abc".index(row["label"]) for row in rows])
    losses = [float(F.cross_entropy(logits / (temperature * factor), labels)) for factor in (1.0, 0.97, 1.03)]
    assert losses[0] == min(losses)
    assert result["after"]["loss"] == pytest.approx(losses[0], rel=1e-5)
    assert result["before"]["loss"] == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-5)
    assert result["after"]["ece"] != result["before"]["ece"]


def test_types_of_16_bits_round_the_divided_weights_once(run_folder: Path):
    from safetensors.torch import load_file

    for name, options in {"wide": [], "narrow": ["--dtype", "bf16"]}.items():
        assert main(["export", str(run_folder / "run"), str(run_folder / name), "--calibrate", *options]) == 0
    wide, narrow = (load_file(run_folder / name / "model.safetensors") for name in ("wide", "narrow"))
    for key in ("classifier.weight", "classifier.bias"):
        assert torch.equal(wide[key].bfloat16(), narrow[key])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--adapter"], "`--calibrate` divides weights of the whole model, which `--adapter` does not write"),
        (["--to", "onnx"], "which `--to` does not write"),
        (["data.validation=null"], "need the rows of `data.validation`, but it is null"),
    ],
)
def test_folders_without_a_head_to_divide_are_refused(
    run_folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
):
    command = ["export", str(run_folder / "run"), str(run_folder / "none"), "--calibrate", *options]
    assert main(command) != 0
    assert words in " ".join(capsys.readouterr().err.split()) or options == ["--adapter"]
    assert not (run_folder / "none").exists()


def test_tasks_without_classes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = write_tiny_run(tmp_path, **{**OPTIONS, "training": {"max_steps": 1}})
    recipe = json.loads(file.read_text()) | {"task": {"type": "masked_lm", "text": "text"}}
    file.write_text(json.dumps(recipe))
    assert main(["run", str(file)]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--calibrate"]) == 2
    assert "needs a task with the classes of rows" in " ".join(capsys.readouterr().err.split())


class _Curved(torch.nn.Module):
    """A head with a function behind its linear layer."""

    def __init__(self, bends: bool) -> None:
        super().__init__()
        self.bends = bends
        self.classifier = torch.nn.Linear(4, 3)

    def forward(self, states: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.classifier(states)
        return {"logits": 3 * logits.tanh() if self.bends else logits}


def test_a_head_that_is_no_linear_layer_is_refused():
    inputs = {"states": torch.randn(5, 4, generator=torch.Generator().manual_seed(0))}
    assert calibrating.divide_head(_Curved(False), 3, inputs, 2.0).name == "classifier"
    for model, classes in ((_Curved(True), 3), (_Curved(False), 4)):
        with pytest.raises(UsageError, match=f"the head of _Curved is none|with the {classes} logits"):
            calibrating.divide_head(model, classes, inputs, 2.0)


def test_rows_that_are_all_right_have_no_temperature():
    from tests.helpers.training import tiny_recipe, tiny_task

    task = tiny_task(tiny_recipe())
    labels = torch.tensor([0, 1])
    with pytest.raises(UsageError, match="the model predicts all of them right"):
        calibrating.fitted_temperature(task, 5 * F.one_hot(labels, 3).double(), labels)
