from __future__ import annotations

import base64
import gzip
import json
import struct
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from trainer.base.errors import DataError
from trainer.data.sources import Split, load_splits
from trainer.data.tokenised_split import encode_split
from trainer.recipe.schema import CausalLM, FileData, FolderData, MaskedLM
from trainer.tasks.registry import build_task

IDS = [[5, 6, 7, 8], [9, 5], [6, 7, 8, 9, 5, 6]]
WHERE = "`rows.jsonl`"


def encode(tokenizer: Any, columns: dict[str, Any], max_length: int = 20, masked: bool = False, **keys: Any):
    rows = datasets.Dataset.from_dict(columns)
    recipe = (
        MaskedLM(type="masked_lm", text="input_ids") if masked else CausalLM(type="causal_lm", text="input_ids", **keys)
    )
    task = build_task(recipe).resolve(rows, WHERE).changed(num_tokens=len(tokenizer))
    return task, rows, task.encode(rows, tokenizer, max_length, WHERE, 0)


def test_rows_without_labels_are_trained_as_texts_are(tokenizer):
    _, _, features = encode(tokenizer, {"input_ids": IDS}, max_length=4)
    assert features == {
        "input_ids": [[5, 6, 7], [9], [6, 7, 8, 9], [5]],
        "labels": [[6, 7, 8], [5], [7, 8, 9, 5], [6]],
    }


def test_labels_and_masks_are_read(tokenizer):
    columns = {
        "input_ids": [[5, 6, 7, 0], [0, 9, 5, 6], [5, 6, 7, 8]],
        "attention_mask": [[1, 1, 1, 0], [0, 1, 1, 1], [1, 1, 1, 1]],
        "labels": [[-100, 6, 7, -100], [-100, -100, -100, 6], [-100, 6, -100, 8]],
    }
    task, rows, features = encode(tokenizer, columns, max_length=3)
    assert features == {
        "input_ids": [[5, 6], [9, 5], [5, 6]],
        "labels": [[6, 7], [-100, 6], [6, -100]],
        "cut": [False, False, True],
    }
    assert task.conversion_notes(rows.features) == [
        "column `input_ids` holds token ids, which are read with `attention_mask` and `labels`"
    ]
    _, _, masked = encode(tokenizer, columns, max_length=2, masked=True)
    assert masked == {"input_ids": [[5, 6], [9, 5], [5, 6]], "cut": [True, True, True]}


@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks", "loss_mask"])
def test_tokens_are_trained_where_a_mask_of_another_tool_is_1(tokenizer, name):
    columns = {"input_ids": [[5, 6, 7, 8], [9, 5, 0, 0]], name: [[0, 0, 1, 1], [0, 1, 1, 0]]}
    task, rows, features = encode(tokenizer, columns, packing="documents")
    assert features["labels"] == [[-100, 7, 8], [5, 0, -100]]
    assert f"read with `{name}`" in task.conversion_notes(rows.features)[0]
    columns |= {"attention_mask": [[1] * 4, [1, 1, 0, 0]], "labels": [[5, 6, 7, 8], [-100] * 3 + [0]]}
    with pytest.raises(DataError, match=f"column `{name}`, row 2 of .* has no token to train"):
        encode(tokenizer, columns)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        (
            {"input_ids": [[5, 6]], "completion_mask": [[0, 2]]},
            "column `completion_mask`, row 1 of .* must be 1 for the",
        ),
        (
            {"input_ids": [[5], [5, 3000]]},
            "column `input_ids`, row 2 of `rows.jsonl` has the token 3000, and the model has",
        ),
        ({"input_ids": [[5, -1]]}, "column `input_ids`, row 1 of `rows.jsonl` has the token -1"),
        ({"input_ids": [[5, 6]], "labels": [[5, 3000]]}, "column `labels`, row 1 of `rows.jsonl` has the token 3000"),
        ({"input_ids": [[5, 6]], "labels": [[5]]}, "must have a number for each of 2 tokens, but has 1"),
        ({"input_ids": [[5, 6, 7]], "attention_mask": [[1, 0, 1]]}, "must be 1 for the tokens and 0 before or behind"),
        ({"input_ids": [[5, 6]], "labels": [[-100, -100]]}, "column `labels`, row 1 .* has no token to train"),
        ({"input_ids": [[5, None]]}, "column `input_ids`, row 1 of `rows.jsonl` holds null"),
        ({"input_ids": [[0.5]]}, "`task.text` must name a column of strings or of token ids"),
    ],
)
def test_bad_rows_are_refused(tokenizer, columns, problem):
    with pytest.raises(DataError, match=problem):
        encode(tokenizer, columns)


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


def test_all_tokenised_sources_give_the_same_rows(tokenizer, tmp_path):
    rows = datasets.Dataset.from_dict({"input_ids": IDS})
    rows.to_parquet(tmp_path / "rows.parquet")
    rows.save_to_disk(tmp_path / "saved")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in IDS))
    sources = [FileData(source="files", train=str(tmp_path / name)) for name in ("rows.parquet", "rows.jsonl")]
    sources += [FileData(source="files", train=str(indexed(tmp_path, IDS, [0, 1, 2, 3])))]
    found = []
    for data in (*sources, FolderData(source="folder", path=str(tmp_path / "saved"), validation=None)):
        split = load_splits(data).train
        task = build_task(CausalLM(type="causal_lm", text="input_ids", packing="documents"))
        task = task.resolve(split.rows, split.where)
        encoded = encode_split(Split(split.rows, split.where), task, tokenizer, 4, tmp_path / "cache")
        found.append({name: values.tolist() for name, values in encoded.tokens.items()})
    assert found == [found[0]] * 4
    assert sum(label != -100 for label in found[0]["labels"]) == 9
