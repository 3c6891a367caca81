"""Distillation: checks of the teacher, a whole run with one, its checkpoints and its plan."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.helpers.tiny_run import write_tiny_image_run, write_tiny_run
from tests.helpers.training import TINY_BERT, TINY_DECODERS, TINY_VIT
from trainer.base.errors import ExitCode, UsageError
from trainer.cli import main
from trainer.features.distillation import feature
from trainer.models.describe import describe
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.reading.loading import load_recipe
from trainer.tools.plan.ledger import GRADIENTS, OPTIMIZER, PARAMETERS, SECOND_MODEL
from trainer.training import describing
from trainer.training.run import run

CLASSIFIER = "AutoModelForSequenceClassification"
LABELS = 'task.labels=["a", "b", "c"]'


def save_teacher(
    folder: Path, config: Mapping[str, Any], head: str = CLASSIFIER, names: Sequence[str] = ("c", "A", "b")
) -> Path:
    described = transformers.AutoConfig.for_model(**config)
    if names:
        described.id2label, described.label2id = dict(enumerate(names)), {name: i for i, name in enumerate(names)}
    torch.manual_seed(1)
    getattr(transformers, head).from_config(described).save_pretrained(folder)
    return folder


def write_student(folder: Path, **sections: Any) -> Path:
    """Write a recipe with a teacher of the same classes, in another order and case, and of the same tokenizer."""
    recipe = write_tiny_run(folder, **{"distillation": {"teacher": "teacher"}, **sections})
    save_teacher(folder / "teacher", {**TINY_BERT, "hidden_size": 48})
    shutil.copytree(folder / "tokenizer", folder / "teacher", dirs_exist_ok=True)
    return recipe


def problems(capsys: pytest.CaptureFixture[str], recipe: Path, *overrides: str) -> str:
    assert main(["check", str(recipe), *overrides]) == ExitCode.USER
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    assert "model.name_or_path" not in shown
    return shown


def train(recipe: Path, *overrides: str) -> int:
    return run(load_recipe(str(recipe), overrides), LaunchEnvironment("none"))


def test_a_run_learns_from_its_teacher_and_stores_none_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    recipe, teacher = write_student(tmp_path), tmp_path / "teacher"
    assert main(["check", str(recipe)]) == ExitCode.DONE
    described: list[Any] = []
    with monkeypatch.context() as patch:
        for module in (describing, feature):
            patch.setattr(module, "describe", lambda *words: described.append(words) or describe(*words))
        assert train(recipe, "training.stop_at_step=4") == ExitCode.STOPPED
    assert len(described) == 2, "the student and the teacher, each once"
    facts = json.loads(next((tmp_path / "run").rglob("state.json")).read_text())
    assert not [name for name in facts["tensors"] if "teacher" in name]
    assert facts["tensors"]["model.bert.embeddings.word_embeddings.weight"] == [211, 32]  # the student's
    assert len(facts["identity"]["distillation"]["teacher"]) == 16  # a digest, not the folder

    weights = load_file(teacher / "model.safetensors")
    save_file(
        {**weights, "classifier.bias": weights["classifier.bias"] + 1}, teacher / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(UsageError, match=r"`distillation\.teacher` was"):
        train(recipe)
    save_file(weights, teacher / "model.safetensors", {"format": "pt"})
    moved = teacher.rename(tmp_path / "moved")
    assert train(recipe, f"distillation.teacher={moved}") == ExitCode.DONE

    shutil.rmtree(moved)  # a trained model needs no teacher
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == ExitCode.DONE
    assert "accuracy" in json.loads(capsys.readouterr().out)["metrics"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["distillation.teacher=./nowhere"], "`distillation.teacher` is a folder that does not exist"),
        (["distillation.temperature=0"], "`distillation.temperature` must be"),
        (["distillation.weight=2"], "`distillation.weight` must be"),
        (["distillation.weight=0"], "`distillation.weight` must be"),
        (["distillation.revision=main"], "applies to a hub repository"),
        (["task.type=sequence_regression", 'task.metrics=["mse"]'], "`task.type` is sequence_regression"),
        (["task.multi_label=true", 'task.labels=["a","b","c"]'], "`task.multi_label` is true"),
        (["parallel.strategy=dp"], "is not supported by `parallel.strategy` dp"),
        (["task.type=causal_lm", 'task.metrics=["perplexity"]', "task.logits_chunk=8"], "set that to null"),
        (["data.max_length=24"], None),
    ],
)
def test_keys_that_do_not_fit_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], words: str | None
):
    recipe = write_student(tmp_path)
    if words is None:
        assert main(["check", str(recipe), *overrides]) == ExitCode.DONE
    else:
        assert words in problems(capsys, recipe, *overrides)


def test_teachers_that_do_not_fit_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe, teacher = write_student(tmp_path), tmp_path / "teacher"
    files = {file.name: file.read_bytes() for file in teacher.iterdir()}

    def refusal(config: Mapping[str, Any] = TINY_BERT, **keys: Any) -> str:
        save_teacher(teacher, config, **keys)
        return problems(capsys, recipe)

    refusal(names=("c", "a", "x"))
    assert "must have the classes of the task, a, b, c, but" in problems(capsys, recipe)
    other_task = refusal(head="AutoModelForMaskedLM", names=())
    assert "must be trained for `task.type` sequence_classification" in other_task
    assert "classifier.weight" in other_task
    assert "LABEL_0, LABEL_1" in other_task  # both problems at once
    assert "at most the 8 tokens that `distillation.teacher`" in refusal({**TINY_BERT, "max_position_embeddings": 8})
    assert "of a type that has the head" in refusal(TINY_VIT, head="AutoModelForImageClassification")
    for name, content in files.items():
        (teacher / name).write_bytes(content)
    vocabulary = json.loads(files["tokenizer.json"])
    words = vocabulary["model"]["vocab"]
    words["word1"], words["word2"] = words["word2"], words["word1"]
    (teacher / "tokenizer.json").write_text(json.dumps(vocabulary))
    assert "must have the student's tokenizer" in problems(capsys, recipe)
    (teacher / "tokenizer.json").unlink()
    assert "distillation.teacher" in problems(capsys, recipe)
    (teacher / "model.safetensors").unlink()
    assert "has no weights" in problems(capsys, recipe)


def test_a_language_model_needs_a_teacher_with_as_many_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    task = {"type": "masked_lm", "metrics": ["accuracy"]}
    recipe = write_student(tmp_path, task=task)
    save_teacher(tmp_path / "teacher", {**TINY_BERT, "vocab_size": 220}, "AutoModelForMaskedLM", ())
    assert "must have the student's `vocab_size` 211" in problems(capsys, recipe)


def test_a_teacher_reads_the_images_of_the_student(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = write_tiny_image_run(tmp_path, distillation={"teacher": "teacher"})
    config = {**TINY_VIT, "num_channels": 3, "hidden_size": 48}
    teacher = save_teacher(tmp_path / "teacher", config, "AutoModelForImageClassification", "cab")
    processor = {"size": {"height": 16, "width": 16}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    transformers.ViTImageProcessorPil(**processor).save_pretrained(teacher)
    assert main(["check", str(recipe)]) == ExitCode.DONE
    transformers.ViTImageProcessorPil(**{**processor, "image_mean": [0.4] * 3}).save_pretrained(teacher)
    assert "must read the inputs of the student" in problems(capsys, recipe)


def test_tensor_ranks_that_do_not_divide_the_heads_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = write_student(tmp_path)
    save_teacher(tmp_path / "teacher", {**TINY_BERT, "num_attention_heads": 1})
    assert "`distillation.teacher`: `parallel.tensor` must divide" in problems(
        capsys, recipe, "parallel.tensor=2", "--processes", "2"
    )


def planned_ranks(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(list(arguments)) == ExitCode.DONE
    shown = capsys.readouterr().out  # DeepSpeed writes a line when it is imported first
    found: list[dict[str, Any]] = json.loads(shown[shown.index("{") :])["ranks"]
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.slow
def test_a_plan_counts_the_teacher(tmp_path: Path, capsys: pytest.CaptureFixture[str], strategy: str):
    recipe, teacher = write_student(tmp_path), tmp_path / "teacher"
    arguments = ["plan", str(recipe), "--gpus", "2x80GiB", "--json", f"parallel.strategy={strategy}", LABELS]

    def resident(*overrides: str) -> dict[str, int]:
        found: dict[str, int] = planned_ranks(capsys, *arguments, *overrides)[0]["resident"]
        return found

    number = sum(tensor.numel() for tensor in load_file(teacher / "model.safetensors").values())
    taught, alone = resident(), resident("distillation=null")
    share = 2 if strategy == "fsdp" else 1
    assert taught[SECOND_MODEL] == pytest.approx(4 * number / share, rel=0.05)
    assert SECOND_MODEL not in alone
    assert [taught.get(name) for name in (PARAMETERS, GRADIENTS, OPTIMIZER)] == [
        alone.get(name) for name in (PARAMETERS, GRADIENTS, OPTIMIZER)
    ]


def test_a_decoder_that_packs_documents_needs_such_a_teacher(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sizes = {**TINY_DECODERS["gpt2"], "vocab_size": 211}
    recipe = write_student(
        tmp_path,
        task={"type": "causal_lm", "packing": "documents", "metrics": ["perplexity"]},
        model={"config": sizes},
    )
    config = {"model_type": "bloom", "vocab_size": 211, "hidden_size": 32, "n_layer": 1, "n_head": 4}
    save_teacher(tmp_path / "teacher", config, "AutoModelForCausalLM", ())
    assert main(["run", str(recipe)]) == ExitCode.USER
    assert "`distillation.teacher`: `task.packing` is" in capsys.readouterr().err


def test_a_plan_has_the_teacher_at_the_last_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = write_student(tmp_path)
    arguments = ["plan", str(recipe), "--gpus", "2x80GiB", "--json", LABELS, "parallel.pipeline.stages=2"]
    first, last = planned_ranks(capsys, *arguments)
    assert SECOND_MODEL not in first["resident"]
    assert last["resident"][SECOND_MODEL] > 0
