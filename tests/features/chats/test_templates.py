"""Templates that do not stop end with a cause, in little memory; the forms that templates read are found."""

from __future__ import annotations

import copy
import resource
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest

from trainer.base.errors import DataError, UsageError
from trainer.data.tokenised_split import tokenizer_digest
from trainer.features.chats import templates as chat_templates
from trainer.features.chats.templates import ChatTemplate, set_date

CHAT = [{"role": "user", "content": "hi"}]
DOUBLED = "{{% set ns = namespace(x={}) %}}{{% for i in range(60) %}}{{% set ns.x = {} %}}{{% endfor %}}{{{{ ns.x }}}}"
TIME, CHARACTERS = "within 0.5 seconds, but was still running", "within 16,777,216 characters, but wrote 20,000,000"
MEMORY = f"within 64 MiB of memory, but needed more|{TIME}"
NUMBER = r"template refuses: a number of more than 65,536 bits"

BOMBS = {
    "{{ 'a' * 3000000000 }}": MEMORY,
    DOUBLED.format("'a'", "ns.x + ns.x"): MEMORY,
    DOUBLED.format("'a'", "ns.x ~ ns.x"): MEMORY,
    DOUBLED.format("'a'", "ns.x.replace('a', 'aa')"): MEMORY,
    DOUBLED.format("['a']", "ns.x + ns.x"): MEMORY,
    DOUBLED.format("['a']", "[ns.x, ns.x]"): MEMORY,
    DOUBLED.format("9", "ns.x * ns.x"): NUMBER,
    "{{ 9 ** (9 ** 9) }}": NUMBER,
    "{% set x = ('f' * 200000) | int(base=16) %}{{ x // 7 }}": NUMBER,
    "{% set x = ('f' * 200000) | int(base=16) %}{{ x % 7 }}": NUMBER,
    "{{ 5 | round(-100000) }}": "rounded to more than 256 digits",
    "{{ 5 | round(100000, 'floor') }}": "rounded to more than 256 digits",
    "{{ [[0], [1]] | sum(start=[]) | length }}": "the filter `sum` adds numbers only",
    "{{ [1, ''] | sum }}": "the filter `sum` adds numbers only",
    "{{ 'a'.ljust(10 ** 9) }}": MEMORY,
    "{{ 'a' | center(1000000000) }}": MEMORY,
    "{{ '%1000000000d' % 1 }}": MEMORY,
    "{{ '%1000000000d' | format(1) }}": MEMORY,
    "{{ '{:{w}}'.format(1, w=1000000000) }}": MEMORY,
    "{% set x = [0] * 1000000000 %}a": MEMORY,
    "{{ (range(1000) | list) | join('a' * 1000000) }}": MEMORY,
    "{{ 'a' * 20000000 }}": CHARACTERS,
    "{{ range(10 ** 12) | list }}": "Range too big",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": TIME,
    "{% set x %}{% for a in range(99) %}{{ 'a' * 1000000 }}{% endfor %}{% endset %}{{ x }}": MEMORY,
    "{% for a in range(99) %}{{ 'a' * 1000000 }}{% endfor %}": MEMORY,
}


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.alone
def test_a_template_that_does_not_stop_is_refused_with_the_cause(monkeypatch):
    monkeypatch.setattr(chat_templates, "_SECONDS", 0.5)
    monkeypatch.setattr(chat_templates, "_BYTES", 64 << 20)
    limit = resource.getrlimit(resource.RLIMIT_AS)
    start_bytes = resident()
    errors = []  # an error must not keep the texts that the template made
    for text, cause in BOMBS.items():
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        with pytest.raises((UsageError, DataError), match=cause) as error:
            ChatTemplate("name", text, ()).write(CHAT, "row 1")
        errors.append(error.value)
        assert resident() - start_bytes < 40 << 20, text
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 128 << 10, text  # KiB
        assert time.process_time() - start < 10, text
    assert resource.getrlimit(resource.RLIMIT_AS) == limit
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    sound = (
        "{{ messages[0].content * 3 }}{{ 2 ** 10 }}{{ 7 // 2 }}{{ '%d' % 5 }}{{ 2.567 | round(1) }}{{ [1, 2.5] | sum }}"
    )
    sound += "{{ [{'a': 2}, {'a': 4}] | sum('a', 1) }}"
    assert ChatTemplate("name", sound, ()).write(CHAT, "") == "hihihi1024352.63.57"


@pytest.mark.parametrize(("text", "name"), [("{{ ['a', 'b']|random }}", "random"), ("{{ lipsum() }}", "lipsum")])
def test_a_template_that_draws_is_refused(text, name):
    with pytest.raises(DataError, match=f"row 1 is a chat that the tokenizer's template refuses: .*'{name}'"):
        ChatTemplate("name", text, ()).write(CHAT, "row 1")


@pytest.mark.alone
@pytest.mark.parametrize(
    ("bomb", "cause"),
    [
        (DOUBLED.format("['a']", "ns.x + ns.x"), "within 64 MiB of memory, but needed more"),
        ("{% for a in range(99999) %}{{ 'a' * 100000 }}{% endfor %}", "within 64 MiB of memory, but needed more"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", TIME),
    ],
)
def test_a_template_in_a_thread_is_ended_too(monkeypatch, bomb: str, cause: str):
    monkeypatch.setattr(chat_templates, "_SECONDS", 0.5)
    monkeypatch.setattr(chat_templates, "_BYTES", 64 << 20)
    text = f"{{% if messages[0].content == 'hi' %}}{bomb}{{% endif %}}{{{{ messages[0].content }}}}"
    with ThreadPoolExecutor(1) as thread:
        with pytest.raises(UsageError, match=cause):
            thread.submit(ChatTemplate("name", text, ()).write, CHAT, "row 1").result(60)
        other = thread.submit(ChatTemplate("name", text, ()).write, [{"role": "user", "content": "a"}], "row 2")
        assert other.result(60) == "a"


DATED = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    "text", [DATED, DATED.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")]
)
def test_the_date_of_a_template_may_be_fixed(tokenizer, text):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = text
    today = f"{datetime.now():%d %b %Y}hi"
    assert ChatTemplate.of(tokenizer).write(CHAT, "row 1") == today
    digest = tokenizer_digest(tokenizer)
    assert set_date(tokenizer, "2024-02-29")
    assert tokenizer_digest(tokenizer) != digest
    assert ChatTemplate.of(tokenizer).write(CHAT, "row 1") == "29 Feb 2024hi"
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == today
