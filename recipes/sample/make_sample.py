"""Makes the sample: `train.jsonl`, `validation.jsonl`, `tokenizer/` and `decoder_tokenizer/` beside this file.

Each row is a passage of one to three sentences from a documentation string of Python's standard library; its label is
the family of the module that it documents. The files are the same whenever it is run, given Python 3.11.7 and the
versions of `tokenizers` and `transformers` named in `README.md`:

    python recipes/sample/make_sample.py
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PYTHON = (3, 11, 7)
FOLDER = Path(__file__).parent

FAMILIES = {
    "concurrency": (
        "asyncio concurrent multiprocessing queue sched selectors signal subprocess threading _threading_local"
    ),
    "files": (
        "bz2 dbm filecmp fileinput fnmatch genericpath glob gzip lzma ntpath os pathlib posixpath _pyio shelve shutil"
        " stat tarfile tempfile zipfile zipapp"
    ),
    "formats": (
        "base64 codecs configparser csv difflib email encodings html json mailbox mimetypes plistlib quopri re string"
        " stringprep textwrap tomllib xml"
    ),
    "graphics": "colorsys curses tkinter turtle",
    "network": (
        "cgi ftplib http imaplib ipaddress nntplib poplib smtplib socket socketserver ssl telnetlib urllib uuid"
        " webbrowser wsgiref xmlrpc"
    ),
    "numbers": "bisect calendar datetime fractions heapq numbers _pydecimal random statistics _strptime zoneinfo",
    "testing": (
        "bdb cProfile doctest faulthandler logging pdb profile pstats timeit trace traceback tracemalloc unittest"
        " warnings"
    ),
}

MOST_ROWS = 700  # of one family, so that no family has most of the rows
VALIDATION_SHARE = 0.16
SENTENCES = 3  # at most, in a row
SHORTEST, LONGEST = 50, 400  # characters of a row
NEAR = 0.6  # share of common word pairs from which two rows count as near-identical
VOCABULARY = 3000
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`'\"(])")
_PROSE = re.compile(r"[A-Z][\w'`\"-]*[ ,].*[.!?]")
_NOT_PROSE = re.compile(r">>>|::|[|=+*_-]{3,}|https?:|\.\.\.\s")


@dataclass(frozen=True)
class Row:
    """A passage, its family, and the documentation string that it is from."""

    text: str
    label: str
    docstring: str


def main() -> None:
    if sys.version_info[:3] != PYTHON:
        sys.exit(f"make_sample.py reads the standard library of Python {'.'.join(map(str, PYTHON))}, not {sys.version}")
    splits: dict[str, list[Row]] = {"train": [], "validation": []}
    for row in _balanced(_without_near_copies(_rows())):
        splits["validation" if _draw(row.docstring) < VALIDATION_SHARE else "train"].append(row)
    for name, rows in splits.items():
        lines = [json.dumps({"text": row.text, "label": row.label}, ensure_ascii=False) for row in rows]
        (FOLDER / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    _write_tokenizer([row.text for row in splits["train"]])


def _draw(text: str) -> float:
    """A number in [0, 1) that depends on `text` alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def _rows(sentences: int = SENTENCES) -> Iterator[Row]:
    for path, label in _paths():
        for docstring in _docstrings(path):
            yield from (Row(text, label, docstring) for text in _passages(docstring, sentences))


def _paths() -> Iterator[tuple[Path, str]]:
    """The source files of the modules, each with the family of its module."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for label, modules in FAMILIES.items():
        for module in modules.split():
            for path in sorted([library / f"{module}.py", *(library / module).rglob("*.py")]):
                if path.is_file() and not {"test", "tests"} & set(path.relative_to(library).parts):
                    yield path, label


def _docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield docstring


def _passages(docstring: str, most: int) -> Iterator[str]:
    """Runs of sentences of one paragraph; what is not prose (sessions, tables, argument lists) is left out."""
    for paragraph in re.split(r"\n\s*\n", docstring):
        if _NOT_PROSE.search(paragraph):
            continue
        sentences = _SENTENCE_END.split(" ".join(paragraph.split()))
        sentences = [sentence for sentence in sentences if _PROSE.fullmatch(sentence)]
        for start in range(0, len(sentences), most):
            passage = " ".join(sentences[start : start + most])
            if SHORTEST <= len(passage) <= LONGEST:
                yield passage


def _without_near_copies(rows: Iterator[Row]) -> Iterator[Row]:
    """Keeps the first of any rows that share at least `NEAR` of the smaller one's word pairs."""
    kept: list[set[tuple[str, str]]] = []
    holders: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        words = re.findall(r"\w+", row.text.lower())
        pairs = set(itertools.pairwise(words))
        common: dict[int, int] = {}
        for pair in pairs:
            for index in holders.get(pair, ()):
                common[index] = common.get(index, 0) + 1
        if any(count >= NEAR * min(len(pairs), len(kept[index])) for index, count in common.items()):
            continue
        for pair in pairs:
            holders.setdefault(pair, []).append(len(kept))
        kept.append(pairs)
        yield row


def _balanced(rows: Iterator[Row]) -> list[Row]:
    """At most `MOST_ROWS` of each family, drawn and mixed by the hash of the text."""
    taken = dict.fromkeys(FAMILIES, 0)
    mixed = []
    for row in sorted(rows, key=lambda row: _draw(row.text)):
        taken[row.label] += 1
        if taken[row.label] <= MOST_ROWS:
            mixed.append(row)
    return mixed


def _write_tokenizer(texts: list[str]) -> None:
    """Writes a lower-casing WordPiece tokenizer, as BERT's, trained on the training rows."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertTokenizerFast

    splitter = BertWordPieceTokenizer(lowercase=True)
    words: Counter[str] = Counter()
    for text in texts:
        words.update(word for word, _ in splitter.pre_tokenizer.pre_tokenize_str(splitter.normalize(text)))
    vocabulary = {piece: index for index, piece in enumerate([*SPECIAL_TOKENS, *_word_pieces(words)])}
    wordpiece = BertWordPieceTokenizer(vocabulary, lowercase=True)
    tokenizer = BertTokenizerFast(tokenizer_object=wordpiece._tokenizer, do_lower_case=True, model_max_length=128)
    tokenizer.save_pretrained(FOLDER / "tokenizer")
    _write_decoder_tokenizer(wordpiece._tokenizer.to_str())


def _write_decoder_tokenizer(content: str) -> None:
    """Writes the same tokenizer for decoders: it adds no token to a text, and has an end token and a chat template."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    description = json.loads(content)
    description["post_processor"] = None
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(description)),
        model_max_length=256,
        eos_token="[SEP]",
        pad_token="[PAD]",
        unk_token="[UNK]",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(FOLDER / "decoder_tokenizer")


def _word_pieces(words: Counter[str]) -> list[str]:
    """All characters, then the most frequent pair of neighbours merged, again and again (Sennrich et al. 2016).

    The trainer of `tokenizers` does the same, but breaks ties in another way each time it is run.
    """
    spelling = {word: [word[0], *(f"##{letter}" for letter in word[1:])] for word in sorted(words)}
    pieces = dict.fromkeys(sorted({piece for parts in spelling.values() for piece in parts}))
    pairs: Counter[tuple[str, str]] = Counter()
    holders: dict[tuple[str, str], dict[str, None]] = {}
    for word, parts in spelling.items():
        for pair in itertools.pairwise(parts):
            pairs[pair] += words[word]
            holders.setdefault(pair, {})[word] = None
    while len(SPECIAL_TOKENS) + len(pieces) < VOCABULARY:
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merged = best[0] + best[1].removeprefix("##")
        pieces[merged] = None
        for word in holders.pop(best):
            parts = spelling[word]
            pairs.subtract({pair: n * words[word] for pair, n in Counter(itertools.pairwise(parts)).items()})
            spelling[word] = parts = _merge(parts, best, merged)
            pairs.update({pair: n * words[word] for pair, n in Counter(itertools.pairwise(parts)).items()})
            for pair in itertools.pairwise(parts):
                holders.setdefault(pair, {})[word] = None
        del pairs[best]
    return list(pieces)


def _merge(parts: list[str], pair: tuple[str, str], merged: str) -> list[str]:
    out: list[str] = []
    for part in parts:
        if out and (out[-1], part) == pair:
            out[-1] = merged
        else:
            out.append(part)
    return out


if __name__ == "__main__":
    main()
