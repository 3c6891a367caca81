"""The findings of an audit, and their forms: lines of a terminal, a CSV file, a page and JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.base.text import aligned, for_terminal, one_line
from trainer.tools.report.page import Section, Table, render
from trainer.tools.writing import write_over

_MOST_LINES = 15
_SHOWN = 60  # characters of an example in a terminal
_OF_PAGE = 20  # rows of each finding on a page
_IN_JSON = 100
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""First characters of cells that spreadsheets read as formulas, full-width ones too (OWASP, CSV injection)."""
HEADER = ("split", "row", "finding", "detail", "label", "believed", "score", "text", "digest")


@dataclass(frozen=True)
class FoundRow:
    """A row with a finding; its number is from 0."""

    split: str
    row: int
    detail: str = ""
    label: str = ""
    believed: str = ""
    score: float | None = None
    text: str = ""
    digest: str = ""


@dataclass(frozen=True)
class Finding:
    """Rows with the same finding, the most notable first.

    `rows` are those that are described; `number` counts all of them.
    """

    name: str
    split: str
    meaning: str
    number: int
    rows: Sequence[FoundRow]


@dataclass(frozen=True)
class AuditResult:
    """The result of an audit.

    Attributes:
        name: that of the recipe or of the run.
        sizes: the number of rows of each split.
        findings: the most notable first.
        facts: lines on all rows, such as the turns that are trained.
        notes: notes on the data, and on things that were not looked at.
        command: the command that measures the gain of leaving rows out; empty: there is none.
    """

    name: str
    sizes: Mapping[str, int]
    findings: Sequence[Finding]
    facts: Sequence[str] = ()
    notes: Sequence[str] = ()
    command: str = ""
    written: Sequence[str] = field(default=())

    def as_object(self) -> dict[str, Any]:
        """Return JSON values; each finding has its first rows."""
        return {
            "name": self.name,
            "rows": dict(self.sizes),
            "findings": [
                {
                    "finding": one.name,
                    "split": one.split,
                    "meaning": one.meaning,
                    "number": one.number,
                    "rows": [dict(zip(HEADER, _cells(one, row), strict=True)) for row in one.rows[:_IN_JSON]],
                }
                for one in self.findings
            ],
            "facts": list(self.facts),
            "notes": list(self.notes),
            "command": self.command,
        }


def lines(result: AuditResult) -> Iterator[str]:
    """Yield the lines of a terminal, at most 15."""
    sizes = " and ".join(f"{number:,} {name}" for name, number in result.sizes.items())
    number = sum(one.number for one in result.findings)
    verdict = f"{number:,} finding{'s' * (number > 1)}" if number else "nothing found"
    yield for_terminal(f"{result.name}: {verdict} in {sizes} rows")
    below = [*result.facts, *(f"note      {note}" for note in result.notes), *result.written]
    below += [f"measure   {result.command}"] if result.command else []
    left = max(3, _MOST_LINES - 1 - len(below))
    table = [
        (one.name, one.split, f"{one.number:,}", _example(one.rows[0]) if one.rows else "") for one in result.findings
    ]
    yield from map(for_terminal, aligned(table[: left if len(table) <= left else left - 1]))
    if len(table) > left:
        yield f"and {len(table) - left + 1} further findings: --output PAGE.html shows all"
    yield from (one_line(line) for line in below[: _MOST_LINES - 4])


def _example(row: FoundRow) -> str:
    words = [f"row {row.row + 1}", row.detail]
    if row.believed != row.label and row.believed:
        words.append(f"{row.label} or {row.believed}?")
    shown = one_line(", ".join(filter(None, words)))
    text = one_line(row.text)
    return f"{shown}: {text if len(text) <= _SHOWN else text[: _SHOWN - 4] + ' ...'}"


def _cells(finding: Finding, row: FoundRow) -> tuple[str, ...]:
    score = "" if row.score is None else f"{row.score:.6g}"
    texts = map(for_terminal, (row.detail, row.label, row.believed, score, row.text, row.digest))
    return (row.split, str(row.row + 1), finding.name, *texts)


def write_rows(result: AuditResult, path: Path) -> None:
    """Write a CSV file with a line for each row of each finding.

    A text that a spreadsheet would run as a formula begins with `'`, and all cells are quoted, as OWASP advises.

    Raises:
        TrainerError: it cannot be written.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerow(HEADER)
    for finding in result.findings:
        for row in finding.rows:
            cells = zip(HEADER, _cells(finding, row), strict=True)
            # A score is a number, which a spreadsheet reads as such.
            writer.writerow(
                "'" + cell if name != "score" and cell.startswith(_FORMULA) else cell for name, cell in cells
            )
    write_over(path, out.getvalue().encode(errors="backslashreplace").decode(), "--write")


def write_page(result: AuditResult, path: Path) -> None:
    """Write an HTML page.

    Raises:
        TrainerError: it cannot be written.
    """
    sizes = ", ".join(f"{number:,} {name} rows" for name, number in result.sizes.items())
    table = Table(
        ("finding", "split", "rows", "meaning"),
        [(one.name, one.split, f"{one.number:,}", one.meaning) for one in result.findings],
    )
    first = Section("Findings", [sizes, *([table] if table.rows else ["nothing found"]), *result.facts, *result.notes])
    parts = [first]
    for one in result.findings:
        rows = [_cells(one, row)[1:2] + _cells(one, row)[3:8] for row in one.rows[:_OF_PAGE]]
        header = ("row", "detail", "label", "believed", "score", "text")
        used = [place for place in range(len(header)) if place == 0 or any(row[place] for row in rows)]
        shown = Table([header[place] for place in used], [[row[place] for place in used] for row in rows])
        more = [f"and {one.number - len(rows):,} further rows"] if one.number > len(rows) else []
        parts.append(Section(f"{one.name}, {one.split}", [one.meaning, shown, *more]))
    if result.command:
        parts.append(Section("Measure the gain", [result.command]))
    write_over(path, render(f"Audit of {result.name}", parts), "--output")
