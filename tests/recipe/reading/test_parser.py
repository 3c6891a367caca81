from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path

import pytest

from trainer.base.errors import RecipeError
from trainer.recipe.paths import shown_key, shown_value
from trainer.recipe.reading.files import MAX_BYTES, read_file
from trainer.recipe.reading.parser import MAX_DEPTH, Origin, parse

HERE = Origin("r.json")


def test_json_reads_as_the_standard_library_reads_it() -> None:
    text = '{"a": [1, -2.5e-3, true, false, null, "\\u00e9\\n\\ud83d\\ude00"], "b": {"c": {}, "d": []}, "e": 0}'
    tree, problems = parse(text, HERE)
    assert tree.plain() == json.loads(text)
    assert problems == []
    assert isinstance(tree.plain()["e"], int)


def test_comments_and_trailing_commas_are_allowed() -> None:
    tree, _ = parse('// first\n{"a": 1, /* { */ "b": "// no comment", "c": [1, 2,],}\n// last', HERE)
    assert tree.plain() == {"a": 1, "b": "// no comment", "c": [1, 2]}


def test_every_key_and_value_knows_its_line_and_column() -> None:
    tree, _ = parse('{\r\n  "a": 1,\n  /* é\n */ "b": [true,\n  "x"]\n}', HERE)
    a, b = tree.members["a"], tree.members["b"]
    assert (str(a.key_origin), str(a.origin)) == ("r.json:2:3", "r.json:2:8")
    assert (str(b.key_origin), str(b.origin)) == ("r.json:4:5", "r.json:4:10")
    assert isinstance(b.value, list)
    assert [str(item.origin) for item in b.value] == ["r.json:4:11", "r.json:5:3"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "r.json:1:1: empty"),
        ("// nothing\n", "r.json:1:1: empty"),
        ('{"a": 1', 'r.json:1:8: expected "," or "}" after the value, found the end of the text'),
        ('{"a": 1 "b": 2}', 'r.json:1:9: expected "," or "}" after the value, found `"b"`'),
        ("{a: 1}", 'r.json:1:2: expected a key in double quotes or "}", found `a`'),
        ("{'a': 1}", "r.json:1:2: strings need double quotes, not single quotes"),
        ('{"a" 1}', 'r.json:1:6: expected ":" after the key, found `1`'),
        ('{"a": True}', 'r.json:1:7: expected a value (JSON writes "true"), found `True`'),
        ('{"a": .5}', "r.json:1:7: .5 is not a JSON number (such as 0.5, 20, 2e-5)"),
        ('{"a": 1_000}', "r.json:1:7: 1_000 is not a JSON number (such as 0.5, 20, 2e-5)"),
        ('{"a": 007}', "r.json:1:7: 007 is not a JSON number (such as 0.5, 20, 2e-5)"),
        ("[1,, 2]", "r.json:1:4: expected a value, found `,`"),
        ('{"a": 1}\n}', "r.json:2:1: expected the end of the file, found `}`"),
        ('{"a": "b\n"}', "r.json:1:7: a string without a closing quote on the same line"),
        ('{"a": "\\q"}', "r.json:1:8: Invalid \\escape in a string"),
        ('{"a": /* b}', "r.json:1:7: a comment without a closing */"),
        ('{"a":\u00a01}', 'r.json:1:6: unexpected character "\\u00a0"'),
        (f'{{"a": {"9" * 101}}}', "r.json:1:7: a number of more than 100 characters"),
    ],
)
def test_a_syntax_error_has_its_line_and_problem(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse(text, HERE)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "a": 2}', "r.json:2:2: `a` is a duplicate key in one object; first at r.json:1:2"),
        ('{"a": {"b": [NaN]}}', "r.json:1:14: `a.b[0]` must be a finite number, but is NaN"),
        ('{"a": -Infinity}', "r.json:1:7: `a` must be a finite number, but is -Infinity"),
        ('{"a": 1e999}', "r.json:1:7: `a` must be a finite number, but is 1e999"),
        ('{"a": "\\ud800"}', 'r.json:1:7: `a` holds "\\ud800", which is not valid Unicode (unpaired surrogate)'),
        ('{"a": "\\u0000"}', 'r.json:1:7: `a` holds "\\u0000", which contains the character U+0000'),
    ],
)
def test_recoverable_errors_are_reported_with_the_rest(text: str, message: str) -> None:
    _, problems = parse(text, HERE)
    assert [str(problem) for problem in problems] == [message]


def test_halves_of_surrogate_pairs_never_reach_the_program() -> None:
    tree, _ = parse('{"\\udc00": "\\ud800"}', HERE)
    json.dumps(tree.plain(), ensure_ascii=False).encode("utf-8")


def test_depth_is_limited_and_no_more_than_that() -> None:
    tree, _ = parse("[" * MAX_DEPTH + "]" * MAX_DEPTH, HERE)
    assert json.dumps(tree.plain()).count("[") == MAX_DEPTH
    with pytest.raises(
        RecipeError, match=rf"r\.json:1:{MAX_DEPTH + 1}: nested deeper than the limit of {MAX_DEPTH} levels"
    ):
        parse("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), HERE)


@pytest.mark.parametrize("unit", ["[", '{"a":', '"\\', "/*", "-", '{"a":"', "\\", "//", '""'])
def test_bombs_end_in_a_clear_message_at_once(unit: str, tmp_path: Path) -> None:
    start = time.process_time()
    with pytest.raises(RecipeError) as parsed:
        parse(unit * (MAX_BYTES // len(unit)), HERE)
    assert len(str(parsed.value)) < 300
    (tmp_path / "bomb.json").write_text(unit * (10_000_000 // len(unit)))
    with pytest.raises(RecipeError, match=r"bomb\.json: cannot be read: it is larger than the limit of 1 MB"):
        read_file(tmp_path / "bomb.json")
    assert time.process_time() - start < 2


def test_the_largest_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("{}" + " " * (MAX_BYTES - 2))
    assert read_file(path)[0].plain() == {}


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    tree, _ = read_file(path)
    assert tree.plain() == {"a": 1}
    assert tree.members["a"].origin.column == 7


def test_files_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("utf16.json").write_bytes('{"a": 1}'.encode("utf-16"))
    Path("folder.json").mkdir()
    os.mkfifo("pipe.json")
    for name, reason in {
        "utf16.json": "it is not UTF-8 text (byte 0); save it as UTF-8",
        "folder.json": "it is a folder",
        "pipe.json": "it is not a regular file",
        "missing.json": "No such file or directory",
    }.items():
        with pytest.raises(RecipeError) as caught:
            read_file(Path(name))
        assert str(caught.value) == f"{name}: cannot be read: {reason}"


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read every file")
def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("{}")
    path.chmod(0)
    with pytest.raises(RecipeError, match="cannot be read: Permission denied"):
        read_file(path)


def test_nothing_that_is_shown_can_steer_a_terminal() -> None:
    assert shown_key("a\x1b[31m") == '"a\\u001b[31m"'
    assert shown_key("") == '""'
    assert shown_value("a\x9b31m\u202e") == '"a\\u009b31m\\u202e"'
    assert shown_value("é") == '"é"'
    assert len(shown_value("x" * 1000)) == 80
    assert shown_value(math.pi) == "3.141592653589793"
