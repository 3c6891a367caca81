"""The examples of `docs/coming_from.md` give the outputs on the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.processes import ROOT
from trainer.base.errors import ExitCode
from trainer.cli import main

PAGE = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")


def test_examples_give_the_output_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    for name, content in re.findall(r"^cat > (\S+) <<'EOF'\n(.*?)^EOF$", PAGE, re.DOTALL | re.MULTILINE):
        Path(name).write_text(content, encoding="utf-8")
    recipe, alone, program = re.findall(r"^```jsonc\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    report, alone_report, program_report = re.findall(r"^```text\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    first, second, third = re.findall(r"^trainer (convert .*)$", PAGE, re.MULTILINE)
    assert main(first.split()) == ExitCode.DONE
    assert Path("mrpc.json").read_text(encoding="utf-8") == recipe
    assert has_lines(capsys.readouterr().err, report)
    assert main(second.split()) == ExitCode.DONE
    shown = capsys.readouterr()
    assert shown.out == alone
    assert has_lines(shown.err, alone_report)
    assert main(third.split()) == ExitCode.DONE
    shown = capsys.readouterr()
    assert shown.out == program
    assert has_lines(shown.err, program_report)


def has_lines(text: str, page: str) -> bool:
    """Whether `text` has the lines of the page in their order, and others only where the page has `...`."""
    parts = [re.escape(part) for part in re.split(r"^  \.\.\.\n", page, flags=re.MULTILINE)]
    return re.fullmatch("(?:.*\n)*?".join(parts), text) is not None
