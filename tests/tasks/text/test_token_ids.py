from __future__ import annotations

import json
from typing import Any

import datasets
import pytest

from trainer.base.errors import DataError
from trainer.data.sources import Split, load_splits
from trainer.data.tokenised_split import encode_split
from trainer.features.masked_lm.section import MaskedLM
from trainer.recipe.schema import CausalLM, FileData, FolderData
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


def test_all_tokenised_sources_give_the_same_rows(tokenizer, tmp_path):
    rows = datasets.Dataset.from_dict({"input_ids": IDS})
    rows.to_parquet(tmp_path / "rows.parquet")
    rows.save_to_disk(tmp_path / "saved")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in IDS))
    sources = [FileData(source="files", train=str(tmp_path / name)) for name in ("rows.parquet", "rows.jsonl")]
    found = []
    for data in (*sources, FolderData(source="folder", path=str(tmp_path / "saved"), validation=None)):
        split = load_splits(data).train
        task = build_task(CausalLM(type="causal_lm", text="input_ids", packing="documents"))
        task = task.resolve(split.rows, split.where)
        encoded = encode_split(Split(split.rows, split.where), task, tokenizer, 4, tmp_path / "cache")
        found.append({name: values.tolist() for name, values in encoded.tokens.items()})
    assert found == [found[0]] * 3
    assert sum(label != -100 for label in found[0]["labels"]) == 9
