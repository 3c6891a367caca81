"""The choice of CUDA graphs, on a simulated GPU with a queue of launches."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.helpers.training import tiny_recipe
from trainer.engine.native import NativeEngine
from trainer.features.auto_graphs import choice
from trainer.features.auto_graphs.choice import Choice, HostShare
from trainer.features.auto_graphs.run_tool import AutoGraphs
from trainer.observe.meter import Meter
from trainer.recipe.graphs_choice import auto_obstacle, coarser_padding
from trainer.training.assembly import Assembly

KERNELS, OPTIMIZER = 200, 20  # of the passes and of the update


class Gpu:
    """A host and a GPU with a queue; times are in seconds."""

    def __init__(self, launch: float, run: float, queue: int, rows: float) -> None:
        self.launch, self.run, self.queue, self.rows = launch, run, queue, rows
        self.now = 0.0
        self.ends: deque[float] = deque([0.0])  # of the kernels in the queue

    def begin(self, number: int) -> float:
        """Launch kernels, and return the time at which the last one ends."""
        for _ in range(number):
            self.now += self.launch
            while len(self.ends) > 1 and self.ends[0] <= self.now:
                self.ends.popleft()
            if len(self.ends) >= self.queue:
                self.now = max(self.now, self.ends.popleft())
            self.ends.append(max(self.now, self.ends[-1]) + self.run)
        return self.ends[-1]

    @property
    def is_idle(self) -> bool:
        return self.ends[-1] <= self.now

    def event(self) -> Event:
        return Event(self)

    def steps(self, host: HostShare, number: int) -> None:
        """Train as the loop does: the host waits for the numbers of the step before, after the passes."""
        before = 0.0
        for _ in range(number):
            self.now += self.rows  # and other work of the loop between two steps
            with host.measured():
                passes = self.begin(KERNELS)
                self.now = max(self.now, before)
                before = passes
                self.begin(OPTIMIZER)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def record(self) -> None:
        self.at = max(self.gpu.now, self.gpu.ends[-1])

    def query(self) -> bool:
        return self.at <= self.gpu.now

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query(), "a time is read without a wait"
        return 1e3 * (end.at - self.at)


@pytest.mark.parametrize(
    ("launch", "run", "queue", "rows", "is_bound"),
    [
        (10e-6, 2e-6, 1024, 1e-4, True),
        (10e-6, 9.5e-6, 1024, 1e-4, True),
        (10e-6, 20e-6, 1024, 1e-4, False),
        (10e-6, 20e-6, 100, 1e-4, False),  # the host waits for room in the queue
        (10e-6, 20e-6, 1024, 10e-3, False),  # the GPU waits for rows
        (5e-6, 50e-6, 1024, 1e-4, False),
    ],
    ids=["late host", "barely late host", "busy GPU", "full queue", "slow loader", "very busy GPU"],
)
def test_the_host_is_late_only_if_the_gpu_runs_its_launches_at_once(
    launch: float, run: float, queue: int, rows: float, is_bound: bool
):
    gpu = Gpu(launch, run, queue, rows)
    host = HostShare(lambda: gpu.is_idle, gpu.event, lambda: gpu.now)
    gpu.steps(host, 10)
    assert host.read() is None, "the first steps compile"
    gpu.steps(host, 10)
    share = host.read()
    assert share is not None
    assert (share >= 0.9) == is_bound, share


class _Schedule:
    num_shapes, longest = 3, 60


class _Engine(NativeEngine):
    def __init__(self) -> None:
        self.schedule = _Schedule()
        self.to_graphs = self._captured

    def _captured(self, engine: NativeEngine, report: Any) -> Any:
        assert engine is self
        self.report = report
        return self.schedule


def _choice(monkeypatch: pytest.MonkeyPatch, has_room: bool = True, depend: bool = False, **keys: Any) -> Choice:
    monkeypatch.setattr(choice, "fits", lambda _: has_room)
    parts = SimpleNamespace(
        mesh=SimpleNamespace(device=torch.device("cuda")),
        recipe=tiny_recipe(**keys),
        engine=_Engine(),
        task=SimpleNamespace(rows_depend=depend),
    )
    host = cast(HostShare, SimpleNamespace(read=lambda: 0.97))
    return Choice(cast(Assembly, parts), host)


def test_all_ranks_capture_after_the_same_record_if_one_is_late(monkeypatch: pytest.MonkeyPatch):
    chosen = _choice(monkeypatch)
    engine = cast(_Engine, chosen._engine)
    late, busy, unknown = chosen.vote(), (0.2, 0.0, 0.0), (-1.0, 0.0, 0.0)
    assert late == (0.97, 0.0, 0.0)
    chosen.choose(10, [late, unknown], 10)
    chosen.choose(20, [busy, busy], 20)
    assert not chosen.news()
    chosen.choose(30, [busy, late], 30)
    assert chosen.news() == [
        "the GPU waits for the host, which takes 97% of a step: passes are captured as CUDA graphs from step 31 on"
    ]
    chosen.choose(40, [late, late], 40)
    assert not chosen.news(), "a note is given once"
    engine.schedule.num_shapes = 9
    for _ in range(2):
        chosen.choose(50, [late, late], 50)
    assert [note.partition("; ")[2] for note in chosen.news()] == ["`data.pad_to=8` makes at most 8 widths"]
    engine.report("out of memory")
    for _ in range(2):
        chosen.choose(60, [busy, chosen.vote()], 60)
    assert chosen.news() == ["new shapes of rank 1 run without CUDA graphs: out of memory"]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"activation_checkpointing": "full"}, '`activation_checkpointing` is "full": a recomputation'),
        ({"training": {"layout_invariant_dropout": False}}, "`training.layout_invariant_dropout` is false"),
        ({"model": {"unfreeze_at_step": 3}}, "`model.unfreeze_at_step` is 3: a graph writes all gradients"),
        ({"has_room": False}, "the memory that is left"),
        ({"depend": True}, "each loss of this task depends on all rows"),
    ],
)
def test_a_late_host_without_graphs_has_one_note(monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], reason: str):
    chosen = _choice(monkeypatch, **keys)
    for step in (10, 20):
        chosen.choose(step, [chosen.vote()], step)
    (note,) = chosen.news()
    assert f"97% of a step, but no CUDA graphs are captured ({reason}" in note


def test_nothing_is_chosen_after_steps_that_a_profiler_may_sample(monkeypatch: pytest.MonkeyPatch):
    chosen = _choice(monkeypatch)
    chosen.choose(choice.LAST_STEP, [(0.5, 0.0, 0.0)], choice.LAST_STEP)
    chosen.choose(300, [chosen.vote()], 300)
    assert not chosen.news()
    late = _choice(monkeypatch)  # its first log comes after the last step
    late.choose(300, [(1.0, 0.0, 0.0)], 300)
    late.choose(400, [(1.0, 0.0, 0.0)], 400)
    assert not late.news()


def test_auto_does_nothing_on_a_cpu():
    tool = AutoGraphs(cast(Any, None), cast(Any, None))
    parts = SimpleNamespace(mesh=SimpleNamespace(device=torch.device("cpu")), recipe=tiny_recipe())
    tool.begin(cast(Assembly, parts), Meter(), saves=True)
    assert (tool.seconds(), tool.news()) == ((), [])


def test_the_default_is_auto_and_excludes_nothing():
    recipe = tiny_recipe(activation_checkpointing="full")
    assert recipe.cuda_graphs == "auto"
    assert auto_obstacle(tiny_recipe()) is None


@pytest.mark.parametrize(
    ("max_length", "longest", "expected"), [(128, 60, 8), (128, 128, 16), (100, 90, 20), (7, 7, 1), (None, 5, None)]
)
def test_the_offered_padding_divides_the_longest_length(max_length: int | None, longest: int, expected: int | None):
    assert coarser_padding(max_length, longest, 8) == expected
