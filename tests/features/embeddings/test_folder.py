"""Folders that sentence-transformers wrote are taken as they are, or refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AutoTokenizer, BertConfig, BertModel

import trainer
from tests.helpers.tiny_run import write_tiny_run
from tests.tools.certify.test_verifying import answered_here
from trainer.base.errors import ExitCode, RecipeError, UsageError
from trainer.data.loader import EvalLoader
from trainer.features.embeddings.folder import read_folder
from trainer.models import sentence_files
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.plan import plan_run
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.schema import Recipe
from trainer.tools.certify import verifying
from trainer.tools.certify.verifying import Verification
from trainer.tools.check import check_local_parts
from trainer.tools.run_metrics import read_metrics
from trainer.training.row_encoding import model_folder
from trainer.training.run import run
from trainer.use.export.exporting import export

SIZE, LENGTH = 16, 12
PROMPTS = {"query": "word1 ", "document": "word2 word3 ", "other": "word4 "}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A tiny BERT with a tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    write_tiny_run(folder)
    AutoTokenizer.from_pretrained(folder / "tokenizer").save_pretrained(folder / "bert")
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 32}
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=128, hidden_size=SIZE, **sizes)).save_pretrained(folder / "bert")
    return folder / "bert"


def save(base: Path, folder: Path, *modules: Any, **options: Any) -> Path:
    transformer = Transformer(str(base), max_seq_length=LENGTH)
    SentenceTransformer(modules=[transformer, *modules], device="cpu", **options).save(str(folder))
    return folder


def recipe_of(folder: Path, model: Path, length: int | None = LENGTH, **task: Any) -> Path:
    """Write a recipe of pairs of texts for a folder of a model; a length of None leaves the key out."""
    recipe = write_tiny_run(folder, model={"name_or_path": str(model), "config": None, "tokenizer": None})
    described = json.loads(recipe.read_text())
    described["data"]["max_length"] = length
    if length is None:
        del described["data"]["max_length"]
    described["task"] = {"type": "embedding", "texts": ["a", "b"], **task}
    recipe.write_text(json.dumps(described))
    for split in ("train", "validation"):
        rows = [{"a": f"word{row} word{row + 1} " * 6, "b": f"word{row}"} for row in range(12)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return recipe


def notes_of(folder: Path, model: Path, **keys: Any) -> list[str]:
    return notes_on(load_recipe(str(recipe_of(folder, model, **keys))).recipe)


def notes_on(recipe: Recipe) -> list[str]:
    folder = model_folder(recipe)
    return list(folder.notes) if folder else []


DENSE = [Dense(SIZE, 8), Dense(8, 4, bias=False, activation_function=None)]
FOLDERS: dict[str, tuple[list[Any], dict[str, Any], dict[str, Any]]] = {
    "cls": ([Pooling(SIZE, "cls")], {}, {"learn_temperature": True}),
    "two poolings": ([Pooling(SIZE, ("max", "weightedmean")), Normalize()], {"prompts": PROMPTS}, {}),
    "no prompt": ([Pooling(SIZE, ("cls", "mean_sqrt_len_tokens"), include_prompt=False)], {"prompts": PROMPTS}, {}),
    "dense": ([Pooling(SIZE, include_prompt=False), *DENSE, Normalize()], {"prompts": PROMPTS}, {}),
}


@pytest.mark.slow
def test_a_graph_holds_dense_layers_and_leaves_prompts_out(base, tmp_path, monkeypatch):
    monkeypatch.setattr(verifying, "_answered", answered_here)
    modules, options, _ = FOLDERS["dense"]
    recipe = recipe_of(tmp_path, save(base, tmp_path / "model", *modules, **options), learn_temperature=True)
    assert run(load_recipe(str(recipe), ["training.max_steps=2"]), LaunchEnvironment("none")) == ExitCode.DONE
    certified = export(tmp_path / "run", tmp_path / "out", verification=Verification(5), to="onnx").certificate
    assert certified is not None
    assert certified.difference <= 1e-6
    assert certified.metrics["mrr"][0] == pytest.approx(certified.metrics["mrr"][1])


def embeddings_of(recipe: Path) -> torch.Tensor:
    with trainer.assemble(recipe) as parts:
        loader = EvalLoader(parts.data.validation, 5, 0, 1, parts.data.preparation.batching)
        found = [(batch.rows, parts.engine.answer(batch)["embeddings"]) for batch in loader]
    return torch.cat([part for _, part in found])[torch.cat([rows for rows, _ in found]).argsort()]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "dense")) for name in FOLDERS])
def test_a_folder_is_trained_as_it_is_and_written_again(base, tmp_path, monkeypatch, name):
    """Losses and embeddings are those of a plain loop of sentence-transformers."""
    monkeypatch.setattr(verifying, "_answered", answered_here)
    modules, options, keys = FOLDERS[name]
    model = save(base, tmp_path / "model", *modules, **options)
    recipe = recipe_of(tmp_path, model, **keys)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    plain = {"optimizer.weight_decay": 0, "optimizer.momentum": 0, "schedule.warmup": 0, "schedule.name": "constant"}
    changed = {"optimizer.name": "sgd", "optimizer.learning_rate": 0.1, **plain, "model.dropout": 0}
    batch = {
        "training.global_batch_size": 12,
        "training.micro_batch_size": 5,
        "training.max_steps": 3,
        "training.max_grad_norm": "null",
    }
    resolved = load_recipe(str(recipe), [f"{key}={value}" for key, value in {**changed, **batch}.items()])
    assert run(resolved, LaunchEnvironment("none")) == ExitCode.DONE
    found = [record.loss for record in read_metrics(tmp_path / "run" / "metrics.jsonl").steps]
    theirs = SentenceTransformer(str(model), device="cpu").eval()  # the recipe has no dropout
    loss, losses = MultipleNegativesRankingLoss(theirs, scale=20.0), []
    log_scale = torch.nn.Parameter(torch.tensor(20.0).log())
    optimizer = torch.optim.SGD([*theirs.parameters(), log_scale], lr=0.1)
    prompts = options.get("prompts", {"query": "", "document": ""})
    for _ in range(3):
        columns = [(prompts[kind], [row[key] for row in rows]) for kind, key in (("query", "a"), ("document", "b"))]
        if keys:
            loss.scale = log_scale.exp()
        value = loss([theirs.preprocess(column, prompt=prompt or None) for prompt, column in columns], None)
        losses.append(value.item())
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    assert found == pytest.approx(losses, rel=1e-5)  # three steps; sums of microbatches round otherwise
    exported = SentenceTransformer(str(tmp_path / "run" / "model"), device="cpu")
    assert [type(module) for module in exported] == [type(module) for module in theirs]
    assert exported[1].get_config_dict() == theirs[1].get_config_dict()
    assert exported.prompts == theirs.prompts
    assert exported.max_seq_length == LENGTH
    certified = export(tmp_path / "run", tmp_path / "out", verification=Verification(5)).certificate
    assert certified is not None
    assert certified.difference <= 1e-6
    assert certified.metrics["mrr"][0] == pytest.approx(certified.metrics["mrr"][1])
    again = recipe_of(tmp_path / "again", tmp_path / "run" / "model", **keys)
    texts = [json.loads(line) for line in (tmp_path / "again" / "validation.jsonl").read_text().splitlines()]
    found = embeddings_of(again)
    for place, (encode, key) in enumerate(((exported.encode_query, "a"), (exported.encode_document, "b"))):
        expected = encode([row[key] for row in texts], convert_to_tensor=True)
        torch.testing.assert_close(found[:, place], expected, atol=1e-5, rtol=1e-5)
    if keys:
        temperature = read_metrics(tmp_path / "run" / "metrics.jsonl").evaluations[-1].metrics["temperature"]
        assert temperature == pytest.approx(1 / log_scale.exp().item(), rel=1e-6) != 0.05
        read = read_folder(load_recipe(str(again)).recipe)
        assert read is not None
        assert read.temperature == pytest.approx(temperature, rel=1e-6)


@pytest.mark.parametrize(
    ("modules", "task", "problem"),
    [
        (
            lambda: [Pooling(SIZE, "cls"), Normalize()],
            {"pooling": "mean"},
            r'pooling cls, .* is "mean"; set it to "cls" or null',
        ),
        (
            lambda: [Pooling(SIZE, ("cls", "mean")), Normalize()],
            {"pooling": "cls"},
            r'pooling cls \+ mean, but .* "cls"; set it to null',
        ),
        (
            lambda: [Pooling(SIZE), Dense(SIZE, SIZE, use_residual=True)],
            {},
            r"with `use_residual` True in 2_Dense, but dense layers map",
        ),
        (lambda: [Pooling(SIZE, "mean")], {"normalize": True}, r"does not scale .* is true; set it to false"),
        (lambda: [Pooling(SIZE), Normalize()], {"normalize": False}, r"that scales .* is false; set it to true"),
        (
            lambda: [Pooling(SIZE), Normalize(), Dense(SIZE, 8)],
            {},
            r"modules Transformer, Pooling, Normalize, Dense, but",
        ),
        (
            lambda: [Pooling(SIZE), Dense(SIZE, 8, activation_function=torch.nn.Softplus())],
            {},
            r"the activation torch.nn.modules.activation.Softplus in 2_Dense",
        ),
    ],
    ids=["cls", "two", "residual", "no normalisation", "normalisation", "order", "activation"],
)
def test_another_embedding_is_refused(base, tmp_path, modules, task, problem):
    model = save(base, tmp_path / "model", *modules())
    recipe = recipe_of(tmp_path, model, **task)
    with pytest.raises(UsageError, match=problem) as refused:
        trainer.run(recipe)
    checked = check_local_parts(plan_run(load_recipe(str(recipe)).recipe, 1))
    assert checked.problems.messages == [str(refused.value)]


def test_length_and_similarity_are_noted(base, tmp_path):
    options = {"prompts": PROMPTS, "default_prompt_name": "query", "similarity_fn_name": "dot"}
    model = save(base, tmp_path / "model", Pooling(SIZE), Normalize(), **options)
    similarity, length = notes = notes_of(tmp_path, model, length=8)
    assert "is dot, but losses, metrics and the exported folder use the cosine" in similarity
    assert re.fullmatch(
        "texts are cut at `data.max_length` 8 tokens, also by the exported folder; .* cuts at 12", length
    )
    resolved = load_recipe(str(tmp_path / "recipe.json"))
    assert set(notes) <= set(check_local_parts(plan_run(resolved.recipe, 1)).notes)
    with trainer.assemble(resolved) as parts:
        assert set(notes) <= set(parts.data.preparation.notes)


def test_a_default_length_and_another_prompt_are_refused(base, tmp_path):
    model = save(base, tmp_path / "model", Pooling(SIZE), Normalize(), prompts=PROMPTS, default_prompt_name="other")
    with pytest.raises(UsageError, match=r"cuts texts at 12 tokens, but `data.max_length` is 128 by default"):
        notes_of(tmp_path, model, length=None)
    with pytest.raises(UsageError, match=r"prompt 'word2 word3 ' \(document\), but `task.document_prompt` is"):
        notes_of(tmp_path, model, document_prompt="word")
    scored = {"score": "c", "loss": "cosent", "metrics": ["spearman"]}
    with pytest.raises(UsageError, match=r"prompt 'word4 ' \(other\), but `task.query_prompt` is 'word1 '"):
        notes_of(tmp_path, model, query_prompt="word1 ", **scored)


OLDER = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ],
    "sentence_bert_config.json": {"max_seq_length": LENGTH, "do_lower_case": False},
    "1_Pooling/config.json": {"word_embedding_dimension": SIZE, "pooling_mode_cls_token": True},
}
"""Files of versions before 5, which most folders on the hub have."""


PROMPTS_FILE = "config_sentence_transformers.json"


def write_older(base: Path, folder: Path, **changed: Any) -> Path:
    folder.mkdir()
    for file in base.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    for name, content in {**OLDER, **changed}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_files_of_older_versions(base, tmp_path):
    model = write_older(base, tmp_path / "model", **{PROMPTS_FILE: {"prompts": {"query": None}}})
    assert SentenceTransformer(str(model), device="cpu")[1].pooling_mode == "cls"
    assert notes_of(tmp_path, model) == []
    read = read_folder(load_recipe(str(tmp_path / "recipe.json")).recipe)
    assert read is not None
    assert (read.poolings, read.prompts) == (("cls",), {"query": ""})
    with pytest.raises(UsageError, match="pooling cls"):
        notes_of(tmp_path, model, pooling="mean")


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"modules.json": "{"}, "modules.json that must hold a list in JSON"),
        ({"modules.json": []}, "with the modules , but"),
        ({"modules.json": [1, {"type": "mine.Pooling"}]}, "modules None, mine.Pooling, but"),
        ({"modules.json": [{**OLDER["modules.json"][0], "path": "0_T"}, *OLDER["modules.json"][1:]]}, "model in '0_T'"),
        ({"1_Pooling/config.json": "[]"}, "1_Pooling/config.json that must hold an object"),
        ({"modules.json": [{"type": "sentence_transformers.base.modules.Router"}]}, "with the modules Router, but"),
        ({"1_Pooling/config.json": {"pooling_mode": 3}}, "`pooling_mode` must be a name or a list of names, and is 3"),
        ({PROMPTS_FILE: {"prompts": ["word1"]}}, r"`prompts` must be texts by name, and are \['word1'\]; correct"),
        (
            {PROMPTS_FILE: {"prompts": PROMPTS, "default_prompt_name": "no"}},
            "name` 'no', but its prompts are query, doc",
        ),
        ({"sentence_bert_config.json": {"do_lower_case": True}}, "with `do_lower_case`, but"),
        ({"sentence_bert_config.json": {"module_output_name": "sentence_embedding"}}, "output 'sentence_embedding' of"),
    ],
)
def test_files_that_cannot_be_followed(base, tmp_path, changed, problem):
    with pytest.raises(UsageError, match=problem):
        notes_of(tmp_path, write_older(base, tmp_path / "model", **changed), pooling="cls")


@pytest.mark.parametrize("path", ["..", "", "1_Pooling/../1_Pooling"])
def test_the_path_of_a_module_stays_in_the_folder(base, tmp_path, path):
    (tmp_path / "config.json").write_text(json.dumps(OLDER["1_Pooling/config.json"]))
    modules = [module | {"path": path} if module["path"] == "1_Pooling" else module for module in OLDER["modules.json"]]
    with pytest.raises(UsageError, match="which names its pooling, is missing"):
        notes_of(tmp_path, write_older(base, tmp_path / "model", **{"modules.json": modules}), pooling="cls")


def test_other_tasks_and_plain_folders_have_no_sentence_embedding(base, tmp_path):
    assert notes_of(tmp_path / "plain", base) == []
    model = write_older(base, tmp_path / "model")
    recipe = write_tiny_run(tmp_path / "other", model={"name_or_path": str(model), "config": None, "tokenizer": None})
    assert model_folder(load_recipe(str(recipe)).recipe) is None


def test_a_hub_that_cannot_be_reached_is_noted(base, tmp_path, monkeypatch):
    def find(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(sentence_files, "find_file", find)
    (note,) = notes_of(tmp_path, base)
    assert note.endswith("is not checked: the hub cannot be reached")


def test_all_differences_are_named_at_once(base, tmp_path):
    with pytest.raises(RecipeError) as refused:
        notes_of(tmp_path, save(base, tmp_path / "model", Pooling(SIZE, "cls")), pooling="max", normalize=True)
    assert len(refused.value.problems) == 2
