"""Question answering as whole trainings: against a plain loop of transformers, and over ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForQuestionAnswering, AutoTokenizer

from tests.helpers.plain_loops import losses_of_both, mean_of_rows
from tests.helpers.ranks import RankPools
from tests.helpers.remade import assert_makes_again
from tests.helpers.tiny_run import WORDS, write_tiny_run
from tests.helpers.training import TINY_BERT, sgd_sections, tiny_recipe, tiny_training
from trainer.base.errors import ExitCode, RecipeError
from trainer.features.question_answering.squad import exact_match, token_f1
from trainer.parallel.microbatch import Microbatch
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.plan import plan_run
from trainer.recipe.reading.loading import load_recipe
from trainer.tools.run_metrics import read_metrics
from trainer.training.assembly import assemble
from trainer.training.process_group import open_mesh
from trainer.training.run import run
from trainer.training.run_data import prepare_data

TASK = {"type": "question_answering", "stride": 2, "max_answer_length": 4, "unanswerable": True, "null_threshold": 2.0}


def test_losses_equal_a_plain_loop():
    """Gradient descent on the mean loss of the windows of a batch, each without padding."""
    recipe = tiny_recipe(
        task={"type": "question_answering"},
        model={"dropout": 0.0},
        training={"max_steps": 6, "global_batch_size": 12, "micro_batch_size": 5, "max_grad_norm": None},
        **sgd_sections(learning_rate=0.1),
    )
    config = AutoConfig.for_model(**TINY_BERT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = AutoModelForQuestionAnswering.from_config(config)

    def losses_of(microbatch: Microbatch) -> Iterator[torch.Tensor]:
        inputs = microbatch.inputs
        for ids, mask, (start, end) in zip(
            inputs["input_ids"], inputs["attention_mask"], microbatch.labels, strict=True
        ):
            row = ids[None, : int(mask.sum())]
            yield model(row, start_positions=start[None], end_positions=end[None]).loss

    with tiny_training(recipe) as training:
        losses_of_both(training, model, mean_of_rows(losses_of), 0.1, abs=1e-5)


def write_questions(folder: Path, **sections: Any) -> Path:
    """Write a tiny run with contexts of several windows; the answer is the word after the word of the question."""
    recipe = write_tiny_run(folder, data={"max_length": 16}, **sections)
    random = torch.Generator().manual_seed(0)
    for split, number in (("train", 24), ("validation", 61)):
        rows = []
        for index in range(number):
            words = [WORDS[i] for i in torch.randperm(100, generator=random)[: 6 + 3 * (index % 5)]]
            context, place = " ".join(words), 2 + index % 4
            start = context.index(words[place])
            answers = {"text": [words[place]], "answer_start": [start]}
            if index % 4 == 3:
                answers = {"text": [], "answer_start": []}
            rows.append({"question": words[place - 1], "context": context, "answers": answers})
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    content = json.loads(recipe.read_text())
    content["task"] = dict(TASK)
    content["task"]["metrics"] = ["f1", "exact_match", "has_answer_f1", "no_answer_f1"]
    content["model"]["config"] |= {"initializer_range": 0.5}
    recipe.write_text(json.dumps(content))
    return recipe


def evaluate(recipe: str) -> tuple[dict[str, float], int]:
    """Evaluate the model at its start, on this rank and the others."""
    resolved = load_recipe(recipe).recipe
    plan = plan_run(resolved, dist.get_world_size() if dist.is_initialized() else 1)
    data = prepare_data(resolved)
    parts = assemble(plan, open_mesh(plan.layout, torch.device("cpu")), data)
    assert data.validation is not None
    note = f"61 validation rows became {len(data.validation)} windows of at most 16 tokens"
    assert note in data.notes(16)
    return parts.evaluate(), len(data.validation)


def test_any_number_of_ranks_gives_the_same_metrics(ranks: RankPools, tmp_path: Path):
    recipe = str(write_questions(tmp_path, evaluation={"batch_size": 4}, training={"global_batch_size": 12}))
    expected, num_windows = evaluate(recipe)
    assert num_windows % 2 == 1
    assert num_windows > 61
    assert expected["f1"] > 0
    for found, _ in ranks(3).run(evaluate, recipe):
        assert found == pytest.approx(expected, rel=1e-5)


def test_the_exported_folder_opens_with_transformers(tmp_path: Path):
    recipe = write_questions(tmp_path, training={"max_steps": 2, "micro_batch_size": 4, "global_batch_size": 8})
    assert run(load_recipe(str(recipe)), LaunchEnvironment("none")) == ExitCode.DONE
    folder = tmp_path / "run" / "model"
    model, loading = AutoModelForQuestionAnswering.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values())
    inputs = AutoTokenizer.from_pretrained(folder)("word1", "word2 word3", return_tensors="pt")
    assert model(**inputs).start_logits.shape == inputs["input_ids"].shape
    card = (folder / "README.md").read_text()
    assert "pipeline_tag: question-answering" in card
    assert 'BertForQuestionAnswering.from_pretrained("path/to/this/folder")' in card


def test_the_shipped_recipe_starts(tmp_path: Path):
    places = [f"checkpoint.folder={tmp_path / 'run'}", f"data.cache={tmp_path / 'cache'}", 'logging.to=["jsonl"]']
    resolved = load_recipe("qa_sample", [*places, "training.max_steps=2"])
    assert run(resolved, LaunchEnvironment("none")) == ExitCode.DONE
    (record,) = read_metrics(tmp_path / "run" / "metrics.jsonl").evaluations
    assert {"exact_match", "f1", "has_answer_f1", "no_answer_f1"} <= set(record.metrics)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("task.stride=128", r"`task.stride` must be below `data.max_length` 128, .* but is 128"),
        ("task.context=question", r"`task.context` is \"question\", which is also `task.question`"),
        (
            "task.unanswerable=false",
            r"`task.metrics` has \"no_answer_f1\", which applies to questions without",
        ),
    ],
)
def test_keys_that_do_not_fit(override: str, problem: str):
    with pytest.raises(RecipeError, match=problem):
        load_recipe("qa_sample", [override])


ROOT = Path(__file__).parents[3]
SAMPLE = ROOT / "trainer" / "features" / "question_answering" / "recipes"


def test_the_readme_of_the_sample_states_the_facts():
    readme = (SAMPLE / "README.md").read_text(encoding="utf-8")
    rows = {
        name: [json.loads(line) for line in (SAMPLE / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        for name in ("train", "validation")
    }
    for name, questions in rows.items():
        unanswerable = sum(not question["answers"]["text"] for question in questions)
        assert re.search(rf"{name}.jsonl` \| {len(questions):,} questions .*{unanswerable} of them without", readme)
    assert not {row["context"] for row in rows["train"]} & {row["context"] for row in rows["validation"]}
    accepted = [row["answers"]["text"] or [""] for row in rows["validation"]]
    first = [re.split(r"(?<=[.!?])\s", row["context"])[0] for row in rows["validation"]]
    assert f"no answer to any question | {exact_match([''] * len(accepted), accepted):.1f} |" in readme
    assert f"the first sentence of the context | 0.0 | {token_f1(first, accepted):.1f} |" in readme


@pytest.mark.nightly
def test_the_script_makes_the_questions_again(tmp_path: Path):
    assert_makes_again(Path(__file__).with_name("make_questions.py"), SAMPLE, tmp_path)
