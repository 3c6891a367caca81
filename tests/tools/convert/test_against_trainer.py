"""A converted recipe compared with the results of transformers and DeepSpeed for the same files."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from trainer.recipe.plan import RunPlan, plan_run
from trainer.recipe.reading.loading import load_recipe
from trainer.tools.convert.convert import convert
from trainer.tools.convert.draft import Outcome

ROWS, RANKS = 3668, 4
ARGUMENTS: dict[str, Any] = {
    "output_dir": "runs/x",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 3,
    "learning_rate": 3e-5,
    "num_train_epochs": 2,
    "warmup_steps": 17,
    "weight_decay": 0.1,
    "adam_beta2": 0.98,
    "max_grad_norm": 0.5,
}
SCRIPT = {"model_name_or_path": "google-bert/bert-base-uncased", "task_name": "mrpc"}
DEEPSPEED: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_type": "linear",
            **dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
        },
    },
}


class Batches:
    """A stand-in with the length of a rank's loader."""

    dataset = range(ROWS)

    def __len__(self) -> int:
        return math.ceil(ROWS / (ARGUMENTS["per_device_train_batch_size"] * RANKS))


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The Trainer of these arguments, which takes itself for one of four ranks."""
    from torch import nn
    from transformers import Trainer, TrainingArguments

    monkeypatch.chdir(tmp_path)
    args = TrainingArguments(**ARGUMENTS, use_cpu=True)
    built = Trainer(model=nn.Linear(2, 2), args=args)
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: RANKS))
    return built


def planned(files: dict[str, Any]) -> RunPlan:
    for name, content in files.items():
        Path(name).write_text(json.dumps(content))
    Path("r.json").write_text(convert([Path(name) for name in files], None, RANKS).text())
    return plan_run(load_recipe("r.json").recipe, RANKS)


def rates(plan: RunPlan, steps: int) -> list[float]:
    return [plan.recipe.optimizer.learning_rate * plan.recipe.schedule.factor(step, steps) for step in range(steps)]


def rates_of(optimizer: Any, scheduler: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_steps_batch_and_rates_equal_the_hugging_face_trainer(trainer):
    plan = planned({"args.json": ARGUMENTS | SCRIPT})
    _, per_epoch, _, _, total_batch, _, max_steps = trainer.set_initial_training_values(trainer.args, Batches())
    assert plan.batch.global_batch_size == total_batch == 48
    assert plan.steps_per_epoch(ROWS) == per_epoch
    assert plan.total_steps(ROWS) == max_steps
    assert plan.batch.num_microbatches == ARGUMENTS["gradient_accumulation_steps"]
    trainer.create_optimizer_and_scheduler(max_steps)
    group = trainer.optimizer.param_groups[0]
    optimizer = plan.recipe.optimizer
    assert (group["betas"], group["eps"], group["weight_decay"]) == (
        tuple(optimizer.betas),
        optimizer.epsilon,
        optimizer.weight_decay,
    )
    ours, theirs = rates(plan, max_steps), rates_of(trainer.optimizer, trainer.lr_scheduler, max_steps)
    warmup = ARGUMENTS["warmup_steps"]
    assert ours[warmup:] == pytest.approx(theirs[warmup:], rel=1e-12)
    highest = ARGUMENTS["learning_rate"]  # in the warmup both are as in the report
    assert ours[:warmup] == pytest.approx([highest * (step + 1) / (warmup + 1) for step in range(warmup)])
    assert theirs[:warmup] == pytest.approx([highest * step / warmup for step in range(warmup)])


def test_a_dump_of_all_fields_gives_the_recipe_of_the_set_fields(trainer):
    dump = json.loads(trainer.args.to_json_string())
    dump["output_dir"] = ARGUMENTS["output_dir"]
    assert len(dump) > 100
    Path("dump.json").write_text(json.dumps(dump | SCRIPT))
    Path("args.json").write_text(json.dumps(ARGUMENTS | SCRIPT))
    whole, written = (convert([Path(name)], None, RANKS) for name in ("dump.json", "args.json"))
    assert whole.recipe == written.recipe
    assert {line.item.key for line in whole.lines if line.outcome in (Outcome.NONE, Outcome.UNKNOWN, Outcome.TODO)} == {
        "dataloader_pin_memory"  # which transformers switches off with use_cpu
    }
    assert len(whole.report().splitlines()) < 35, "defaults are no noise"


def test_a_pair_with_deepspeed_equals_the_result_of_transformers(trainer):
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.lr_schedules import WarmupDecayLR
    from torch import nn, optim
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig, unset_hf_deepspeed_config

    plan = planned({"args.json": ARGUMENTS | SCRIPT, "ds.json": DEEPSPEED})
    steps = trainer.set_initial_training_values(trainer.args, Batches())[-1]
    filled = HfTrainerDeepSpeedConfig(json.loads(json.dumps(DEEPSPEED)))
    try:
        filled.trainer_config_process(trainer.args)
        filled.trainer_config_finalize(trainer.args, trainer.model, steps)
    finally:
        unset_hf_deepspeed_config()
    theirs, optimizer = filled.config, plan.recipe.optimizer
    assert plan.engine_keys()["zero_optimization"]["stage"] == theirs["zero_optimization"]["stage"]
    assert plan.batch.global_batch_size == theirs["train_batch_size"]
    assert plan.batch.micro_batch_size == theirs["train_micro_batch_size_per_gpu"]
    assert plan.batch.num_microbatches == theirs["gradient_accumulation_steps"]
    assert plan.recipe.training.max_grad_norm == theirs["gradient_clipping"]
    params = theirs["optimizer"]["params"]
    assert (optimizer.learning_rate, optimizer.betas, optimizer.epsilon, optimizer.weight_decay) == (
        params["lr"],
        params["betas"],
        params["eps"],
        params["weight_decay"],
    )
    assert plan.total_steps(ROWS) == theirs["scheduler"]["params"]["total_num_steps"]
    assert plan.recipe.schedule.warmup == theirs["scheduler"]["params"]["warmup_num_steps"]
    sgd = optim.SGD(nn.Linear(1, 1).parameters(), lr=params["lr"])
    late = rates_of(sgd, WarmupDecayLR(sgd, **theirs["scheduler"]["params"]), steps)
    warmup = plan.recipe.schedule.warmup
    assert rates(plan, steps)[warmup:-1] == pytest.approx(late[warmup + 1 :], rel=1e-9), "one step later, as is said"


def test_notes_on_the_schedule_are_true(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    planned({"args.json": ARGUMENTS | SCRIPT})
    plain = convert([Path("args.json")], None, RANKS).report()
    assert re.search(r"warmup_steps 17 -> .*\(s \+ 1\) / \(W \+ 1\) instead of s / W", plain)
    planned({"args.json": ARGUMENTS | SCRIPT, "ds.json": DEEPSPEED})
    assert "starts at 0, one step later" in convert([Path("args.json"), Path("ds.json")], None, RANKS).report()
