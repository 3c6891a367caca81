"""`trainer certify` as a user runs it, the records that it reads, and its comparisons."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.features.fingerprints.recorded import record
from tests.helpers import processes, warm
from tests.helpers.ranks import RankPools
from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.training import TINY_BERT
from tests.tools.certificate.faults import sparse
from trainer.base.errors import ExitCode, UsageError
from trainer.cli import main
from trainer.tools.certificate.certifying import JSON, MOST_STEPS, PAGE, beside, certify_records
from trainer.tools.certificate.layouts import named_layouts, one_process, usual_layouts
from trainer.tools.certificate.recording import FOLDER, read_recording
from trainer.tools.certificate.result import LayoutResult, content_hash

SHAPE: dict[str, Any] = {"training": {"global_batch_size": 7, "micro_batch_size": 7}}


class TestLayouts:
    def test_words_are_strategies_switches_and_keys(self):
        text = "fsdp; tensor=2 sequence; stages=2 micro_batch_size=3; zero3 processes=4;"
        found = named_layouts(text, "bert_sample", [], None)
        assert [(one.overrides, one.processes) for one in found] == [
            (("parallel.strategy=fsdp",), 2),
            (("parallel.tensor=2", "parallel.sequence=true"), 2),
            (("parallel.pipeline.stages=2", "training.micro_batch_size=3"), 2),
            (("parallel.strategy=zero3",), 4),
        ]

    def test_ranks_of_experts_are_ranks_of_the_layout(self):
        found = named_layouts("expert=4; tensor=2 expert=2; fsdp expert=2", "bert_sample", [], None)
        assert [(one.overrides[-1], one.processes) for one in found] == [
            ("parallel.expert=4", 4), ("parallel.expert=2", 4), ("parallel.expert=2", 2),
        ]  # fmt: skip
        assert "parallel.expert=1" in one_process("bert_sample", ["parallel.expert=2"]).overrides

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("", "no layout"),
            ("fdsp", "neither a strategy"),
            ("folder=a", "a part of"),
            ("fsdp processes=0", "a number"),
        ],
    )
    def test_other_words_are_refused(self, text: str, problem: str):
        with pytest.raises(UsageError, match=problem):
            named_layouts(text, "bert_sample", [], None)

    def test_the_reference_has_no_cuts(self):
        found = one_process("bert_sample", ["parallel.tensor=2", "parallel.sequence=true", "parallel.strategy=fsdp"])
        assert found.processes == 1
        assert set(found.overrides) == {"parallel.strategy=ddp", "parallel.tensor=1", "parallel.sequence=false"}

    def test_usual_layouts_have_one_precision(self):
        found = [one.name for one in usual_layouts("bert_sample", [], 2, 0)]
        assert {"strategy=fsdp", "tensor=2", "stages=2"} <= set(found)
        assert not any("precision" in name for name in found)


@pytest.mark.slow
def test_as_a_user(tmp_path: Path):
    recipe = write_tiny_run(tmp_path, evaluation={"every": None})
    folder = tmp_path / "certificate"
    words = ["certify", recipe, "--layouts", "fsdp; tensor=2", "--steps", "2", "--output", folder, "--json"]
    ended = processes.finish(warm.start(words))
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found == json.loads((folder / JSON).read_text())
    assert found["hash"] == content_hash(found)
    assert found["equal"]
    assert [(one["name"], one["equal"], one["processes"]) for one in found["layouts"]] == [
        ("one process", True, 1), ("strategy=fsdp", True, 2), ("tensor=2", True, 2),
    ]  # fmt: skip
    assert len(found["layouts"][1]["losses"]) == 2
    assert found["layouts"][2]["largest"]["forward"]["difference"] < 1e-5
    assert "Differences by depth" in (folder / PAGE).read_text()
    # A certificate is compared with a later one, and a changed one is refused.
    again = certify_records(folder, folder / JSON, None)
    assert again.is_equal
    (folder / JSON).write_text((folder / JSON).read_text().replace('"steps": 2', '"steps": 3'))
    with pytest.raises(UsageError, match="another hash"):
        certify_records(folder, folder, None)


@pytest.mark.slow
def test_a_layout_that_fails_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = write_tiny_run(tmp_path, evaluation={"every": None})
    words = ["certify", str(recipe), "--layouts", "tensor=3", "--steps", "1", "--output", str(tmp_path / "out")]
    assert main(words) == ExitCode.FAILED
    assert "tensor=3: failed: `parallel.tensor` must divide" in " ".join(capsys.readouterr().out.split())


class TestRecords:
    @pytest.fixture(scope="class")
    def run(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("run")
        record(folder, SHAPE, steps=2)
        return folder

    @pytest.fixture
    def copy(self, run: Path, tmp_path: Path) -> Path:
        shutil.copytree(run, tmp_path / "copy")
        return tmp_path / "copy"

    def test_two_recorded_runs(self, run: Path, copy: Path, capsys: pytest.CaptureFixture[str]):
        assert main(["certify", str(run), str(copy)]) == ExitCode.DONE
        assert "equal within the tolerances (no difference)" in capsys.readouterr().out

    def test_another_recipe_is_the_cause(self, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        record(tmp_path, {**SHAPE, "optimizer": {"learning_rate": 2e-3}}, steps=2)
        assert main(["certify", str(run), str(tmp_path), "--output", str(tmp_path / "out")]) == ExitCode.FAILED
        shown = " ".join(capsys.readouterr().out.split())
        assert "differs: step 1, update of " in shown
        assert "the recipes differ in optimizer.learning_rate" in shown
        first = json.loads((tmp_path / "out" / JSON).read_text())["layouts"][1]["first_difference"]
        assert (first["step"], first["pass"]) == (1, "update")

    def test_a_killed_run_counts_until_its_last_whole_step(self, run: Path, copy: Path):
        file = next((copy / FOLDER).iterdir())
        text = file.read_text()
        file.write_text(text[: len(text) - 1000])
        found = certify_records(run, copy, None)
        assert found.is_equal
        assert "the runs hold the steps 1 to 2 and 1 to 1; those in both are compared" in found.notes

    def test_a_damaged_record_is_refused(self, run: Path, copy: Path):
        file = next((copy / FOLDER).iterdir())
        lines = file.read_text().splitlines(keepends=True)
        for damaged in (["{}\n", *lines[1:]], [lines[0], lines[1][:100] + "\n", lines[2]], lines[:1], ["[]\n"] * 3):
            file.write_text("".join(damaged))
            with pytest.raises(UsageError, match="is damaged"):
                read_recording(copy)
        step = json.loads(lines[2])
        step["forward"][0][4]["0"] = [1.0]
        file.write_text("".join([*lines[:2], json.dumps(step) + "\n"]))
        with pytest.raises(UsageError, match="has 6 numbers"):
            read_recording(copy)
        file.write_bytes(b"\xff")
        with pytest.raises(UsageError, match="is damaged"):
            read_recording(copy)

    def test_a_missing_rank_is_refused(self, copy: Path):
        file = next((copy / FOLDER).iterdir())
        file.write_text(file.read_text().replace('"world_size":1', '"world_size":2', 1))
        with pytest.raises(UsageError, match="of 2 ranks, but holds 1 files"):
            read_recording(copy)

    def test_other_folders_are_refused(self, run: Path, tmp_path: Path):
        with pytest.raises(UsageError, match=r"logging\.fingerprints=true"):
            certify_records(run, tmp_path, None)

    def test_numbers_that_are_not_finite_differ(self, run: Path, copy: Path):
        file = next((copy / FOLDER).iterdir())
        header, start, *steps = file.read_text().splitlines()
        step = json.loads(steps[0])
        step["forward"][5][4]["3"][1] = float("nan")
        file.write_text("\n".join([header, start, json.dumps(step), *steps[1:], ""]))
        first = certify_records(run, copy, None).results[1].comparison
        assert first is not None
        assert first.first is not None
        assert (first.first.place, first.first.name, first.first.row) == ("forward", step["forward"][5][0], 3)


ROWS = 7  # the second batch of 6 has one row, so most ranks have none
HONEST: dict[str, tuple[int, dict[str, Any]]] = {
    "3 ranks, accumulation": (3, {"parallel": {"strategy": "fsdp"}, "training": {"micro_batch_size": 1}}),
    "tensor, sequence, recomputation": (
        2, {"parallel": {"tensor": 2, "sequence": True}, "activation_checkpointing": "full"},
    ),
    "stages, ragged microbatches": (
        2, {"parallel": {"pipeline": {"stages": 2}}, "training": {"micro_batch_size": 2}},
    ),
    "padding-free": (2, {"data": {"padding_free": True}, "training": {"micro_batch_size": 2}}),
    "selective recomputation": (
        2, {"parallel": {"tensor": 2, "sequence": True}, "activation_checkpointing": "selective"},
    ),
    "experts": (2, {"parallel": {"expert": 2}, "training": {"micro_batch_size": 3}, **sparse()}),
    "experts, sharded": (
        3, {"parallel": {"expert": 3, "strategy": "fsdp"}, "training": {"micro_batch_size": 1}, **sparse(6)},
    ),
    "an adapter under tensor ranks": (
        2, {"parallel": {"tensor": 2}, "model": {"adapter": {"type": "lora", "rank": 4}}},
    ),
}  # fmt: skip


def result_of(
    ranks: RankPools,
    folder: Path,
    number: int,
    common: dict[str, Any],
    sections: dict[str, Any],
    num_rows: int = ROWS,
) -> LayoutResult:
    """Return the result of a layout without a fault."""
    merged = {**common, **sections}
    for key in common.keys() & sections.keys() - {"precision"}:
        merged[key] = {**common[key], **sections[key]}
    ranks(number).run(record, folder / "layout", merged, num_rows=num_rows)
    ranks(1).run(record, folder / "reference", common, num_rows=num_rows)
    return beside("layout", number, read_recording(folder / "layout"), read_recording(folder / "reference"))


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_layout_is_equal(name: str, ranks: RankPools, tmp_path: Path):
    number, sections = HONEST[name]
    common = {"training": {"global_batch_size": 6, "micro_batch_size": 6}, "model": sections.get("model", {})}
    common |= {key: sections[key] for key in ("task",) if key in sections}
    result = result_of(ranks, tmp_path, number, common, sections)
    assert result.is_equal, result.sentence()
    assert result.comparison is not None
    assert result.comparison.steps == (1, 2)
    assert not result.comparison.not_compared


def _many_layouts() -> dict[str, tuple[int, dict[str, Any]]]:
    """Return ranks and sections of many layouts, by their names."""
    found: dict[str, tuple[int, dict[str, Any]]] = {}

    def add(name: str, number: int, parallel: dict[str, Any], micro: int = 12, **others: Any) -> None:
        found[name] = number, {"parallel": parallel, "training": {"micro_batch_size": micro}, **others}

    for strategy, number, micro in product(("ddp", "fsdp", "zero1", "zero2", "zero3"), (2, 3), (1, 12)):
        add(f"{strategy}, {number} ranks, microbatches of {micro}", number, {"strategy": strategy}, micro)
    add("hsdp", 4, {"strategy": "hsdp", "shard": 2})
    for strategy in ("fsdp", "zero1", "zero2"):
        add(f"tensor and {strategy}", 4, {"strategy": strategy, "tensor": 2})
    add("tensor, sequence and fsdp", 4, {"strategy": "fsdp", "tensor": 2, "sequence": True}, 2)
    for strategy in ("ddp", "fsdp"):
        add(f"experts and {strategy}", 4, {"strategy": strategy, "expert": 2}, 2, **sparse())
    add("context", 2, {"context": 2})
    add("context and fsdp", 4, {"context": 2, "strategy": "fsdp"})
    for schedule in ("1f1b", "gpipe", "interleaved_1f1b", "zero_bubble"):
        add(schedule, 2, {"pipeline": {"stages": 2, "schedule": schedule}}, 2)
    add("stages and ddp", 4, {"pipeline": {"stages": 2}}, 2)
    add("stages and tensor", 4, {"pipeline": {"stages": 2}, "tensor": 2}, 2)
    for name, parallel in (("fsdp", {"strategy": "fsdp"}), ("tensor", {"tensor": 2}), ("zero3", {"strategy": "zero3"})):
        add(f"{name} in bf16", 2, parallel, precision="bf16")
    return found


MANY = _many_layouts()


def test_there_are_forty_honest_layouts():
    assert len(HONEST) + len(MANY) >= 40


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "zero_bubble" else pytest.mark.nightly) for name in MANY]
)
def test_many_honest_layouts_are_equal(name: str, ranks: RankPools, tmp_path: Path):
    number, sections = MANY[name]
    common = {
        "training": {"global_batch_size": 12, "micro_batch_size": 12},
        "model": {"config": {**TINY_BERT, "num_hidden_layers": 4}},
        "precision": sections.get("precision", "fp32"),
    }
    common |= {key: sections[key] for key in ("model", "task") if key in sections}
    result = result_of(ranks, tmp_path, number, common, sections, num_rows=25)
    assert result.is_equal, result.sentence()


def test_the_steps_are_those_that_are_recorded():
    from trainer.features.fingerprints.recorder import STEPS

    assert MOST_STEPS == STEPS
