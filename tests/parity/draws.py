"""Random recipes, data and layouts for the fuzz of the parity promise; see `tests/parity/fuzz.py`.

A case is a function of (seed, number, attempt) and of nothing else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from random import Random
from typing import Any

from tests.features.deepspeed.test_keys import ZERO_VALUES, strategies_of
from tests.helpers.families import CONFIGS, EXPERTS, SHIPPED, VARIANTS, has_head
from tests.helpers.training import RANK_STRATEGIES, TINY_BERT, TINY_RESNET
from tests.parity import tokens
from tests.parity.tokens import CHATS, SHORTENED, Tokens, draw_chat, draw_tokens, few_words
from trainer.models.families.table import FAMILIES
from trainer.recipe.schedules import SCHEDULES
from trainer.recipe.strategies import STRATEGIES

ENCODER_DECODERS = ("t5", "bart")
FAMILY_CONFIGS: dict[str, dict[str, Any]] = {**CONFIGS, **SHIPPED, "resnet": TINY_RESNET}
IMAGES = ("vit", "resnet")
DECODERS = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "olmo", "starcoder2", "exaone4")
KINDS = {"encoder-decoder": ENCODER_DECODERS, "decoder": DECODERS}  # others are encoders
POSITIONS_AFTER_PADDING = ("roberta", "xlm-roberta")

HEADS = {
    "sequence_classification": "AutoModelForSequenceClassification",
    "sequence_regression": "AutoModelForSequenceClassification",
    "masked_lm": "AutoModelForMaskedLM",
    "token_classification": "AutoModelForTokenClassification",
    "question_answering": "AutoModelForQuestionAnswering",
    "multiple_choice": "AutoModelForMultipleChoice",
    "causal_lm": "AutoModelForCausalLM",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
    "image_classification": "AutoModelForImageClassification",
}
ANSWERS = {"causal_lm": "preference", "sequence_regression": "reward_model"}
"""Tasks of answers, which every fifth case of the task with the same head has."""
TASKS = (*HEADS, "embedding", *ANSWERS.values())

DATA = ("uneven", "one_token", "equal", "seven_rows", "one_class", "duplicates")
EVALUATED = (1, 2, 3, 5, 8, 16)  # batch sizes of evaluations
NUM_DISTINCT = 4  # texts of `duplicates`
DATA_OF = {
    "sequence_regression": (*DATA, "huge"),
    "image_classification": ("uneven", "seven_rows", "one_class"),
    "embedding": (*DATA, "duplicates", "duplicates"),  # its metrics and its loss have ties
}


@dataclass(frozen=True)
class Part:
    """A part of a training, from the step at which the one before it stopped, under a layout of its own.

    Attributes:
        num_ranks: the number of ranks.
        stop: the step at which it stops; None: the last.
        sections: keys of the recipe that must not change the training, by section.
    """

    num_ranks: int
    stop: int | None
    sections: dict[str, Any]


@dataclass(frozen=True)
class Drawn:
    """A drawn case: a recipe for one process, its data, and the parts in which ranks train it."""

    recipe: dict[str, Any]
    data: str  # of `DATA` or `DATA_OF`
    num_rows: int
    tokens: Tokens  # of images, they are not read
    parts: tuple[Part, ...]
    family: str

    @property
    def task(self) -> str:
        return str(self.recipe["task"]["type"])

    @property
    def traits(self) -> list[str]:
        """The names of the groups of the report in which it counts."""
        found = [f"precision {self.recipe['precision']}", f"task {self.task}", f"family {self.family}"]
        found += [f"data {self.data}"] + ["stopped and resumed"] * (len(self.parts) > 1)
        found += self.tokens.traits if self.family not in IMAGES else []
        sizes = {part.sections["evaluation"]["batch_size"] for part in self.parts}
        found += ["other evaluation batches"] * (sizes != {self.recipe["evaluation"]["batch_size"]})
        model = self.recipe["model"]
        found += [key for key in ("adapter", "freeze") if model.get(key)]
        found += ["dropout"] * bool(model.get("dropout"))
        for part in self.parts:
            parallel = part.sections["parallel"]
            pipeline = parallel.get("pipeline")
            found += [f"ranks {part.num_ranks}", f"strategy {parallel['strategy']}"]
            found += [f"tensor {parallel['tensor']}"] * (parallel["tensor"] > 1)
            found += ["sequence"] * bool(parallel.get("sequence"))
            context = parallel.get("context", 1)
            found += [f"context {context}"] * (context > 1)
            found += [f"expert {parallel.get('expert')}"] * ("expert" in parallel)
            found += ["tensor and context"] * (parallel["tensor"] > 1 and context > 1)
            found += ["stages and context"] * (pipeline is not None and context > 1)
            found += ["without padding"] * ("data" in part.sections)
            found += [f"schedule {pipeline['schedule']}"] if pipeline else []
            found += ["offload"] * (parallel.get("offload", "none") != "none")
            found += ["DeepSpeed keys"] * bool(parallel.get("deepspeed"))
            how = part.sections["activation_checkpointing"]
            found += [f"recompute {how}"] * (how != "none")
        return list(dict.fromkeys(found))

    def recipe_of(self, part: Part) -> dict[str, Any]:
        """Return the recipe of a part."""
        recipe = dict(self.recipe)
        for section, keys in part.sections.items():
            recipe[section] = {**recipe.get(section, {}), **keys} if isinstance(keys, dict) else keys
        if part.stop is not None:
            recipe["training"] = {**recipe["training"], "stop_at_step": part.stop}
        return recipe

    def write(self, folder: Path, seed: int) -> None:
        """Write rows and tokenizer into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        random = Random(f"rows {seed}")
        for name, number in (("train", self.num_rows), ("validation", 11)):
            rows = write_rows(self.recipe["task"], self.data, number, random, self.tokens.words)
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        if self.family not in IMAGES:
            self.tokens.write(folder / "tokenizer")


def draw(seed: int, number: int, attempt: int) -> Drawn:
    """Draw a case. Another attempt replaces a case that `trainer check` or the start of a run refuses."""
    random = Random(f"{seed} {number} {attempt}")
    # The first attempt decides the task, so that refusals do not make a task rare.
    task_type = TASKS[number % (len(HEADS) + 1)]
    family = random.choice(_families(task_type))
    if number // (len(HEADS) + 1) % 5 == 2 and family not in ENCODER_DECODERS:
        task_type = ANSWERS.get(task_type, task_type)
    task = _task(task_type, random, family)
    data = random.choice(DATA_OF.get(task_type, DATA))
    num_rows = 7 if data == "seven_rows" else random.choice((23, 40, 50))
    special = family in ENCODER_DECODERS or (data != "one_token" and random.random() < 0.8)
    chat = _chat(task, random)
    kind = next((kind for kind, names in KINDS.items() if family in names), "encoder")
    drawn_tokens = draw_tokens(random, kind, special, chat, family in POSITIONS_AFTER_PADDING)
    steps = random.randint(3, 6)
    batch = random.choice((6, 8, 12, 12, 12, 24))
    precision = random.choice(("fp32", "fp32", "fp32", "bf16", "fp16"))
    model: dict[str, Any] = {"config": _config(family, precision, random, drawn_tokens)}
    if task_type != "image_classification":
        model["tokenizer"] = "tokenizer"
    if family != "resnet" and random.random() < 0.8:
        model["dropout"] = random.choice((0.0, 0.1, 0.3))
        model["config"].pop("attention_dropout", None)
    if random.random() < 0.25:
        model |= _adapter_or_frozen(random)
    recipe: dict[str, Any] = {
        "name": "case",
        "task": task,
        "model": model,
        "data": {"source": "files", "train": "train.jsonl", "validation": "validation.jsonl", "cache": "cache"},
        "precision": precision,
        "training": {
            "max_steps": steps,
            "global_batch_size": batch,
            "micro_batch_size": batch,
            "max_grad_norm": random.choice((None, 1.0, 0.1)),
            "max_bad_steps": 9,
            "seed": random.randint(0, 2**40),
        },
        "optimizer": _optimizer(random),
        "schedule": {"name": random.choice(("linear", "cosine", "constant")), "warmup": random.choice((0, 1, 0.3))},
        "evaluation": {
            "every": random.choice(("2 steps", f"{steps} steps")),
            "batch_size": random.choice(EVALUATED),
        },
        "checkpoint": {"folder": "run"},
        "logging": {"every": "1 step", "to": ["jsonl"]},
    }
    if task_type != "image_classification":
        longest = 32 if chat else random.choice((12, 16, 24))
        recipe["data"] |= {"max_length": longest, "group_by_length": random.random() < 0.5}
    number_of_parts = random.choice((1, 2, 2, 3))
    stops = sorted(random.sample(range(1, steps), min(number_of_parts, steps) - 1))
    parts = tuple(_part(random, batch, stop, family, task) for stop in (*stops, None))
    known = FAMILIES.get(family)
    if known and known.tensor and known.tensor.context_parallel:
        # Numbers of another source, so that the other keys of a case stay as they were.
        others = Random(f"context {seed} {number} {attempt}")
        for part in parts:
            _replace_tensor_ranks(random, part.sections["parallel"])
            _replace_data_ranks(others, part)
    if known and known.padding_free:
        for part in parts:
            if "pipeline" not in part.sections["parallel"] and random.random() < 0.5:
                part.sections["data"] = {"padding_free": True}
    others = Random(f"experts {seed} {number} {attempt}")
    # Few layouts have tensor and context ranks, so they keep their family.
    cuts = [part.sections["parallel"] for part in parts]
    is_cut_twice = any(cut["tensor"] > 1 and cut.get("context", 1) > 1 for cut in cuts)
    if family in DECODERS and not is_cut_twice and others.random() < 0.3:
        family = _replace_by_experts(others, recipe, parts)
    return Drawn(recipe, data, num_rows, drawn_tokens, parts, family)


def wide() -> Drawn:
    """Return a case of BERT-base's width that goes through five layouts, two steps under each."""
    config = {
        **TINY_BERT,
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    }
    drawn = draw(0, TASKS.index("masked_lm"), 0)
    layouts: list[dict[str, Any]] = [
        {"parallel": {"strategy": "ddp"}, "training": {"micro_batch_size": 2}},
        {"parallel": {"strategy": "fsdp"}, "training": {"micro_batch_size": 6}},
        {"parallel": {"strategy": "zero2"}, "training": {"micro_batch_size": 3}},
        {"parallel": {"tensor": 2, "sequence": True}, "activation_checkpointing": "full"},
        {"parallel": {"pipeline": {"stages": 2, "schedule": "1f1b"}}},
    ]
    usual: dict[str, Any] = {
        "activation_checkpointing": "none",
        "evaluation": {"batch_size": 4},
        "checkpoint": {"asynchronous": False},
    }
    stops = (2, 4, 6, 8, None)
    recipe = {
        **drawn.recipe,
        "task": {"type": "masked_lm", "text": "text"},
        "model": {"config": config, "tokenizer": "tokenizer", "dropout": 0.1},
        "data": {**drawn.recipe["data"], "max_length": 16},
        "precision": "fp32",
        "training": {"max_steps": 10, "global_batch_size": 12, "micro_batch_size": 12, "seed": 1},
        "optimizer": {"name": "adamw", "learning_rate": 5e-5, "weight_decay": 0.01},
        "schedule": {"name": "linear", "warmup": 1},
        "evaluation": {"every": "10 steps", "batch_size": 11},
    }
    for layout in layouts:
        layout["parallel"] = {"strategy": "ddp", "tensor": 1, **layout["parallel"]}
    parts = tuple(Part(2, stop, {**usual, **layout}) for stop, layout in zip(stops, layouts, strict=True))
    return Drawn(recipe, "uneven", 50, Tokens("encoder"), parts, "bert")


def _families(task_type: str) -> list[str]:
    if task_type == "embedding":
        return [family for family in FAMILY_CONFIGS if family not in (*IMAGES, *ENCODER_DECODERS)]
    if task_type == "seq2seq_lm":
        return list(ENCODER_DECODERS)
    if task_type == "image_classification":
        return list(IMAGES)
    return [family for family in FAMILY_CONFIGS if family not in IMAGES and has_head(family, HEADS[task_type])]


def _chat(task: dict[str, Any], random: Random) -> str:
    """Return the chat template that the task needs, and draw the turns that it trains; an empty text for no chats."""
    if "messages" not in task:
        return ""
    chat = random.choice(list(CHATS))
    task["train_on"] = random.choice(("each", "last") if chat == SHORTENED else ("all", "all", "each", "last"))
    return chat


def _config(family: str, precision: str, random: Random, drawn: Tokens) -> dict[str, Any]:
    """Return a tiny configuration. Weights are large in fp32, so that errors show."""
    config = {"model_type": family, **FAMILY_CONFIGS[family]}
    variants = [changed for of, changed in VARIANTS.values() if of == family]
    if variants and random.random() < 0.4:
        config |= random.choice(variants)
    if family == "resnet":
        return config
    heads, key_values, hidden = random.choice(((4, 2, 32), (4, 4, 32), (6, 3, 48), (8, 4, 64)))
    if family not in ("llama", "mistral", "qwen2", "qwen3", "olmo", "starcoder2", "exaone4"):
        key_values = heads
    layers = (config.get("num_hidden_groups") and config["num_hidden_layers"]) or random.choice((2, 2, 3, 4))
    end, padding = drawn.id_of(drawn.end), drawn.padding and drawn.id_of(drawn.padding)
    separator = drawn.id_of(drawn.separator or drawn.end)
    sizes: dict[tuple[str, ...], Any] = {
        ("hidden_size", "dim", "n_embd", "d_model"): hidden,
        ("num_attention_heads", "n_heads", "n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads"):
            heads,
        ("num_key_value_heads",): key_values,
        ("intermediate_size", "hidden_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"): random.choice((48, 96)),
        ("num_hidden_layers", "n_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"): layers,
        ("vocab_size",): random.choice((211, 128)),
        ("pad_token_id",): padding,
        ("bos_token_id", "cls_token_id"): drawn.id_of(tokens.START),
        ("eos_token_id",): end,
        ("sep_token_id",): separator,
        ("decoder_start_token_id",): padding if family == "t5" else end,
    }  # fmt: skip
    if family in IMAGES:
        config["num_channels"] = 1
        config.pop("vocab_size", None)
    else:
        config |= dict.fromkeys(("pad_token_id", "eos_token_id", *(() if family == "t5" else ("bos_token_id",))), 0)
    for names, size in sizes.items():
        config |= {name: size for name in names if name in config}
    config.pop("head_dim", None)  # transformers divides
    if family == "qwen3":
        config["head_dim"] = hidden // heads
    # Rounding to 16 bits grows with the weights, and the limits for these types were measured with default weights.
    scale = {} if family in ENCODER_DECODERS or precision != "fp32" else {"initializer_range": 0.2}
    return config | scale


def _adapter_or_frozen(random: Random) -> dict[str, Any]:
    if random.random() < 0.7:
        return {"adapter": {"type": "lora", "rank": 2, "alpha": 4.0, "dropout": random.choice((0.0, 0.1))}}
    return {"freeze": ["*embed*"]}


def _optimizer(random: Random) -> dict[str, Any]:
    if random.random() < 0.5:
        return {"name": "sgd", "learning_rate": random.choice((0.01, 0.1)), "momentum": random.choice((0.0, 0.9))}
    return {"name": "adamw", "learning_rate": 1e-3, "weight_decay": random.choice((0.0, 0.01))}


_PAIRS = {"prompt": "question", "chosen": "other", "rejected": "third"}


def _task(kind: str, random: Random, family: str) -> dict[str, Any]:
    task: dict[str, Any] = {"type": kind}
    if kind in ("sequence_classification", "sequence_regression", "masked_lm"):
        task["text"] = ["text", "other"] if family not in ENCODER_DECODERS and random.random() < 0.2 else "text"
    if kind in ("sequence_classification", "image_classification"):
        task["labels"] = list("abc")
        if kind == "sequence_classification" and random.random() < 0.3:
            return task | {"label": "several", "multi_label": True, "metrics": ["f1_macro", "accuracy"]}
        task["class_weights"] = random.choice((None, None, {"a": 0.5, "b": 3.0, "c": 7.0}))
        task["label_smoothing"] = random.choice((0.0, 0.1))
    elif kind == "sequence_regression":
        task |= {"label": "number", "metrics": ["mse"]}
    elif kind == "masked_lm":
        task["mask_probability"] = random.choice((0.15, 0.5))
    elif kind == "embedding":
        loss = random.choice(("multiple_negatives", "multiple_negatives", "cosine", "cosent"))
        task |= {"loss": loss, "pooling": random.choice(("mean", "cls", "last")), "normalize": random.random() < 0.7}
        if loss == "multiple_negatives":
            task |= {"texts": ["text", "other", "third"][: random.choice((2, 3))]}
            task |= {"mask_duplicates": random.random() < 0.3, "metrics": ["recall_at_1", "recall_at_5", "mrr"]}
        else:
            task |= {"texts": ["text", "other"], "score": "score", "metrics": ["spearman"]}
    elif kind == "token_classification":
        tags = ["O", "B-P", "I-P", "B-Q", "I-Q"]
        task |= {"words": "words", "tags": "tags", "labels": tags} if random.random() < 0.7 else {
            "text": "text", "spans": "spans", "labels": tags
        }  # fmt: skip
        task["label_all"] = random.random() < 0.5
    elif kind == "question_answering":
        task["unanswerable"] = random.random() < 0.5
        task["stride"] = random.choice((None, 2))
    elif kind == "causal_lm":
        chats = {"messages": "messages"}
        columns = random.choice(({"text": "text"}, {"prompt": "text", "completion": "other"}, chats, chats))
        task |= columns
        task["packing"] = random.choice(("none", "documents", "joined") if "text" in columns else ("none", "documents"))
        task["logits_chunk"] = random.choice((None, 7))
        task["metrics"] = ["perplexity", "accuracy"]
    elif kind == "reward_model":
        task |= _PAIRS | {"margin": random.choice((None, "score")), "center_coefficient": random.choice((0.0, 0.1))}
    elif kind == "preference":
        loss = random.choice(("dpo", "dpo", "ipo", "simpo", "orpo", "kto"))
        labelled = {"prompt": "question", "completion": "other", "label": "desirable"}
        task |= {"loss": {"type": loss}, **(labelled if loss == "kto" else _PAIRS)}
        task["logits_chunk"] = random.choice((None, 7))
    elif kind == "multiple_choice" and random.random() < 0.5:
        task["question"] = "question"
    elif kind == "seq2seq_lm":
        task["max_target_length"] = random.choice((4, 12))
    return task


def _part(random: Random, batch: int, stop: int | None, family: str, task: dict[str, Any]) -> Part:
    """Draw a layout. Some do not fit the model or each other, and are refused."""
    ranks = random.choice((1, 1, 2, 2, 2, 2, 3, 3, 4, 4, 4, 6, 8))
    tensor = _degree(random, ranks, (1, 1, 1, 2, 2, 3, 4)) if family != "resnet" else 1
    stages = _degree(random, ranks // tensor, (1, 1, 1, 2, 2, 3, 4))
    names = [name for name in RANK_STRATEGIES if stages == 1 or not STRATEGIES[name].no_pipeline]
    strategy = random.choice(names)
    row, data_ranks = STRATEGIES[strategy], ranks // tensor // stages
    parallel: dict[str, Any] = {"strategy": strategy, "tensor": tensor}
    if tensor > 1:
        parallel["sequence"] = random.random() < 0.5
    if row.groups:
        parallel["shard"] = random.choice([size for size in (1, 2, 3, 4, 6, 8) if data_ranks % size == 0])
    if stages > 1:
        schedule = random.choice(list(SCHEDULES))
        several = SCHEDULES[schedule].several_stages
        parallel["pipeline"] = {
            "stages": stages,
            "schedule": schedule,
            "stages_per_rank": random.choice((None, 2, 3)) if several else None,
            "microbatches": random.choice((None, None, 1, 2, 4)),
        }
    elif random.random() < 0.3:
        parallel["offload"] = random.choice(row.offloads)
    if row.cuts_parameters and not row.package:
        parallel["reshard_after_forward"] = random.random() < 0.7
    if row.package and random.random() < 0.5:
        free = [key for key in ZERO_VALUES if strategy in strategies_of(key)]
        chosen = random.sample(free, random.choice((1, 2, 3)))
        parallel["deepspeed"] = {"zero_optimization": {key: ZERO_VALUES[key] for key in chosen}}
    sections: dict[str, Any] = {
        "parallel": parallel,
        "activation_checkpointing": random.choice(("none", "none", "selective", "full")),
        "training": {
            "micro_batch_size": random.randint(1, batch),
            "check_replicas": random.choice((None, "1 step")),
        },
        "evaluation": {"batch_size": random.choice(EVALUATED)},
        "checkpoint": {"asynchronous": random.random() < 0.5},
    }
    return Part(ranks, stop, sections)


def _replace_tensor_ranks(random: Random, parallel: dict[str, Any]) -> None:
    """Make context ranks of tensor ranks, for every second layout that has them; every second one keeps two of four."""
    if parallel["tensor"] > 1 and (chance := random.random()) < 0.5:
        tensor = 2 if parallel["tensor"] == 4 and chance < 0.25 else 1
        context = parallel["tensor"] // tensor
        parallel |= {"tensor": tensor, "sequence": tensor > 1 and parallel["sequence"], "context": context}


def _replace_data_ranks(random: Random, part: Part) -> None:
    """Make two context ranks of two data ranks, for half of the layouts with tensor ranks or stages beside them."""
    parallel = part.sections["parallel"]
    stages = parallel.get("pipeline", {}).get("stages", 1)
    data_ranks = part.num_ranks // parallel["tensor"] // parallel.get("context", 1) // stages
    has_others = stages > 1 or parallel["tensor"] > 1
    if has_others and parallel.get("context", 1) == 1 and data_ranks % 2 == 0 and random.random() < 0.5:
        parallel["context"] = 2
        if "shard" in parallel:
            parallel["shard"] = gcd(parallel["shard"], data_ranks // 2)


def _replace_by_experts(random: Random, recipe: dict[str, Any], parts: tuple[Part, ...]) -> str:
    """Replace a decoder by one with experts in fp32, divide the experts where ranks can, and return the family."""
    kind, model = recipe["task"]["type"], recipe["model"]
    head = HEADS.get(next((task for task, answer in ANSWERS.items() if answer == kind), kind))  # none: embeddings
    family = random.choice([name for name in EXPERTS if name in FAMILIES and (head is None or has_head(name, head))])
    known = FAMILIES[family]
    kept = {key: value for key, value in model["config"].items() if key == "vocab_size" or key.endswith("token_id")}
    dense = model["config"]
    layers = dense.get("num_hidden_layers") or dense["n_layer"]  # as many as the layouts were drawn for
    sizes = {"num_hidden_layers": layers, "initializer_range": 0.2}
    model["config"] = {"model_type": family, **EXPERTS[family], **kept, **sizes}
    recipe["precision"] = "fp32"
    if "adapter" in model and random.random() < 0.5:
        model["adapter"] |= {"target_parameters": "all-experts", "dropout": 0.0}
    for part in parts:
        parallel = part.sections["parallel"]
        parallel["sequence"] = False
        if not (known.tensor and known.tensor.context_parallel):
            parallel.pop("context", None)
        cuts = parallel["tensor"] * parallel.get("context", 1) * parallel.get("pipeline", {}).get("stages", 1)
        ranks = part.num_ranks // cuts
        degrees = [degree for degree in (2, 4) if parallel.get("shard", ranks) % degree == 0]
        if degrees and not STRATEGIES[parallel["strategy"]].package and random.random() < 0.8:
            parallel["expert"] = random.choice(degrees)
        if not known.padding_free:
            part.sections.pop("data", None)
    return family


def _degree(random: Random, ranks: int, degrees: tuple[int, ...]) -> int:
    return random.choice([degree for degree in degrees if ranks % degree == 0])


# Rows


def write_rows(
    task: dict[str, Any], data: str, number: int, random: Random, words: list[str] = tokens.WORDS
) -> list[dict[str, Any]]:
    """Return rows with the columns of every text task, or images with their classes."""
    if task["type"] == "image_classification":
        classes = "a" if data == "one_class" else "abc"
        return [{"image": _image(random), "label": random.choice(classes)} for _ in range(number)]
    unanswerable = bool(task.get("unanswerable"))
    if data == "duplicates":  # each column repeats its texts, with other labels and other texts beside them
        texts = [_row(data, random, unanswerable, words) for _ in range(NUM_DISTINCT)]
        labels = [_row(data, random, unanswerable, words) for _ in range(number)]
        return [row | _some_texts(texts, random) for row in labels]
    return [_row(data, random, unanswerable, words) for _ in range(number)]


def _some_texts(rows: list[dict[str, Any]], random: Random) -> dict[str, Any]:
    """Return the columns of texts, each of one of some rows; `text` and its tags and spans are of the same one."""
    one = random.choice(rows)
    alone = ("other", "third", "question", "target", "messages", "choices")
    together = ("text", "words", "tags", "spans", "context", "answers", "source")
    return {name: one[name] for name in together} | {name: random.choice(rows)[name] for name in alone}


def _image(random: Random) -> list[list[int]]:
    return [[random.randrange(256) for _ in range(16)] for _ in range(16)]


def _row(data: str, random: Random, unanswerable: bool, vocabulary: list[str]) -> dict[str, Any]:
    def length() -> int:
        return {"one_token": 1, "equal": 6}.get(data) or random.choice((1, 2, 3, 5, 8, 13))

    words = random.choices(vocabulary, k=length())
    text = " ".join(words)
    one = data == "one_class"
    number = random.gauss(0, 1) * (1e5 if data == "huge" else 1)
    context = random.choices(vocabulary, k=3 * length())
    first = random.randrange(len(context))
    answer = " ".join(context[first : first + random.choice((1, 2))])
    place = len(" ".join(context[:first])) + (first > 0)
    answers = {"text": [answer], "answer_start": [place]}
    if unanswerable and (one or random.random() < 0.3):
        answers = {"text": [], "answer_start": []}
    spans = [] if one else [{"start": 0, "end": len(words[0]), "label": random.choice("PQ")}]
    return {
        "text": text,
        "other": " ".join(random.choices(vocabulary, k=length())),
        "third": " ".join(random.choices(vocabulary, k=length())),
        "label": "a" if one else random.choice("abc"),
        "several": ["a"] if one else [name for name in "abc" if random.random() < 0.5],
        "number": 2.0 if one else number,
        "desirable": one or number > 0,
        "score": 1.0 if one else random.choice((-1.0, 0.0, 0.2, 0.5, 1.0)),
        "words": words,
        "tags": ["O" if one else random.choice(("O", "B-P", "I-P", "B-Q")) for _ in words],
        "spans": spans,
        "question": " ".join(random.choices(vocabulary, k=2)),
        "context": " ".join(context),
        "answers": answers,
        "source": text,
        "target": " ".join(random.choices(vocabulary, k=length())),
        "messages": draw_chat(vocabulary, random),
        "choices": [few_words(vocabulary, random) for _ in range(random.choice((3, 4)))],
    }
