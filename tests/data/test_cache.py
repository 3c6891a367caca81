from __future__ import annotations

import json
import os
import pickle
import threading

import numpy as np
import pytest

from tests.checkpoint.samples import changed
from trainer.data.cache import CorruptEntryError, EntryWriter, open_entry, open_or_write

ROWS = {"input_ids": [[1, 2, 3], [4]], "token_type_ids": [[0, 0, 1], [0]], "labels": [1, 0], "cut": [True, False]}


def write(folder, *batches):
    with EntryWriter(folder) as writer:
        for batch in batches:
            writer.add(batch)
    return folder


def test_rows_come_back(tmp_path):
    split = open_entry(write(tmp_path / "entry", ROWS, ROWS), verify=True)
    assert len(split) == 4
    assert split.lengths.tolist() == [3, 1, 3, 1]
    assert split.tokens["input_ids"].tolist() == [1, 2, 3, 4, 1, 2, 3, 4]
    assert split.tokens["input_ids"][split.offsets[2] : split.offsets[3]].tolist() == [1, 2, 3]
    assert split.scalars["labels"].tolist() == [1, 0, 1, 0]
    assert split.num_cut == 2


def test_numbers_keep_their_kind(tmp_path):
    rows = ROWS | {"labels": [0.5, 2.0]}
    assert open_entry(write(tmp_path / "entry", rows)).scalars["labels"].dtype == np.float32
    assert open_entry(write(tmp_path / "other", ROWS)).scalars["labels"].dtype == np.int64


def test_labels_of_tokens_run_along_with_them(tmp_path):
    split = open_entry(write(tmp_path / "entry", ROWS | {"labels": [[-100, 1, 2], [0]]}))
    assert split.tokens["labels"].tolist() == [-100, 1, 2, 0]
    assert not split.scalars


def test_arrays_come_back_in_their_shape(tmp_path):
    images = [np.arange(6, dtype=np.uint8).reshape(1, 2, 3) + index for index in range(3)]
    split = open_entry(write(tmp_path / "entry", *[{"pixel_values": images, "labels": [0, 1, 0]}] * 2), verify=True)
    np.testing.assert_array_equal(split.arrays["pixel_values"], images * 2)
    assert (len(split), split.lengths.tolist(), split.tokens, split.num_cut) == (6, [0] * 6, {}, 0)
    again = pickle.loads(pickle.dumps(split))
    np.testing.assert_array_equal(again.arrays["pixel_values"], images * 2)


def test_the_content_hash_depends_on_content(tmp_path):
    one, same = (open_entry(write(tmp_path / name, ROWS)) for name in ("a", "b"))
    other = open_entry(write(tmp_path / "c", ROWS | {"labels": [1, 1]}))
    assert one.content_hash == same.content_hash != other.content_hash


def test_a_split_travels_to_a_worker_as_its_folder(tmp_path):
    split = open_entry(write(tmp_path / "entry", *[ROWS] * 500))
    sent = pickle.dumps(split)
    assert len(sent) < 1000
    np.testing.assert_array_equal(pickle.loads(sent).tokens["input_ids"], split.tokens["input_ids"])


def test_an_error_leaves_nothing_behind(tmp_path):
    with pytest.raises(KeyError), EntryWriter(tmp_path / "entry") as writer:
        writer.add({"cut": [False]})
    assert not list(tmp_path.iterdir())


def test_files_of_a_killed_writer_are_replaced(tmp_path):
    killed = EntryWriter(tmp_path / "entry")
    killed.__enter__()
    killed.add(ROWS)
    with pytest.raises(FileNotFoundError):
        open_entry(tmp_path / "entry")
    assert len(open_entry(write(tmp_path / "entry", ROWS), verify=True)) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def rewrite_meta(path, change):
    meta = json.loads(path.read_text())
    change(meta)
    path.write_text(json.dumps(meta))


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: (entry / "input_ids").write_bytes(b""),
        lambda entry: (entry / "input_ids").unlink(),
        lambda entry: flip_a_byte(entry / "labels"),
        lambda entry: flip_a_byte(entry / "offsets"),
        lambda entry: (entry / "meta.json").unlink(),
        lambda entry: (entry / "meta.json").write_bytes(b"\xff\xfe"),
        lambda entry: (entry / "meta.json").write_text("[]"),
        lambda entry: rewrite_meta(entry / "meta.json", lambda meta: meta.pop("num_cut")),
        lambda entry: rewrite_meta(entry / "meta.json", lambda meta: meta["arrays"].pop("labels")),
        lambda entry: rewrite_meta(entry / "meta.json", lambda meta: meta["arrays"]["labels"].update(dtype="O")),
    ],
)
def test_damage_is_found(tmp_path, damage):
    entry = write(tmp_path / "entry", ROWS)
    damage(entry)
    with pytest.raises(CorruptEntryError):
        open_entry(entry, verify=True)


def test_two_runs_that_share_a_damaged_entry(tmp_path):
    """Each file is damaged in many ways, before both runs open the entry and while they hold it."""
    cache, num_written = tmp_path / "cache", 0

    def fill(writer):
        nonlocal num_written
        num_written += 1
        writer.add(ROWS)

    def both():
        found = []
        runs = [threading.Thread(target=lambda: found.append(open_or_write(cache, "entry", fill))) for _ in range(2)]
        for run in runs:
            run.start()
        for run in runs:
            run.join()
        assert [split.tokens["input_ids"].tolist() for split in found] == [[1, 2, 3, 4]] * 2
        return found

    held = both()
    files = sorted((cache / "entry").iterdir())
    assert (num_written, len(files)) == (1, 5)
    for file in files:
        for change in range(24):
            content, before = file.read_bytes(), num_written
            damaged = changed(content, change)
            file.unlink()  # a write in place would reach the runs that hold the entry
            file.write_bytes(damaged)
            both()
            assert num_written - before == (damaged != content), (file, change)
        for make in (os.mkfifo, os.mkdir, lambda path: path.symlink_to("nowhere"), lambda path: None):
            file.unlink()
            make(file)
            both()
    assert [split.tokens["input_ids"].tolist() for split in held] == [[1, 2, 3, 4]] * 2
