"""Callbacks are made again in the processes of the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from trainer import Callback
from trainer.base.errors import UsageError
from trainer.tools.apart import described, made


@dataclass
class Answer(Callback):
    answers: list[Any] = field(default_factory=list)


class Plain(Callback):
    def __init__(self, limit: float | None = None) -> None:
        if limit is not None:
            self.limit = limit


class TestOtherProcesses:
    def test_make_it_anew_from_its_fields(self):
        callback = Answer([1, "two", {"three": [3.0]}])
        (copy,) = made([described(callback)])
        assert copy == callback
        assert copy is not callback
        assert type(made([described(Plain())])[0]) is Plain

    def test_cannot_make_a_class_of_a_script(self, monkeypatch):
        monkeypatch.setattr(Plain, "__module__", "__main__")
        with pytest.raises(
            UsageError, match=r"`Plain`.*its class is in this script or notebook.*move it into a module"
        ):
            described(Plain())

    def test_cannot_make_a_class_inside_of_a_function(self):
        class Inner(Callback):
            pass

        with pytest.raises(UsageError, match=r"`Inner`.*nested in another one.*move it to the top"):
            described(Inner())

    @pytest.mark.parametrize(
        ("callback", "problem"),
        [
            (Plain(0.5), r"`Plain`.*has values \(limit\) and is no dataclass; make it a dataclass"),
            (Answer([print]), r"`Answer`.*its field `answers` is \[<built-in function print>\]"),
            (Answer([(1, 2)]), r"its field `answers` is \[\(1, 2\)\]"),
        ],
    )
    def test_cannot_make_values_that_json_lacks(self, callback, problem):
        with pytest.raises(UsageError, match=problem):
            described(callback)

    def test_name_a_class_that_they_cannot_import(self):
        with pytest.raises(UsageError, match=r"`nowhere:Target` could not be created: ModuleNotFoundError"):
            made([{"class": "nowhere:Target", "fields": {}}])
