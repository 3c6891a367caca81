from __future__ import annotations

import io
import json
import os
import random
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.helpers.families import CONFIGS
from tests.helpers.tiny_run import WORDS, write_tiny_run
from tests.helpers.webhdfs import webhdfs
from trainer.base.errors import DataError, RecipeError, TrainerError, UsageError
from trainer.checkpoint.counters import Progress
from trainer.features.streams import shards
from trainer.features.streams.feature import StreamSource
from trainer.features.streams.index import RowReader, index_of
from trainer.features.streams.shards import find_shards
from trainer.features.streams.windows import Windows
from trainer.recipe.plan import plan_run
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.schema import FileData, FolderData, HubData
from trainer.training.assembly import batches_of
from trainer.training.row_source import row_source
from trainer.training.run_data import prepare_data

LABELS = ["a", "b", "c"]
SIZES = (23, 1, 40, 17)


def rows_of(number: int, start: int) -> list[dict]:
    draws = random.Random(start)
    return [
        {"text": " ".join(draws.choices(WORDS, k=draws.randint(3, 12))), "label": LABELS[draws.randrange(3)], "id": row}
        for row in range(start, start + number)
    ]


ROWS = [row for shard, size in enumerate(SIZES) for row in rows_of(size, sum(SIZES[:shard]))]


def write_shards(folder: Path, ending: str, sizes=SIZES) -> None:
    start = 0
    for number, size in enumerate(sizes):
        rows, path = ROWS[start : start + size], folder / f"part-{number}{ending}"
        if ending == ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=5)
        elif ending == ".arrow":
            path.write_bytes(arrow_file(rows))
        else:
            text = "\n".join(json.dumps(row) + "\n" * (index % 3 == 0) for index, row in enumerate(rows))
            path.write_text("\ufeff" * (number == 0) + text + "\n" * (number % 2), encoding="utf-8")
        start += size


def arrow_file(rows: list[dict], makes=pyarrow.ipc.new_file) -> bytes:
    file, table = io.BytesIO(), pyarrow.Table.from_pylist(rows)
    with makes(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    return file.getvalue()


def long_rows() -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["word1", "x" * 5000], "label": ["a", "b"]}), file)
    return file.getvalue()


def damaged_page() -> bytes:
    file, texts = io.BytesIO(), ["word1 word2 word3"] * 9
    table = pyarrow.table({"text": texts, "label": ["a"] * 9})
    pyarrow.parquet.write_table(table, file, compression="none", use_dictionary=False, write_page_checksum=True)
    return file.getvalue().replace(b"word2 word3", b"word2 word4", 3)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.features.streams.shards._BLOCK_BYTES", 300)  # several runs of lines in a shard
    monkeypatch.setattr("trainer.features.streams.index._ROWS_AT_ONCE", 7)
    write_tiny_run(tmp_path)
    write_shards(tmp_path, ".jsonl")
    write_shards(tmp_path, ".parquet")
    return tmp_path


def recipe_of(folder: Path, *overrides: str, train: str | list[str] = "part-*.jsonl", task: dict | None = None):
    file = folder / "recipe.json"
    recipe = json.loads(file.read_text())
    recipe["task"] = task or {"type": "sequence_classification", "text": "text", "labels": LABELS}
    recipe["data"] |= {"train": train, "streaming": True, "shuffle_window": 24, "group_by_length": False}
    recipe["training"] = {"epochs": 2, "global_batch_size": 12, "micro_batch_size": 5}
    stream = folder / "stream.json"
    stream.write_text(json.dumps(recipe))
    return load_recipe(str(stream), overrides).recipe


def loaders(recipe, ranks=1, progress=None, data=None):
    plan, data = plan_run(recipe, ranks), data or prepare_data(recipe)
    return [batches_of(plan, data, rank, progress) for rank in range(ranks)]


def contents(batches):
    """The rows of a step over all ranks by their place: tokens and label."""
    found = {}
    for microbatch in (one for batch in batches for one in batch.microbatches if not one.filler):
        ids, masks = microbatch.inputs["input_ids"], microbatch.inputs["attention_mask"].bool()
        for place, row, mask, label in zip(microbatch.rows.tolist(), ids, masks, microbatch.labels, strict=True):
            found[place] = (row[mask].tolist(), (label[mask] if label.shape == mask.shape else label).tolist())
    return [found[place] for place in range(len(found))]


def steps_of(recipe, ranks=1, progress=None):
    return [contents(batches) for batches in zip(*loaders(recipe, ranks, progress), strict=True)]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet", ".arrow"])
def test_an_epoch_has_every_row_once_and_in_another_order(folder, ending):
    write_shards(folder, ending)
    (loader,) = loaders(recipe_of(folder, train=f"part-*{ending}"))
    epochs = [[loader.row_ids(step) for step in range(start, start + 7)] for start in (0, 7)]
    assert len(loader) == 14, "81 rows in batches of 12, twice"
    for epoch in epochs:
        assert [len(ids) for ids in epoch] == [12] * 6 + [9]
        assert sorted(chain.from_iterable(epoch)) == list(range(81))
    assert epochs[0] != epochs[1]
    words = {row["text"]: row["id"] for row in ROWS}
    vocabulary = {5 + index: word for index, word in enumerate(WORDS)}
    for ids, rows in zip(chain.from_iterable(epochs), map(contents, zip(loader, strict=True)), strict=True):
        texts = [" ".join(vocabulary[token] for token in tokens[1:-1]) for tokens, _ in rows]
        assert [words[text] for text in texts] == ids, "the rows are those of the numbers"
        assert [LABELS[label] for _, label in rows] == [ROWS[row]["label"] for row in ids]


@pytest.mark.parametrize("window", [24, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (5, 1000))])
def test_every_number_of_ranks_learns_from_the_same_rows(folder, window):
    key = f"data.shuffle_window={window}"
    expected = steps_of(recipe_of(folder, key))
    for ranks, *keys in ((2, "data.num_workers=2"), (3, "training.micro_batch_size=1"), (4,)):
        assert steps_of(recipe_of(folder, key, *keys), ranks) == expected


def test_a_place_goes_on_without_a_read_from_the_start(folder, monkeypatch):
    recipe = recipe_of(folder)
    (loader,) = loaders(recipe)
    batches = list(loader)
    read = []
    monkeypatch.setattr(RowReader, "read", lambda self, *span, of=RowReader.read: read.append(span) or of(self, *span))
    for done in (1, 6, 7, 9):
        read.clear()
        samples = sum(batch.num_rows for batch in batches[:done])
        progress = Progress(done, samples, place=batches[done - 1].place)
        assert steps_of(recipe, 2, progress) == [contents([batch]) for batch in batches[done:]]
        assert sum(stop - start for _, start, stop in read) <= 162 - samples + 24, "at most a window too much"
    with pytest.raises(UsageError, match="no such place"):
        loaders(recipe, progress=Progress(1, 13, place=(0, 0, 12)))
    for place in ((0, 9, 12), None):
        with pytest.raises(UsageError, match="no such place"):
            loaders(recipe, progress=Progress(1, 12, place=place))


@pytest.mark.parametrize(
    "packing", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("none", "documents")), "joined"]
)
def test_tasks_that_change_the_number_of_rows(folder, packing):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    tokenizer.eos_token = "[SEP]"
    tokenizer.save_pretrained(folder / "tokenizer")
    keys = (
        "data.max_length=8",
        f"model.config={json.dumps(CONFIGS['gpt2'] | {'model_type': 'gpt2'})}",
        "training.max_steps=30",
        "evaluation.every=null",
    )
    task = {"type": "causal_lm", "text": "text", "packing": packing}
    recipe = recipe_of(folder, *keys, task=task)
    (loader,) = loaders(recipe)
    batches = list(loader)
    expected = [contents([batch]) for batch in batches]
    assert len(expected) == 30
    assert steps_of(recipe, 3) == expected
    samples = sum(batch.num_rows for batch in batches[:13])
    assert steps_of(recipe, 2, Progress(13, samples, place=batches[12].place)) == expected[13:]
    with pytest.raises(TrainerError, match=r"`training.max_steps` must be set"):
        prepare_data(recipe_of(folder, *keys[:2], "evaluation.every=null", task=task), most_rows=20)
    with pytest.raises(TrainerError, match=r"`evaluation.every` must count steps"):
        prepare_data(recipe_of(folder, *keys[:3], "evaluation.every=1 epoch", task=task))


def test_images_equal_a_split_in_memory(tmp_path):
    sample = "vit_sample"
    keys = (f"data.cache={tmp_path}", "data.validation=null", f"task.labels={json.dumps(list('0123456789'))}")
    whole = prepare_data(load_recipe(sample, keys).recipe).train
    recipe = load_recipe(sample, (*keys, "data.streaming=true", "data.shuffle_window=80")).recipe
    data = prepare_data(recipe)
    rows = data.training_rows(recipe, Progress())
    for step in range(2):
        found, ids = rows.of_step(step), rows.row_ids(step)
        assert len(set(ids)) == recipe.training.global_batch_size
        assert np.array_equal(found.split.arrays["pixel_values"], whole.arrays["pixel_values"][ids])
        assert np.array_equal(found.split.scalars["labels"], whole.scalars["labels"][ids])


TAGS = {
    "type": "token_classification", "words": "tokens", "tags": "tags", "labels": LABELS, "stride": 2,
    "metrics": ["accuracy"],
}  # fmt: skip
WINDOWED = {
    "question_answering": ({"type": "question_answering", "stride": 2}, lambda row: {
        "id": str(row["id"]), "question": "word1", "context": row["text"],
        "answers": {"text": [row["text"].split()[0]], "answer_start": [0]},
    }),
    "token_classification": (TAGS, lambda row: {
        "tokens": row["text"].split(), "tags": [row["label"]] * len(row["text"].split()),
    }),
}  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow if kind == "question_answering" else ()) for kind in WINDOWED],
)
def test_long_rows_become_windows(folder, kind):
    task, convert = WINDOWED[kind]
    for path in folder.glob("part-*.jsonl"):
        path.unlink()
    (folder / "part-0.jsonl").write_text("\n".join(json.dumps(convert(row)) for row in ROWS))
    keys = ("data.max_length=8", "training.max_steps=25", "evaluation.every=null", "data.validation=null")
    recipe = recipe_of(folder, *keys, task=task)
    assert not prepare_data(recipe).opened.keeps_rows
    assert steps_of(recipe, 2) == steps_of(recipe)


def test_a_mixture_has_the_shares_of_its_weights(folder):
    train = ["part-0.jsonl", "part-2.parquet"]
    (loader,) = loaders(recipe_of(folder, "data.mixture=[0.75, 0.25]", train=train))
    epochs = [np.concatenate([loader.row_ids(step) for step in range(start, start + 6)]) for start in (0, 6)]
    for epoch in epochs:
        assert len(epoch) == 63
        assert (epoch < 23).sum() == 47
    read = np.bincount(np.concatenate(epochs)[np.concatenate(epochs) < 23], minlength=23)
    assert read.max() - read.min() <= 1, "a source is read pass by pass"
    windows = Windows([[index_of(shard, folder)] for shard in find_shards([str(folder / "part-0.jsonl")])], None, 7, 1)
    assert windows.bounds.tolist() == [0, 7, 14, 21, 23]


def test_a_read_after_an_error_begins_again(folder, monkeypatch):
    (shard,) = find_shards([str(folder / "part-2.jsonl")])
    reader, whole = RowReader([index_of(shard, folder)]), type(shard).open
    monkeypatch.setattr(type(shard), "open", lambda self: (_ for _ in ()).throw(DataError("away")))
    with pytest.raises(DataError, match="away"):
        next(reader.read(0, 3, 9))
    monkeypatch.setattr(type(shard), "open", whole)
    assert [len(rows) for _, rows in reader.read(0, 3, 9)] == [6]


def test_a_loader_without_steps_closes_without_a_cache(folder):
    recipe = recipe_of(folder, f"data.cache={folder}/cache", "data.validation=null", "evaluation.every=null")
    (loader,) = loaders(recipe, progress=Progress(14, 162, place=(2, 0, 0)))
    assert list(loader) == []


def test_rows_are_mapped_and_filtered(folder):
    kept = [row for row in ROWS if row["label"] != "c"]
    columns = {"words": "{text} word1", "kind": {"column": "label", "values": {"a": "x", "b": "y", "c": "x"}}}
    keys = (f"data.map.columns={json.dumps(columns)}", 'data.map.where=["label != c"]', "evaluation.every=null")
    steps = -(-len(kept) // 12)
    task = {"type": "sequence_classification", "text": "words", "label": "kind", "labels": ["x", "y"]}
    recipe = recipe_of(
        folder, *keys, f"training.max_steps={steps}", "data.max_length=30", "data.validation=null", task=task
    )
    expected = steps_of(recipe)
    assert steps_of(recipe, 2) == expected
    rows = list(chain.from_iterable(expected))
    assert len(rows) == len(kept)
    assert {tokens[-2] for tokens, _ in rows} == {5 + WORDS.index("word1")}
    assert sorted(len(tokens) - 3 for tokens, _ in rows) == sorted(len(row["text"].split()) for row in kept)
    assert sum(label for _, label in rows) == sum(row["label"] == "b" for row in kept)


def test_an_index_is_kept_and_notices_another_file(folder, monkeypatch):
    cache = folder / "cache"
    cache.mkdir()
    (shard,) = find_shards([str(folder / "part-2.jsonl")])
    index = index_of(shard, cache)
    assert index.num_rows == 40
    assert len(index.starts) > 3
    with monkeypatch.context() as patched:
        patched.setattr("trainer.features.streams.index._line_runs", lambda shard: pytest.fail("read again"))
        assert index_of(shard, cache).ends.tolist() == index.ends.tolist()
    (kept,) = cache.glob("index-*.json")
    whole = kept.read_text()
    assert '"' not in whole, "no text of a shard"
    damages = ["", whole[:-9], "\0" * len(whole), "[" * 100_000, "é", whole.replace("0, ", "1, ", 1)]
    for damage in damages:
        kept.write_text(damage, encoding="latin-1")
        assert index_of(shard, cache).ends.tolist() == index.ends.tolist()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'[{"text": "x"}]\n', "row 1 of `.*a.jsonl` must be a JSON object"),
        ("a.jsonl", b'{"text": "word1", "label": "a"}\n' * 20 + b"[1]", "`.*a.jsonl` at byte .* begins with"),
        ("a.jsonl", b'{"text": "x", "label": "a"}\n{"text": \n', "row 2 of `.*a.jsonl` is not JSON"),
        ("a.jsonl", b'{"text": "x", "label": "a"}\n{"text": 1, "label": "a"}\n', "of the same type|must be a string"),
        ("a.jsonl", b"\n\n", "must hold at least one row"),
        ("a.parquet", b"PAR1 no", "must hold parquet that can be read, but `.*a.parquet` cannot"),
        ("a.arrow", arrow_file(ROWS)[:-9], "must hold arrow that can be read, but `.*a.arrow` cannot"),
        ("a.arrow", arrow_file(ROWS, pyarrow.ipc.new_stream), "`.*a.arrow` must be in Arrow's file format"),
        ("a.jsonl.gz", b"", "cannot be read from the middle"),
        ("a.jsonl", b"{" + b"a" * 3000, "the line of `.*a.jsonl` at byte 0 is longer than"),
        ("a.parquet", long_rows(), "those of a row group of `.*a.parquet` have"),
        ("a.parquet", damaged_page(), "must hold parquet that can be read, but `.*a.parquet` cannot: .*CRC"),
    ],
)
def test_bad_shards_are_named(folder, monkeypatch, name, content, message):
    monkeypatch.setattr("trainer.features.streams.index._LONGEST_LINE", 2000)
    (folder / name).write_bytes(content)
    with pytest.raises(TrainerError, match=message):
        list(loaders(recipe_of(folder, train=name))[0])


def test_a_shard_of_equal_size_with_other_rows_is_another_stream(folder):
    def content_hash():
        return prepare_data(recipe_of(folder, train=["part-0.jsonl", "part-2.parquet"])).train_hash

    before, file = content_hash(), folder / "part-0.jsonl"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("word1", "word2"), encoding="utf-8")
    os.utime(file, (1, 1))
    changed = content_hash()
    file.write_text(text, encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[24:64]), folder / "part-2.parquet", row_group_size=6)
    assert len({before, changed, content_hash()}) == 3


def test_first_rows_may_all_be_filtered_out(folder, monkeypatch):
    keys = ("training.max_steps=2", "evaluation.every=null", "data.validation=null")
    (loader,) = loaders(recipe_of(folder, 'data.map.where=["id >= 50"]', *keys))
    assert [len(rows) for rows in map(contents, zip(loader, strict=True))] == [12, 12]
    with pytest.raises(DataError, match=r"`data.map.where` must keep a row"):
        prepare_data(recipe_of(folder, 'data.map.where=["id >= 500"]', *keys))
    monkeypatch.setattr("trainer.features.streams.index._ROWS_AT_ONCE", 10)
    late = [{**row, "id": f"no {row['id']}" if place > 11 else None} for place, row in enumerate(ROWS[:20])]
    (folder / "late.jsonl").write_text("".join(json.dumps(row) + "\n" for row in late))
    with pytest.raises(DataError, match=r"column `id`, row 13 of `.*late.jsonl` is 'no 12', a text"):
        prepare_data(recipe_of(folder, 'data.map.where=["id >= 5"]', *keys, train="late.jsonl"))


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_a_changed_shard_is_named(folder, ending):
    write_shards(folder, ending)
    (loader,) = loaders(recipe_of(folder, train=f"part-2{ending}"))
    write_shards(folder, ending, sizes=(20, 20, 20, 20))
    with pytest.raises(DataError, match=rf"`.*part-2{ending}` must not change"):
        list(loader)


@pytest.mark.parametrize(
    ("protocol", "ending"), [pytest.param("webhdfs", ".jsonl", marks=pytest.mark.slow), ("http", ".parquet")]
)
def test_a_server_that_comes_back(folder, monkeypatch, capfd, protocol, ending):
    waits, away = [], "away" if protocol == "webhdfs" else "cut"
    with webhdfs(folder) as server:
        url = server.http_url if protocol == "http" else server.url
        recipe = recipe_of(folder, train=url(f"part-*{ending}"))
        expected = steps_of(recipe_of(folder, train=f"part-*{ending}"))
        batches = iter(loaders(recipe)[0])
        found = [contents([next(batches)])]
        server.state = away

        def sleep(seconds):
            waits.append(seconds)
            server.state = "well" if seconds == 4 else away

        monkeypatch.setattr(shards.time, "sleep", sleep)
        found += [contents([batch]) for batch in batches]
        assert found == expected
        assert waits[:3] == [1, 2, 4]
        assert "retry 1 of 5 in 1 s" in capfd.readouterr().err
        server.state = "well"
        batches = iter(loaders(recipe_of(folder, "training.seed=3", train=url(f"part-*{ending}")))[0])
        server.state = "away"
        monkeypatch.setattr(shards.time, "sleep", waits.append)
        with pytest.raises(TrainerError, match=r"gave up after 5 retries in 31 s"):
            next(batches)


def test_a_slow_server_is_named_while_it_is_awaited(folder, monkeypatch, capfd):
    monkeypatch.setattr(shards, "_PATIENCE", 0.1)
    with webhdfs(folder) as server:
        recipe = recipe_of(folder, train=server.http_url("part-2.parquet"))
        server.state = "slow"
        (loader,) = loaders(recipe)
        next(iter(loader))
    shown = capfd.readouterr().err
    for part in ("shards", "index", "first window"):
        assert f"reading the {part} of `data.train` for " in shown


def test_a_silent_server_ends_the_start_with_a_fault_that_may_pass(folder, monkeypatch, capfd):
    monkeypatch.setattr(shards, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(shards.time, "sleep", lambda seconds: None)
    with webhdfs(folder) as server:
        recipe = recipe_of(folder, train=server.http_url("part-2.parquet"))
        (loader,) = loaders(recipe)
        server.state = "silent"
        with pytest.raises(TrainerError, match="which cannot be read") as found:
            prepare_data(recipe)
        assert found.value.exit_code == 1
        with pytest.raises(TrainerError, match="gave up after 5 retries") as found:
            next(iter(loader))
        assert found.value.exit_code == 1


def test_missing_files_and_lost_servers_of_http_differ(folder, monkeypatch, capfd):
    monkeypatch.setattr(shards.time, "sleep", lambda seconds: None)
    with webhdfs(folder) as server:
        (shard,) = find_shards([server.http_url("part-2.jsonl")])
        with pytest.raises(DataError, match="there is none at"):
            find_shards([server.http_url("part-9.jsonl")])
        server.state = "closed"
        for read in (lambda: find_shards([server.http_url("part-2.jsonl")]), lambda: index_of(shard, folder)):
            with pytest.raises(
                DataError, match=r"may read, but the server of `http.*` answers with the status 401; cor"
            ):
                read()
        for server.state in ("away", "cut"):
            with pytest.raises(TrainerError, match="cannot be read") as found:
                find_shards([server.http_url("part-2.jsonl")])
            assert not isinstance(found.value, DataError)
        with pytest.raises(TrainerError, match="gave up after 5 retries"):
            index_of(shard, folder)
        server.state, server.has_ranges = "well", False
        with pytest.raises(DataError, match=r"must hold json that can be read, but .* range requests"):
            index_of(shard, folder)
        (folder / "part-2.jsonl").unlink()
        with pytest.raises(DataError, match="must hold json that can be read"):
            index_of(shard, folder)
    assert capfd.readouterr().err.count("retry") == 5


@pytest.mark.slow
def test_an_s3_server_that_is_killed_and_comes_back(folder, monkeypatch, capfd):
    fsspec, server = pytest.importorskip("fsspec"), pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    names = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)

    def start(port):
        found = server.ThreadedMotoServer("127.0.0.1", port)
        found.start()
        return found, found.get_host_and_port()[1]

    running, port = start(0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    files.mkdir("bucket")
    for number in range(len(SIZES)):
        files.put(str(folder / f"part-{number}.parquet"), f"bucket/rows/part-{number}.parquet")
    expected = steps_of(recipe_of(folder, train="part-*.parquet"))
    batches = iter(loaders(recipe_of(folder, train="s3://bucket/rows/part-*.parquet"))[0])
    found = [contents([next(batches)])]
    running.stop()
    waits = []

    def sleep(seconds):
        nonlocal running
        waits.append(seconds)
        if len(waits) == 2:
            running, _ = start(port)

    monkeypatch.setattr(shards, "time", SimpleNamespace(sleep=sleep))
    found += [contents([batch]) for batch in batches]
    running.stop()
    assert found == expected
    assert waits[:2] == [1, 2]
    assert "`s3://bucket/rows/part-" in capfd.readouterr().err


@pytest.mark.slow
def test_a_server_of_google_storage(folder, monkeypatch):
    fsspec, server = pytest.importorskip("fsspec"), pytest.importorskip("gcp_storage_emulator.server")
    pytest.importorskip("gcsfs")
    running = server.create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    running.start()
    try:
        port = running._api._httpd.server_address[1]
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        files = fsspec.filesystem("gs", skip_instance_cache=True)
        for number in range(len(SIZES)):
            files.put(str(folder / f"part-{number}.parquet"), f"bucket/rows/part-{number}.parquet")
        found = steps_of(recipe_of(folder, train="gs://bucket/rows/part-*.parquet"))
    finally:
        running.stop()
    assert found == steps_of(recipe_of(folder, train="part-*.parquet"))


def test_only_files_have_the_keys_of_streams(folder):
    assert {"streaming", "shuffle_window"} <= {*FileData.model_fields}
    assert not {"streaming", "shuffle_window"} & {*HubData.model_fields, *FolderData.model_fields}
    recipe = recipe_of(folder)
    assert isinstance(row_source(recipe), StreamSource)
    assert row_source(recipe.model_copy(update={"data": HubData(source="hub", name="a/b")})) is None


def first_rows_of(place: Path):
    recipe = SimpleNamespace(data=FileData(source="files", train=str(place), streaming=True))
    return StreamSource().read(recipe, ()).rows


def test_types_of_parquet(tmp_path):
    place = tmp_path / "a.parquet"
    views = {"text": pyarrow.array(["a"], pyarrow.string_view()), "bytes": pyarrow.array([b"a"], "binary_view")}
    unread = {"list": pyarrow.array([["x"]], pyarrow.list_view(pyarrow.string()))}
    pyarrow.parquet.write_table(pyarrow.table({**views, **unread}), place)
    rows = first_rows_of(place)
    assert rows.to_list() == [{"text": "a", "bytes": b"a"}]
    assert rows.features["text"].dtype == "string"
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["label"] * 2), place)
    with pytest.raises(DataError, match="names `label` more than once; rename one"):
        first_rows_of(place)


def test_half_of_a_pair_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("a", "b\ud800")))
    with pytest.raises(DataError, match=r"row 2 of .* has half of a surrogate pair"):
        first_rows_of(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.validation=http://host/rows.jsonl", "is for the training split"),
        ("data.group_by_length=true", "group_by_length"),
        ("data.validation=0.1", "hold out"),
        ("data.format=csv", "which `data.streaming` does not read"),
        ("data.encoding=latin-1", "encoding"),
        ("task.labels=null", "`task.labels` is missing"),
        ("task.class_weights=balanced", "not counted"),
        ("data.streaming=false", "shuffle_window"),
    ],
)
def test_refusals(folder, override, message):
    with pytest.raises(RecipeError, match=message):
        recipe_of(folder, override)
