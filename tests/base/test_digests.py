from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import pytest

from trainer.base.digests import code_digest, digest_of, source_digest

ROOT = Path(__file__).parents[2]


@dataclass
class Point:
    x: int
    y: object = None


VALUES = [
    None, True, 1, 1.0, "1", b"1", [1], (1,), {1}, frozenset({1}), {1: 2}, {"1": 2}, {2: 1}, [[1], 2], [1, [2]],
    Point(1), Point(2), Point(1, Point(1)), OrderedDict(a=1), re.compile("a"), re.compile("b"),
    Point, int, len, os.path.join,
]  # fmt: skip


def test_different_values_have_different_digests():
    assert len({digest_of(value) for value in VALUES}) == len(VALUES)


def test_equal_values_have_equal_digests():
    shared = Point(1)
    assert digest_of([shared, shared]) == digest_of([Point(1), Point(1)])
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
    circle = Point(1)
    circle.y = [circle]
    assert digest_of(circle) != digest_of(shared)
    assert digest_of([Point(1)], {Point: lambda point: point.x}) == digest_of([1])


def test_an_unpicklable_value_has_no_digest():
    with pytest.raises(TypeError):
        digest_of([(value for value in range(3))])


def test_processes_agree():
    code = "from trainer.base.digests import digest_of; print(digest_of({'a', 'b', 'c', ('d', 1)}))"
    digests = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, cwd=ROOT, text=True,
            capture_output=True, check=True, timeout=60,
        ).stdout
        for seed in "12"
    }  # fmt: skip
    assert len(digests) == 1


def test_the_code_of_a_class_covers_its_own_file():
    assert code_digest(type("Mine", (Point,), {"__module__": __name__})) != code_digest(int)
    assert len(source_digest()) == 12
