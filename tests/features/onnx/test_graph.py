"""`trainer export --to onnx`: graphs that ONNX Runtime runs with the outputs of the trained model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import transformers
from onnx import numpy_helper
from transformers import AutoConfig

from tests.helpers.families import CONFIGS
from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.training import TINY_BART
from tests.tools.certify.test_verifying import ASKED, FAULTS, answered_here, planted, train
from trainer.base.errors import TrainerError, UsageError
from trainer.features.onnx import graph as graph_module
from trainer.features.onnx.graph import Onnx, _sample, to_onnx
from trainer.features.onnx.opener import open_folder
from trainer.tools.certify import verifying
from trainer.tools.certify.comparing import NotTheTrainedModelError
from trainer.use.export.exporting import export
from trainer.use.trained import load_trained


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "_answered", answered_here)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that trains a tiny model once, and writes its graph beside the run."""

    @cache
    def make(name: str) -> Path:
        place = tmp_path_factory.mktemp(name)
        recipe = write_tiny_run(place)
        recipe.write_text(json.dumps({**json.loads(recipe.read_text()), **SECTIONS[name]}))
        settings = place / "tokenizer" / "tokenizer_config.json"
        settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token": "[SEP]"}))
        for rows in place.glob("*.jsonl"):
            read = [json.loads(line) for line in rows.read_text().splitlines()]
            beside = [{**row, "other": row["text"][:9], "right": at % 2} for at, row in enumerate(read)]
            rows.write_text("".join(json.dumps(row) + "\n" for row in beside))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verifying, "_answered", answered_here)
            train(recipe)
            export(place / "run", place / "graph", verification=ASKED, to="onnx")
        return place

    return make


CHOICE = {"type": "multiple_choice", "context": "text", "choices": ["other", "label"], "label": "right"}
SECTIONS: dict[str, dict[str, Any]] = {
    "classes": {},
    "embeddings": {
        "task": {"type": "embedding", "texts": ["text", "label"], "metrics": ["mrr"], "query_prompt": "word1 "}
    },
    "choices": {"task": {**CHOICE, "metrics": ["accuracy"]}},
    "targets": {
        "task": {"type": "seq2seq_lm", "source": "text", "target": "other", "max_target_length": 9},
        "model": {"config": {**TINY_BART, "eos_token_id": 3}, "tokenizer": "tokenizer"},
        "evaluation": {"every": None, "verify_export": 0},
    },
}
NIGHTLY = pytest.mark.nightly
EMBEDDED = pytest.param("embeddings", marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "name", ["classes", EMBEDDED, *(pytest.param(n, marks=NIGHTLY) for n in ("choices", "targets"))]
)
def test_a_sound_graph_has_a_certificate(made: Callable[[str], Path], name: str) -> None:
    graph = made(name) / "graph"
    assert not list(graph.rglob("*.safetensors"))
    card = (graph / "README.md").read_text()
    assert "Another process, without `trainer`, with ONNX Runtime on the CPU in fp32, opened this folder" in card
    assert "onnxruntime" in card
    assert 'InferenceSession(f"{folder}/model.onnx")' in card
    use = (
        card.split("```python\n")[1].split("```")[0].replace("path/to/this/folder", str(graph)).replace("...", "word1")
    )
    exec(compile(use, "README.md", "exec"), {})
    with pytest.raises(
        UsageError, match=r"`RUN` must hold weights, but .* holds a graph of ONNX; name the run's folder"
    ):
        load_trained(graph, None, [], 1, evaluates=True)


def _edited(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        model = onnx.load(folder / "model.onnx")
        change(model.graph)
        onnx.save(model, folder / "model.onnx")

    return plant


def _permute_head(graph: Any) -> None:
    (head,) = [one for one in graph.initializer if one.name.endswith("classifier.weight")]
    head.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(head)[::-1].copy(), head.name))


def _lose_head(graph: Any) -> None:
    graph.output[0].name = "other"
    for node in graph.node:
        node.output[:] = ["other" if name == "logits" else name for name in node.output]


def _lose_normalisation(graph: Any) -> None:
    (last,) = [node for node in graph.node if "sentence_embedding" in node.output]
    assert last.op_type == "Div"
    last.op_type = "Identity"
    del last.input[1:]


GRAPH_FAULTS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "a permuted head": ("classes", _edited(_permute_head), "must compute the outputs of the trained one, but differs"),
    "a lost head": ("classes", _edited(_lose_head), "but differs by inf"),
    "a lost normalisation": ("embeddings", _edited(_lose_normalisation), "but differs by"),
    **{name: ("classes", *FAULTS[name]) for name in ("permuted labels", "another tokenizer")},
}


@pytest.mark.parametrize(
    "fault",
    [pytest.param(name, marks=[pytest.mark.slow] * (row[0] == "embeddings")) for name, row in GRAPH_FAULTS.items()],
)
def test_a_planted_fault_is_caught_and_nothing_is_left(
    tmp_path: Path, here: None, monkeypatch: pytest.MonkeyPatch, made: Callable[[str], Path], fault: str
) -> None:
    name, plant, message = GRAPH_FAULTS[fault]
    sound = made(name)

    def copied(_: Onnx, folder: Path, *others: Any) -> Path:
        return Path(shutil.copy(sound / "graph" / "model.onnx", folder))

    monkeypatch.setattr(Onnx, "convert", copied)
    planted(monkeypatch, plant)
    with pytest.raises(NotTheTrainedModelError, match=message):
        export(sound / "run", tmp_path / "out", verification=ASKED, to="onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_a_sample_has_the_end_at_which_encoder_decoders_classify(
    tmp_path: Path, made: Callable[[str], Path], family: str
) -> None:
    folder = tmp_path / family
    shutil.copytree(made("classes") / "graph", folder, ignore=shutil.ignore_patterns("model.onnx"))
    config = AutoConfig.for_model(family, **CONFIGS[family])
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    assert model(**_sample(folder, model)[0]).logits.shape[0] == 2


@pytest.mark.nightly
@pytest.mark.parametrize("family", sorted(CONFIGS.keys() - {"bert"}))
def test_families(made: Callable[[str], Path], tmp_path: Path, family: str) -> None:
    """Numbers of rows and of tokens are free; causal models compute logits without a cache."""
    is_causal = "num_key_value_heads" in CONFIGS[family] or family == "gpt2"
    auto = transformers.AutoModelForCausalLM if is_causal else transformers.AutoModelForTokenClassification
    auto = transformers.AutoModelForImageClassification if family == "vit" else auto
    auto = transformers.AutoModelForSeq2SeqLM if family in ("t5", "bart") else auto
    torch.manual_seed(0)
    model = auto.from_config(AutoConfig.for_model(family, **CONFIGS[family])).eval()
    folder = tmp_path / family
    shutil.copytree(made("classes") / "graph", folder, ignore=shutil.ignore_patterns("model.onnx"))
    if family == "vit":
        transformers.ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
    model.save_pretrained(folder)
    to_onnx(folder, type(model), None)
    computed = open_folder({"folder": str(folder)})
    for rows, tokens in ((1, 7), (3, 12), (4, 1)):
        inputs = {"input_ids": torch.randint(5, 99, (rows, tokens)), "attention_mask": torch.ones(rows, tokens).long()}
        inputs["attention_mask"][1:, 5:] = 0
        if family == "vit":
            inputs = {"pixel_values": torch.randn(rows, 3, 16, 16)}
        is_token = inputs.get("attention_mask", torch.ones(rows)) == 1
        if family in ("t5", "bart"):
            inputs["decoder_input_ids"] = torch.randint(5, 99, (rows, 2 * rows))
            is_token = torch.ones(rows, 2 * rows).bool()
        beside = {"token_type_ids": torch.zeros(rows, tokens).long()}
        with torch.no_grad():
            expected = model(**inputs).logits[is_token]
        arrays = {name: tensor.numpy() for name, tensor in (beside | inputs).items()}
        found = torch.from_numpy(computed(arrays)["logits"])[is_token]
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def test_unsupported_operations_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"`--dtype` must be fp32 with `--to onnx`, but is bf16; convert"):
        Onnx().require("bf16", adapter=False)
    with pytest.raises(UsageError, match=r"`--adapter` and `--to onnx` exclude each other: a graph holds"):
        Onnx().require("fp32", adapter=True)
    monkeypatch.setattr(graph_module, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r'needs the package onnx, .* \(pip install "recipe-trainer\[onnx\]"\)'):
        Onnx().require("fp32", adapter=False)


def test_a_model_that_the_exporter_does_not_support_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[[str], Path]
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise torch.onnx.OnnxExporterError("step 1") from ValueError("no such operation:\n  aten::odd")

    monkeypatch.setattr(torch.onnx, "export", fails)
    message = (
        r"`--to onnx` cannot write a BertFor.*: the exporter of torch .* fails: no such operation: aten::odd; leave"
    )
    with pytest.raises(TrainerError, match=message):
        export(made("classes") / "run", tmp_path / "out", to="onnx")
    assert not list(tmp_path.iterdir())
