"""New tokens of a pretrained model: against transformers and PEFT in a plain loop, layouts, folders, and refusals."""

from __future__ import annotations

import json
import re
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from tests.features.quantization.test_quantizing import assert_same_steps, quantized_folder
from tests.helpers.ranks import RankPools
from tests.helpers.tiny_run import WORDS, write_tiny_run
from tests.helpers.training import (
    TINY_DECODERS,
    TINY_VIT,
    VOCABULARY,
    TinyTraining,
    sgd_sections,
    tiny_recipe,
    tiny_training,
    train_tiny,
    weights_of,
)
from tests.models.test_adapters import _name_in_peft
from tests.parity.cases import FEW_ROWS, TOLERANCES, assert_same_curve
from tests.parity.test_adapters import ADAPTER_LAYOUTS
from tests.use.export.test_peft_folder import CAUSAL, assert_same_logits, train
from trainer.base.errors import UsageError
from trainer.engine.state import MODEL_PREFIX
from trainer.models.configuration import load_config
from trainer.models.describe import ModelUse, describe
from trainer.models.whole_model import load_whole
from trainer.parallel.tensor.trained_rows import ROWS
from trainer.recipe.plan import plan_run
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.schema import Model, Recipe, Training
from trainer.tools.certify.opening import trained_model
from trainer.tools.check import check_local_parts
from trainer.use.export.checkpoint_model import open_checkpoint
from trainer.use.export.exporting import export

NEW = [f"<new{number}>" for number in range(6)]
NUM_OLD = VOCABULARY - len(NEW)
IDS = [*range(NUM_OLD, VOCABULARY)]
LORA = {"type": "lora", "rank": 4, "alpha": 16.0}
SPECIAL = ["[PAD]", "[UNK]", "[END]"]


def write_base(folder: Path, tied: bool = False, num_layers: int = 2) -> Path:
    """Write a model and its tokenizer without the new tokens."""
    described = {**TINY_DECODERS["llama"], "vocab_size": NUM_OLD, "tie_word_embeddings": tied, "pad_token_id": 0}
    described["num_hidden_layers"] = num_layers
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**described)).save_pretrained(folder)
    words = [*SPECIAL, *WORDS, *(f"other{number}" for number in range(NUM_OLD - len(WORDS) - len(SPECIAL)))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", eos_token="[END]")
    saved.save_pretrained(folder)
    return folder


def recipe_of(base: Path, adapter: Any, **sections: Any) -> Recipe:
    model = {"config": None, "tokenizer": None, "name_or_path": str(base), "dropout": 0.0, "new_tokens": NEW}
    if isinstance(adapter, str):
        adapter, model["quantization"] = LORA, adapter
    keys = {"training": {"max_steps": 4}, **sections}
    return tiny_recipe(task={"type": "causal_lm", "text": "text"}, model={**model, "adapter": adapter}, **keys)


def start_of(training: TinyTraining) -> dict[str, torch.Tensor]:
    state = training.engine.state()
    return {
        part.name.removeprefix(MODEL_PREFIX): part.boxes[0].view.clone() for part in (*state.parts, *state.frozen())
    }


def enlarged(base: Path) -> Any:
    """Return the model as transformers enlarges it, without the noise around the mean."""
    model = AutoModelForCausalLM.from_pretrained(base)
    layers = (model.get_input_embeddings(), model.lm_head)
    means = [layer.weight.detach().mean(0) for layer in layers]
    model.resize_token_embeddings(VOCABULARY)
    for layer, mean in zip((model.get_input_embeddings(), model.lm_head), means, strict=True):
        assert torch.allclose(layer.weight[IDS], mean.expand(len(IDS), -1), atol=1e-4)  # the noise
        layer.weight.data[IDS] = mean
    return model


@pytest.mark.parametrize(("tied", "adapter"), [(True, LORA), (False, LORA), (True, None)])
def test_a_loop_with_transformers_and_peft_has_the_same_losses(tied: bool, adapter: Any, tmp_path: Path):
    base = write_base(tmp_path, tied)
    with tiny_training(recipe_of(base, adapter)) as training:
        start = start_of(training)
        batches, results = [], []
        for batch in training.loader:
            batches.append(batch)
            results.append(training.engine.train_step(batch))
        end = weights_of(training.engine, training.mesh)
    reference, names = enlarged(base), {name: name for name in end}
    if adapter is not None:
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        rows = {"embed_tokens": IDS} | ({} if tied else {"lm_head": IDS})
        config = peft.LoraConfig(
            r=4, lora_alpha=16, target_modules=targets, trainable_token_indices=rows, task_type="CAUSAL_LM"
        )
        reference = peft.get_peft_model(reference, config)
        in_rows = "token_adapter.trainable_tokens_delta.default"
        names = {
            name: f"base_model.model.{name.removesuffix(f'{ROWS}.rows')}{in_rows}"
            if ROWS in name
            else _name_in_peft(name)
            for name in end
        }
        assert sum(ROWS in name and name.endswith("rows") for name in end) == (1 if tied else 2)
        assert all(".lora." in name or ROWS in name for name in end)
    named = dict(reference.named_parameters())
    names = {name: other for name, other in names.items() if other in named}
    for name, other in names.items():
        if ".lora." in name:
            named[other].data.copy_(start[name])
        else:
            assert torch.allclose(named[other], start[name], atol=1e-7)
    trained = [p for p in reference.parameters() if p.requires_grad]
    assert len(trained) == len(names)
    biased = [p for name, p in named.items() if p.requires_grad and "norm" in name]
    others = [p for p in trained if all(p is not one for one in biased)]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": biased, "weight_decay": 0.0}], weight_decay=0.01)
    assert_same_steps(reference, optimizer, batches, results)
    for name, other in names.items():
        assert (named[other] - end[name]).abs().max() < 1e-4 * end[name].abs().max()


def curves(base: Path, adapter: Any, keys: dict[str, Any]) -> Any:
    sgd = {**keys, **sgd_sections(0.5), "training": {**keys.get("training", {}), "max_steps": 2, "max_grad_norm": None}}
    few = {**keys, "training": {**keys.get("training", {}), "max_steps": 4}}
    return [train_tiny(recipe_of(base, adapter, **one), num_rows=FEW_ROWS) for one in (few, sgd)]


LAYOUTS = {
    **ADAPTER_LAYOUTS,
    "broadcast": (2, {"parallel": {"strategy": "fsdp", "load": "broadcast"}}),
    "tensor-3": (3, {"parallel": {"strategy": "fsdp"}}),
    "ddp-3": (3, {"parallel": {"strategy": "ddp"}}),
    "hsdp": (4, {"parallel": {"strategy": "hsdp", "shard": 2}}),
}


@pytest.mark.parametrize(
    ("layout", "adapter"),
    [
        pytest.param("broadcast", LORA, marks=pytest.mark.slow),
        pytest.param("broadcast", "nf4", marks=pytest.mark.slow),
        pytest.param("broadcast", "nf4_single", marks=pytest.mark.nightly),
        pytest.param("tensor-sequence-accumulated", None),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("zero3", LORA),
                ("tensor-3", None),
                ("tensor-sequence-accumulated", LORA),
                ("fsdp-tensor-pipeline", LORA),
            )
        ),
        *(
            pytest.param(*row, marks=pytest.mark.nightly)
            for row in product(("ddp-3", "hsdp", "zero1", "zero2-accumulated"), (LORA, None))
        ),
    ],
)
def test_any_layout_is_one_process(ranks: RankPools, tmp_path: Path, layout: str, adapter: Any):
    base = write_base(tmp_path / "base", num_layers=4)
    if isinstance(adapter, str):  # files that are quantised already
        tokenizer = AutoTokenizer.from_pretrained(base)
        base = quantized_folder(base, adapter)
        tokenizer.save_pretrained(base)
    world_size, keys = LAYOUTS[layout]
    expected = curves(base, adapter, {})
    for found in ranks(world_size).run(curves, base, adapter, keys):
        for one, other in zip(found, expected, strict=True):
            assert_same_curve(one, other, TOLERANCES["fp32"])


def tuned(folder: Path, adapter: Any, base: Path) -> Path:
    """Train on texts that each hold a new token, and return the recipe."""
    model = {"config": None, "tokenizer": None, "name_or_path": str(base), "new_tokens": NEW, "adapter": adapter}
    sections = {"task": CAUSAL, "optimizer": {"learning_rate": 0.01}, "evaluation": {"every": "8 steps"}}
    recipe = write_tiny_run(folder, model=model, checkpoint={"every": "4 steps", "keep": 2})
    recipe.write_text(json.dumps(json.loads(recipe.read_text()) | sections))
    rows = folder / "train.jsonl"
    lines = [json.loads(line)["text"] for line in rows.read_text().splitlines()]
    texts = [{"text": f"{line} {NEW[number % 6]} word1"} for number, line in enumerate(lines)]
    rows.write_text("".join(f"{json.dumps(text)}\n" for text in texts))
    train(recipe)
    return recipe


HEAD = {**LORA, "targets": ["q_proj", "lm_head"], "trainable_tokens": ["word2"]}


@pytest.mark.parametrize(
    "adapter",
    [
        LORA,
        pytest.param({**HEAD, "type": "dora", "start": "pissa"}, marks=pytest.mark.slow),
        None,
        *(pytest.param({**HEAD, **keys}, marks=pytest.mark.nightly) for keys in ({}, {"rank_stabilised": True})),
    ],
)
def test_folders_hold_the_tokens_and_resume(adapter: Any, tmp_path: Path):
    base = write_base(tmp_path / "base", tied=adapter is None)
    recipe = tuned(tmp_path / "tuned", adapter, base)
    run = tmp_path / "tuned" / "run"
    merged = AutoModelForCausalLM.from_pretrained(run / "model")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    assert tokenizer("word1 <new3> word2")["input_ids"] == [4, NUM_OLD + 3, 5]
    assert merged.config.vocab_size == VOCABULARY == merged.lm_head.weight.shape[0]
    rows = merged.get_input_embeddings().weight[IDS]
    assert (rows - rows[0]).abs().max() > 1e-3  # they are trained
    export(run, tmp_path / "exported")
    assert_same_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "exported"), merged)
    assert_same_logits(_model_of(run), merged)
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoints" / "step-00000008")
    train(recipe)  # resumes at step 4
    again = AutoModelForCausalLM.from_pretrained(run / "model")
    assert all(torch.equal(one, other) for one, other in zip(again.parameters(), merged.parameters(), strict=True))
    if adapter is not None:
        export(run, tmp_path / "adapter", adapter=True)
        over = AutoModelForCausalLM.from_pretrained(base)
        over.resize_token_embeddings(len(AutoTokenizer.from_pretrained(tmp_path / "adapter")))
        assert_same_logits(peft.PeftModel.from_pretrained(over, tmp_path / "adapter"), merged)
        assert_same_logits(peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter"), merged)


def _model_of(run: Path) -> Any:
    """Return the trained model with its adapter apart from the weights."""
    return trained_model(open_checkpoint(run)[0])


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"freeze": ["embed_tokens"]}, r"`model.freeze` must leave the embedding to train with `model.new_tokens`"),
        ({"new_tokens": NEW[1:], "tokenizer": "larger"}, r"`model.new_tokens` must name all tokens.* 1 more.*id 205"),
        ({"adapter": {**LORA, "trainable_tokens": [VOCABULARY]}}, r"name it in `model.new_tokens`"),
    ],
)
def test_tokens_that_cannot_be_trained_are_refused_by_name(keys: dict[str, Any], words: str, tmp_path: Path):
    base = write_base(tmp_path / "base")
    larger = AutoTokenizer.from_pretrained(base)
    larger.add_tokens(NEW)
    larger.save_pretrained(tmp_path / "larger")
    keys = keys | ({"tokenizer": str(tmp_path / "larger")} if "tokenizer" in keys else {})
    model = {"config": None, "tokenizer": None, "name_or_path": str(base), "new_tokens": NEW, **keys}
    recipe = write_tiny_run(tmp_path / "tuned", model=model)
    recipe.write_text(json.dumps(json.loads(recipe.read_text()) | {"task": CAUSAL}))
    problems = check_local_parts(plan_run(load_recipe(str(recipe)).recipe, 1)).problems.messages
    assert any(re.search(words, problem) for problem in problems), problems


def test_a_model_without_a_vocabulary_is_refused():
    with pytest.raises(UsageError, match=r"`model.new_tokens` needs a model with an embedding of tokens"):
        load_config(Model.model_validate({"config": TINY_VIT, "new_tokens": ["<a>"]}), {})


def test_a_model_that_is_loaded_whole_keeps_its_settings_of_generation(tmp_path: Path):
    base = write_base(tmp_path)
    GenerationConfig(bad_words_ids=[[3]], eos_token_id=[2, 4]).save_pretrained(base)
    described = describe(recipe_of(base, None).model, Training(), ModelUse("AutoModelForCausalLM"))
    whole: Any = load_whole(described)[0]
    assert whole.generation_config.bad_words_ids == [[3]]
    assert whole.generation_config.eos_token_id == [2, 4]
    assert whole.config.name_or_path == str(base)
