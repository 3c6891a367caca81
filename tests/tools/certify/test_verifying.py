"""Exported folders against the trained model: `trainer export --verify`, and the few rows at the end of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import trainer
from tests.helpers import processes, warm
from tests.helpers.tiny_run import WORDS, write_tiny_run
from trainer.base.errors import ExitCode, UsageError
from trainer.models.weight_files import WeightFiles
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.reading.loading import load_recipe
from trainer.tools.certify import folder_reader, verifying
from trainer.tools.certify.comparing import NotTheTrainedModelError
from trainer.tools.certify.run_end import ComparedRows
from trainer.tools.certify.verifying import FolderCheck, Verification
from trainer.training.run import run
from trainer.use.export.checkpoint_model import CheckpointModel
from trainer.use.export.exporting import export

MASKED_LM = {"type": "masked_lm", "text": "text", "metrics": ["accuracy"]}
SEQUENCE_PAIR = {"type": "sequence_classification", "text": ["text", "other"], "label": "label"}
ASKED = Verification(12, (), "trainer export run out --verify")


def train(recipe: Path, *overrides: str) -> None:
    done = run(load_recipe(str(recipe), ["training.max_steps=2", "evaluation.every=null", *overrides]), ALONE)
    assert done == ExitCode.DONE


ALONE = LaunchEnvironment("none")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "_answered", answered_here)


def answered_here(request: dict[str, Any], place: Path) -> dict[str, Any]:
    """Answer a request in this process, which has the imports."""
    (place / "request.json").write_text(json.dumps(request))
    folder_reader.main(place)
    reply: dict[str, Any] = json.loads((place / "reply.json").read_text())
    return reply


@pytest.mark.parametrize(
    ("write", "task", "by"),
    [
        (write_tiny_run, SEQUENCE_PAIR, "transformers"),
        (write_tiny_run, MASKED_LM, "transformers"),
    ],
    ids=["classes", "masks"],
)
def test_a_sound_folder_has_a_certificate(tmp_path, here, write, task, by):
    assert_certified(tmp_path, write, task, by)


def assert_certified(tmp_path, write, task, by):
    train(_own(write, tmp_path, task))
    done = export(tmp_path / "run", tmp_path / "out", verification=ASKED)
    assert done.certificate is not None
    assert done.certificate.difference <= 1e-5 * max(1.0, done.certificate.largest)
    assert all(one == pytest.approx(other, abs=1e-6) for one, other in done.certificate.metrics.values())
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"Another process, without `trainer`, with {by} on the CPU" in card
    assert "- command: `trainer export run out --verify`" in card


def _own(write: Callable[..., Path], folder: Path, task: dict[str, Any] | None) -> Path:
    """Write a run with exactly these keys of the task."""
    file = write(folder)
    recipe = json.loads(file.read_text())
    recipe["task"] = task or recipe["task"]
    for rows in folder.glob("*.jsonl"):
        read = [json.loads(line) for line in rows.read_text().splitlines()]
        rows.write_text("".join(json.dumps({**row, "other": row["text"][:9]}) + "\n" for row in read))
    file.write_text(json.dumps(recipe))
    return file


def _weights(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _config(folder: Path, name: str = "config.json", **keys: Any) -> None:
    config = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**config, **keys}))


def _lost_head(folder: Path) -> None:
    _weights(folder, lambda tensors: tensors.pop("classifier.weight"))


def _permuted_head(folder: Path) -> None:
    _weights(folder, lambda tensors: tensors.update({"classifier.weight": tensors["classifier.weight"].flip(0)}))


def _other_words(folder: Path) -> None:
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    words = vocabulary["model"]["vocab"]
    pairs = zip(WORDS, WORDS[1:] + WORDS[:1], strict=True)
    vocabulary["model"]["vocab"] = words | {word: words[other] for word, other in pairs}
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a lost head": (_lost_head, r"differs by .*; the folder has no classifier.weight; do not use"),
    "a permuted head": (_permuted_head, r"must compute the outputs of the trained one, but differs by"),
    "permuted labels": (
        lambda folder: _config(folder, id2label={"0": "b", "1": "a", "2": "c"}),
        r"must have the classes of the training, \{0: 'a', .*, but has \{0: 'b'",
    ),
    "another tokenizer": (_other_words, r"the exported tokenizer must be that of the training, but gives"),
    "another epsilon": (lambda folder: _config(folder, layer_norm_eps=1e-3), r"but differs by"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(write_tiny_run(folder))
    return folder / "run"


def planted(monkeypatch: pytest.MonkeyPatch, plant: Callable[[Path], None]) -> None:
    """Change each new folder before it is compared."""
    compare, verify = ComparedRows.compare, FolderCheck.compare

    def compare_planted(self: ComparedRows, folder: Path) -> Any:
        plant(folder)
        return compare(self, folder)

    def verify_planted(self: FolderCheck, folder: Path) -> Any:
        plant(folder)
        return verify(self, folder)

    monkeypatch.setattr(ComparedRows, "compare", compare_planted)
    monkeypatch.setattr(FolderCheck, "compare", verify_planted)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught_and_nothing_is_left(tmp_path, here, monkeypatch, trained, fault):
    plant, message = FAULTS[fault]
    planted(monkeypatch, plant)
    with pytest.raises(NotTheTrainedModelError, match=message):
        export(trained, tmp_path / "out", verification=ASKED)
    assert not list(tmp_path.iterdir())


def test_a_forgotten_tied_weight_is_caught(tmp_path, here, monkeypatch):
    train(_own(write_tiny_run, tmp_path / "made", MASKED_LM))
    planted(monkeypatch, lambda folder: _config(folder, tie_word_embeddings=False))
    with pytest.raises(NotTheTrainedModelError, match=r"the folder has no cls.predictions.decoder"):
        export(tmp_path / "made" / "run", tmp_path / "out", verification=ASKED)


@pytest.mark.parametrize("adapter", [False, True], ids=["merged", "apart"])
def test_adapters(tmp_path, here, adapter):
    train(write_tiny_run(tmp_path / "base"))
    first = {"name_or_path": str(tmp_path / "base" / "run" / "model"), "config": None}
    train(write_tiny_run(tmp_path / "tuned", model={**first, "adapter": {"type": "lora", "rank": 4}}))
    done = export(tmp_path / "tuned" / "run", tmp_path / "out", adapter=adapter, verification=ASKED)
    assert done.certificate is not None
    assert 0 <= done.certificate.difference < 1e-6
    assert ("with PEFT on" if adapter else "with transformers on") in (tmp_path / "out" / "README.md").read_text()


def test_adapters_over_int8_that_other_programs_compute_otherwise(tmp_path, monkeypatch, trained):
    message = r"over `model.quantization` int8 other programs round the inputs of layers"
    assert_adapters_are_refused(tmp_path, monkeypatch, trained, None, {"quantization": "int8"}, message)


def assert_adapters_are_refused(tmp_path, monkeypatch, trained, task, model, message):
    """Check that an adapter of this task and model is not verified apart from its base."""
    recipe = _own(write_tiny_run, tmp_path / "own", task)
    base = {"name_or_path": str(trained / "model"), "adapter": {"type": "lora", "rank": 4}, **model}
    recipe.write_text(json.dumps({**json.loads(recipe.read_text()), "model": base}))
    train(recipe)
    monkeypatch.setattr(CheckpointModel, "base_weights", None)  # refused before any work
    with pytest.raises(UsageError, match=f"`--verify` with `--adapter` .*{message}.*; leave one of them out"):
        export(tmp_path / "own" / "run", tmp_path / "out", adapter=True, verification=ASKED)
    assert [one.name for one in tmp_path.iterdir()] == ["own"]


def test_python_equals_the_command(tmp_path, here, trained):
    done = trainer.export(trained, tmp_path / "out", dtype="bf16", verify_rows=4, overrides=["evaluation.batch_size=2"])
    assert (done.weights, done.step) == (("model.safetensors",), 2)
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"- command: `trainer.export('{trained}', '{tmp_path / 'out'}', verify_rows=4)`" in card
    with pytest.raises(trainer.TrainerError, match=r"`FOLDER` must be empty or missing"):
        trainer.export(trained, tmp_path / "out")


def test_16_bits_have_a_wider_bound(tmp_path, here, trained):
    done = export(trained, tmp_path / "out", "bf16", verification=ASKED)
    assert done.certificate is not None
    assert 1e-6 < done.certificate.difference < 0.1 * done.certificate.largest


@pytest.mark.parametrize("key", ["fp8_features=16", "residuals=bf16"])
def test_other_types_are_verified_in_fp32(tmp_path, here, key):
    recipe = write_tiny_run(tmp_path)
    train(recipe, "precision=bf16", key)
    verified = export(tmp_path / "run", tmp_path / "out", verification=ASKED).certificate
    assert verified is not None


def test_rows_that_are_missing(tmp_path, here):
    train(write_tiny_run(tmp_path), "data.validation=null")
    with pytest.raises(UsageError, match=r"but it is null; name rows by a further argument: data.validation=FILE"):
        export(tmp_path / "run", tmp_path / "out", verification=ASKED)
    rows = f"data.validation={tmp_path / 'validation.jsonl'}"
    done = export(tmp_path / "run", tmp_path / "out", verification=Verification(5, (rows,)))
    assert done.certificate is not None
    assert "5 rows" in done.certificate.rows


@pytest.mark.slow
@pytest.mark.parametrize("to", ["safetensors", "onnx"])
def test_as_a_user_in_a_process_that_lacks_this_project(tmp_path, trained, to):
    export_ = [str(part) for part in ("export", trained, tmp_path / "out")]
    ended = processes.finish(warm.start([*export_, "data.validation=other"]))
    assert ended.returncode == ExitCode.USER
    assert "which only --verify and --calibrate read; add one of them" in ended.stderr
    ended = processes.finish(warm.start([*export_, "--verify", "--to", to, "--rows", "4"]))
    assert ended.returncode == 0, ended.stderr
    assert "Another process, without `trainer`" in ended.stdout
    assert "--rows 4`" in (tmp_path / "out" / "README.md").read_text()


class TestComparedRows:
    def test_the_end_of_a_run_compares_and_notes_it_in_the_card(self, tmp_path):
        train(write_tiny_run(tmp_path), "evaluation.verify_export=3")
        card = (tmp_path / "run" / "model" / "README.md").read_text()
        assert "The end of the run, with transformers, opened this folder. It computed the outputs" in card
        assert "for 3 rows" in card

    @pytest.mark.parametrize("fault", ["a lost head", "permuted labels", "another tokenizer"])
    def test_a_planted_fault_ends_the_run(self, tmp_path, monkeypatch, fault):
        planted(monkeypatch, FAULTS[fault][0])
        with pytest.raises(NotTheTrainedModelError, match=r"exported (model must have|tokenizer must be)"):
            train(write_tiny_run(tmp_path), "evaluation.verify_export=3", "checkpoint.every=null")
        assert not (tmp_path / "run" / "model").exists()
        with pytest.raises(UsageError, match=r"`--verify` is needed for this run, which did not keep its exported mod"):
            export(tmp_path / "run", tmp_path / "out")
        monkeypatch.undo()
        train(write_tiny_run(tmp_path), "evaluation.verify_export=3", "checkpoint.every=null")
        export(tmp_path / "run", tmp_path / "out")

    def test_another_process_has_lost_weights_that_the_export_forgot(self, tmp_path, here, monkeypatch, trained):
        write = WeightFiles.write

        def forgetful(self: WeightFiles, read: Any, folder: Path) -> list[Path]:
            written = write(self, read, folder)
            _lost_head(folder)
            return written

        monkeypatch.setattr(WeightFiles, "write", forgetful)
        with pytest.raises(NotTheTrainedModelError, match=r"has no classifier\.weight"):
            export(trained, tmp_path / "out", verification=ASKED)
