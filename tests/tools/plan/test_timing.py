"""The time of a step: rooflines, rings and timelines by hand, and the figures of devices."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.benchmarks.planned_gpu_times import MEASURED, PUBLISHED, Work, row
from tests.benchmarks.planned_times import LAYOUTS, PAGE, Row, page, published, rank_correlation, regret
from tests.helpers.training import TINY_DECODERS, TINY_TASKS
from tests.tools.plan.measured import recipe_of
from trainer.base.errors import UsageError
from trainer.cli import main
from trainer.observe.meter import peak_flops, peaks
from trainer.recipe.plan import Layout, PipelinePlan, plan_run
from trainer.recipe.schedules import SCHEDULES
from trainer.tools.plan import hardware, measuring, reference
from trainer.tools.plan.hardware import LIKELY, Cost, Machine, Speed, known_devices, parse_devices
from trainer.tools.plan.ledger import GRADIENTS, PARAMETERS, POINT_TO_POINT, Ledger
from trainer.tools.plan.pipeline_plan import plan_steps
from trainer.tools.plan.plan_text import text_of
from trainer.tools.plan.reference import Operation
from trainer.tools.plan.timing import (
    HOST,
    SHARDS,
    STAGES,
    SUMS,
    TENSOR,
    Link,
    collective_seconds,
    link_of,
    operation_seconds,
    step_time,
)
from trainer.tools.plan.work import (
    ATTENTION,
    FORWARD,
    INTEGER,
    MATMUL,
    NOTHING,
    OTHER,
    REDUCTION,
    SPECIAL,
    VIEW,
    Amount,
    Kind,
)  # fmt: skip
from trainer.tools.report.timeline import Action, as_text, order_of, simulate

HARDWARE = Path(hardware.__file__).parent / "hardware"
MEMORY = Cost(0.0, 1e11)
SPEED = Speed(
    {"fp32": Cost(0.0, 1e12)},
    memory=MEMORY,
    attention=MEMORY.scaled(8),
    special=MEMORY,
    reduction=MEMORY.scaled(2),
    integer=MEMORY,
    inside=Cost(1e-5, 1e10),
    between=Cost(1e-4, 1e9),
    host=Cost(0.0),
    operation=Cost(1e-6),
)


def _pipeline(schedule: str, ranks: int, microbatches: int) -> PipelinePlan:
    row = SCHEDULES[schedule]
    return PipelinePlan(row, ranks, row.stages_per_rank, microbatches)


def _cost(action: Action) -> float:
    return {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}[action.kind]


def test_the_roofline_of_a_matrix_product():
    with Ledger() as ledger, torch.no_grad():
        nn.Linear(64, 32, bias=False)(torch.empty(16, 64))
    (kind,) = [kind for kind in ledger.totals.work if kind.operation == MATMUL]
    amount = ledger.totals.work[kind]
    assert kind.phase == FORWARD
    products = 2 * 16 * 64 * 32
    assert amount == (1, products, 4 * (16 * 64 + 64 * 32 + 16 * 32), products)
    assert operation_seconds(kind, amount.flops, amount.num_bytes, SPEED) == pytest.approx(amount.num_bytes / 1e11)
    assert operation_seconds(kind, 1e10, amount.num_bytes, SPEED) == pytest.approx(1e10 / 1e12)


def test_norms_and_attention_move_bytes_at_their_own_rates():
    with Ledger() as ledger, torch.no_grad():
        nn.LayerNorm(64)(torch.empty(16, 64))
        nn.functional.scaled_dot_product_attention(*(torch.empty(1, 2, 16, 64) for _ in range(3)))
    seconds = {
        kind.operation: (operation_seconds(kind, amount.flops, amount.num_bytes, SPEED), amount)
        for kind, amount in ledger.totals.work.items()
    }
    norm, attention = seconds[REDUCTION], seconds[ATTENTION]
    assert norm[0] == pytest.approx(2 * norm[1].num_bytes / 1e11)
    assert attention[0] == pytest.approx(8 * attention[1].num_bytes / 1e11)


def test_tf32_multiplies_at_its_own_rate():
    keys = {"task": TINY_TASKS["causal_lm"].keys, "model": {"config": TINY_DECODERS["llama"], "tokenizer": "none"}}
    plan, fast = (plan_run(recipe_of({**keys, "tf32": tf32}), 1) for tf32 in (False, True))
    steps = plan_steps(plan, 16)
    machine = parse_devices("A100-80").machine
    assert machine
    figures = {**machine.figures, "memory_gb_per_second": 1e9, "operation_us": [1e-6] * 3}
    slow, quick = (step_time(one, steps, Machine("here", 1, "nvlink", 1.0, figures)) for one in (plan, fast))
    assert slow.likely / quick.likely == pytest.approx(156 / 19.5, rel=1e-2)  # the peaks of the data sheet
    assert quick.mfu == pytest.approx(slow.mfu, rel=1e-2)
    with pytest.raises(UsageError, match="`tf32` is true, but V100-32 has no TF32"):
        step_time(fast, steps, parse_devices("V100-32").machine)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_plan_of_cuda_graphs_writes_gradients_as_a_run_without_graphs():
    plans = [plan_run(recipe_of({"cuda_graphs": graphs}), 1) for graphs in (False, True)]
    (eager,), (graphed,) = (plan_steps(plan, 16) for plan in plans)
    weights = graphed.resident[PARAMETERS]
    assert GRADIENTS not in {**graphed.resident, **eager.resident}  # activations of the next step use their memory
    bytes_of = [sum(amount.num_bytes for amount in step.totals.work.values()) for step in (eager, graphed)]
    assert bytes_of[0] < bytes_of[1] < bytes_of[0] + weights / 10  # the rows of the batch are copied to the graph
    machine = parse_devices("H200").machine
    assert machine
    found = [step_time(plan, [step], machine).parts[HOST] for plan, step in zip(plans, (eager, graphed), strict=True)]
    assert found[1] < 0.3 * found[0]  # the host issues the update


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(work, marks=pytest.mark.nightly if number else pytest.mark.slow, id=f"{work.name} {work.devices}")
        for number, work in enumerate((*MEASURED, *PUBLISHED))
    ],
)
def test_the_page_has_the_planned_times_of_gpus(work: Work):
    assert row(work) in PAGE.read_text(encoding="utf-8")


def test_the_page_explains_each_figure_out_of_its_range():
    rows = [line.split("|")[1:-1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.count("|") == 8]
    outside, planned = [], [row for row in rows if "x" in row[1]]
    assert len(planned) == len(MEASURED) + len(PUBLISHED)
    for name, devices, _, _, ends, figure, _ in planned:
        least, most, found = (float(number.replace(",", "")) for number in (*ends.split(" to "), figure))
        outside += [] if least <= found <= most else [f"{name.strip()} {devices.strip()}"]
    large = [f"BERT-large, SQuAD, {work}" for work in ("fp16 1xV100-32", "fp16 1xA100-80", "TF32 1xA100-80")]
    explained = ["BERT-base 1xH200", *large, "Llama 8B, LoRA, bf16 1xH100", "mpnet, texts of pairs, fp16 4xV100-16"]
    assert outside == explained, "the list below the tables has the reasons"


def test_measured_operations_and_collectives_replace_the_roofline():
    points = ((1e8, 1e-3), (1e10, 1e-1))
    speed = replace(
        SPEED,
        kernels={"mm fp32": Cost(0.0, points=points), "add fp32": Cost(0.0, points=((1e6, 1e-4),))},
        collectives={"_allgather_base_": Cost(2e-3), "send": Cost(3e-3)},
    )
    product, addition = (Kind(FORWARD, *names, torch.float32, 0, 0) for names in ((MATMUL, "mm"), (OTHER, "add")))
    assert operation_seconds(product, 1e9, 1e3, speed) == pytest.approx(1e-2)
    assert operation_seconds(product, 2e10, 1e3, speed) == pytest.approx(2e-1)  # the roofline's growth
    assert operation_seconds(addition, 0, 5e5, speed) == pytest.approx(5e-5)
    assert operation_seconds(addition._replace(name="mul"), 0, 5e5, speed) == pytest.approx(5e5 / 1e11)
    assert operation_seconds(addition._replace(dtype=torch.int64), 0, 5e5, speed) == pytest.approx(5e5 / 1e11)
    pair = Link(ranks=2, together=2, local_ranks=2)
    assert collective_seconds("_allgather_base_", 8, pair, speed) == pytest.approx(2e-3)
    assert collective_seconds("recv_", 8, pair, speed) == pytest.approx(3e-3)
    assert collective_seconds("_reduce_scatter_base_", 1e6, pair, speed) == pytest.approx(1e-5 + 0.5e6 / 1e10)


def test_operations_of_about_one_size_have_one_point():
    product, view = Kind("", MATMUL, "mm", torch.bfloat16, 0, 0), Kind("", VIEW, "", None, 0, 0)
    found = [Operation(product, Amount(1, size, 99), seconds) for size, seconds in ((9, 1.0), (15, 4.0), (16, 8.0))]
    found += [Operation(view, NOTHING, 9.0), Operation(product._replace(mixed=torch.uint8), Amount(1, 0, 9), 5.0)]
    assert measuring._kernels(found) == {"mm bf16": [(12, 2.5), (16, 8.0)], "mm bf16 uint8": [(9, 5.0)]}


def test_a_product_with_a_mask_is_an_operation_of_its_own():
    """A CPU converts each element of the mask, so it takes longer than a product of one type."""
    numbers, mask = torch.ones(4), torch.ones(4, dtype=torch.uint8)
    with Ledger() as ledger:
        _ = numbers * mask, numbers * numbers
    assert {kind.mixed for kind in ledger.totals.work} == {torch.uint8, None}


def test_the_host_takes_longer_behind_large_tensors():
    """Steps of 10 and 40 operations, of which the host takes 5 us for each and 2 us for each MB."""
    steps = []
    for number, megabytes in ((10, 1), (10, 8), (40, 1), (40, 8)):
        one = Operation(Kind("", OTHER, "add", None, 0, 0), Amount(1, 0, megabytes * 10**6), 1e-5)
        steps.append((number * (1e-5 + 5e-6 + 2e-6 * megabytes), number * [one]))
    for_each, rate = measuring._host(steps)
    assert for_each == pytest.approx(5e-6)
    assert rate == pytest.approx(1e6 / 2e-6)
    figures = json.loads((HARDWARE / "CPU.json").read_text()) | {"measured": {"1": {"host": [for_each, rate]}}}
    assert Machine("here", 1, "memory", 1.0, figures).speed(LIKELY).operation.seconds(8e6) == pytest.approx(21e-6)


@pytest.mark.slow
def test_a_measured_step_computes_as_its_plan_does():
    training = reference.of_operations()[0]
    seconds, found = reference.operations_of(training)
    (step,) = plan_steps(training.plan(1), training.length, cuda=False)
    computing = {MATMUL, ATTENTION, SPECIAL, INTEGER}  # fake tensors have no values, so other operations read none
    planned = Counter[str]()
    for kind, amount in step.totals.work.items():
        planned[kind.name] += amount.number if kind.operation in computing else 0
    measured = Counter(one.kind.name for one in found if one.kind.operation in computing)
    del measured["_local_scalar_dense"]  # the host's read of its own masks, which have no values in a plan
    del measured["copy_"]  # of dropout keys to where they were, from the third step on; a plan shows the second
    assert +planned == measured
    assert min(seconds, *(one.seconds for one in found)) > 0


@pytest.mark.slow
def test_the_rest_of_a_measured_step_is_lost_beside_its_collectives(monkeypatch: pytest.MonkeyPatch):
    layouts = dict(training for training in reversed(reference.of_strategies()) if training[0] != SHARDS)
    layouts = dict(reversed(layouts.items()))
    plans = {kind: training.plan(2) for kind, training in layouts.items()}
    steps = {plan.layout: plan_steps(plan, 32, cuda=False) for plan in plans.values()}
    monkeypatch.setattr(reference, "of_strategies", lambda: list(layouts.items()))
    monkeypatch.setattr(measuring, "plan_steps", lambda plan, *_, **__: steps[plan.layout])
    lost = {SUMS: 1e-4, TENSOR: 3e-4, STAGES: 2e-4}
    figures = {**json.loads((HARDWARE / "CPU.json").read_text()), "measured": {"2": {"waiting": lost}}}
    figures["shares"]["link"] = [1, 1, 1]
    machine = Machine("here", 2, "memory", 1.0, figures)

    def seconds() -> dict[str, float]:
        return {kind: step_time(plan, steps[plan.layout], machine).likely for kind, plan in plans.items()}

    measured = seconds()
    figures["measured"]["2"]["waiting"] = {}
    calls = Counter[bool]()
    (step,) = steps[plans[TENSOR].layout]
    for collective, traffic in step.totals.traffic.items():
        calls[step.axes.get(collective.group) == "tp"] += traffic.calls
    assert measured[TENSOR] - seconds()[TENSOR] == pytest.approx(3e-4 * calls[True] + 1e-4 * calls[False])
    assert measuring._waiting(machine, list(measured.values())) == pytest.approx(lost)


@pytest.mark.slow
def test_a_shift_of_a_ring_waits_once():
    """A ring of two sends keys and values once in the forward pass and once in the backward, then their gradients."""
    keys = {
        "task": TINY_TASKS["causal_lm"].keys,
        "model": {"config": {**TINY_DECODERS["llama"], "num_key_value_heads": 1}, "tokenizer": "none"},
        "parallel": {"strategy": "ddp", "context": 2},
    }
    plan = plan_run(recipe_of(keys), 2)
    (step,) = plan_steps(plan, 16, cuda=False)
    traffic = {key: one for key, one in step.totals.traffic.items() if step.axes.get(key.group) == "cp"}
    shifts = 3 * TINY_DECODERS["llama"]["num_hidden_layers"] * plan.batch.num_microbatches
    assert sum(one.calls for key, one in traffic.items() if key.operation == "send") == 2 * shifts
    others = sum(one.calls for key, one in traffic.items() if key.operation not in POINT_TO_POINT)
    figures = {**json.loads((HARDWARE / "CPU.json").read_text()), "measured": {"2": {"waiting": {TENSOR: 1e-3}}}}
    figures["shares"]["link"] = [1, 1, 1]
    machine = Machine("here", 2, "memory", 1.0, figures)
    waiting = step_time(plan, [step], machine).likely
    figures["measured"]["2"]["waiting"] = {}
    assert waiting - step_time(plan, [step], machine).likely == pytest.approx(1e-3 * (shifts + others))


def test_the_published_times():
    rows = published()
    assert [row.name for row in rows] == [name for name, *_ in LAYOUTS]
    assert "\n".join(page(rows)) in PAGE.read_text(encoding="utf-8")


def test_ranks_and_regrets():
    rows = [Row(name, 0.0, likely, 9.0, found) for name, likely, found in (("a", 1, 2), ("b", 2, 1), ("c", 3, 3))]
    assert rank_correlation(rows) == pytest.approx(0.5)  # 1 - 6 (1 + 1) / (3 (9 - 1))
    assert regret(rows) == 1.0


def test_rings_and_trees():
    inside = Link(ranks=4, together=4, local_ranks=8)
    assert collective_seconds("allreduce_", 1e9, inside, SPEED) == pytest.approx(2 * 3 * (1e-5 + 0.25e9 / 1e10))
    assert collective_seconds("_allgather_base_", 1e9, inside, SPEED) == pytest.approx(3 * (1e-5 + 0.25e9 / 1e10))
    assert collective_seconds("allreduce_", 4, inside, SPEED) == pytest.approx(2 * 2 * 1e-5, rel=1e-3)  # a tree
    # Two ranks on two machines of eight: eight groups share the network.
    across = Link(ranks=2, together=1, local_ranks=8)
    assert collective_seconds("send", 1e6, across, SPEED) == pytest.approx(1e-4 + 8 * 1e6 / 1e9)


@pytest.mark.parametrize(
    ("axis", "expected"),
    [("tp", Link(2, 2, 8)), ("dp_shard", Link(2, 2, 8)), ("dp_replicate", Link(2, 1, 8)), ("pp", Link(2, 1, 8)),
     ("dp", Link(4, 2, 8)), ("cp", Link(2, 2, 8)), ("cp_tp", Link(4, 4, 8)), ("all", Link(32, 8, 8))],
)  # fmt: skip
def test_the_place_of_an_axis(axis: str, expected: Link):
    assert link_of(Layout(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2), axis, 8) == expected


@pytest.mark.parametrize(("schedule", "ranks", "microbatches"), [("gpipe", 4, 8), ("1f1b", 4, 8), ("1f1b", 3, 5)])
def test_the_bubble_of_one_stage_a_rank(schedule: str, ranks: int, microbatches: int):
    timeline = simulate(order_of(_pipeline(schedule, ranks, microbatches)), _cost, 0.0)
    assert timeline.seconds == 3 * (microbatches + ranks - 1)
    for rank in range(ranks):
        assert timeline.idle_share(rank) == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
        assert timeline.most_alive(rank) == (microbatches if schedule == "gpipe" else min(microbatches, ranks - rank))


def test_several_stages_have_a_smaller_bubble():
    idle = {}
    for schedule in ("interleaved_1f1b", "zero_bubble"):
        pipeline = _pipeline(schedule, 4, 8)
        order = order_of(pipeline)
        assert sum(map(len, order)) == (2 if schedule == "interleaved_1f1b" else 3) * 8 * 8
        idle[schedule] = simulate(order, _cost, 0.0).idle_share(0)
    assert idle["interleaved_1f1b"] == pytest.approx(3 / (2 * 8 + 3))
    assert idle["zero_bubble"] < idle["interleaved_1f1b"]


def test_a_timeline_is_drawn():
    timeline = simulate(order_of(_pipeline("1f1b", 2, 2)), _cost, 0.5)
    assert timeline.seconds == 10  # rank 1: F0 at 1.5, B0 until 4.5, F1, B1 until 7.5; then rank 0: B1 from 8
    assert [line.split()[1] for line in as_text(timeline, 10)] == ["0", "1"]
    assert text_of("timeline", timeline=timeline).count("<title>") == 8


def test_measured_costs_are_interpolated():
    cost = Cost(0.0, points=((10.0, 1.0), (1000.0, 100.0)))
    assert [cost.seconds(size) for size in (1, 100, 2000)] == pytest.approx([1.0, 10.0, 200.0])
    assert cost.scaled(2).seconds(100) == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("device", "name"),
    [("A100-80", "NVIDIA A100-SXM4-80GB"), ("H100", "NVIDIA H100 80GB HBM3"), ("V100-32", "Tesla V100-SXM2-32GB"),
     ("RTX-4090", "NVIDIA GeForce RTX 4090"), ("RTX-6000-Ada", "NVIDIA RTX 6000 Ada Generation"),
     ("MI300X", "AMD Instinct MI300X"), ("GH200", "NVIDIA GH200 480GB")],
)  # fmt: skip
def test_peaks_equal_the_meter(device: str, name: str):
    machine = parse_devices(device).machine
    assert machine
    for precision in ("fp32", "fp16", "bf16"):
        peak = peak_flops(name, precision)
        assert machine.figures["teraflops"].get(precision) == (peak and pytest.approx(peak / 1e12))


def test_every_device_has_its_peaks_in_the_table_of_runs():
    assert {*known_devices()} - {"CPU"} <= peaks().keys()
    for name in known_devices():
        machine = parse_devices(name).machine
        assert machine is not None
        assert machine.figures["sources"]["teraflops"]


def test_links_and_networks():
    machine = parse_devices("8xA100-80", "pcie", "2x100Gb").machine
    assert machine
    speed = machine.speed(LIKELY)
    share = machine.figures["shares"]["link"][1]
    assert speed.inside.rate == pytest.approx(32e9 * share)
    assert speed.between.rate == pytest.approx(25e9 * share)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("8xT4", "nvlink"), "use pcie"),
        (("8xA100-80", "nvlnk"), "use nvlink"),
        (("8xA100-80", None, "fast"), "write the gigabits"),
        (("8x80GiB", "nvlink"), "gives no device"),
        (("2xnone.json",), "--measure"),
    ],
)
def test_unknown_links_are_refused(arguments: tuple[str, ...], message: str):
    with pytest.raises(UsageError, match=message):
        parse_devices(*arguments)


@pytest.mark.slow
def test_hours_and_price_of_a_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file, picture = tmp_path / "recipe.json", tmp_path / "timeline.svg"
    (tmp_path / "rows.csv").write_text("text,label\ngood,1\n")
    data = {"source": "files", "train": str(tmp_path / "rows.csv"), "max_length": 8}
    keys = {"parallel": {"pipeline": {"stages": 2}}, "data": data}
    file.write_text(recipe_of(keys).model_dump_json(exclude_defaults=True))
    arguments = ["plan", str(file), "--gpus", "1xA100-80", "--nodes", "2", "--price-per-gpu-hour", "2"]
    assert main([*arguments, "--json", "--timeline", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    seconds, training = found["time"]["seconds"], found["training"]
    assert seconds["least"] < seconds["likely"] < seconds["most"]
    assert sum(found["time"]["parts"].values()) == pytest.approx(seconds["likely"])
    assert training["steps"] == 4  # training.max_steps
    assert training["tokens"] == 4 * recipe_of(keys).training.global_batch_size * 8
    assert training["gpu_hours"] == pytest.approx(2 * 4 * seconds["likely"] / 3600)
    assert training["price"] == pytest.approx(2 * training["gpu_hours"])
    first = found["ranks"][0]
    assert first["bytes_by_link"]["between"] == sum(row["bytes"] for row in first["communication"])
    assert [rank["most_microbatches_alive"] for rank in found["time"]["pipeline"]] == [2, 1]
    assert picture.read_text().startswith("<svg")
    assert main(["plan", str(file), "--gpus", "2x80GiB", "--price-per-gpu-hour", "2"]) == 2
    assert "name the GPUs" in capsys.readouterr().err
    assert main(["plan", str(file), "--gpus", "2xT4", "parallel.pipeline.stages=1", "--timeline", "-"]) == 2
    assert "parallel.pipeline.stages" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [1, 2])
def test_measured_speeds_are_of_the_same_number_of_ranks(tmp_path: Path, ranks: int):
    file = tmp_path / "here.json"
    points = {str(number): {"matmul": {"fp32": [[1e6, number]]}, "host": [1e-5], "overlap": 0.0} for number in (1, 2)}
    figures = {**json.loads((HARDWARE / "CPU.json").read_text()), "measured": points}
    file.write_text(json.dumps(figures))
    machine = parse_devices(f"{ranks}x{file}").machine
    assert machine
    share = figures["shares"]["matmul"][1]
    assert machine.speed(LIKELY).matmul["fp32"].seconds(2e6) == pytest.approx(2 * ranks / share)
    del points["2"]["host"]
    file.write_text(json.dumps(figures))
    with pytest.raises(UsageError, match="which an earlier version measured; measure again"):
        parse_devices(f"{ranks}x{file}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_gb": "much"}, "`memory_gb` is 'much'"),
        ({"teraflops": {"bf16": 3}}, "`teraflops` is"),
        ({"links_gb_per_second": {}}, "`links_gb_per_second` is"),
        ({"shares": {"matmul": [1, 2]}}, "`shares` is"),
        ({"network": "fast"}, "`network` is"),
    ],
)
def test_a_broken_hardware_file_is_refused(tmp_path: Path, change: dict[str, Any], message: str):
    file = tmp_path / "here.json"
    file.write_text(json.dumps({**json.loads((HARDWARE / "CPU.json").read_text()), **change}))
    with pytest.raises(UsageError, match=message):
        parse_devices(f"2x{file}")
