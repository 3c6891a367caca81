"""Makes the questions of `qa_sample`: `train.jsonl` and `validation.jsonl` beside that recipe.

Each context is a documentation string of Python's standard library. Patterns find facts in it, such as the exception
that a function raises. A fact gives a question, and its answer is a span of the context. Some questions have no
answer. The files are the same at every run with Python 3.11.7:

    python tests/features/question_answering/make_questions.py
"""

from __future__ import annotations

import ast
import json
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "trainer" / "features" / "question_answering" / "recipes"
sys.path.insert(0, str(ROOT / "recipes" / "sample"))

from make_sample import PYTHON, _draw, _without_near_copies  # noqa: E402

OTHERS = {"test", "tests", "site-packages", "idlelib", "lib2to3"}
SHORTEST, LONGEST = 60, 420  # characters of a context
VALIDATION_SHARE = 0.16
UNANSWERABLE_SHARE = 0.05  # of the contexts without a word on errors

FACTS = {
    "What does {} return?": r"\b[Rr]eturns? (?!value)(?P<answer>[\w' -]{6,60}?)(?=[.,;:(]| if | when | that )",
    "Which error does {} raise?": r"\b[Rr]aises? (?:an? |the )?(?P<answer>\w+(?:Error|Exception|Warning|Exit))\b",
    "When does {} raise an error?": r"Error (?:is raised )?(?:if|when) (?P<answer>[\w' -]{6,60}?)(?=[.,;:(])",
    "What is the default of {}?": r"\b[Dd]efault(?:s|ing) to (?P<answer>[\w'\"/.-]*\w[\w'\"/-]*)",
    "What is {} used for?": r"\bused (?:to|for) (?P<answer>[\w' -]{4,60}?)(?=[.,;:(])",
    "What happens in {} if {given} is {state}?": (
        r"\bIf (?P<given>\w+) is (?P<state>[Tt]rue|[Ff]alse|None|given|specified|omitted|not given),"
        r" (?P<answer>[\w' -]{6,60}?)(?=[.,;:(])"
    ),
}
"""The form of a question, and the pattern that finds its answer."""
UNANSWERABLE = "Which error does {} raise?"


@dataclass(frozen=True)
class Document:
    """A documentation string without line breaks, and the name that it documents."""

    name: str
    text: str


def main() -> None:
    if sys.version_info[:3] != PYTHON:
        sys.exit(f"this script reads the standard library of Python {'.'.join(map(str, PYTHON))}, not {sys.version}")
    splits: dict[str, list[str]] = {"train": [], "validation": []}
    for document in sorted(_without_near_copies(_documents()), key=lambda document: _draw(document.text)):
        name = "validation" if _draw(document.text[::-1]) < VALIDATION_SHARE else "train"
        splits[name].extend(json.dumps(row, ensure_ascii=False) for row in _questions(document))
    for name, lines in splits.items():
        (FOLDER / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _documents() -> Iterator[Document]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        if OTHERS & set(path.relative_to(library).parts):
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = " ".join((ast.get_docstring(node) or "").split())
                if SHORTEST <= len(text) <= LONGEST:
                    yield Document(node.name, text)


def _questions(document: Document) -> Iterator[dict[str, object]]:
    for form, pattern in FACTS.items():
        match = re.search(pattern, document.text)
        if match is not None and match["answer"].lower() not in ("a", "an", "the"):
            question = form.format(document.name, **match.groupdict())
            yield _row(question, document, {"text": [match["answer"]], "answer_start": [match.start("answer")]})
    has_errors = re.search("rais|error|exception", document.text.lower()) is not None
    if not has_errors and _draw(document.name + document.text) < UNANSWERABLE_SHARE:
        yield _row(UNANSWERABLE.format(document.name), document, {"text": [], "answer_start": []})


def _row(question: str, document: Document, answers: dict[str, list[object]]) -> dict[str, object]:
    return {"question": question, "context": document.text, "answers": answers}


if __name__ == "__main__":
    main()
