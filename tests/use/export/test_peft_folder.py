"""`trainer export --adapter`: a folder that PEFT opens, with the logits of the merged model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from transformers import AutoConfig

from tests.helpers.families import CONFIGS
from tests.helpers.seq2seq import tiny_tokenizer
from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.training import TINY_BERT
from trainer.base.errors import ExitCode, UsageError
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.reading.loading import load_recipe
from trainer.training.run import run
from trainer.use.export.exporting import export
from trainer.use.export.peft_folder import _shortest
from trainer.use.trained import load_trained

LORA = {"type": "lora", "rank": 4, "alpha": 64.0}
TOKENS = {**LORA, "trainable_tokens": [*range(20, 90)]}
# Every kind of adapter at once, in a model whose layers differ.
STARTED = {
    **LORA,
    "type": "dora",
    "start": "pissa",
    "rank_stabilised": True,
    "rank_pattern": {"layer.1.*.query": 3},
    "alpha_pattern": {"key": 8.0},
}
SUMMARY = {"type": "seq2seq_lm", "source": "text", "target": "label", "max_target_length": 4, "metrics": ["perplexity"]}
CAUSAL = {"type": "causal_lm", "text": "text", "metrics": ["perplexity"]}


def base_folder(folder: Path, model_type: str, head: str, seed: int = 1) -> Path:
    """Write a model with random weights, as the base of an adapter."""
    torch.manual_seed(seed)
    sizes = TINY_BERT if model_type == "bert" else {**CONFIGS[model_type], "vocab_size": TINY_BERT["vocab_size"]}
    sizes = {key: value for key, value in sizes.items() if key != "model_type"}
    config = AutoConfig.for_model(model_type, **{**sizes, "initializer_range": 0.2, "pad_token_id": 0})
    getattr(transformers, head).from_config(config).save_pretrained(folder)
    return folder


def train(recipe: Path, *overrides: str) -> None:
    assert run(load_recipe(str(recipe), [*overrides]), LaunchEnvironment("none")) == ExitCode.DONE


def opened(folder: Path, head: str, base: Path) -> Any:
    config = AutoConfig.from_pretrained(folder)
    return peft.PeftModel.from_pretrained(getattr(transformers, head).from_pretrained(base, config=config), folder)


def assert_same_logits(one: Any, other: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, TINY_BERT["vocab_size"], (3, 9), generator=generator)
    with torch.no_grad():
        found, expected = (model.eval()(input_ids=tokens)[0] for model in (one, other))
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


_BERT = (
    "bert",
    "AutoModelForMaskedLM",
    "AutoModelForSequenceClassification",
    {"optimizer": {"learning_rate": 0.01}},
)
_BERT_SAVED = {"task_type": "SEQ_CLS", "modules_to_save": ["bert.pooler", "classifier"]}

# Family, head of the base, head of the run, sections, and the expected part of `adapter_config.json`.
CASES: dict[str, tuple[str, str, str, dict[str, Any], dict[str, Any]]] = {
    # The base has no pooler, so that of the run is drawn, trained and saved.
    "bert": (
        *_BERT,
        {
            **_BERT_SAVED,
            "target_modules": ["intermediate.dense", "key", "output.dense", "query", "value"],
            "fan_in_fan_out": False,
        },
    ),
    "started": (
        *_BERT,
        {
            **_BERT_SAVED,
            "use_dora": True,
            "use_rslora": True,
        },
    ),
    "gpt2": (
        "gpt2",
        "AutoModelForCausalLM",
        "AutoModelForCausalLM",
        {"task": CAUSAL, "optimizer": {"learning_rate": 0.01}},
        {
            "task_type": "CAUSAL_LM",
            "modules_to_save": None,
            "fan_in_fan_out": True,
            "trainable_token_indices": {"transformer.wte": TOKENS["trainable_tokens"]},  # tied to the head
        },
    ),
    "llama": (
        "llama",
        "AutoModelForCausalLM",
        "AutoModelForCausalLM",
        {"task": CAUSAL, "optimizer": {"learning_rate": 0.01}},
        {
            "task_type": "CAUSAL_LM",
            "modules_to_save": ["model.norm"],
            "trainable_token_indices": dict.fromkeys(("lm_head", "model.embed_tokens"), TOKENS["trainable_tokens"]),
        },
    ),
    # has a buffer, which the base holds
    "bart": (
        "bart",
        "AutoModelForSeq2SeqLM",
        "AutoModelForSeq2SeqLM",
        {"task": SUMMARY, "optimizer": {"learning_rate": 0.01}},
        {"task_type": "SEQ_2_SEQ_LM", "modules_to_save": None},
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("bert", "started", "llama") else pytest.mark.nightly) for name in CASES],
)
def test_peft_opens_the_folder_with_the_logits_of_the_merged_model(tmp_path: Path, name: str):
    family, base_head, head, sections, expected = CASES[name]
    base = base_folder(tmp_path / "base", family, base_head)
    adapter = {"started": STARTED, "gpt2": TOKENS, "llama": {**TOKENS, "modules_to_save": ["model.norm"]}}.get(
        name, LORA
    )
    model = {"config": None, "name_or_path": str(base), "adapter": adapter}
    recipe = write_tiny_run(tmp_path / "tuned", model=model)
    recipe.write_text(json.dumps(json.loads(recipe.read_text()) | sections))
    if name == "bart":  # needs an end token
        tiny_tokenizer().save_pretrained(tmp_path / "tuned" / "tokenizer")
    train(recipe)
    export(tmp_path / "tuned" / "run", tmp_path / "adapter", adapter=True)

    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert {key: written[key] for key in expected} == expected
    doubled = 2 if name == "started" else 1  # the rank, beside the start
    assert (written["base_model_name_or_path"], written["r"]) == (str(base), 4 * doubled)
    assert written["lora_alpha"] == pytest.approx(64 * doubled**0.5)
    merged = getattr(transformers, head).from_pretrained(tmp_path / "tuned" / "run" / "model")
    assert_same_logits(opened(tmp_path / "adapter", head, base), merged)
    auto = getattr(peft, head.replace("Auto", "AutoPeft")).from_pretrained(tmp_path / "adapter", num_labels=3)
    assert_same_logits(auto, merged)
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert "PeftModel.from_pretrained(base, folder)" in card
    assert ("base.generation_config = GenerationConfig" in card) == merged.can_generate()


def test_an_adapter_folder_is_refused_where_a_whole_model_is_needed(tmp_path: Path):
    base = base_folder(tmp_path / "base", "bert", "AutoModelForMaskedLM")
    model = {"config": None, "name_or_path": str(base), "adapter": LORA}
    recipe = write_tiny_run(tmp_path / "tuned", model=model, training={"max_steps": 1})
    train(recipe)
    export(tmp_path / "tuned" / "run", tmp_path / "adapter", adapter=True)
    with pytest.raises(UsageError, match=r"`RUN` must hold merged weights.*without --adapter"):
        load_trained(tmp_path / "adapter", None, [], 1, evaluates=False)
    with pytest.raises(UsageError, match=r"`model.name_or_path` must be a whole model.*is an adapter of PEFT"):
        train(recipe, f"model.name_or_path={tmp_path / 'adapter'}", "checkpoint.folder=other")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"adapter": None}, r"`--adapter` needs a run with `model.adapter`"),
        ({"adapter": LORA}, r"`--adapter` needs a run with `model.name_or_path`"),
    ],
)
def test_a_run_without_a_base_or_an_adapter_is_refused(tmp_path: Path, keys: dict[str, Any], words: str):
    train(write_tiny_run(tmp_path, model=keys, training={"max_steps": 1}))
    with pytest.raises(UsageError, match=words):
        export(tmp_path / "run", tmp_path / "adapter", adapter=True)
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize(
    ("layers", "targets"),
    [
        (["query", "layer.0.query"], ["query"]),
        (["layer.0.query"], ["0.query"]),
        (["query"], "query"),
        (["layer.1.key", "query"], r"layer\.1\.key|query"),
    ],
)
def test_targets_match_the_layers_and_no_others(layers: list[str], targets: list[str] | str) -> None:
    """The name `query` ends another name, so that its end alone would match both."""

    def model() -> torch.nn.Module:
        block = torch.nn.ModuleDict({"query": torch.nn.Linear(2, 2), "key": torch.nn.Linear(2, 2)})
        inner = {"0": block, "1": torch.nn.ModuleDict({"key": torch.nn.Linear(2, 2)})}
        return torch.nn.ModuleDict({"query": torch.nn.Linear(2, 2), "layer": torch.nn.ModuleDict(inner)})

    names = [name for name, _ in model().named_modules() if name]
    assert _shortest(names, layers) == targets
    adapted = peft.PeftModel(model(), peft.LoraConfig(target_modules=targets)).base_model.model
    found = [name for name, module in adapted.named_modules() if isinstance(module, peft.tuners.lora.Linear)]
    assert sorted(found) == sorted(layers)
