"""FSDP's streams order all uses of memory, on a rank without others whose streams are stand-ins that keep clocks.

Torch runs its gathers, its sums of gradients and the model on streams of a GPU. The trainer changes how FSDP gathers
parameters, by private names of torch. Here, each operation of a step is checked against all earlier ones on the same
memory: an earlier stream must have been waited for, directly or through other streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.training import build_tiny, parallel_keys, tiny_recipe
from trainer.engine import fsdp_internals

ONLY_ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "detach"}


class Stream:
    """A stream with the number of operations of every stream that are done before its next one."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.done: dict[Stream, int] = {}
        self.begun = 0

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        for stream, number in event.done.items():
            self.done[stream] = max(self.done.get(stream, 0), number)

    def record_event(self) -> Event:
        return Event(self)


class Event:
    """A moment of a stream."""

    def __init__(self, stream: Stream) -> None:
        self.done = {**stream.done, stream: stream.begun}


class Uses(TorchDispatchMode):
    """The streams of a rank, and `races`: uses of memory by streams that did not wait for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.current = self.compute = Stream()
        self.races: list[str] = []
        self.streams = {self.compute}
        self.writes: dict[StorageWeakRef, tuple[Stream, int, str]] = {}
        self.reads: dict[StorageWeakRef, dict[Stream, tuple[int, str]]] = {}

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def event(self) -> Any:
        """Return an event like `torch.cuda.Event`, which is recorded later."""
        made = Event(Stream())
        made.record = lambda: vars(made).update(done=Event(self.current).done)  # type: ignore[attr-defined]
        return made

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        name = function._opname
        if function.is_view or name in ONLY_ALLOCATES:
            return made
        self.current.begun += 1
        self.streams.add(self.current)
        fields = {one.name: one for one in function._schema.arguments}
        named = dict(zip(fields, args, strict=False)) | (kwargs or {})
        for key, value in named.items():
            alias = fields[key].alias_info
            self.use(value, name, function.namespace == "c10d" or (alias is not None and alias.is_write))
        self.use(made, name, writes=True)
        return made

    def use(self, tensors: Any, name: str, writes: bool) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):  # its parts follow
                self._use(StorageWeakRef(tensor.untyped_storage()), name, writes)

    def _use(self, memory: StorageWeakRef, name: str, writes: bool) -> None:
        now = self.current
        earlier = [self.writes[memory]] if memory in self.writes else []
        if writes:
            earlier += [(stream, *last) for stream, last in self.reads.pop(memory, {}).items()]
            self.writes[memory] = (now, now.begun, name)
        else:
            self.reads.setdefault(memory, {})[now] = (now.begun, name)
        for stream, number, before in earlier:
            if stream is not now and now.done.get(stream, 0) < number:
                self.races.append(f"{name} does not wait for {before}")


def steps(strategy: str, uses: Uses, num_steps: int = 2, **sections: Any) -> None:
    """Take steps of a rank without others, which sends its messages to none."""
    world_size = 4 if strategy == "hsdp" else 2
    recipe = tiny_recipe(parallel=parallel_keys(strategy, world_size), **sections)
    with ExitStack() as stack:
        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        for name, stand_in in {
            "Stream": Stream,
            "Event": uses.event,
            "stream": uses.stream,
            "current_stream": lambda *_: uses.current,
        }.items():
            stack.enter_context(mock.patch.object(torch.cpu, name, stand_in))
        training = build_tiny(recipe)
        stack.callback(training.close)
        with uses:
            for batch in islice(training.loader, num_steps):
                training.engine.train_step(batch)


@pytest.mark.parametrize(
    ("strategy", "sections"),
    [
        ("fsdp", {"precision": "bf16", "training": {"micro_batch_size": 3}}),
        ("hsdp", {"precision": "bf16", "training": {"micro_batch_size": 1}}),
        ("fsdp", {"activation_checkpointing": "full"}),
    ],
)
def test_streams_wait_for_each_other(strategy: str, sections: dict[str, Any]):
    uses = Uses()
    steps(strategy, uses, **sections)
    assert len(uses.streams) == (5 if strategy == "hsdp" else 4)
    assert uses.races == []


@pytest.mark.parametrize(
    ("wait", "race"),
    [
        ("wait_event", "split_with_sizes_copy does not wait for _allgather_base_"),
        ("wait_stream", "_allgather_base_ does not wait for all_gather_copy_in"),
    ],
)
def test_a_missing_wait_is_detected(monkeypatch: pytest.MonkeyPatch, wait: str, race: str):
    monkeypatch.setattr(Stream, wait, lambda *_: None)
    uses = Uses()
    steps("fsdp", uses, num_steps=1)
    assert race in uses.races


def test_torch_calls_the_hooks_of_rounded_weights_in_order(monkeypatch: pytest.MonkeyPatch):
    """The types before the first gather; the gradients' type behind the backward pass, on the stream that computes."""
    uses, types, gradients = Uses(), [], []

    def set_types(dtype: torch.dtype, parameter: Any, *arguments: Any) -> None:
        gathered_in(dtype, parameter, *arguments)
        types.append((parameter._param_fqn, uses.streams == {uses.compute}))

    def cast(parameters: Any, reduce: Any, *arguments: Any) -> None:
        rounded = [one for one in parameters if one._unsharded_param.grad.dtype == torch.bfloat16]
        computes = uses.current is uses.compute

        def note_and_reduce() -> None:
            for one in rounded:
                exact = one.unsharded_accumulated_grad
                stream, _, name = uses.writes[StorageWeakRef(exact.untyped_storage())]
                is_there = (stream, name) == (uses.compute, "_foreach_copy_") and exact.dtype == torch.float32
                gradients.append((one._param_fqn, computes and is_there and one._unsharded_param.grad is None))
            reduce()

        reduced_in_fp32(parameters, note_and_reduce, *arguments)

    gathered_in, reduced_in_fp32 = fsdp_internals._gathered_in, fsdp_internals._reduced_in_fp32
    monkeypatch.setattr(fsdp_internals, "_gathered_in", set_types)
    monkeypatch.setattr(fsdp_internals, "_reduced_in_fp32", cast)
    steps("fsdp", uses, num_steps=1, precision="bf16")
    assert all(in_order for _, in_order in (*types, *gradients))
    names = [name for name, _ in types]
    assert len(names) == 2 * (2 * 6 + 2)  # weights and biases of two layers, the pooler and the classifier
    assert sorted(names) == sorted(name for name, _ in gradients)
