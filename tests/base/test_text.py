"""Values that are safe to show in a terminal."""

from __future__ import annotations

import pytest

from trainer.base.text import for_terminal, has_secret, masked, without_secrets
from trainer.cli.options import without_repetitions


def test_controls_are_escaped_and_lines_stay():
    controls = [*map(chr, range(32)), *map(chr, range(0x7F, 0xA0)), "\u2028", "\u2029", "\u202e", "\u2066"]
    shown = for_terminal("".join(controls))
    assert {text for text in shown if not text.isprintable()} == {"\t", "\n"}
    assert for_terminal("a\x1b[31mb\x9b\u202e\r") == "a\\x1b[31mb\\x9b\\u202e\\r"
    assert for_terminal('`é`:\n\t"日本"') == '`é`:\n\t"日本"'


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("trainer run r.json training.epochs=1", "trainer run r.json training.epochs=1"),
        ("env WANDB_API_KEY=abc HF_TOKEN=hf_x trainer", "env WANDB_API_KEY=*** HF_TOKEN=*** trainer"),
        ("'MLFLOW_TRACKING_PASSWORD=two words' next", "'MLFLOW_TRACKING_PASSWORD=***' next"),
        ("HF_TOKEN='two words' next", "HF_TOKEN=*** next"),
        ("in https://user:p@ss@host:5000/a?b=1", "in https://host:5000/a?b=1"),
        ("https://host/a?access_token=x&b=1&ApiKey=y#z", "https://host/a?access_token=***&b=1&ApiKey=***#z"),
        ("mail a@b.c", "mail a@b.c"),
        ("at ftp://me:p/a?s#s@host/a.", "at ftp://host/a."),
        ("at /data/ftp:/me:pass@host/a", "at /data/ftp://host/a"),
        ("s3://a/b?X-Amz-Signature=0a&X-Amz-Date=1&sig=x", "s3://a/b?X-Amz-Signature=***&X-Amz-Date=1&sig=***"),
        (f"as hf_{'a' * 34}.", "as ***."),
    ],
)
def test_secrets_are_masked(text: str, shown: str):
    assert without_secrets(text) == shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ftp://me:pass@host/a", True),
        ("ftp://me:@host/a", True),
        ("ftp://me:p/a?s@host/a", True),
        ("simplecache::sftp://me:pass@host/a", True),
        ("/data/ftp:/me:pass@host/a", True),
        ("https://token@host/a", True),
        ("https://host/a?X-Amz-Signature=1", True),
        ("abfs://a/b?sv=1&sig=1", True),
        ("gs://a/b#access_token=1", True),
        ("https://host/a;token=1", True),
        *((f"https://host/a?x=1&{name}=1", True) for name in ("code", "auth_code", "api", "api_key", "jwt", "session")),
        *((f"https://host/a?{name}=1", False) for name in ("api-version", "encode", "country_code", "sidebar")),
        (f"hf_{'a' * 34}", True),
        ("ftp://me@host/a", False),
        ("abfs://container@account.dfs.core.windows.net/a", False),
        ("http://host:8000/a@b", False),
        ("hf://datasets/me/rows@main/a", False),
        ("s3://bucket/a:b@c", False),
        ("https://host/a?design=1", False),
        ("a template: {{ token=1 }} me:you@there", False),
    ],
)
def test_addresses_with_secrets_are_found(text: str, expected: bool):
    assert has_secret(text) is expected
    assert masked({"a": [text, 1]}) == {"a": [without_secrets(text) if expected else text, 1]}


def test_many_messages_of_a_kind_become_one():
    alike = [f"`a`, row {row} is 'class {row}'" for row in range(5)]
    assert without_repetitions([*alike, "`b`, row 1"]) == [f"{alike[0]} (and 4 more like it)", "`b`, row 1"]
    assert without_repetitions(alike[:2]) == alike[:2]
