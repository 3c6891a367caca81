"""Copies of microbatches, one ahead, on a stream of their own: their order, on fakes of CUDA's streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.training import tiny_recipe, tiny_training
from trainer.parallel import microbatch as module
from trainer.parallel.microbatch import Microbatch, RankBatch, copied_ahead
from trainer.recipe.plan import plan_run
from trainer.training.assembly import train_batches

GPU = SimpleNamespace(type="cuda")
KINDS = ("ids", "labels", "rows")


class Streams:
    """Fakes of torch.cuda's streams, which write a log."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = "compute"

    def Stream(self, device: Any) -> FakeStream:  # noqa: N802
        assert device is GPU
        return FakeStream(self, "copy")

    def current_stream(self, device: Any) -> FakeStream:
        assert device is GPU
        return FakeStream(self, self.now)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.now = self.now, stream.name
        yield
        self.now = before


class FakeStream:
    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name, self.device = streams, name, GPU

    def record_event(self) -> str:
        self.streams.log.append(f"record on {self.name}")
        return f"event {len(self.streams.log)}"

    def wait_event(self, event: str) -> None:
        self.streams.log.append(f"{self.name} waits for {event}")


class FakeTensor:
    def __init__(self, streams: Streams, name: str, device: Any = None) -> None:
        self.streams, self.name, self.device = streams, name, device

    def to(self, device: Any, non_blocking: bool) -> FakeTensor:
        assert non_blocking, "the host waits for the copy"
        self.streams.log.append(f"copy {self.name} on {self.streams.now}")
        return FakeTensor(self.streams, self.name, device)

    def record_stream(self, stream: FakeStream) -> None:
        self.streams.log.append(f"keep {self.name} for {stream.name}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    monkeypatch.setattr(module.torch, "cuda", streams)
    return streams


def batch(streams: Streams, names: str) -> RankBatch:
    """A batch with a microbatch for each letter of `names`."""
    microbatches = []
    for name in names:
        inputs: Any = {"ids": FakeTensor(streams, f"ids {name}")}
        labels, rows = (FakeTensor(streams, f"{kind} {name}") for kind in ("labels", "rows"))
        microbatches.append(Microbatch(inputs, labels, rows))  # type: ignore[arg-type]
    return RankBatch(microbatches, 1, 1)


def test_a_copy_begins_before_the_passes_of_the_microbatch_before_it(streams: Streams):
    def load() -> Iterator[RankBatch]:
        for names in ("ab", "c"):
            streams.log.append(f"load {names}")
            yield batch(streams, names)

    for loaded in copied_ahead(load(), GPU):  # type: ignore[arg-type]
        for microbatch in loaded.microbatches:
            ready = microbatch.to(GPU)  # type: ignore[arg-type]
            assert ready.ahead is None
            assert ready.labels.device is ready.rows.device is ready.inputs["ids"].device is GPU
            streams.log.append("pass")

    def copied(name: str) -> list[str]:
        return [*(f"copy {kind} {name} on copy" for kind in KINDS), "record on copy"]

    def taken(name: str, event: int) -> list[str]:
        return [f"compute waits for event {event}", *(f"keep {kind} {name} for compute" for kind in KINDS), "pass"]

    assert streams.log == [
        "load ab",
        *copied("a"),
        "load c",
        *copied("b"),
        *taken("a", 5),
        *copied("c"),
        *taken("b", 10),
        *taken("c", 19),
    ]


def test_a_copy_is_taken_once_and_then_freed(streams: Streams):
    """The rows of a bad step are evaluated again, and the loop keeps the last good batch on the host."""
    (loaded,) = copied_ahead([batch(streams, "a")], GPU)  # type: ignore[arg-type]
    (one,) = loaded.microbatches
    first, again = one.to(GPU), one.to(GPU)  # type: ignore[arg-type]
    assert first.rows is not again.rows
    assert streams.log[-3:] == [f"copy {kind} a on compute" for kind in KINDS]
    assert one.ahead is not None
    assert one.ahead.take() is None


@pytest.mark.parametrize(
    ("parallel", "begins"), [({}, True), ({"strategy": "fsdp"}, True), ({"pipeline": {"stages": 2}}, False)]
)
def test_batches_are_copied_where_the_engine_takes_copies(parallel: dict[str, Any], begins: bool):
    with tiny_training(tiny_recipe()) as training:
        parts = training.parts
        assert parts.train_loader.ahead_to is None, "there is no GPU"
        recipe = tiny_recipe(parallel=parallel)
        plan = plan_run(recipe, 2 if parallel else 1)
        mesh: Any = SimpleNamespace(device=torch.device("cuda", 0), index=lambda axis: 0)
        assert (train_batches(plan, mesh, parts.data).ahead_to is not None) == begins
