"""Makes `train.jsonl` and `validation.jsonl` beside this file from the sentences of `../sample`.

Each row is a sentence with four topics, one of which is its own and has the relevance 1. Each run makes the same files:

    python recipes/choices/make_choices.py
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

FOLDER = Path(__file__).parent
LONGEST = 120  # characters of a sentence
NUM_CHOICES = 4


def main() -> None:
    for split in ("train", "validation"):
        text = (FOLDER.parent / "sample" / f"{split}.jsonl").read_text(encoding="utf-8")
        rows = [json.loads(line) for line in text.splitlines()]
        topics = sorted({row["label"] for row in rows})
        found = [_row(row["text"], row["label"], topics) for row in rows if len(row["text"]) <= LONGEST]
        lines = [json.dumps(row, ensure_ascii=False) for row in found]
        (FOLDER / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _row(sentence: str, own: str, topics: list[str]) -> dict[str, object]:
    """Return the row of a sentence with the topic `own`; a hash draws the other topics and the order."""
    others = sorted(set(topics) - {own}, key=lambda topic: _draw(sentence + topic))[: NUM_CHOICES - 1]
    choices = sorted([own, *others], key=lambda topic: _draw(topic + sentence))
    right = choices.index(own)
    relevance = [int(place == right) for place in range(NUM_CHOICES)]
    return {"sentence": sentence, "topics": choices, "answer": "ABCD"[right], "relevance": relevance}


def _draw(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


if __name__ == "__main__":
    main()
