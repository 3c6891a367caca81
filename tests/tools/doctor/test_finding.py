from __future__ import annotations

from dataclasses import replace

import click

from trainer import __version__
from trainer.tools.doctor.finding import Result, as_object, lines

FOUND = [
    Result("cores", "system", "ok", "2 of 2", None),
    Result("shared memory", "system", "warning", "64 MiB", "start it " + "again " * 12 + "with --shm-size=8g"),
    Result("gloo", "network", "problem", "no", "mend it"),
]


def test_lines():
    assert click.unstyle("\n".join(lines(FOUND, 90, verbose=True))).splitlines() == [
        "system",
        "  ok       cores          2 of 2",
        "  warning  shared memory  64 MiB",
        "                          -> start it again again again again again again again again",
        "                             again again again again with --shm-size=8g",
        "network",
        "  problem  gloo           no",
        "                          -> mend it",
        "",
        "1 problem, 1 warning",
    ]


def test_a_long_value_is_whole_if_it_is_no_success_or_on_request():
    long = replace(FOUND[0], value=", ".join(f"package {number}" for number in range(30)))
    short = click.unstyle("\n".join(lines([long] * 11, 80))).splitlines()
    assert len(short) == 13
    assert all(len(line) <= 80 and line.endswith(" ...") for line in short[:11])
    assert short[-1] == "no problems, no warnings; --verbose shows whole values"
    for whole in (lines([long], 80, verbose=True), lines([replace(long, status="problem")], 80)):
        assert "package 29" in "".join(whole)


def test_an_empty_list_of_remedies_is_reported():
    assert list(lines(FOUND[:1], 90))[-1] == "\nno problems, no warnings"


def test_the_object_of_json():
    answer = as_object(FOUND)
    assert (answer["trainer"], answer["problems"], answer["warnings"]) == (__version__, 1, 1)
    assert answer["checks"][2] == {
        "name": "gloo",
        "group": "network",
        "status": "problem",
        "value": "no",
        "remedy": "mend it",
    }
    assert answer["checks"][0]["remedy"] is None
