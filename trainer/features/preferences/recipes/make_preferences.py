"""Makes `train.jsonl` and `validation.jsonl` beside this file, from the short sentences of `recipes/sample`.

Each row is a sentence, an answer that names its topic in a calm sentence, and one that shouts it:

    python trainer/features/preferences/recipes/make_preferences.py
"""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).parent
SAMPLE = FOLDER.parents[3] / "recipes" / "sample"
LONGEST = 80  # characters of a sentence


def main() -> None:
    for split in ("train", "validation"):
        lines = (SAMPLE / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        with (FOLDER / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for row in map(json.loads, lines):
                text, topic = row["text"], row["label"]
                if len(text) <= LONGEST:
                    pair = {"prompt": text, "chosen": f" The topic is {topic}.", "rejected": f" {topic}! {topic}!"}
                    file.write(json.dumps(pair) + "\n")


if __name__ == "__main__":
    main()
