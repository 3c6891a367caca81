"""Parity of captured passes: a graph reads new rows, new dropout keys and new scalars, and adds to gradients in place.

A tape of operations stands for CUDA graphs here (`tests/helpers/taped.py`); `tests/gpu` has the real ones.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.ranks import RankPools
from tests.helpers.taped import TapeCapture, Watching
from tests.helpers.training import TINY_TASKS, Curve, tiny_recipe, tiny_training
from tests.parity.cases import TOLERANCES, assert_same_curve
from trainer.base.errors import UsageError
from trainer.engine import graphs
from trainer.engine.graphs import CudaCapture
from trainer.models import compiled
from trainer.parallel import gradients
from trainer.parallel.microbatch import Microbatch
from trainer.recipe.schema import Recipe

STEPS = 6
DROPPED = {"model": {"dropout": 0.1}, "data": {"pad_to": 8}, "training": {"micro_batch_size": 4}}


class Backend:
    """A compiler that counts the calls of its code."""

    def __init__(self) -> None:
        self.num_graphs = self.num_calls = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        self.num_graphs += 1

        def call(*arguments: object) -> object:
            self.num_calls += 1
            return graph(*arguments)

        return call


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    backend = Backend()
    monkeypatch.setattr(compiled, "BACKEND", backend)
    yield backend
    torch._dynamo.reset()


def train(
    recipe: Recipe,
    graphed: bool,
    steps: int = STEPS,
    tapes: list[TapeCapture] | None = None,
    eager: int = 0,
    reports: list[str] | None = None,
) -> tuple[Curve, int, int]:
    """Train some steps, and return their curve and the numbers of captures and replays; add the tape to `tapes`.

    Args:
        eager: the steps before graphs are chosen, which then report failures to `reports`.
    """
    tapes = [] if tapes is None else tapes
    with pytest.MonkeyPatch.context() as patch:

        def capture(device: torch.device) -> TapeCapture:
            tapes.append(
                TapeCapture(
                    lambda: [*(p.grad for p in parameters), schedule._numbers.total],
                    lambda: list(schedule._gradients.values()),
                )
            )
            return tapes[0]

        def watched(schedule: graphs.GraphedSchedule, *arguments: Any) -> None:
            with Watching():
                run_pass(schedule, *arguments)

        run_pass = graphs.GraphedSchedule._pass
        if recipe.compile:
            patch.setattr(graphs.GraphedSchedule, "_pass", watched)
        patch.setattr(graphs, "CudaCapture", capture)
        # As a copy that was begun ahead: it does not know the padding.
        patch.setattr(Microbatch, "to", lambda self, device: replace(self.map(torch.clone), is_padded=None))
        # A mesh may name its device otherwise than its tensors do, as "cuda" and "cuda:0".
        graphs_now = graphed and not eager
        with tiny_training(recipe.model_copy(update={"cuda_graphs": graphs_now}), device="cpu:0") as training:
            engine = training.engine
            parameters = list(engine.parameters.values())
            batches = list(islice(training.loader, steps))
            results = [engine.train_step(batch) for batch in batches[:eager]]
            if eager:
                call = engine._forward._call
                wrapped = [weakref.ref(call)] if isinstance(call, DistributedDataParallel) else []
                del call
                engine.to_graphs(engine, (reports if reports is not None else []).append)
                assert not any(one() for one in wrapped), "DDP is gone, and so are its hooks"
            schedule = engine._schedule
            results += [engine.train_step(batch) for batch in batches[eager:]]
            curve = Curve([result.loss for result in results], [result.grad_norm for result in results])
    return curve, sum(tape.num_captures for tape in tapes), sum(tape.num_replays for tape in tapes)


@pytest.mark.parametrize(
    "precision", ["fp32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bf16", "fp16"))]
)
def test_captured_passes_equal_eager_passes_bit_for_bit(precision: str):
    recipe = tiny_recipe(**DROPPED, precision=precision)
    expected, *none = train(recipe, graphed=False)
    found, captures, replays = train(recipe, graphed=True)
    assert none == [0, 0]
    assert replays > captures > 1, "several shapes, each captured once"
    assert found.losses == expected.losses
    assert found.grad_norms == expected.grad_norms


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.nightly)])
def test_compiled_and_captured_passes_equal_eager_passes(precision: str, backend: Backend):
    recipe = tiny_recipe(**DROPPED, precision=precision)
    eager, *_ = train(recipe, graphed=False)
    found = {}
    for graphed in (False, True):
        found[graphed], captures, replays = train(recipe.model_copy(update={"compile": True}), graphed)
        assert backend.num_calls
        assert_same_curve(found[graphed], eager, TOLERANCES[precision])
    assert replays > captures > 1
    # The graphs hold the operations of the compiled layers, with the keys of each step.
    assert found[True].losses == found[False].losses
    assert found[True].grad_norms == found[False].grad_norms


def test_a_captured_shape_has_run_compiled(backend: Backend):
    """Two passes of it run before the capture, and the first of all is uncompiled."""
    recipe = tiny_recipe(data={"pad_to": 32}, compile=True)
    _, captures, replays = train(recipe, True, 4)
    assert (captures, replays) == (1, 2)
    # The code of each of the two layers runs in the second step, and in the capture of the third one.
    assert (backend.num_graphs, backend.num_calls) == (1, 2 * 2)


def test_a_compilation_in_a_captured_pass_is_refused_by_name(backend: Backend, monkeypatch: pytest.MonkeyPatch):
    recipe = tiny_recipe(data={"pad_to": 32}, training={"micro_batch_size": 4}, compile=True)
    capture = TapeCapture.__call__

    def forgetful(tape: TapeCapture, function: Callable[[], None]) -> Callable[[], object]:
        torch._dynamo.reset_code_caches()
        return capture(tape, function)

    monkeypatch.setattr(TapeCapture, "__call__", forgetful)
    with pytest.raises(
        UsageError, match=r"`cuda_graphs` is true and `compile` is true, but a layer would be compiled again"
    ):
        train(recipe, graphed=True)


def test_the_first_graph_of_a_step_adds_to_no_gradient():
    tapes: list[TapeCapture] = []
    train(tiny_recipe(model={"dropout": 0.1}, data={"pad_to": 32}, training={"micro_batch_size": 4}), True, 2, tapes)
    first, further = tapes[0].added
    assert first == 0 < further


def test_two_data_ranks_sum_the_gradients_of_their_graphs(ranks: RankPools):
    recipe = tiny_recipe(**DROPPED)
    expected, *_ = train(recipe, graphed=False)
    for found, _, replays in ranks(2).run(train, recipe, True):
        assert replays
        assert_same_curve(found, expected, TOLERANCES["fp32"])


def train_in_parts(parts: int, recipe: Recipe) -> tuple[Curve, list[str | int]]:
    """Train with passes cut into some graphs, and return the curve and the events of all replays."""
    tapes: list[TapeCapture] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "_MOST_PARTS", parts)
        patch.setattr(gradients, "_BUCKET_BYTES", 2**10)
        curve, *_ = train(recipe, True, STEPS, tapes)
    return curve, tapes[0].events


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({"training": {"micro_batch_size": 4}}, 1),
        ({"training": {"micro_batch_size": 2, "max_grad_norm": 0.01}, "precision": "bf16"}, 2),
        pytest.param({"training": {"micro_batch_size": 2}, "precision": "fp16"}, 2, marks=pytest.mark.slow),
    ],
    ids=["one microbatch", "accumulated, clipped, bf16", "accumulated, fp16"],
)
def test_sums_begin_between_the_graphs_of_the_last_pass(ranks: RankPools, changes: dict[str, Any], passes: int):
    recipe = tiny_recipe(model={"dropout": 0.1}, data={"pad_to": 32}, **changes)
    recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update={"global_batch_size": 8})})
    whole, parted = (ranks(2).run(train_in_parts, parts, recipe) for parts in (1, 4))
    for (expected, of_whole), (found, events) in zip(whole, parted, strict=True):
        assert found == expected, "bit for bit"
        operations = [event for event in of_whole if isinstance(event, int)]
        assert "sums" not in of_whole
        # The last step: all graphs of its first passes, and the sums after each graph of the last pass.
        *_, last = (words.split() for words in " ".join(map(str, events)).split("join") if words.strip())
        sizes, parts = [int(word) for word in last if word != "sums"], last.count("sums")
        assert sum(sizes) == sum(operations[-passes:])
        assert parts >= 3
        assert all(sizes)
        assert [word == "sums" for word in last] == [False] * parts * (passes - 1) + [False, True] * parts


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(name, marks=() if tiny.graphs_refusal or name == "masked_lm" else pytest.mark.nightly)
        for name, tiny in TINY_TASKS.items()
    ],
)
def test_each_task_is_captured_or_refused(task: str):
    if refusal := TINY_TASKS[task].graphs_refusal:
        with pytest.raises(UsageError, match=re.escape(f"`cuda_graphs` is true, but {refusal}")):
            train(_recipe_of(task), graphed=True, steps=2)
    else:
        assert_is_captured(task)


def _recipe_of(task: str) -> Recipe:
    return tiny_recipe(task=TINY_TASKS[task].keys, training={"micro_batch_size": 4}, data={"pad_to": 32})


def assert_is_captured(task: str) -> None:
    """Compare captured passes of a task with eager ones."""
    recipe = _recipe_of(task)
    expected, *_ = train(recipe, graphed=False, steps=2)
    found, captures, replays = train(recipe, graphed=True, steps=2)
    # The microbatches of the first step run eagerly; then there are one graph that writes gradients and one that adds.
    assert (captures, replays) == (2, 3)
    # A CPU may add the numbers of a tensor at another place in memory in another order.
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-6)


def test_a_read_of_the_device_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    recipe = tiny_recipe(data={"pad_to": 32})
    monkeypatch.setattr(graphs.GraphedSchedule, "_pass", lambda self, rows, numbers: numbers.total.item())
    with pytest.raises(UsageError, match=r"cannot be captured \(operation not permitted when stream is capturing"):
        train(recipe, graphed=True)


def test_too_many_shapes_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(graphs, "MOST_SHAPES", 1)
    with pytest.raises(UsageError, match="more than 1 shapes, and each has a graph"):
        train(tiny_recipe(**DROPPED), graphed=True)


def test_a_cpu_is_refused():
    with pytest.raises(UsageError, match="needs an NVIDIA GPU, but the device is cpu; set it to false"):
        CudaCapture(torch.device("cpu"))


@pytest.mark.slow
def test_ranks_that_capture_at_different_steps_send_the_same_messages(ranks: RankPools):
    # Microbatches of many widths, and of one row or two: a rank replays a pass that another one runs eagerly.
    recipe = tiny_recipe(data={"pad_to": 8}, training={"global_batch_size": 9, "micro_batch_size": 2})
    whole, parted = (ranks(3).run(train_in_parts, parts, recipe) for parts in (1, 4))
    assert [curve for curve, _ in parted] == [curve for curve, _ in whole]
    assert len({len(events) for _, events in parted}) > 1


def train_then_capture(recipe: Recipe, eager: int, fails: bool = False) -> tuple[Curve, int, list[str]]:
    """Train with graphs from a later step on, and return the curve, the replays and the reports."""
    reports: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        if fails:
            patch.setattr(TapeCapture, "__call__", _fail)
        curve, _, replays = train(recipe, True, STEPS, eager=eager, reports=reports)
    return curve, replays, reports


def _fail(self: TapeCapture, function: Callable[[], None]) -> None:
    function()  # which sets gradients that nothing will write
    self._kept()[-1].zero_()
    raise RuntimeError("CUDA out of memory\nmore")


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_run_that_captures_later_has_the_losses_of_one_without_graphs(ranks: RankPools, precision: str):
    recipe = tiny_recipe(
        model={"dropout": 0.1}, data={"pad_to": 32}, training={"micro_batch_size": 3}, precision=precision
    )
    expected = ranks(2).run(train, recipe, False)
    for (plain, *_), (found, replays, reports) in zip(
        expected, ranks(2).run(train_then_capture, recipe, 2), strict=True
    ):
        assert found == plain, "bit for bit"
        assert not reports
        # Two microbatches a step. The first step after the choice is eager, and so is the short one at the epoch's end.
        assert replays == 4


def test_a_failed_capture_is_reported_and_the_pass_runs_eagerly():
    recipe = tiny_recipe(data={"pad_to": 32}, training={"micro_batch_size": 12})
    expected, *_ = train(recipe, graphed=False)
    found, replays, reports = train_then_capture(recipe, 2, fails=True)
    assert found == expected
    assert replays == 0
    assert reports == [
        '`cuda_graphs` is "auto", but a pass of this model cannot be captured (CUDA out of memory); set it to false'
    ]


class _FakeGraph:
    """A CUDA graph that notes its calls."""

    log: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self.name = f"graph {sum(line.startswith('begin') for line in self.log) + 1}"

    def capture_begin(self, *pool: str, capture_error_mode: str, **options: Any) -> None:
        self._pool = [*pool, *([options["pool"]] if options.get("pool") else [])]
        self.log.append(f"begin {self.name}{' in ' * bool(self._pool)}{''.join(self._pool)}")

    def capture_end(self) -> None:
        self.log.append(f"end {self.name}")

    def pool(self) -> str:
        return "the pool"

    def replay(self) -> None:
        self.log.append(f"replay {self.name}")


def test_a_cut_ends_a_graph_and_begins_the_next_in_its_pool(monkeypatch: pytest.MonkeyPatch):
    log: list[str] = []
    monkeypatch.setattr(_FakeGraph, "log", log)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _FakeGraph)
    for name in ("synchronize", "empty_cache", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: "a stream")
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    capture = CudaCapture(torch.device("cuda"))
    weight = torch.ones(2, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda _: capture.cut(lambda: log.append("sums")))

    def step() -> None:
        log.append("pass")
        (weight * 2).sum().backward()

    replay = capture(step)
    assert log == ["begin graph 1", "pass", "end graph 1", "begin graph 2 in the pool", "end graph 2"]
    log.clear()
    replay()
    assert log == ["replay graph 1", "sums", "replay graph 2"]
    log.clear()
    capture(lambda: None)()
    assert log == ["begin graph 1 in the pool", "end graph 1", "replay graph 1"]
