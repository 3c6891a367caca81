from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest

from tests.helpers.forking import forked_children
from trainer.base.errors import DataError, TrainerError, UsageError
from trainer.data import tokenised_split
from trainer.data.sources import Split
from trainer.data.tokenised_split import encode_split
from trainer.recipe.schema import CausalLM
from trainer.tasks.registry import build_task
from trainer.tasks.sequence_classification import SequenceClassificationTask

ROOT = Path(__file__).parents[2]
TASK = SequenceClassificationTask(("text",), "label", ("accuracy",), class_names=("no", "yes"), labels_are_names=True)


def split_of(num_rows=6, text="sends a message over the socket"):
    rows = {"text": [f"{text} {i}" for i in range(num_rows)], "label": ["no", "yes"] * (num_rows // 2)}
    return Split(datasets.Dataset.from_dict(rows | {"unread": list(range(num_rows))}), "`some.jsonl`")


def entries(cache):
    return [path for path in cache.iterdir() if path.is_dir()]


class CountingTask(SequenceClassificationTask):
    """Says whether it was asked to encode at all."""

    calls = 0

    def encode(self, *args):
        CountingTask.calls += 1
        return super().encode(*args)


@pytest.fixture
def counting(monkeypatch):
    monkeypatch.setattr(CountingTask, "calls", 0)
    return CountingTask(**vars(TASK))


def test_encoded_rows_hold_the_inputs_of_the_model(tokenizer, tmp_path):
    split = encode_split(split_of(), TASK, tokenizer, 32, tmp_path)
    expected = tokenizer([f"sends a message over the socket {i}" for i in range(6)])["input_ids"]
    assert [split.tokens["input_ids"][a:b].tolist() for a, b in itertools.pairwise(split.offsets)] == expected
    assert split.scalars["labels"].tolist() == [0, 1, 0, 1, 0, 1]
    assert split.num_cut == 0


def test_rows_that_are_cut_are_counted(tokenizer, tmp_path):
    whole = tokenizer("sends a message over the socket 1")["input_ids"]
    exact = encode_split(split_of(), TASK, tokenizer, len(whole), tmp_path)
    assert exact.num_cut == 0
    cut = encode_split(split_of(), TASK, tokenizer, len(whole) - 1, tmp_path)
    assert cut.num_cut == 6
    assert set(cut.lengths) == {len(whole) - 1}


def test_many_pieces_are_one_split(tokenizer, tmp_path):
    split = encode_split(split_of(2500, "a"), TASK, tokenizer, 32, tmp_path)
    assert len(split) == 2500
    assert split.scalars["labels"].tolist() == [0, 1] * 1250


def contents(cache):
    (entry,) = entries(cache)
    return {path.name: path.read_bytes() for path in entry.iterdir()}


@pytest.mark.parametrize("keys", [{"packing": "documents"}, {"packing": "joined"}, {"packing": "none"}])
def test_several_processes_write_the_same_bytes(tokenizer, tmp_path, keys, monkeypatch):
    monkeypatch.setattr(tokenised_split, "_ROWS_AT_ONCE", 100)
    task = build_task(CausalLM(type="causal_lm", text="text", **keys))
    for processes in (1, 3):
        encode_split(split_of(1050, "a"), task, tokenizer, 32, tmp_path / str(processes), processes)
    assert contents(tmp_path / "3") == contents(tmp_path / "1")
    assert not forked_children()


@pytest.mark.parametrize("packing", ["none", "documents", "joined"])
def test_rows_of_different_sources_are_cached_apart(tokenizer, tmp_path, packing):
    task = build_task(CausalLM(type="causal_lm", text="text", packing=packing))
    parts = [split_of(number, text) for number, text in ((40, "a"), (60, "b c d"))]
    rows = datasets.concatenate_datasets([part.rows for part in parts])
    joined = encode_split(Split(rows, "both", sources=(40, 60)), task, tokenizer, 32, tmp_path, 2)
    alone = [encode_split(part, task, tokenizer, 32, tmp_path) for part in parts]
    assert joined.sources == tuple(map(len, alone))
    np.testing.assert_array_equal(
        joined.tokens["input_ids"], np.concatenate([one.tokens["input_ids"] for one in alone])
    )
    whole = encode_split(Split(rows, "both"), task, tokenizer, 32, tmp_path)
    assert whole.sources == ()
    assert whole.content_hash != joined.content_hash
    for sources in ((0, 40, 60), (40, 0, 60), (40, 60, 0)):
        found = encode_split(Split(rows, "both", sources=sources), task, tokenizer, 32, tmp_path).sources
        assert [bool(number) for number in found] == [bool(number) for number in sources]
    again = encode_split(Split(rows, "both", sources=(40, 60)), task, tokenizer, 32, tmp_path)
    assert pickle.loads(pickle.dumps(again)).sources == joined.sources


class DyingTask(SequenceClassificationTask):
    """Kills the process that encodes later rows."""

    def encode(self, *args):
        if args[-1] > 1000:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(*args)


def test_the_death_of_a_process_is_an_error_without_leftovers(tokenizer, tmp_path):
    task = DyingTask(**vars(TASK))
    with pytest.raises(TrainerError, match=r"`data.preparation_processes` \(2\) died: signal SIGKILL.*fewer"):
        encode_split(split_of(5000, "a"), task, tokenizer, 32, tmp_path, 2)
    assert not entries(tmp_path)
    assert not forked_children()


def test_the_second_time_nothing_is_tokenised(tokenizer, tmp_path, counting):
    first = encode_split(split_of(), counting, tokenizer, 32, tmp_path)
    tokenizer("leaves truncation and padding states behind", truncation=True, max_length=4, padding="max_length")
    again = encode_split(split_of(), counting, tokenizer, 32, tmp_path)
    assert CountingTask.calls == 1
    assert again.content_hash == first.content_hash


def test_whatever_changes_the_result_changes_the_entry(tokenizer, tmp_path):
    def encode(split=None, task=TASK, max_length=32):
        encode_split(split or split_of(), task, tokenizer, max_length, tmp_path)
        return len(entries(tmp_path))

    swapped = replace(TASK, class_names=("yes", "no"))
    counts = [
        encode(),
        encode(split_of(text="other")),
        encode(task=swapped),
        encode(max_length=16),
        encode(split_of(8)),
    ]
    assert counts == [1, 2, 3, 4, 5]
    unread = split_of()
    assert encode(Split(unread.rows.remove_columns("unread"), "elsewhere")) == 5, "what is not read must not matter"


@pytest.mark.parametrize("name", ["input_ids", "labels", "offsets", "meta.json"])
def test_a_damaged_entry_is_made_again(tokenizer, tmp_path, counting, name):
    first = encode_split(split_of(), counting, tokenizer, 32, tmp_path)
    (entry,) = entries(tmp_path)
    ids = first.tokens["input_ids"].tolist()
    damaged = (entry / name).read_bytes()[:-1] + b"\x7f"
    (entry / name).unlink()  # `first` still maps the old pages
    (entry / name).write_bytes(damaged)
    again = encode_split(split_of(), counting, tokenizer, 32, tmp_path)
    assert CountingTask.calls == 2
    assert again.tokens["input_ids"].tolist() == ids
    encode_split(split_of(), counting, tokenizer, 32, tmp_path)
    assert CountingTask.calls == 2


def encode_in_process(cache, start):
    from transformers import AutoTokenizer

    class Slow(SequenceClassificationTask):
        def encode(self, *args):
            (cache / f"{os.getpid()}.encoded").touch()
            time.sleep(0.5)
            return super().encode(*args)

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "recipes" / "sample" / "tokenizer")
    task = Slow(**vars(TASK))
    start.wait(60)
    return encode_split(split_of(), task, tokenizer, 32, cache).content_hash


def put_result(cache, start, queue):
    queue.put(encode_in_process(cache, start))


def test_four_processes_at_once_share_one_tokenisation(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [__name__, "transformers.models.auto.tokenization_auto"]
    )  # imported once, not 4 times
    start, queue = context.Barrier(4), context.Queue()
    processes = [context.Process(target=put_result, args=(tmp_path, start, queue)) for _ in range(4)]
    try:
        for process in processes:
            process.start()
        hashes = [queue.get(timeout=90) for _ in processes]
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    assert len(set(hashes)) == 1
    assert len(list(tmp_path.glob("*.encoded"))) == 1
    assert len(entries(tmp_path)) == 1


KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.data.test_tokenised_split import TASK, SequenceClassificationTask, encode_split, split_of
from transformers import AutoTokenizer

encode = SequenceClassificationTask.encode

def dying(*args):
    if args[-1] > 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return encode(*args)

SequenceClassificationTask.encode = dying
tokenizer = AutoTokenizer.from_pretrained({root!r} + "/recipes/sample/tokenizer")
encode_split(split_of(1500), TASK, tokenizer, 32, Path({cache!r}))
"""


@pytest.mark.slow
def test_a_run_that_was_killed_while_tokenising_is_no_obstacle(tokenizer, tmp_path):
    script = KILLED.format(root=str(ROOT), cache=str(tmp_path))
    killed = subprocess.run([sys.executable, "-c", script], timeout=90, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    (partial,) = entries(tmp_path)
    assert partial.suffix == ".partial"
    split = encode_split(split_of(1500), TASK, tokenizer, 32, tmp_path)
    assert len(split) == 1500
    assert [entry.suffix for entry in entries(tmp_path)] == [""]


def test_an_error_in_a_row_leaves_no_entry(tokenizer, tmp_path):
    rows = datasets.Dataset.from_dict({"text": ["a", "b"], "label": ["no", "maybe"]})
    with pytest.raises(DataError, match=r"row 2 of `v.csv` is the label 'maybe'"):
        encode_split(Split(rows, "`v.csv`"), TASK, tokenizer, 32, tmp_path)
    assert not entries(tmp_path)


@pytest.mark.parametrize("processes", [1, 2])
def test_rows_are_numbered_through_all_pieces(tokenizer, tmp_path, processes):
    rows = datasets.Dataset.from_dict({"text": ["a"] * 2000, "label": ["no"] * 1003 + [None] * 997})
    with pytest.raises(DataError, match=r"column `label`, row 1004 of `v.csv` is null"):
        encode_split(Split(rows, "`v.csv`"), TASK, tokenizer, 32, tmp_path, processes)


def test_lengths_that_do_not_fit_the_tokenizer_are_refused(tokenizer, tmp_path):
    with pytest.raises(UsageError, match=r"`data.max_length` must be at most the 128 tokens.*but is 129"):
        encode_split(split_of(), TASK, tokenizer, 129, tmp_path)
    with pytest.raises(UsageError, match=r"`data.max_length` must be more than the 2 special tokens, but is 2"):
        encode_split(split_of(), TASK, tokenizer, 2, tmp_path)


def test_a_cache_that_cannot_be_written_is_named(tokenizer, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UsageError, match=r"`data.cache` must be a folder that can be written"):
        encode_split(split_of(), TASK, tokenizer, 32, blocked / "cache")


def test_the_cache_holds_no_pickle(tokenizer, tmp_path):
    encode_split(split_of(), TASK, tokenizer, 32, tmp_path)
    (entry,) = entries(tmp_path)
    assert sorted(path.name for path in entry.iterdir()) == [
        "input_ids",
        "labels",
        "meta.json",
        "offsets",
        "token_type_ids",
    ]
    raw = np.fromfile(entry / "labels", "<i8")
    assert raw.tolist() == [0, 1, 0, 1, 0, 1]


class TestUnknownTokens:
    def test_are_counted_among_tokens_that_are_not_special(self, tokenizer, tmp_path):
        text = "sends \u4e2d \u6587 message"
        split = encode_split(split_of(2, text), TASK, tokenizer, 32, tmp_path)
        whole = tokenizer(f"{text} 0")["input_ids"], tokenizer(f"{text} 1")["input_ids"]
        unknown = sum(ids.count(tokenizer.unk_token_id) for ids in whole)
        assert unknown > 0
        assert split.unknown_tokens == (unknown, sum(map(len, whole)) - 2 * 2)

    def test_most_of_them_are_refused(self, tokenizer, tmp_path):
        with pytest.raises(DataError, match=r"`some.jsonl` has .* unknown to the tokenizer .*`model.tokenizer`"):
            encode_split(split_of(6, "\u4e2d \u6587 \u5b57 \u6bcd"), TASK, tokenizer, 32, tmp_path)
