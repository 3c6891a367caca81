"""The HTML page of runs: its curves in a real browser, and runs that are damaged, unfinished or hostile."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.browser import CURVE, needs_browser, open_page
from tests.helpers.figures import figures_of
from tests.helpers.tiny_run import write_tiny_run
from trainer.cli import main
from trainer.recipe.reading.loading import load_recipe
from trainer.tools.report.figures import Curve, confusion, curves, ranges

HOSTILE = "</script><script>document.title='run'</script><b>"
STEP = {
    "epoch": 0.5, "grad_norm": 1.0, "learning_rate": 1e-3, "samples": 8, "step_seconds": 0.5,
    "samples_per_second": 16.0, "peak_memory_bytes": 2**30,
}  # fmt: skip


def write_lines(folder: Path, *lines: dict[str, Any], end: str = "\n") -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + end)
    return folder


def steps(*losses: float | str, first: int = 1, **more: Any) -> list[dict[str, Any]]:
    return [{"step": first + number, "loss": loss, **STEP, **more} for number, loss in enumerate(losses)]


def html(file: Path) -> str:
    """Return a page without the classes of its elements."""
    return re.sub(r' class="[a-z ]*"', "", file.read_text(encoding="utf-8"))


def page(*words: str | Path) -> Path:
    output = Path(words[0]) / "page.html"
    assert main(["report", *map(str, words), "-o", str(output)]) == 0
    return output


def test_the_page_of_a_run_shows_its_metrics(tmp_path: Path):
    assert main(["run", str(write_tiny_run(tmp_path)), "training.max_steps=3", "evaluation.every=2 steps"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert main(["report", str(tmp_path / "run")]) == 0
    drawn = figures_of(tmp_path / "run" / "report.html")
    assert drawn["loss"][0]["y"] == [line["loss"] for line in lines if "loss" in line]
    assert drawn["validation accuracy"][0]["y"] == [line["eval"]["accuracy"] for line in lines if "eval" in line]
    assert drawn["validation accuracy"][1]["name"] == "best"
    (matrix,) = drawn["validation rows at step 3"]
    counts = lines[-2]["picture"]["confusion"]
    assert matrix["text"] == [list(map(str, row)) for row in counts]
    rows, right = sum(map(sum, counts)), sum(row[index] for index, row in enumerate(counts))
    assert lines[-2]["eval"]["accuracy"] == pytest.approx(right / rows)
    assert (tmp_path / "run" / "report.html").stat().st_size < 1_000_000
    assert {"gradient norm before clipping", "learning rate", "throughput"} <= drawn.keys()


def test_a_run_without_progress_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    # Its labels are random, and its metrics are those of one class.
    recipe = str(write_tiny_run(tmp_path, logging={"to": ["console", "jsonl"], "every": "1 step"}))
    assert main(["run", recipe, "training.max_steps=6", "optimizer.learning_rate=50"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "warning the loss diverged: the first logged losses are near" in shown
    text = html(page(tmp_path / "run"))
    assert "run, warning: the loss diverged" in text


def test_marks_stand_at_the_steps_of_the_run(tmp_path: Path):
    run = write_lines(
        tmp_path / "run",
        {"run": {"resumed_from": None}},
        *steps(1.0, 0.9, skipped_steps=0),
        {"run": {"resumed_from": 2}},
        {"step": 3, "bad_step": {"loss": "NaN", "grad_norm": "NaN", "ranks": [], "rows": []}},
        *steps("NaN", 0.7, first=3, skipped_steps=1),
        *({"step": step, "logged": {"gap": step / 4}} for step in (2, 4)),
    )
    (tmp_path / "run" / "checkpoints" / "step-00000002").mkdir(parents=True)
    drawn = figures_of(page(run))
    raw, smooth, *marks = drawn["loss"]
    assert drawn["gap"][0]["y"] == [0.5, 1.0]
    assert raw["y"] == [1.0, 0.9, None, 0.7]
    assert smooth["y"][1] == pytest.approx((0.9 * 1.0 + 0.9) / 1.9)
    assert smooth["y"][2] is None
    assert {mark["name"]: mark["x"] for mark in marks if mark["x"]} == {
        "bad step": [3],
        "skipped for overflow": [3],
        "started again": [2],
        "checkpoint that is kept": [2],
    }
    assert [mark["y"] for mark in marks if mark["x"] == [2]] == [[0.9], [0.9]]


def test_runs_are_overlaid_with_the_differences_of_their_recipes(tmp_path: Path):
    def run(name: str, rate: float) -> Path:
        info = {"recipe": {"optimizer": {"learning_rate": rate}, "precision": "fp32"}}
        return write_lines(tmp_path / name / "run", {"run": info}, *steps(1.0, rank_memory_bytes=[2**30, 2**29]))

    file = page(run("one", 0.1), run("two", 0.2))
    drawn = figures_of(file)
    assert [trace["name"] for trace in drawn["learning rate"]] == ["one/run", "two/run"]
    assert drawn["peak memory by rank"][0]["x"] == [1024.0, 512.0]
    rows = re.findall(r'<tr><th scope="row">([^<]*)</th><td>([^<]*)</td><td>([^<]*)</td></tr>', html(file))
    assert rows == [("optimizer.learning_rate", "0.1", "0.2")]


def test_shares_texts_and_ranks_of_a_run_are_shown(tmp_path: Path):
    texts = [{"text": "long <b>", "generated": "short"}]
    run = write_lines(
        tmp_path / "run",
        {"run": {"ranks": [["rank", "stage"], ["0", "0"], ["1", "1"]]}},
        *steps(1.0),
        {"step": 1, "eval": {"rouge1": 0.5}, "picture": {"texts": texts}},
        {"step": 1, "end": {"outcome": "failed", "exit_code": 1, "message": "rank 1 <died>", "idle": [0.5, 0.25]}},
    )
    file = page(run)
    assert figures_of(file)["idle time of the ranks of the pipeline axis"][0]["x"] == [50.0, 25.0]
    text = html(file)
    assert '<tr><th scope="row">1</th><td>long &lt;b&gt;</td><td>short</td></tr>' in text
    assert "run failed: rank 1 &lt;died&gt;" in text


def test_the_order_of_work_in_a_pipeline_is_drawn(tmp_path: Path):
    keys = ["parallel.pipeline.stages=2", "parallel.pipeline.schedule=gpipe", "parallel.pipeline.microbatches=2"]
    info = {"recipe": load_recipe("bert_sample", keys).recipe.model_dump(mode="json"), "world_size": 2}
    drawn = figures_of(page(write_lines(tmp_path / "<b>", {"run": info}, *steps(1.0))))
    (title,) = (name for name in drawn if "gpipe" in name)
    assert title.startswith("<b>: gpipe")
    forward, backward = drawn[title]
    assert (forward["name"], backward["name"]) == ("forward", "backward")
    assert (forward["y"], forward["base"]) == (["rank 0", "rank 0", "rank 1", "rank 1"], [0, 1, 1, 2])
    assert (backward["base"], backward["x"]) == ([5, 7, 3, 5], [2, 2, 2, 2])
    older = {**info, "recipe": {"parallel": {"pipeline": {"stages": 2}}, "of": "another version"}}
    assert not any("gpipe" in name for name in figures_of(page(write_lines(tmp_path / "old", {"run": older}))))


def test_ranks_of_one_colour_hold_the_same_parameters(tmp_path: Path):
    mesh = [["rank", "stage", "replica", "shard"]]
    mesh += [[str(rank), str(rank // 4), str(rank // 2 % 2), str(rank % 2)] for rank in range(8)]
    drawn = figures_of(page(write_lines(tmp_path / "run", {"run": {"ranks": mesh}}, *steps(1.0))))
    (cells,) = drawn["ranks: equal colours hold the same parameters"]
    assert cells["x"] == ["stage 0", "stage 1"]
    assert cells["y"] == [f"replica {replica}, shard {shard}" for replica in "01" for shard in "01"]
    assert cells["text"] == [[f"rank {row}", f"rank {row + 4}"] for row in range(4)]
    assert cells["z"] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_a_single_evaluation_is_a_table(tmp_path: Path):
    run = write_lines(tmp_path / "run", {"run": {}}, *steps(1.0), {"step": 1, "eval": {"f1": 0.5, "f1/<b>": 0.25}})
    file = page(run)
    assert not any("validation" in name for name in figures_of(file))
    assert '<th scope="row">f1/&lt;b&gt;</th><td>0.2500</td>' in html(file)


def test_a_page_follows_the_run(tmp_path: Path):
    words = [
        "run",
        str(write_tiny_run(tmp_path)),
        "training.max_steps=3",
        'logging.to=["html"]',
        "logging.every=1 steps",
    ]
    assert main(words) == 0
    drawn = tmp_path / "run" / "report.html"
    assert figures_of(drawn)["loss"][0]["x"] == [1, 2, 3]
    assert "<td>finished</td>" in html(drawn)


def test_curves_in_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first = write_lines(
        tmp_path / "one",
        {"run": {}},
        *steps(4.0, 2.0, "NaN", 1.0),
        {"step": 2, "eval": {"accuracy": 0.75, "loss": 0.9}},
        {"step": 4, "eval": {"accuracy": 0.75, "loss": 0.8}},
    )
    second = write_lines(tmp_path / "tw\x1bo", {"run": {}}, *steps(3.0))
    assert main(["report", "--plain", str(first), str(second)]) == 0
    shown = capsys.readouterr().out
    assert "one: killed, step 4 of ?, best accuracy 0.7500 at step 4" in shown
    assert re.search(r"^ *4\.00?┤", shown, re.MULTILINE)
    assert re.search(r"^ *1\.00?┤", shown, re.MULTILINE)
    assert "validation accuracy" in shown
    assert re.search(r"^ *1 +2 +3 +4 *$", shown, re.MULTILINE), "steps are whole numbers"
    assert "\x1b" not in shown


@pytest.mark.parametrize("form", ["page", "plain", "compared"])
def test_secrets_of_an_earlier_version_are_masked(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str):
    run = {"recipe": {"name": "x", "checkpoint": {"mirror": "s3://name:hidden1@host/b?token=hidden2"}}}
    end = {"outcome": "failed", "message": "no answer from https://name:hidden3@host/"}
    lines = [{"run": run}, *steps(1.0), {"step": 1, "end": end}]
    folders = [write_lines(tmp_path / "one", *lines), write_lines(tmp_path / "two", {"run": {}}, *steps(2.0))]
    if form == "plain":
        assert main(["report", "--plain", str(folders[0])]) == 0
        shown = capsys.readouterr().out
    else:
        shown = page(*folders[: 1 if form == "page" else 2]).read_text(encoding="utf-8")
        assert "s3://host/b?token=***" in shown
    assert "https://host/" in shown
    assert not re.search(r"hidden\d", re.sub(r"<(script|style).*?</\1>", "", shown, flags=re.DOTALL))


@pytest.mark.parametrize(
    ("lines", "end"),
    [
        ([{"run": {}}], "\n"),
        ([{"run": {}}, *steps(1.0)], '\n{"step": 2, "lo'),
        ([*steps(1.0)], "\n"),
        ([], ""),
    ],
    ids=["no step", "cut off", "no start", "empty"],
)
def test_an_unfinished_run_has_a_page(tmp_path: Path, lines: list[dict[str, Any]], end: str):
    assert ("loss" in figures_of(page(write_lines(tmp_path / "run", *lines, end=end)))) == any(
        "loss" in x for x in lines
    )


@pytest.mark.parametrize("twice", [False, True])
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], twice: bool):
    run = write_lines(tmp_path / "run", {"run": {}})
    assert main(["report", *([str(run)] * 2 if twice else [str(tmp_path)])]) == 2
    assert ("named twice" if twice else "must be the folder of a run") in capsys.readouterr().err


def test_a_moving_average_ignores_gaps():
    figure = curves("loss", [Curve("run", [1, 2, 3], [4.0, float("inf"), 4.0])], smooths=True)
    assert figure.data[1].y == pytest.approx((4.0, None, 4.0))


def test_a_bar_that_is_far_longer_leaves_the_figure():
    even = ranges("", [("a", (1, 2, 3)), ("b", (3, 4, 5))], "ms")
    assert even.layout.xaxis.range is None
    far = ranges("", [("a", (1, 2, 3)), ("b", (3, 4, 5)), ("c", (90, 100, 110))], "ms")
    assert far.layout.xaxis.range == (0, 7.5)
    assert far.data[0].text == ("", "", "100")


def test_long_names_of_a_confusion_have_room():
    few, many = (confusion("", [name, "b"], [[1, 0], [0, 1]]) for name in ("a", "a" * 40))
    assert many.layout.height == few.layout.height + 40 * 7
    assert (few.layout.xaxis.tickangle, many.layout.xaxis.tickangle) == (0, -90)


@needs_browser
def test_a_browser_draws_the_page_without_errors_and_requests(tmp_path: Path):
    info = {"classes": [[HOSTILE, 3]], "recipe": {"name": HOSTILE}, "versions": {"trainer": HOSTILE}}
    evaluations = [{"step": step, "eval": {"accuracy": 0.5, HOSTILE: 0.5}} for step in (1, 2)]
    first = write_lines(tmp_path / "<b>run", {"run": info}, *steps(1.0, 0.5), *evaluations)
    second = write_lines(tmp_path / "second", {"run": info}, *steps(2.0, 1.5))
    press = 'for (const one of document.querySelectorAll("figcaption button")) one.click();'
    opened = open_page(page(first, second), tmp_path, press)
    assert (opened.console, opened.requests) == ([], [])
    assert opened.policy.startswith("default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline';")
    assert "form-action 'none'" in opened.policy
    figures = re.findall(r"<figure>(.*?)</figure>", opened.dom, re.DOTALL)
    assert len(figures) == 7
    for figure in figures:
        assert CURVE.search(figure)
        assert re.search(r'<svg width="\d+" height="280"', figure)
        assert "> &lt;b&gt;run</button>" in figure
        assert "> second</button>" in figure
    assert opened.dom.count('aria-pressed="true">smooth') == 3
    assert len(page(first, second).read_bytes()) < 100_000
    assert "<title>&lt;b&gt;run and second</title>" in opened.dom
    assert "<b>" not in re.sub(r"<script.*?</script>", "", "".join(figures), flags=re.DOTALL)
