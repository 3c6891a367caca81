"""Ten files as users write them: converted, checked, and run for two steps beside the other tool's own arithmetic."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.helpers.trl import save_decoder
from trainer.cli import main
from trainer.recipe.plan import RunPlan, plan_run
from trainer.recipe.reading.loading import load_recipe
from trainer.tools.convert.convert import convert
from trainer.tools.convert.sources import tool_of
from trainer.training.assembly import assemble
from trainer.training.process_group import open_mesh
from trainer.training.run_data import prepare_data

FILES = Path(__file__).parent / "configurations"
ROWS = 40
TEMPLATE = (
    "{% for m in messages %}w0 {{ m.role }} {% if m.role == 'assistant' %}{% generation %}{{ m.content }} </s>"
    "{% endgeneration %} {% else %}{{ m.content }} </s> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}w0 assistant {% endif %}"
)
PAIRS = {"source": "files", "train": "rows/scored.jsonl", "validation": "rows/scored.jsonl"}


@dataclass(frozen=True)
class Case:
    """A file, with the arithmetic of its tool.

    Attributes:
        batch: rows of one optimizer step: rows of a device x accumulated x ranks.
        schedule: the name of the schedule, its peak and its further arguments in transformers.
        epochs: passes over the rows; None: `steps` holds the number of steps.
        warmup: steps of the warmup, or their share.
        filled: the keys that the file does not have.
        packed: whether steps count packed rows.
    """

    batch: int
    schedule: tuple[str, float, dict[str, float]]
    epochs: int | None = 1
    steps: int = 0
    warmup: float = 0.0
    ranks: int = 1
    filled: dict[str, Any] = field(default_factory=dict)
    packed: bool = False


CASES = {
    "axolotl_lora.yml": Case(2 * 2, ("cosine", 2e-4, {}), warmup=0.1, packed=True),
    "axolotl_qlora.yml": Case(2 * 4 * 2, ("constant_with_warmup", 2e-4, {}), None, 20, 10, ranks=2),
    "axolotl_dpo.yml": Case(1 * 2, ("cosine_with_min_lr", 5e-6, {"min_lr_rate": 0.1}), 3, warmup=2),
    "llama_factory_lora_sft.yaml": Case(1 * 8 * 4, ("cosine", 1e-4, {}), 3, warmup=0.1, ranks=4),
    "llama_factory_dpo.yaml": Case(1 * 4, ("cosine", 5e-6, {}), 3, warmup=0.1),
    "llama_factory_full.json": Case(1 * 2 * 8, ("cosine", 1e-5, {}), 3, warmup=0.1, ranks=8),
    "trl_sft.yaml": Case(2 * 4, ("linear", 2e-4, {}), packed=True),
    "trl_dpo.sh": Case(2 * 4, ("linear", 5e-7, {})),
    "sentence_transformers.json": Case(
        4 * 2,
        ("linear", 3e-5, {}),
        warmup=0.1,
        ranks=2,
        filled={
            "task.loss": "multiple_negatives",
            "task.texts": ["one", "two"],
            "model.name_or_path": "tiny/decoder",
            "data": PAIRS,
        },
    ),
    "setfit.json": Case(
        4,
        ("linear", 2e-5, {}),
        warmup=0.1,
        filled={"task.texts": ["one", "two"], "model.name_or_path": "tiny/decoder", "data": PAIRS},
    ),
}
TOOLS = {"sentence_transformers.json": "sentence-transformer"}


def write_rows(folder: Path) -> None:
    folder.mkdir()
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in ("sharegpt", "instructions", "messages")}
    rows |= {name: [] for name in ("pairs", "preferences", "scored")}
    for index in range(ROWS):
        asked, answer, worse = f"w{index % 30} w{index % 7}", f"w{index % 9} w3", f"w{index % 5} w8"
        chat = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        names = {"user": "human", "assistant": "gpt"}
        rows["sharegpt"].append({"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in chat]})
        rows["instructions"].append({"instruction": asked, "input": "w9" * (index % 2), "output": answer})
        rows["messages"].append({"messages": chat})
        answers = {"chosen": chat[1], "rejected": {"role": "assistant", "content": worse}}
        rows["pairs"].append({"conversation": chat[:1], **answers})
        rows["preferences"].append({"prompt": asked, "chosen": f" {answer}", "rejected": f" {worse}"})
        rows["scored"].append({"one": asked, "two": f"w{index % 11} {answer}", "score": float(index % 2)})
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    columns = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
    info = {
        "instructions": {"file_name": "instructions.jsonl"},
        "chats": {"file_name": "sharegpt.jsonl", "formatting": "sharegpt"},
        "preferences": {"file_name": "preferences.jsonl", "ranking": True, "columns": columns},
    }
    (folder / "dataset_info.json").write_text(json.dumps(info))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the model, the rows and the files."""
    folder = tmp_path_factory.mktemp("programs")
    write_rows(folder / "rows")
    tokenizer = save_decoder(folder / "tiny" / "decoder")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "tiny" / "decoder")
    for file in FILES.iterdir():
        shutil.copy(file, folder)
    (folder / "ds_z3_config.json").write_text('{"train_batch_size": "auto", "zero_optimization": {"stage": 3}}')
    return folder


def converted(name: str, case: Case) -> dict[str, Any]:
    """Return the recipe of a file, with the keys that the file does not have."""
    found = convert([Path(name)], tool_of(TOOLS.get(name)), case.ranks)
    assert set(found.todo) == set(case.filled)
    recipe = found.recipe
    for path, value in case.filled.items():
        *sections, key = path.split(".")
        inner = recipe
        for section in sections:
            inner = inner[section]
        inner[key] = value | inner.get(key, {}) if isinstance(value, dict) else value
    return recipe


def expected_rates(case: Case, steps: int) -> list[float]:
    """Return the rates of transformers' schedule of a tool."""
    name, peak, further = case.schedule
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    warmup = math.ceil(case.warmup * steps) if case.warmup < 1 else int(case.warmup)
    schedule = transformers.get_scheduler(name, optimizer, warmup, steps, further)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    for step in range(warmup):  # as the report says
        rates[step] = peak * (step + 1) / (warmup + 1)
    return rates


def plan_of(recipe: dict[str, Any], ranks: int) -> RunPlan:
    Path("r.json").write_text(json.dumps(recipe))
    return plan_run(load_recipe("r.json").recipe, ranks)


@pytest.mark.parametrize("name", CASES)
def test_batch_steps_and_rates_are_those_of_the_tool(place: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    case = CASES[name]
    monkeypatch.chdir(place)
    plan = plan_of(converted(name, case), case.ranks)
    assert plan.batch.global_batch_size == case.batch
    rows = 10 * case.batch
    steps = case.steps if case.epochs is None else math.ceil(rows / case.batch) * case.epochs
    assert plan.total_steps(rows) == steps
    optimizer, schedule = plan.recipe.optimizer, plan.recipe.schedule
    rates = [optimizer.learning_rate * schedule.factor(step, steps) for step in range(steps)]
    assert rates == pytest.approx(expected_rates(case, steps), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_recipe_is_checked_and_trains_for_two_steps(
    place: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    case = CASES[name]
    monkeypatch.chdir(place)
    recipe = converted(name, case)
    recipe["data"]["cache"] = "cache"
    recipe["logging"] = {"to": ["jsonl"]}
    recipe["parallel"] = {"strategy": "ddp"}
    Path("r.json").write_text(json.dumps(recipe))
    assert main(["check", "r.json", "--processes", str(case.ranks)]) == 0, capsys.readouterr().err
    plan = plan_run(load_recipe("r.json").recipe, 1)
    parts = assemble(plan, open_mesh(plan.layout, torch.device("cpu")), prepare_data(plan.recipe))
    before = {key: value.detach().clone() for key, value in parts.models[0].state_dict().items()}
    results = [parts.engine.train_step(batch) for batch, _ in zip(parts.train_loader, range(2), strict=False)]
    assert [result.is_finite for result in results] == [True, True]
    rates = [result.learning_rate for result in results]
    # Few packed rows make so few steps that a share of them is no warmup.
    assert rates[0] == pytest.approx(case.schedule[1]) or rates[0] < rates[1] <= case.schedule[1]
    after = parts.models[0].state_dict()
    changed = {key for key, value in before.items() if not torch.equal(value, after[key])}
    assert changed
    assert "model.adapter" not in recipe or all("lora" in key for key in changed)
