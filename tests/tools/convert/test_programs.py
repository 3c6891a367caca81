"""Files of axolotl, LLaMA-Factory, TRL, sentence-transformers and SetFit: values, defaults, and odd files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.base.errors import RecipeError, TrainerError, UsageError
from trainer.tools.convert.convert import Conversion, convert
from trainer.tools.convert.draft import Outcome
from trainer.tools.convert.sources import Tool, tool_of

Write = Callable[..., Path]
AXOLOTL: dict[str, Any] = {
    "base_model": "m",
    "datasets": [{"path": "a.jsonl", "type": "completion"}],
    "micro_batch_size": 2,
    "learning_rate": 1e-4,
    "output_dir": "runs/x",
}
FACTORY: dict[str, Any] = {
    "model_name_or_path": "m",
    "stage": "sft",
    "dataset": "d",
    "dataset_dir": "ONLINE",
    "output_dir": "runs/x",
    "per_device_train_batch_size": 2,
}
SFT: dict[str, Any] = {
    "model_name_or_path": "m",
    "dataset_name": "d",
    "dataset_text_field": "text",
    "packing": False,
    "output_dir": "runs/x",
}


def of(write: Write, keys: dict[str, Any], tool: Tool | None = None) -> Conversion:
    return convert([write(keys, "a.yaml")], tool, 1)


def test_defaults_of_axolotl_apply(write: Write):
    recipe = of(write, AXOLOTL).recipe
    assert recipe["data"]["max_length"] == 512
    assert recipe["schedule"] == {"name": "cosine", "warmup": 0.03}
    assert recipe["training"] == {"epochs": 1, "micro_batch_size": 2, "global_batch_size": 2}
    assert recipe["precision"] == "bf16"
    assert recipe["checkpoint"]["keep"] == 4
    assert of(write, AXOLOTL | {"max_steps": 50}).recipe["schedule"]["warmup"] == 1  # int(0.03 x 50)
    assert of(write, AXOLOTL | {"max_steps": 5000}).recipe["schedule"]["warmup"] == 100
    assert of(write, AXOLOTL | {"max_steps": 33, "warmup_ratio": 0.1}).recipe["schedule"]["warmup"] == 3
    assert of(write, AXOLOTL | {"warmup_steps": 1}).recipe["schedule"]["warmup"] == 2


def test_defaults_of_llama_factory_apply(write: Write):
    recipe = of(write, FACTORY).recipe
    assert recipe["data"]["max_length"] == 2048
    assert recipe["model"]["adapter"] == {"type": "lora", "targets": "all-linear"}  # rank 8 and alpha 16, as here
    assert of(write, FACTORY | {"lora_rank": 4}).recipe["model"]["adapter"]["alpha"] == 8
    assert recipe["activation_checkpointing"] == "full"
    assert "precision" not in recipe
    assert "adapter" not in of(write, FACTORY | {"finetuning_type": "full"}).recipe["model"]


def test_defaults_of_trl_depend_on_the_script(write: Write):
    rates = {"trl-sft": 2e-5, "trl-dpo": 1e-6, "trl-kto": 1e-6, "trl-reward": 1e-4}
    keys = {"model_name_or_path": "m", "dataset_name": "d", "output_dir": "x", "use_peft": True}
    for name, rate in rates.items():
        recipe = of(write, keys | {"lora_target_modules": ["q_proj"]}, tool_of(name)).recipe
        assert recipe["optimizer"] == {"learning_rate": rate}
        assert recipe["data"]["max_length"] == 1024
        assert recipe["precision"] == "bf16"
        # Trainers of preferences and rewards turn dropout off, also in the adapter.
        dropout = {"dropout": 0.05} if name == "trl-sft" else {}
        assert recipe["model"]["adapter"] == {
            "type": "lora", "rank": 16, "alpha": 32, "targets": ["q_proj"], **dropout
        }  # fmt: skip
    with pytest.raises(UsageError, match=r"may be a file of TRL's SFT or .*--from trl-sft or --from trl-dpo or"):
        of(write, keys)


def test_defaults_of_setfit_apply(write: Write):
    recipe = of(write, {"output_dir": "x", "body_learning_rate": 1e-5}).recipe
    assert recipe["training"] == {"epochs": 1, "micro_batch_size": 16, "global_batch_size": 16}
    assert recipe["optimizer"] == {"learning_rate": 1e-5, "weight_decay": 0.01}
    assert recipe["schedule"] == {"warmup": 0.1}
    assert recipe["task"]["loss"] == "cosine"


@pytest.mark.parametrize(
    ("keys", "tool"),
    [
        (AXOLOTL, Tool.AXOLOTL),
        (FACTORY, Tool.LLAMA_FACTORY),
        (SFT, Tool.TRL_SFT),
        ({"output_dir": "x", "beta": 0.1, "loss_type": "sigmoid", "loss_weights": None}, Tool.TRL_DPO),
        ({"output_dir": "x", "desirable_weight": 1.0, "beta": 0.1}, Tool.TRL_KTO),
        ({"output_dir": "x", "center_rewards_coefficient": 0.01, "max_length": 9}, Tool.TRL_REWARD),
        ({"output_dir": "x", "num_iterations": 20, "body_learning_rate": 1e-5}, Tool.SETFIT),
        ({"output_dir": "x", "learning_rate": 1e-5, "task_name": "sst2"}, Tool.TRAINING_ARGUMENTS),
    ],
)
def test_a_file_is_recognised(write: Write, keys: dict[str, Any], tool: Tool):
    lines = [line for line in of(write, keys).lines if line.item.origin]
    assert {line.item.program or line.item.tool for line in lines} == {tool}


def test_the_two_tools_of_ambiguous_arguments_are_named(write: Write):
    with pytest.raises(UsageError, match="--from sentence-transformer or --from cross-encoder"):
        of(write, {"output_dir": "x", "batch_sampler": "no_duplicates"})
    with pytest.raises(UsageError, match=r"`--from` must be one of training-arguments, .*, but is axolotel"):
        tool_of("axolotel")


@pytest.mark.parametrize(
    ("keys", "name"), [(AXOLOTL, "num_epochs"), (FACTORY, "num_train_epochs"), (SFT, "num_train_epochs")]
)
def test_fractions_of_an_epoch_stay(write: Write, keys: dict[str, Any], name: str):
    conversion = of(write, keys | {name: 1.5})
    assert conversion.recipe["training"]["epochs"] == 1.5
    assert "training.epochs" not in conversion.todo


@pytest.mark.parametrize("processes", [1, 4])
def test_the_batch_counts_the_ranks(write: Write, processes: int):
    file = write(AXOLOTL | {"gradient_accumulation_steps": 3}, "a.yaml")
    assert convert([file], None, processes).recipe["training"]["global_batch_size"] == 6 * processes
    assert "number of processes" in convert([file]).todo["training.global_batch_size"]
    split = AXOLOTL | {"tensor_parallel_size": 2}
    assert convert([write(split, "a.yaml")], None, 4).recipe["training"]["global_batch_size"] == 4


# Rows


ALPACA = [{"role": "user", "content": "{instruction}[\n{input}]"}, {"role": "assistant", "content": "{output}"}]


@pytest.mark.parametrize(
    ("entry", "stage", "task", "columns"),
    [
        ({}, "sft", {"messages": "messages"}, {"messages": ALPACA}),
        ({"columns": {"prompt": "text"}}, "pt", {"text": "text"}, None),
        (
            {"columns": {"prompt": "q", "response": "a", "system": "s"}},
            "sft",
            {"messages": "messages"},
            {
                "messages": [
                    {"role": "system", "content": "[{s}]"},
                    {"role": "user", "content": "{q}"},
                    {"role": "assistant", "content": "{a}"},
                ]
            },
        ),
        (
            {
                "formatting": "sharegpt",
                "columns": {"messages": "messages"},
                "tags": {
                    "role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
                    "system_tag": "system",
                },
            },
            "sft",
            {"messages": "messages"},
            None,
        ),
        (
            {"formatting": "sharegpt", "columns": {"messages": "conversations", "kto_tag": "label"}},
            "kto",
            {"completion": "completion", "label": "label"},
            {
                "completion": {
                    "column": "conversations",
                    "chat": {
                        "role": "from",
                        "content": "value",
                        "roles": {
                            "human": "user", "gpt": "assistant", "observation": "tool", "function_call": "tool_calls",
                        },
                    },
                },
                "label": "label",
            },
        ),
    ],
)  # fmt: skip
def test_rows_of_dataset_info(write: Write, entry: dict[str, Any], stage: str, task: dict[str, str], columns: Any):
    write({"d": {"file_name": "d.json", **entry}}, "dataset_info.json")
    recipe = of(write, FACTORY | {"dataset_dir": ".", "stage": stage}).recipe
    assert {key: recipe["task"][key] for key in task} == task
    assert recipe["data"].get("map") == (columns and {"columns": columns})
    assert recipe["data"]["train"] == "d.json"


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"columns": {"prompt": "q", "response": "a", "images": "i"}}, "has images: models of text and images"),
        ({"num_samples": 9}, "has num_samples, which decides what is learned"),
        ({"folder": "x"}, "has folder without a counterpart"),
        ({"formatting": "odd"}, "has the formatting odd; write alpaca, sharegpt or openai"),
        ({"columns": ["a"]}, "has columns without a counterpart"),
    ],
)
def test_rows_that_cannot_be_read_alike_are_refused(write: Write, entry: dict[str, Any], words: str):
    write({"d": {"file_name": "d.json", **entry}}, "dataset_info.json")
    with pytest.raises(RecipeError, match=words):
        of(write, FACTORY | {"dataset_dir": "."})


def test_sets_of_several_shapes_have_a_map_each(write: Write):
    chats = {"path": "b.jsonl", "type": "chat_template", "field_messages": "chat"}
    turns = {**chats, "path": "c.jsonl", "message_property_mappings": {"role": "from", "content": "value"}}
    data = of(write, AXOLOTL | {"datasets": [chats, turns]}).recipe["data"]
    assert data["train"] == ["b.jsonl", "c.jsonl"]
    roles = {"human": "user", "gpt": "assistant"}
    assert data["maps"] == [
        {"columns": {"messages": "chat"}},
        {"columns": {"messages": {"column": "chat", "chat": {"role": "from", "content": "value", "roles": roles}}}},
    ]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"path": "a.jsonl", "type": "sharegpt"}, r"datasets\[0\] has the type sharegpt, which decides"),
        ({"path": "a.jsonl", "type": "chat_template", "roles_to_train": ["user"]}, "has `roles_to_train`, which"),
        ({"path": "a.jsonl", "type": "chat_template", "train_on_eos": "all"}, "has `train_on_eos`, which"),
        ({"type": "completion"}, r"has no path in datasets\[0\]; write it"),
        ({"path": "a.jsonl", "type": "completion", "shards": 4}, "has `shards`, which decides"),
        (
            {"path": "a.jsonl", "type": "chat_template", "roles": ["a"]},
            r"wrong type in datasets\[0\]: roles; correct it",
        ),
        ({"path": "a.jsonl", "type": {"format": 5}}, r"wrong type in datasets\[0\]: format; correct it"),
        ({"path": "a.jsonl", "type": "completion", "data_files": 5}, r"in datasets\[0\]: data_files; correct it"),
        ({"path": 3, "type": "completion"}, r"in datasets\[0\]: path; correct it"),
    ],
)
def test_sets_of_axolotl_that_cannot_be_read_alike_are_refused(write: Write, entry: dict[str, Any], words: str):
    with pytest.raises(RecipeError, match=words):
        of(write, AXOLOTL | {"datasets": [entry]})


@pytest.mark.parametrize("keys", [AXOLOTL | {"rl": "dpo"}, SFT | {"dataset_name": None}])
def test_single_files_of_a_repository_are_left_to_the_user(write: Write, keys: dict[str, Any]):
    entry = {"path": "org/rows", "data_files": "a.jsonl"} | ({"type": "chat_template"} if "rl" in keys else {})
    conversion = of(write, keys | {"datasets": [entry]})
    assert "single files of a hub repository, a.jsonl; download them" in conversion.todo["data.train"]


def test_setfits_embeddings_that_learn_with_the_head_are_refused(write: Write):
    keys = {"output_dir": "x", "body_learning_rate": 1e-5}
    with pytest.raises(RecipeError, match="the embeddings do not learn with the head"):
        of(write, keys | {"end_to_end": True})
    lines = of(write, keys | {"end_to_end": False, "head_learning_rate": 0.01}).lines
    assert any("LogisticRegression().fit(SentenceTransformer" in line.text for line in lines)


# Odd files


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("base_model: m\n  lora_r: 8\n", "a.yaml:2"),
        ("base_model: m\nbase_model: n\n", "duplicate key"),
        ("base_model: m\n---\nbase_model: n\n", "must hold one document"),
        ("base_model: !!python/object:os.system m\n", "the tag .* is not allowed"),
        ("a: &a {lora_r: 8}\n<<: *a\nbase_model: m\n", "merges the keys of an anchor"),
        ("base_model: ${oc.env:MODEL}\nsequence_len: 8\n", "`base_model` has a variable"),
        ("base_model: m\nsequence_len: eight\n", "`sequence_len` must be an integer of at least 1"),
        ("base_model: m\ndatasets: {path: a.jsonl, type: completion}\n", "`datasets` must be a list of data sets"),
        ("base_model: m\nlora_rr: 8\nsequence_len: 8\n", "did you mean `lora_r`"),
        ("base_model: m\nsequence_len: 8\nnext_years_key: 1\n", "`next_years_key` is not known as a key of axolotl"),
        ("base_model: m\nsequence_len: 8\nlearning_rate: [1]\n", "`learning_rate` must be a number"),
        ("base_model: m\nsequence_len: 8\nlearning_rate: 1e999\n", "must be a number|finite"),
        ("base_model: m\nsequence_len: 8\nlisa_n_layers: 2\n", "`lisa_n_layers` decides what is learned"),
        ("base_model: m\nsequence_len: 8\nplugins: [axolotl.integrations.kd.KDPlugin]\n", "`plugins` decides"),
        ("base_model: m\nadapter: mora\nlora_r: 8\n", "adapters are lora and qlora"),
        ("base_model: m\nwarmup_steps: 3\nwarmup_ratio: 0.1\nsequence_len: 8\n", "written beside warmup_steps"),
    ],
)
def test_odd_files_are_refused_with_their_place(write: Write, text: str, words: str):
    with pytest.raises(TrainerError, match=words) as caught:
        convert([write(text, "a.yaml")], Tool.AXOLOTL, 1)
    assert "a.yaml" in str(caught.value)


def test_numbers_are_read_as_the_tools_read_them(write: Write):
    text = json.dumps(AXOLOTL).replace("0.0001", "1e-4")  # a text in YAML 1.1
    assert "1e-4" in text
    assert convert([write(text, "a.yaml")], None, 1).recipe["optimizer"] == {"learning_rate": 1e-4}
    assert of(write, AXOLOTL | {"learning_rate": "2e-4"}).recipe["optimizer"] == {"learning_rate": 2e-4}


def test_nulls_are_keys_left_out(write: Write):
    empty = dict.fromkeys(["adapter", "wandb_project", "optimizer", "bf16", "fsdp", "deepspeed", "max_steps"])
    assert of(write, AXOLOTL | empty).recipe == of(write, AXOLOTL).recipe


SECRETS = {
    "hub_token": "hf_AAAABBBBCCCCDDDDEEEE",
    "comet_api_key": "abcdef123456",
    "wandb_entity": "hf_AAAABBBBCCCCDDDDEEEE",
    "mlflow_tracking_uri": "https://me:abcdef123456@example.com",
}


def test_secrets_are_neither_written_nor_printed(write: Write):
    hidden = ("hf_AAAA", "abcdef123456")
    keys = {key: value for key, value in SECRETS.items() if key != "hub_token"}
    shown = []
    for found in (of(write, AXOLOTL | keys), of(write, FACTORY | {"hub_token": SECRETS["hub_token"]})):
        shown += [found.text(), found.report(everything=True), json.dumps(found.as_json())]
    for wrong in ({"comet_api_key": [SECRETS["comet_api_key"]], "my_token": SECRETS["hub_token"], "odd": 1},):
        with pytest.raises(RecipeError) as caught:
            of(write, AXOLOTL | wrong)
        shown.append(str(caught.value))
    assert not any(secret in text for text in shown for secret in hidden)
    assert "(hidden)" in shown[1]


# Commands


def test_a_command_of_trl_is_read(write: Write):
    command = "accelerate launch --num_processes 2 trl/scripts/sft.py --model_name_or_path m \\\n  --dataset_name d"
    end = " --dataset_text_field=t --lora_target_modules q_proj v_proj --use_peft --learning_rate 1e-5\n"
    recipe = convert([write(f"#!/bin/sh\necho start\n{command}{end}", "run.sh")]).recipe
    assert recipe["training"]["global_batch_size"] == 8 * 2
    assert recipe["optimizer"] == {"learning_rate": 1e-5}
    assert recipe["model"]["adapter"]["targets"] == ["q_proj", "v_proj"]
    assert recipe["task"]["text"] == "t"


def test_a_command_may_override_its_file(write: Write):
    write(FACTORY | {"learning_rate": 1.0}, "f.yaml")
    conversion = convert([write("llamafactory-cli train f.yaml learning_rate=1e-5", "run.sh")], None, 1)
    assert conversion.recipe["optimizer"] == {"learning_rate": 1e-5}
    (line,) = (line for line in conversion.lines if line.item.name == "learning_rate")
    assert str(line.item.origin) == "run.sh:1:1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo nothing", "has no command of a training"),
        ("trl sft --beta 1\ntrl dpo --beta 1", "has 2 commands of a training"),
        ("trl sft --model_name_or_path $MODEL", "has a variable of the shell"),
        ("trl sft --max_length 1 --max_length 2", "`--max_length` is there twice"),
        ("trl sft --model_name_or_path 'm", "write each quoted value on one line"),
        ("trl sft stray --max_length 1", "`stray` belongs to no option"),
        ("trl sft --config --max_length 1", "`--config` must be the path of one file, but is true"),
        ("trl sft --config a.yaml b.yaml", "`--config` must be the path of one file"),
    ],
)
def test_odd_commands_are_refused(write: Write, text: str, words: str):
    with pytest.raises(TrainerError, match=words):
        convert([write(text, "run.sh")])


def test_a_different_behaviour_is_named(write: Write):
    keys = {"chat_template": "llama3", "evals_per_epoch": 4, "val_set_size": 0.1, "num_epochs": 2, "bf16": True}
    chats = {"datasets": [{"path": "a.jsonl", "type": "chat_template"}]}
    found = of(write, AXOLOTL | keys | chats)
    names = {line.item.name for line in found.lines if line.outcome is Outcome.DIFFERS}
    assert names >= {"chat_template", "evals_per_epoch", "num_epochs", "bf16", "datasets"}
