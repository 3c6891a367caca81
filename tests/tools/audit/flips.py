"""The share of flipped labels that the judge of the audit finds: `python -m tests.tools.audit.flips SET [SEED ...]`.

5 % of the labels are flipped. The share is that of flipped rows among the 5 % with the smallest margins. The ceiling is
the same share by the same model, if it learns from the labels before they were flipped.
"""

from __future__ import annotations

import json
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.processes import ROOT
from trainer.tools.audit import judge

SHARE = 0.05
REAL = Path("/work/shared/data")
ENTITIES = ROOT / "trainer" / "features" / "token_classification" / "recipes" / "train.jsonl"
FILES = {
    "sample": (ROOT / "recipes" / "sample" / "train.jsonl", "text"),
    "trec": (REAL / "trec_train.jsonl", "question"),
    "sst2": (REAL / "sst2_train.jsonl", "sentence"),
    "entities": (ENTITIES, "words"),
    "wnut17": (REAL / "wnut17_train.jsonl", "tokens"),
}


_LEARN = judge._out_of_fold


def read(name: str) -> list[dict[str, Any]]:
    """Return rows with `text` and `label`, or `words` and `tags`."""
    file, column = FILES[name]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    if "tags" in rows[0]:
        return [{"words": row[column], "tags": row["tags"]} for row in rows]
    return [{"text": row[column], "label": str(row["label"])} for row in rows]


def flip(rows: list[dict[str, Any]], seed: int = 5) -> set[int]:
    """Give 5 % of the rows another label, and return them."""
    draw = random.Random(seed)
    labels = sorted({row["label"] for row in rows})
    flipped = set(draw.sample(range(len(rows)), round(SHARE * len(rows))))
    for row in flipped:
        rows[row]["label"] = draw.choice([label for label in labels if label != rows[row]["label"]])
    return flipped


def flip_entities(rows: list[dict[str, Any]], seed: int = 5) -> set[int]:
    """Give an entity in 5 % of the rows with entities another type, and return these rows."""
    draw = random.Random(seed)
    types = sorted({tag[2:] for row in rows for tag in row["tags"] if tag != "O"})
    with_entity = [number for number, row in enumerate(rows) if any(tag != "O" for tag in row["tags"])]
    flipped = set(draw.sample(with_entity, round(SHARE * len(with_entity))))
    for number in flipped:
        tags = rows[number]["tags"] = list(rows[number]["tags"])
        start = draw.choice([place for place, tag in enumerate(tags) if tag[0] == "B"])
        end = next((place for place in range(start + 1, len(tags)) if tags[place][0] != "I"), len(tags))
        kind = draw.choice([one for one in types if one != tags[start][2:]])
        tags[start:end] = [f"{tag[:2]}{kind}" for tag in tags[start:end]]
    return flipped


def similar_pairs(draw: random.Random) -> list[dict[str, Any]]:
    """Return pairs of sentences as in MRPC: nearly all words of one are in the other, and they say the same or not.

    The second sentence has its halves swapped. Of those that say the same, 10 % of the words are other ones, else 35 %.
    """
    texts = [row["text"].split()[:24] for row in read("sample")]
    texts = [text for text in texts if len(text) >= 12][:2000]
    rows: list[dict[str, Any]] = []
    for text in texts:
        label = draw.choice(["equal", "other"])
        changed = draw.sample(range(len(text)), round(len(text) * {"equal": 0.1, "other": 0.35}[label]))
        second = [draw.choice(draw.choice(texts)) if place in changed else word for place, word in enumerate(text)]
        half = len(text) // 2
        rows.append({"first": " ".join(text), "second": " ".join(second[half:] + second[:half]), "label": label})
    return rows


def main(name: str, seeds: list[int]) -> None:
    for seed in seeds:
        rows = similar_pairs(random.Random(seed)) if name == "pairs" else read(name)
        right = [row.get("label", row.get("tags")) for row in rows]
        flipped = (flip if "label" in rows[0] else flip_entities)(rows, seed)
        wrong = [row.get("label", row.get("tags")) for row in rows]
        names = sorted({*_flat(right), *_flat(wrong)})
        numbers, given = (np.array([names.index(one) for one in _flat(labels)], np.int64) for labels in (right, wrong))
        shown = []
        for is_ceiling in (False, True):
            judge._out_of_fold = partial(_by_right_labels, numbers) if is_ceiling else _LEARN
            if "tags" in rows[0]:
                ends = np.cumsum([len(row) for row in wrong])[:-1]
                found = judge.judge_words([row["words"] for row in rows], np.split(given, ends))
            else:
                columns = [[row[one] for row in rows] for one in rows[0] if one != "label"]
                found = judge.judge_rows(columns, given)
            judge._out_of_fold = _LEARN
            assert found is not None
            worst = {*np.argsort(found.margin, kind="stable")[: len(flipped)].tolist()}
            shown.append(f"{len(worst & flipped) / len(flipped):.2f}")
            if not is_ceiling:
                listed = {*found.suspects.tolist()}
                more = f"right {found.right:.2f}  listed {len(listed):,}, {len(listed & flipped):,} of them flipped"
        print(f"{name} seed {seed}: found {shown[0]} of {len(flipped)}, ceiling {shown[1]}  {more}", flush=True)


def _by_right_labels(right: judge.Rows, features: Any, labels: judge.Rows, parts: judge.Rows, fit: judge.Fit) -> Any:
    return _LEARN(features, right, parts, fit)


def _flat(labels: Any) -> list[str]:
    return [one for row in labels for one in ([row] if isinstance(row, str) else row)]


if __name__ == "__main__":
    main(sys.argv[1], [int(seed) for seed in sys.argv[2:]] or [1, 2, 3])
