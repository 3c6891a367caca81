from __future__ import annotations

import collections
import errno
import itertools
import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data._utils import signal_handling

from tests.helpers import processes, warm
from trainer.base.errors import TrainerError, UsageError
from trainer.data import loader
from trainer.data.cache import EntryWriter, open_entry
from trainer.data.collate import Padding
from trainer.data.loader import EvalLoader, SplitRows, TrainLoader
from trainer.data.order import GlobalOrder
from trainer.data.split import EncodedSplit
from trainer.recipe.plan import BatchPlan

ROOT = Path(__file__).parents[2]
PADDING = Padding(token_id=0)


def entry_of(folder, num_rows):
    """Row i holds 1 to 9 tokens that are all i + 1, and the label i."""
    lengths = np.random.default_rng(0).integers(1, 10, num_rows)
    ids = [[i + 1] * int(length) for i, length in enumerate(lengths)]
    with EntryWriter(folder) as writer:
        writer.add({"input_ids": ids, "labels": list(range(num_rows)), "cut": [False] * num_rows})
    return open_entry(folder)


@pytest.fixture
def split(tmp_path):
    return entry_of(tmp_path / "entry", 31)


def train_loader(split, data_rank=0, ranks=1, micro_batch_size=4, grouped=True, total_steps=8, **keys):
    size = 12
    plan = BatchPlan(size, ranks, micro_batch_size, -(-size // ranks // micro_batch_size))
    order = GlobalOrder(len(split), split.lengths if grouped else None, size, seed=5)
    rows = SplitRows(split, order, keys.pop("start_sample", 0))
    return TrainLoader(rows, plan, data_rank, PADDING, total_steps, **keys)


def real_rows(rank_batch):
    """(place in the global batch, row id) of the rows that count."""
    return [
        (int(place), int(label))
        for microbatch in rank_batch.microbatches
        if not microbatch.filler
        for place, label in zip(microbatch.rows, microbatch.labels, strict=True)
    ]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_world_size_learns_from_the_same_rows(split, ranks, grouped):
    steps = zip(*[train_loader(split, rank, ranks, grouped=grouped) for rank in range(ranks)], strict=True)
    order = GlobalOrder(31, split.lengths if grouped else None, 12, seed=5)
    for step, batches in enumerate(steps):
        expected = order.batch(*divmod(step, 3))  # 12 + 12 + 7 rows
        rows = sorted(itertools.chain.from_iterable(real_rows(batch) for batch in batches))
        assert rows == list(enumerate(expected.tolist()))
        assert {batch.num_rows for batch in batches} == {len(expected)}
        assert {batch.num_tokens for batch in batches} == {split.lengths[expected].sum()}
        assert len({len(batch.microbatches) for batch in batches}) == 1
    assert step == 7


def own_bytes() -> int:
    """The memory of this process without that of mapped files, which the system takes back when it needs it."""
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_batches_of_a_corpus_of_a_billion_tokens_take_no_memory(tmp_path):
    width, num_tokens = 128, 10**9
    offsets = np.lib.format.open_memmap(tmp_path / "offsets", "w+", np.int64, (num_tokens // width + 1,))
    offsets[:] = np.arange(len(offsets)) * width
    tokens, labels = (
        np.lib.format.open_memmap(tmp_path / name, "w+", np.int32, (size,))  # files with holes
        for name, size in (("tokens", num_tokens), ("labels", len(offsets) - 1))
    )
    tokens[-width:] = 7
    before = own_bytes()
    corpus = EncodedSplit(offsets, {"input_ids": tokens}, {"labels": labels}, "hash")
    assert len(corpus) == 7_812_500
    assert corpus.widths(np.array([len(corpus) - 1]), padded=True).tolist() == [[width]]
    assert PADDING.inputs(corpus, np.array([3, len(corpus) - 1]))["input_ids"].sum() == 7 * width
    loader = train_loader(corpus, grouped=False, total_steps=10**7)
    assert next(iter(loader)).num_tokens == 12 * width
    assert all(len(set(loader.row_ids(step))) == 12 for step in (100_000, 5_000_000))  # of other epochs, too
    assert own_bytes() - before < 32 * 2**20


def test_a_ragged_batch_of_seven_rows_on_three_ranks(split):
    ragged = [list(train_loader(split, rank, 3, micro_batch_size=1))[2] for rank in range(3)]
    assert [len(batch.microbatches) for batch in ragged] == [3, 3, 3]
    assert [[microbatch.filler for microbatch in batch.microbatches] for batch in ragged] == [
        [False, False, False],
        [False, False, True],
        [False, False, True],
    ]
    filler = ragged[1].microbatches[-1]
    assert filler.labels.tolist() == [row for place, row in real_rows(ragged[0]) if place == filler.rows]


def test_one_row_on_two_ranks(tmp_path):
    split = entry_of(tmp_path / "entry", 13)
    last = [list(train_loader(split, rank, 2, total_steps=2))[1] for rank in range(2)]
    assert [(len(batch.microbatches), batch.microbatches[0].filler) for batch in last] == [(1, False), (1, True)]
    assert torch.equal(last[0].microbatches[0].inputs["input_ids"], last[1].microbatches[0].inputs["input_ids"])
    assert [batch.num_rows for batch in last] == [1, 1]


@pytest.mark.parametrize("done", range(9))
def test_going_on_gives_the_steps_that_are_left(split, done):
    whole = [real_rows(batch) for batch in train_loader(split)]
    consumed = sum(batch.num_rows for batch in itertools.islice(train_loader(split), done))
    rest = train_loader(split, start_sample=consumed)
    assert len(rest) == 8 - done
    assert [real_rows(batch) for batch in rest] == whole[done:]


def test_a_position_of_another_batch_size_is_refused(split):
    with pytest.raises(UsageError, match=r"`training.global_batch_size`"):
        train_loader(split, start_sample=5)


def assert_same(one, other):
    assert (one.num_rows, one.num_tokens) == (other.num_rows, other.num_tokens)
    for a, b in zip(one.microbatches, other.microbatches, strict=True):
        assert a.filler == b.filler
        tensors = [(a.labels, b.labels), (a.rows, b.rows), *((a.inputs[name], b.inputs[name]) for name in a.inputs)]
        assert all(torch.equal(x, y) for x, y in tensors)


def test_a_batch_asked_for_beforehand_is_made_once(split):
    loader = train_loader(split)
    first = loader.batch(0)
    assert next(iter(loader)) is first
    assert next(iter(loader)) is not first  # kept until it is used only


def test_workers_change_nothing(split):
    state = torch.get_rng_state()
    for one, other in zip(train_loader(split), train_loader(split, num_workers=2), strict=True):
        assert_same(one, other)
    assert torch.equal(torch.get_rng_state(), state), "the loader must not draw from the model's generator"


@pytest.mark.parametrize(("num_rows", "ranks", "batch_size"), [(31, 1, 8), (31, 3, 4), (2, 3, 4), (7, 2, 1)])
def test_evaluation_covers_every_row_once(tmp_path, num_rows, ranks, batch_size):
    split = entry_of(tmp_path / "entry", num_rows)
    parts = [list(EvalLoader(split, batch_size, rank, ranks, PADDING)) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    assert len(parts[0]) == len(EvalLoader(split, batch_size, 0, ranks, PADDING))
    rows = [microbatch for part in parts for microbatch in part if not microbatch.filler]
    assert sorted(torch.cat([microbatch.rows for microbatch in rows]).tolist()) == list(range(num_rows))
    assert all(torch.equal(microbatch.rows, microbatch.labels) for microbatch in rows)
    widths = [microbatch.inputs["input_ids"].shape[1] for microbatch in parts[0]]
    assert widths == sorted(widths, reverse=True)


class Marking:
    """A masking that shows what it was told: the row ids become the labels, the epoch the features."""

    def __call__(self, input_ids, rows, epoch):
        return torch.full_like(input_ids, -1 if epoch is None else epoch), rows.unsqueeze(1).expand_as(input_ids)

    def at(self, step, total_steps):
        return self


@pytest.mark.parametrize(("ranks", "micro_batch_size", "num_workers"), [(1, 12, 0), (3, 2, 0), (2, 1, 2)])
def test_a_masking_receives_row_ids_and_epoch(split, ranks, micro_batch_size, num_workers):
    """Whatever the layout: so what it hides is, too."""
    keys = {"micro_batch_size": micro_batch_size, "num_workers": num_workers, "masking": Marking()}
    plain = zip(*[train_loader(split, rank, ranks, micro_batch_size) for rank in range(ranks)], strict=True)
    marked = zip(*[train_loader(split, rank, ranks, **keys) for rank in range(ranks)], strict=True)
    for step, (batches, expected) in enumerate(zip(marked, plain, strict=True)):
        for batch, other in zip(batches, expected, strict=True):
            for one, two in zip(batch.microbatches, other.microbatches, strict=True):
                assert (one.inputs["input_ids"] == step // 3).all()
                assert torch.equal(one.labels[:, 0], two.labels)
                assert one.labels.shape == two.inputs["input_ids"].shape
                assert torch.equal(one.inputs["attention_mask"], two.inputs["attention_mask"])


def test_a_masking_of_an_evaluation_has_no_epoch(split):
    for batch in EvalLoader(split, 8, 0, 2, PADDING, masking=Marking()):
        assert (batch.inputs["input_ids"] == -1).all()
        assert torch.equal(batch.labels[:, 0], batch.rows)


@pytest.fixture
def silent_deaths():
    """Without torch's SIGCHLD handler, which raises wherever the rank happens to be: the loader itself must notice."""
    yield lambda: signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_dead_worker_is_reported_with_a_remedy(split, silent_deaths, evaluates):
    others = psutil.Process().children()  # ranks that other tests keep alive
    of_evaluation = EvalLoader(split, 1, 0, 1, PADDING, num_workers=1)
    batches = iter(of_evaluation if evaluates else train_loader(split, total_steps=1000, num_workers=1))
    next(batches)
    silent_deaths()
    (worker,) = (child for child in psutil.Process().children() if child not in others)
    worker.send_signal(signal.SIGKILL)
    with pytest.raises(
        TrainerError, match=r"`data.num_workers` \(1\) died: signal SIGKILL.* set `data.num_workers` to 0"
    ):
        collections.deque(batches, maxlen=0)


def send_and_work(worker: psutil.Process, number: signal.Signals) -> None:
    worker.send_signal(number)
    for _ in range(100):
        time.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGBUS])
def test_a_worker_that_dies_between_batches_is_reported(split, silent_deaths, number, monkeypatch):
    """As that of the training while an evaluation reads from its own worker; torch raises in the middle of it."""
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)  # torch sets its handler once
    others = psutil.Process().children()
    batches = iter(train_loader(split, total_steps=1000, num_workers=1))
    next(batches)
    (worker,) = (child for child in psutil.Process().children() if child not in others)
    evaluated = iter(EvalLoader(split, 1, 0, 1, PADDING, num_workers=1))
    next(evaluated)
    with pytest.raises(TrainerError, match=rf"`data.num_workers` \(1\) died: signal {number.name}"):
        send_and_work(worker, number)
    assert next(evaluated) is not None


def test_an_error_in_a_worker_is_not_called_a_death(split):
    loader = train_loader(split, num_workers=1)
    loader.plan = None
    with pytest.raises(AttributeError):
        next(iter(loader))


def stopped(arguments):
    """Get both stop signals while a worker still starts, and go on with 50 batches."""
    init_worker = loader._init_worker

    def start_late(worker_id):
        time.sleep(worker_id)  # the second worker still starts when the signals come
        init_worker(worker_id)

    loader._init_worker = start_late
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: None)
    batches = iter(train_loader(open_entry(Path(arguments[0])), total_steps=10**6, num_workers=2))
    next(batches)
    os.killpg(0, signal.SIGTERM)
    os.killpg(0, signal.SIGINT)
    for _ in range(50):
        next(batches)
    print("saved", len(psutil.Process().children()), flush=True)
    return 3


def test_a_stop_signal_leaves_the_workers_to_the_rank_which_still_ends(split):
    process = warm.start([split.reopen.args[0]], program="tests.data.test_loader:stopped")
    ended = processes.finish(process, 60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "saved 2\n", "")


class _Unsendable:
    def __reduce__(self):
        raise RuntimeError("unable to write to file </torch_1_2_3>: No space left on device (28)")


class _Batches:
    def __getitem__(self, key: int) -> object:
        return _Unsendable()


@pytest.mark.parametrize("is_full_at", ["start", "batch"])
def test_full_shared_memory_is_reported_with_a_remedy(is_full_at, monkeypatch, silent_deaths):
    """A worker sends batches from a thread, and without a batch the rank would wait forever."""
    if is_full_at == "start":

        def full(*arguments: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(loader, "iter", full, raising=False)
    silent_deaths()
    with pytest.raises(TrainerError, match=r"/dev/shm\) is full, but `data.num_workers` is 1.* or set `data.num_w"):
        list(loader._load(_Batches(), range(2), 1, False))
