from __future__ import annotations

import click

from trainer import __version__
from trainer.tools.doctor.finding import Result, as_object, lines

FOUND = [
    Result("cores", "system", "ok", "2 of 2", None),
    Result("shared memory", "system", "warning", "64 MiB", "start it " + "again " * 12 + "with --shm-size=8g"),
    Result("gloo", "network", "problem", "no", "mend it"),
]


def test_lines():
    assert click.unstyle("\n".join(lines(FOUND, 90))).splitlines() == [
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
