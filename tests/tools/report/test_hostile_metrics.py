"""Run folders that somebody has edited: each field of `metrics.jsonl` with hostile values, and a very long file."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.observe.samples import end_record, run_info, step_record
from trainer.base.errors import UsageError
from trainer.observe.metrics_file import METRICS_FILE_NAME, MetricsFile
from trainer.observe.records import BadStepRecord, EvaluationRecord, Idling
from trainer.tools.report import report, runs
from trainer.tools.report.listing import find_runs, listing
from trainer.tools.report.plain import plain_lines
from trainer.tools.report.report import page_of
from trainer.tools.report.runs import read_runs
from trainer.tools.run_metrics import read_metrics

CODE = "</script><script>alert(1)</script>\x1b[31m\u202e"
VALUES = (
    None, True, "x", CODE, "NaN", [], {}, [1], {"a": 1}, -1, 0, 1.5, 1e308, float("nan"), float("inf"), 10**18,
    10**400, [[["x"]]], "\ud800", ["a", ["b"]], [None], {"a": {"b": [1]}}, {CODE: CODE}, [CODE],
)  # fmt: skip


def write(folder: Path) -> list[dict[str, Any]]:
    """Write the metrics of a run with lines of each kind, and return them."""
    recipe = {"evaluation": {"best": "accuracy"}, "parallel": {"pipeline": {"stages": 2}}, "optimizer": {"name": "x"}}
    mesh = (("rank", "stage"), ("0", "0"), ("1", "1"))
    file = MetricsFile()
    file.start(run_info(folder, recipe=recipe, ranks=mesh, classes=(("a", 3), ("b", 1)), stages=("1f1b", "stage 0")))
    for step in (1, 2):
        file.step(step_record(step, rank_memory_bytes=(1 << 20, 2 << 20), skipped_steps=step, loss_scale=2.0**16))
        picture: dict[str, Any] = {
            "classes": ["a", "b"],
            "confusion": [[1, 2], [3, 4]],
            "texts": [{"text": "a", "generated": "b"}],
        }
        picture["ece"] = {"rows": [1, 2], "confidence": [0.5, 0.75], "right": [0.0, 1.0]}
        file.evaluation(EvaluationRecord(step, {"accuracy": step / 100, "loss": 0.5}, picture))
    file.bad_step(BadStepRecord(2, float("nan"), 1.0, (0,), (3, 4)))
    file.end(end_record(folder, outcome="failed", message="no room", pipeline=Idling((0.5, 0.25), 0.3)))
    file.close()
    return [json.loads(line) for line in (folder / METRICS_FILE_NAME).read_text().splitlines()]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values within a value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*path, key))


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = put(value[path[0]], path[1:], new)
    return copy


def shown(folder: Path) -> list[str]:
    """Return the page, the curves and the listing of a run."""
    runs = read_runs([folder])
    return [page_of(runs), "\n".join(plain_lines(runs, 60)), "\n".join(listing(find_runs(folder)))]


@pytest.mark.slow
@pytest.mark.parametrize("line", range(7))
def test_no_value_becomes_code_or_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: int):
    lines = write(tmp_path / "run")
    assert len(lines) == 7
    others, choice = [json.dumps(one) for one in lines], random.Random(line)
    refused = 0
    for path in places(lines[line]):
        for value in choice.sample(VALUES, 2):
            others[line] = json.dumps(put(lines[line], path, value))
            (tmp_path / "run" / METRICS_FILE_NAME).write_text("\n".join(others) + "\n")
            try:
                html, plain, table = shown(tmp_path / "run")
            except UsageError:
                refused += 1
                assert "unreadable" in "\n".join(listing(find_runs(tmp_path)))
                continue
            except Exception as error:
                raise AssertionError(f"{path} is {value!r}") from error
            html.encode()
            assert "<script>alert" not in html, (path, value)
            assert not {"\x1b", "\u202e"} & {*plain, *table}, (path, value)
    assert refused


def test_a_long_file_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = MetricsFile()
    file.start(run_info(tmp_path))
    for step in range(1, 1001):
        file.step(step_record(step))
    file.evaluation(EvaluationRecord(1000, {"accuracy": 0.5}, {"texts": []}))
    file.evaluation(EvaluationRecord(1000, {"accuracy": 0.5}, {"texts": [{"text": "a"}]}))
    file.close()
    found = read_metrics(tmp_path / METRICS_FILE_NAME, most_steps=100)
    assert [one.step for one in found.steps] == [*range(1, 1001, found.stride), 1000]
    assert 50 <= len(found.steps) <= 101
    assert [one.picture for one in found.evaluations] == [None, {"texts": [{"text": "a"}]}]
    assert len(read_metrics(tmp_path / METRICS_FILE_NAME).steps) == 1000
    monkeypatch.setattr(runs, "MOST_STEPS", 100)
    monkeypatch.setattr(report, "MOST_STEPS", 100)
    assert f"every {found.stride}th logged step" in page_of(read_runs([tmp_path]))
