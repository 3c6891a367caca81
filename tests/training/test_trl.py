"""Preferences, rewards and chats against the trainers of TRL: the same rows, losses and weights on one process."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from trainer.recipe.plan import plan_run
from trainer.recipe.schema import Recipe
from trainer.training.assembly import Assembly, assemble
from trainer.training.process_group import open_mesh
from trainer.training.run_data import prepare_data

STEPS, ROWS = 4, 8
RATES = {"ipo": 0.01, "orpo": 0.03, "simpo": 0.03}
"""Rates at which the training does not diverge, so that differences of rounding do not grow; else 0.3."""
LENGTHS = {"dpo": 9, "kto": 9, "labels": 9}
"""`max_length` that cuts rows; else 48."""
WORDS = [f"w{number}" for number in range(40)]
SIZES = {
    "vocab_size": len(WORDS) + 3,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}

Trained = tuple[list[float], dict[str, torch.Tensor], Assembly]

CASES: dict[str, dict[str, Any]] = {
    "dpo": {"type": "dpo", "beta": 0.3},
    "conservative": {"type": "dpo", "beta": 0.5, "label_smoothing": 0.2},
    "ipo": {"type": "ipo", "beta": 0.4},
    "simpo": {"type": "simpo", "beta": 2.0, "gamma": 0.7},
    "orpo": {"type": "orpo", "beta": 0.2},
    "kto": {"type": "kto", "beta": 0.4, "desirable_weight": 1.3, "undesirable_weight": 0.8},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny decoder with its tokenizer, and rows of texts."""
    place = tmp_path_factory.mktemp("trl")
    words = {word: index for index, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(place)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    model.save_pretrained(place)
    draw = random.Random(0)

    def text(least: int, most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))

    def answer() -> str:
        return " " + text(1, 5)

    rows: list[dict[str, Any]] = [
        {"prompt": text(2, 6), "chosen": answer(), "rejected": answer(), "margin": draw.random()} for _ in range(ROWS)
    ]
    datasets.Dataset.from_list(rows).to_json(place / "pairs.jsonl")
    single = [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": index % 3 > 0} for index, row in enumerate(rows)
    ]
    datasets.Dataset.from_list(single).to_json(place / "single.jsonl")
    config = transformers.LlamaConfig(**SIZES, num_labels=1, problem_type="regression")
    transformers.LlamaForSequenceClassification(config).save_pretrained(place / "reward")
    tokenizer.save_pretrained(place / "reward")
    return place


def ours(
    folder: Path,
    task: dict[str, Any],
    file: str,
    rate: float,
    model: Path,
    section: dict[str, Any] | None = None,
    length: int = 48,
) -> Trained:
    """Return the losses and the weights of this project, and its parts."""
    recipe = Recipe.model_validate(
        {
            "name": "truth",
            "task": task,
            "model": {"name_or_path": str(model), "dropout": 0.0},
            "data": {
                "source": "files",
                "train": str(folder / file),
                "validation": None,
                "max_length": length,
                "map": section or {},
                "cache": str(folder / "cache"),
            },
            "training": {
                "max_steps": STEPS, "global_batch_size": ROWS, "micro_batch_size": ROWS, "max_grad_norm": None
            },
            "optimizer": {"name": "sgd", "learning_rate": rate, "weight_decay": 0.0},
            "schedule": {"name": "constant", "warmup": 0},
        }
    )  # fmt: skip
    plan = plan_run(recipe, 1)
    parts = assemble(plan, open_mesh(plan.layout, torch.device("cpu")), prepare_data(recipe))
    losses = [parts.engine.train_step(batch).loss for batch in parts.train_loader]
    weights = {name: value.detach().clone() for name, value in parts.models[0].state_dict().items()}
    return losses, weights, parts


def theirs(
    folder: Path, trainer_class: Any, config: Any, model: Any, file: str
) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses: list[float] = []

    class Recording(trainer_class):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            found = super().compute_loss(*args, **kwargs)
            losses.append(float(found[0] if isinstance(found, tuple) else found))
            return found

    rows = datasets.load_dataset("json", data_files=str(folder / file), split="train", cache_dir=str(folder / "hub"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    trainer = Recording(model=model, args=config, train_dataset=rows, processing_class=tokenizer)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    trainer.create_optimizer_and_scheduler(STEPS)
    trainer.train()
    number = len(losses) // STEPS
    means = [sum(losses[step * number : (step + 1) * number]) / number for step in range(STEPS)]
    return means, {name: value.detach().clone() for name, value in model.state_dict().items()}


def settings(folder: Path, rate: float, rows: int = ROWS, **keys: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": ROWS // rows,
        "max_steps": STEPS,
        "learning_rate": rate,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "weight_decay": 0.0,
        "max_length": 48,
        "use_cpu": True,
        "bf16": False,
        "fp16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        **keys,
    }


def trained_by_trl(folder: Path, name: str, rate: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    loss, length = CASES[name], {"max_length": LENGTHS.get(name, 48)}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    match loss["type"]:
        case "dpo" | "ipo":
            from trl import DPOConfig, DPOTrainer

            keys: dict[str, Any] = {"loss_type": {"dpo": "sigmoid", "ipo": "ipo"}[loss["type"]]}
            if wrong := loss.get("label_smoothing"):  # a mixture of two losses of TRL, which has it no more by itself
                keys = {"loss_type": ["sigmoid", "robust"], "loss_weights": [2 * (1 - wrong), 2 * wrong - 1]}
                keys["label_smoothing"] = wrong
            config: Any = DPOConfig(**settings(folder, rate, beta=loss["beta"], **keys, **length))
            return theirs(folder, DPOTrainer, config, model, "pairs.jsonl")
        case "simpo":
            from trl.experimental.cpo import CPOConfig, CPOTrainer

            keys = {"loss_type": "simpo", "beta": loss["beta"], "simpo_gamma": loss["gamma"], "cpo_alpha": 0.0}
            return theirs(folder, CPOTrainer, CPOConfig(**settings(folder, rate, **keys)), model, "pairs.jsonl")
        case "orpo":
            from trl.experimental.orpo import ORPOConfig, ORPOTrainer

            config = ORPOConfig(**settings(folder, rate, rows=1, beta=loss["beta"]))
            return theirs(folder, ORPOTrainer, config, model, "pairs.jsonl")
    from trl import KTOConfig, KTOTrainer

    weights = {key: loss[key] for key in ("beta", "desirable_weight", "undesirable_weight")}
    return theirs(folder, KTOTrainer, KTOConfig(**settings(folder, rate, **weights, **length)), model, "single.jsonl")


def differences(found: Any, expected: Any) -> tuple[float, float]:
    losses = max(abs(one - other) for one, other in zip(found[0], expected[0], strict=True))
    weights = max(float((found[1][name] - expected[1][name]).abs().max()) for name in expected[1])
    return losses, weights


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_training_is_that_of_trl(folder: Path, name: str):
    rate = RATES.get(name, 0.3)
    pytest.importorskip("trl")
    expected = trained_by_trl(folder, name, rate)
    file = "single.jsonl" if name == "kto" else "pairs.jsonl"
    task, length = {"type": "preference", "loss": CASES[name]}, LENGTHS.get(name, 48)
    *found, _ = ours(folder, task, file, rate, folder, length=length)
    losses, weights = differences(found, expected)
    assert max(expected[0]) - min(expected[0]) > 1e-3, "the weights change"
    assert losses <= 1e-6
    assert weights <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("has_margin", [False, True])
def test_a_reward_model_is_that_of_trl_and_its_folder_gives_the_same_rewards(folder: Path, has_margin: bool):
    pytest.importorskip("trl")
    from trl import RewardConfig, RewardTrainer

    place = folder / "reward"
    auto = transformers.AutoModelForSequenceClassification
    rows = datasets.load_dataset("json", data_files=str(folder / "pairs.jsonl"), split="train")
    file = "pairs.jsonl" if has_margin else "plain.jsonl"
    (rows if has_margin else rows.remove_columns("margin")).to_json(folder / file)
    coefficient = 0.05 if has_margin else 0.0
    config = RewardConfig(**settings(folder, 0.02, center_rewards_coefficient=coefficient or None))
    model = auto.from_pretrained(place, attn_implementation="eager")
    expected = theirs(folder, RewardTrainer, config, model, file)
    task = {"type": "reward_model", "margin": "margin" if has_margin else None, "center_coefficient": coefficient}
    *found, parts = ours(folder, task, file, 0.02, place)
    losses, weights = differences(found, expected)
    assert max(expected[0]) - min(expected[0]) > 1e-3, "the weights change"
    assert losses <= 1e-6
    assert weights <= 1e-6
    parts.export(folder / "exported")
    exported = auto.from_pretrained(folder / "exported", attn_implementation="eager").eval()
    (batch,) = list(parts.train_loader)[:1]
    (microbatch,) = batch.microbatches
    with torch.no_grad():
        inputs = {name: tensor.flatten(0, 1) for name, tensor in microbatch.inputs.items()}
        rewards = exported(**inputs).logits.view(-1, 2)
    assert torch.allclose(parts.engine.eval_step(microbatch).predictions["rewards"], rewards, atol=1e-6)


TOOLS = [{"type": "function", "function": {"name": "w1", "parameters": {"w2": "w3"}}}]
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{% for m in messages %}w0 {{ m.role }} "
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }} {{ call.function.arguments.x }} {% endfor %} </s>{% endgeneration %} "
    "{% else %}{{ m.content }} </s> {% endif %}{% endfor %}{% if add_generation_prompt %}w0 assistant {% endif %}"
)


def chat_of(index: int) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": f"w{index}", "arguments": {"x": f"w{index + 9}"}}}
    return [
        {"role": "system", "content": "w30 w31"},
        {"role": "user", "content": f"w{index} w{index + 1}"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": f"w{index + 2}"},
        {"role": "assistant", "content": " ".join(f"w{index + place}" for place in range(index % 3 + 2))},
    ]


def as_sharegpt(chat: list[dict[str, Any]]) -> list[dict[str, str]]:
    names = {"user": "human", "assistant": "gpt", "tool": "observation"}
    return [
        {"from": "function_call", "value": json.dumps(message["tool_calls"][0]["function"])}
        if "tool_calls" in message
        else {"from": names.get(message["role"], message["role"]), "value": message["content"]}
        for message in chat
    ]


def shapes() -> dict[str, tuple[dict[str, Any], dict[str, Any], list[Any], list[Any]]]:
    """Return for each shape our task, our map, the rows of the shape, and those that TRL reads."""
    chats = [chat_of(index) for index in range(ROWS)]
    asked = [[f"w{row} w2", f"w{row + 3}" * (row % 2), f"w{row + 4} w{row}"] for row in range(ROWS)]
    alpaca = [dict(zip(("instruction", "input", "output"), row, strict=True)) for row in asked]
    joined = [
        {"prompt": f"{one}\n{two}" if two else one, "completion": three} for one, two, three in asked
    ]  # as people write it by hand
    parts = [{"prompt": chat[:4], "completion": chat[4:]} for chat in chats]
    ids = [{"input_ids": [row + place + 3 for place in range(5 + row)]} for row in range(ROWS)]
    labelled = [{**row, "labels": [-100, -100, *row["input_ids"][2:]]} for row in ids]
    plain = [{"messages": chat} for chat in chats]
    sharegpt = [{"conversations": as_sharegpt(chat)} for chat in chats]
    messages, pair = {"messages": "messages"}, {"prompt": "prompt", "completion": "completion"}
    template = {"columns": {"prompt": "{instruction}[\n{input}]", "completion": " {output}"}}
    with_tools = [{"messages": chat, "tools": TOOLS} for chat in chats]
    return {
        "sharegpt": (messages, {}, sharegpt, plain),
        "tools": ({**messages, "tools": "tools"}, {}, with_tools, with_tools),
        "parts": (pair, {}, parts, parts),
        "template": (pair, template, alpaca, [{**row, "completion": f" {row['completion']}"} for row in joined]),
        "ids": ({"text": "input_ids"}, {}, ids, ids),
        "labels": ({"text": "input_ids"}, {}, labelled, labelled),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", shapes())
def test_rows_of_all_shapes_are_trained_as_trl_trains_them(folder: Path, tmp_path: Path, name: str):
    pytest.importorskip("trl")
    from trl import SFTConfig, SFTTrainer

    shutil.copytree(folder, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("cache", "hub", "out"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    task, section, rows, expected_rows = shapes()[name]
    for file, written in (("ours.jsonl", rows), ("theirs.jsonl", expected_rows)):
        (tmp_path / file).write_text("".join(json.dumps(row) + "\n" for row in written))
    keys = {"assistant_only_loss": "messages" in task, "completion_only_loss": "prompt" in task}
    length = LENGTHS.get(name, 48)
    config = SFTConfig(**settings(tmp_path, 0.1, **keys, max_length=length))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    expected = theirs(tmp_path, SFTTrainer, config, model, "theirs.jsonl")
    *found, _ = ours(tmp_path, {"type": "causal_lm", **task}, "ours.jsonl", 0.1, tmp_path, section, length)
    losses, weights = differences(found, expected)
    assert max(expected[0]) - min(expected[0]) > 1e-3, "the weights change"
    assert losses <= 1e-6
    assert weights <= 1e-6
