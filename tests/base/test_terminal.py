from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

import trainer
from tests.helpers.tiny_run import write_tiny_run
from trainer.base.drawn import SafeConsole
from trainer.base.errors import ExitCode
from trainer.base.terminal import say, say_json, say_styled, say_text
from trainer.cli import main

HOSTILE = "\x1b]0;title\x07\x9b31m\u202e\u2066\x7f\r"
SHOWN = r"\x1b]0;title\x07\x9b31m\u202e\u2066\x7f\r"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
FORGED = "\nforged a line"
"""A line break in a value, which must not begin a line."""
OF_TEXTS = ("base/terminal.py", "cli/convert.py", "cli/launch_script.py", "cli/plan.py", "cli/rehearse.py")
"""The modules that write texts with line breaks of their own."""
WRITERS = ("base/terminal.py", "base/drawn.py")


def test_texts_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]):
    say(f"a {HOSTILE}\tb", "c\nd")
    say_text(f"{HOSTILE}\nb", err=True)
    say_styled("\x1b[1mbold\x1b[0m")
    assert capsys.readouterr() == (f"a {SHOWN}\tb\nc\\nd\nbold\n", f"{SHOWN}\nb\n")
    say_json(json.dumps({HOSTILE: HOSTILE}, ensure_ascii=False, indent=1))
    shown = capsys.readouterr().out
    assert (CONTROL.search(shown), json.loads(shown)) == (None, {HOSTILE: HOSTILE})


def test_a_stream_of_few_characters_does_not_end_the_program(monkeypatch: pytest.MonkeyPatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    say("caf\u00e9 \ud800")
    stream.seek(0)
    assert stream.read() == "caf\\xe9 \\ud800\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_drawing_has_the_styles_of_the_program_and_no_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    console = SafeConsole(stream := Terminal())
    table = Table("name")
    table.add_row(f"\x1b[2K\x1b[1Aname {HOSTILE}")
    for part in (Text(HOSTILE, style="bold"), f"[red]{HOSTILE}", table):
        console.print(part, soft_wrap=True)
    shown = stream.getvalue()
    assert "\x1b[1m" in shown
    assert "[red]" in shown
    assert CONTROL.search(re.sub("\x1b\\[[0-9;]*m", "", shown)) is None


def test_a_program_escapes_the_words_of_libraries_and_of_python():
    code = (
        "import logging, warnings; from trainer.base.terminal import guard; guard();"
        f"text = {HOSTILE!a}; logging.warning('log %s', text); warnings.warn('warning ' + text);"
        "raise ValueError('error ' + text)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    shown = ended.stderr.decode().replace("\n", " ")
    for word in ("log", "warning", "ValueError: error"):
        assert f"{word} {SHOWN}" in shown
    assert CONTROL.search(shown) is None


def test_names_and_texts_of_rows_are_shown_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    label = f"label{HOSTILE}{FORGED}"
    recipe = write_tiny_run(tmp_path, task={"label": label})
    for name in ("train", "validation"):
        rows = [
            {"text": f"{'word1 ' * 9}{FORGED}{HOSTILE}", label: f"{'abc'[row % 3]}{FORGED}{HOSTILE}"}
            for row in range(12)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for command in (["preview"], ["check", "--all", "--quick"], ["check", f"task.text={HOSTILE}{FORGED}"]):
        code = main([command[0], str(recipe), *command[1:]])
        shown = "".join(capsys.readouterr())
        assert code == (ExitCode.USER if len(command) > 1 and "=" in command[1] else ExitCode.DONE), shown
        assert CONTROL.search(shown) is None, command
        assert "title" in shown
        assert FORGED not in shown
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({**row, f"x{FORGED}": "y"}) + "\n" for row in rows))
    (tmp_path / "arguments.json").write_text(json.dumps({"output_dir": FORGED, "run_name": FORGED, f"x{FORGED}": None}))
    place = str(tmp_path / f"a{FORGED}.yaml")
    for verb in (["init", str(tmp_path / "rows.jsonl"), "--yes", "-o", place], ["runs", place], ["report", place]):
        main(verb)
    main(["convert", str(tmp_path / "arguments.json"), "--from", "training-arguments", "--all"])
    shown = "".join(capsys.readouterr())
    assert shown.count(r"\nforged a line") > 5
    assert FORGED not in shown


def test_no_module_writes_to_the_terminal_but_the_writers():
    folder = Path(trainer.__file__).parent
    writes = re.compile(r"print|Console|typer\.s?echo|(?:sys\.)?std(?:out|err)\.write(?:lines)?")
    sources = {file: file.read_text(encoding="utf-8") for file in folder.rglob("*.py")}
    of_texts = [file for file, source in sources.items() if "say_text(" in source]
    assert sorted(file.relative_to(folder).as_posix() for file in of_texts) == sorted(OF_TEXTS)
    found = [
        f"{file.relative_to(folder)}:{node.lineno}"
        for file, source in sources.items()
        if file.relative_to(folder).as_posix() not in WRITERS and writes.search(source)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and writes.fullmatch(ast.unparse(node.func))
    ]
    assert not found, "write by `say` of base/terminal.py"
