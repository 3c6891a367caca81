"""Values that are safe to show in a terminal."""

from __future__ import annotations

import pytest

from trainer.base.text import for_terminal, without_secrets


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
    ],
)
def test_secrets_are_masked(text: str, shown: str):
    assert without_secrets(text) == shown
