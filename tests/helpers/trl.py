"""Trainings of this project and of the trainers of TRL: the same rows on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from trainer.recipe.plan import plan_run
from trainer.recipe.schema import Recipe
from trainer.training.assembly import Assembly, assemble
from trainer.training.process_group import open_mesh
from trainer.training.run_data import prepare_data

STEPS, ROWS = 4, 8
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


def save_decoder(place: Path) -> transformers.PreTrainedTokenizerFast:
    """Save a tiny decoder with its tokenizer, and return the tokenizer."""
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
    return tokenizer


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


def differences(found: Any, expected: Any) -> tuple[float, float]:
    losses = max(abs(one - other) for one, other in zip(found[0], expected[0], strict=True))
    weights = max(float((found[1][name] - expected[1][name]).abs().max()) for name in expected[1])
    return losses, weights
