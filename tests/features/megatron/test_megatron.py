from __future__ import annotations

import base64
import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pytest

from trainer.base.errors import DataError
from trainer.data.sources import load_splits
from trainer.data.tokenised_split import encode_split
from trainer.recipe.schema import CausalLM, FileData
from trainer.tasks.registry import build_task

IDS = [[5, 6, 7, 8], [9, 5], [6, 7, 8, 9, 5, 6]]


def indexed(folder: Path, sequences: list[list[int]], bounds: list[int], kind: str = "<u2", code: int = 8) -> Path:
    """Write an indexed data set as Megatron does: sequences, and the first sequence of each document."""
    width = np.dtype(kind).itemsize
    np.array([token for one in sequences for token in one], kind).tofile(folder / "text_document.bin")
    starts = [width * sum(map(len, sequences[:place])) for place in range(len(sequences))]
    content = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(bounds))
    content += np.array([len(one) for one in sequences], "<i4").tobytes()
    content += np.array(starts, "<i8").tobytes() + np.array(bounds, "<i8").tobytes()
    (folder / "text_document.idx").write_bytes(content)
    return folder / "text_document.idx"


def overwrite(path: Path, place: int, content: bytes) -> None:
    whole = bytearray(path.read_bytes())
    place %= len(whole)
    whole[place : place + len(content)] = content
    path.write_bytes(whole)


@pytest.mark.parametrize(("kind", "code"), [("<u2", 8), ("<i4", 4)])
def test_indexed_data_sets_of_megatron(tmp_path, kind, code):
    path = indexed(tmp_path, IDS, [0, 1, 3], kind, code)
    rows = load_splits(FileData(source="files", train=str(path), validation=0.5)).train.rows
    whole = load_splits(FileData(source="files", train=str(path))).train.rows
    assert whole["input_ids"][:] == [IDS[0], IDS[1] + IDS[2]], "a document may have several sequences"
    assert len(rows) == 1


def test_documents_are_encoded_as_rows_of_json_lines_are(tokenizer, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in IDS))
    found = []
    for path in (indexed(tmp_path, IDS, [0, 1, 2, 3]), tmp_path / "rows.jsonl"):
        split = load_splits(FileData(source="files", train=str(path))).train
        task = build_task(CausalLM(type="causal_lm", text="input_ids", packing="documents"))
        encoded = encode_split(split, task.resolve(split.rows, split.where), tokenizer, 4, tmp_path / "cache")
        found.append({name: values.tolist() for name, values in encoded.tokens.items()})
    assert found[0] == found[1]


def test_files_of_megatrons_own_writer(tmp_path):
    # By its IndexedDatasetBuilder: documents of 1, 2, 3 and 1 sequences, one of them empty, and one of `add_document`.
    index = (
        "H4sICB6XCWsCA3UxNi5pZHgA8/X1dPF0iWBgYGSAAA5OKIMNiQZJsiJhBijNBMTMDAjAA6X5oLQElFaC0jpotBmUtmJABTDHMKO5hR1Kw9wIACwT6w++"
        "AAAA"
    )
    tokens = "aHzUY7E0HzwACLIOOyLWfkWyXWJ7dpm9fXstalttobYrNgeDiAD7THanQ2yCjlilTiJwEZaoAQACAAMABAAFAA=="
    (tmp_path / "own.idx").write_bytes(gzip.decompress(base64.b64decode(index)))
    (tmp_path / "own.bin").write_bytes(base64.b64decode(tokens))
    rows = load_splits(FileData(source="files", train=str(tmp_path / "own.idx"))).train.rows
    assert rows["input_ids"][:] == [
        [31848, 25556, 13489, 15391, 2048, 3762],
        [8763, 32470, 45637, 25181, 30331, 48537],
        [31613, 27181, 27995, 46753, 13867, 33543, 136, 19707, 42870, 27715],
        [36482, 42328, 8782, 4464, 43158],
        [1, 2, 3, 4, 5],
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda idx, _: idx.write_bytes(b"no index"), "must be an index of Megatron, but does not start as one"),
        (lambda idx, _: idx.write_bytes(idx.read_bytes()[:-9]), "must hold 3 sequences, but ends earlier"),
        (lambda _, tokens: tokens.write_bytes(tokens.read_bytes()[:-2]), "must hold 12 tokens, but has 22 bytes"),
        (lambda _, tokens: tokens.unlink(), "does not exist; copy it"),
        (
            lambda idx, _: idx.write_bytes(idx.read_bytes()[:17] + b"\x07" + idx.read_bytes()[18:]),
            "version 1 with type 7",
        ),
        (
            lambda idx, _: idx.write_bytes(idx.read_bytes()[:-8] + struct.pack("<q", 9)),
            "sequences and documents in order",
        ),
    ],
)
def test_damaged_indexed_data_sets_are_refused(tmp_path, change, problem):
    path = indexed(tmp_path, IDS, [0, 1, 2, 3])
    change(path, path.with_suffix(".bin"))
    with pytest.raises(DataError, match=problem):
        load_splits(FileData(source="files", train=str(path)))
