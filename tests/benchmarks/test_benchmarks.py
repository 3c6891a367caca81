"""Smoke tests of the benchmarks. Their results are only valid on an otherwise idle machine."""

from __future__ import annotations

import json
import math
import re
import shlex
import signal
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from docs.generate import compiled_step, gpu_figures, operations, throughput, throughput_by_default
from tests.benchmarks import budget, first_gpu, gpu, memory
from tests.benchmarks.first_gpu import SAME_LOSSES, Part, Runner, checks
from tests.benchmarks.gpu import BASE, Case, read_plans, shrunk
from tests.benchmarks.gpu import cases as gpu_cases
from tests.benchmarks.gpu import run as run_trainings
from tests.benchmarks.gpu_profile import main as gpu_profile
from tests.benchmarks.gpu_profile import waits_counted
from tests.benchmarks.operations import STORED, Count, cases, ours, own_form, plain
from tests.benchmarks.throughput import FURTHER, regressions
from tests.helpers import processes, warm
from tests.helpers.memory import needs_peak
from trainer.tools.plan.ledger import Totals
from trainer.tools.plan.work import HOST_WAIT, VIEW, Amount, Kind

NUMBER = r"-?\d+\.\d+"


def cells(output: str) -> list[list[str]]:
    """Return the rows of the tables in an output, without their headers."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in output.splitlines() if line[:1] == "|"]
    return [row for row in rows if re.search(r"\d", row[-1])]


def run(*arguments: str) -> list[list[str]]:
    done = processes.run([sys.executable, "-m", *arguments], timeout_seconds=580)
    assert done.returncode == 0, done.stderr
    return cells(done.stdout)


@pytest.mark.nightly
def test_throughput():
    rows = run(
        "tests.benchmarks.throughput", "--processes=2", "--models=small", "--rounds=2", "--steps=2", "--defaults"
    )
    names = ["PyTorch by hand", "ours", "ours, torch's dropout", "ours, fsdp", "ours, zero1", "transformers' Trainer"]
    names += ["accelerate", "DeepSpeed, ZeRO-1", "accelerate, FSDP2", "transformers' Trainer, defaults"]
    assert [row[0] for row in rows] == names
    for _, rate, *ratios in rows:
        assert float(rate) > 0
        for ratio in ratios:
            # loose bounds: they only detect a training that computes something else
            assert 0.1 < float(re.match(NUMBER, ratio)[0]) < 10, rows


@pytest.mark.nightly
def test_tensor():
    rows = run("tests.benchmarks.tensor", "--models=small", "--rounds=2", "--steps=1")
    assert [row[0].split(",")[0] for row in rows] == ["our blocks", "DTensor", "transformers"]
    for _, milliseconds, ratio, peak in rows:
        assert float(milliseconds) > 0
        assert 0.1 < float(re.match(NUMBER, ratio)[0]) < 20, rows
        assert float(re.match(NUMBER, peak)[0]) > 0


@pytest.mark.nightly
def test_startup():
    ((processes, imports, whole, *added),) = run("tests.benchmarks.startup", "--processes=1", "--rounds=1")
    assert processes == "1"
    assert float(re.match(NUMBER, imports)[0]) > 0
    assert float(re.match(NUMBER, whole)[0]) > 0
    assert all(re.match(NUMBER, cell) for cell in added)


@pytest.mark.nightly
def test_scale():
    *real, simulated = run("tests.benchmarks.scale", "--processes", "2", "6", "--simulate=1024")
    assert [row[:2] for row in real] == [["2", "rank 0"], ["2", "rank 1"], ["6", "rank 0"], ["6", "rank 5"]]
    assert simulated[0] == "1024"
    of_two, of_six = [[int(row[2]) for row in rows] for rows in (real[:2], real[2:])]
    assert max(of_six) - min(of_two) <= 2, "the questions to the store do not grow"
    assert all(0 < int(row[4]) < 40 for row in real)
    assert [row[5] for row in real] == ["1", "1", "5", "1"]


@pytest.mark.nightly
@needs_peak
def test_memory(capsys):
    """Half of a model on each of two ranks: no phase holds more multiples of the whole than its state has."""
    memory.main(["--ranks=2", "--layouts=fsdp", "--layers", "2", "8"])  # its ranks are new forks
    (row,) = cells(capsys.readouterr().out)
    assert row[:2] == ["2", "fsdp"]
    kept, loading, drawing, training, checkpoint, export, device = (
        float(re.match(NUMBER, cell)[0]) for cell in row[2:]
    )
    assert kept == pytest.approx(0.5, abs=0.01)
    assert 0.4 < loading < 0.75, "the rows of a rank"
    assert 0.4 < drawing < 0.75
    assert 1.8 < training < 2.4, "weights, gradients and two moments"
    assert 1.3 < checkpoint < 1.8, "the copy of weights and moments"
    assert abs(export) < 0.25, "files of 8 MB"
    assert 1.8 < device < 2.4


@pytest.mark.slow
def test_gpu_runs_in_small_on_a_cpu(tmp_path: Path):
    file = tmp_path / "gpu.json"
    words = ["--tiny", "--models", "Llama 1B", "--shapes", "2x2048", "--turns", "1", "--json", file]
    words += ["--variants", "keyed dropout, CUDA graphs", "keyed dropout"]
    peers = ["plain", "transformers"]  # the others compile, which takes minutes
    words += ["--contestants", "ours", "updates", *peers]
    started = warm.start(words, program="tests.benchmarks.gpu:main")
    assert processes.finish(started, 580).returncode == 0
    found = json.loads(file.read_text())
    graphs, name, *_ = found["training"]
    assert name == "Llama 1B, 2 x 2048 tokens, bf16, ddp, keyed dropout"
    assert "needs an NVIDIA GPU" in found["training"][graphs]["error"]
    row = found["training"][name]
    assert row["tokens_per_second"] > 0
    assert row["planned_peak_bytes"] == found["plans"][name]["peak_bytes"] > 0
    assert row["planned_step_seconds"] == found["plans"][name]["step_seconds"] > 0
    assert found["updates"]["adamw"]["elements"] == found["updates"]["adamw_8bit"]["elements"] == 12 * 64**2
    shown_name = name.removesuffix(", bf16, ddp, keyed dropout")
    (shown,) = [line for line in gpu_figures([found]).splitlines() if line.startswith(f"| {shown_name} |")]
    ratios = [row["rows_per_second"] / found[peer][name]["rows_per_second"] for peer in peers]
    assert shown.startswith(f"| {shown_name} | {row['rows_per_second']:,.0f} | - | - | "), shown
    assert shown.endswith("".join(f" | {ratio:.2f}" for ratio in ratios) + " |"), shown


def test_a_profile_names_the_lines_that_wait_for_a_gpu(monkeypatch: pytest.MonkeyPatch):
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with waits_counted(SimpleNamespace(is_gpu=True)) as waits:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)
        warnings.warn("another warning", UserWarning, stacklevel=1)
    ((line, number),) = waits.items()
    assert (number, modes) == (2, ["warn", "default"])
    assert line.startswith(f"{__file__}:")


@pytest.mark.nightly
def test_a_profile_runs_in_small_on_a_cpu(tmp_path: Path):
    assert gpu_profile(["--tiny", "--json", str(tmp_path / "profile.json")]) == 0
    found = json.loads((tmp_path / "profile.json").read_text())
    assert all(row["step_seconds"] > row["busy_seconds"] / 2 > 0 for row in found.values())
    assert all(any("mm" in one["name"] for one in row["operations"]) for row in found.values())


def test_the_first_minutes_on_a_gpu_keep_what_ended(tmp_path: Path):
    """A part that is cut off keeps its output, a part that fails ends no other, and runs are compared."""
    runner = Runner(tmp_path, time.monotonic() + 60)
    runner.run(Part("long", ("-c", "import time; print('begun', flush=True); time.sleep(60)"), 2.0))
    runner.run(Part("failed", ("-c", "raise SystemExit('reason')")))
    runner.run(Part("stopped", ("-c", "raise SystemExit(75)")))
    (tmp_path / "full.txt").symlink_to("/dev/full")
    runner.run(Part("full", ("-c", "pass")))
    for name, losses in {"one": (2.0, 2.0), "two": (2.1, 2.0), "odd": (2.0, math.nan)}.items():
        (tmp_path / name).mkdir()
        rows = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(rows))
    for other in ("two", "odd", "three"):
        runner.compare("one", other, 0.01)
    assert runner.has_failed
    Runner(tmp_path, time.monotonic()).run(Part("late", ("-c", "pass")))
    assert "begun" in (tmp_path / "long.txt").read_text()
    assert "reason" in (tmp_path / "failed.txt").read_text()
    lines = (tmp_path / "summary.txt").read_text().splitlines()
    expected = (
        "cut off after 2 s",
        "failed with exit code 1",
        "ok",
        "failed: No space left on device",
        "differ by 5.0e-02 at most, failed",
        "differ by nan at most, failed",
        "no losses to compare",
        "no time was left",
    )
    assert all(word in line for word, line in zip(expected, lines, strict=True)), lines


STOPPING = f"import os, time; print('begun', flush=True); os.kill(os.getppid(), {int(signal.SIGTERM)}); time.sleep(60)"


def test_a_signal_ends_the_first_minutes_on_a_gpu_and_loses_no_result(tmp_path: Path, monkeypatch, capsys):
    parts = [Part("first", ("-c", "pass")), Part("stopped", ("-c", STOPPING)), Part("last", ("-c", "pass"))]
    monkeypatch.setattr(first_gpu, "checks", lambda: [])
    monkeypatch.setattr(first_gpu, "measurements", lambda *_: parts)
    monkeypatch.setattr(first_gpu, "has_gpu", lambda: True)
    arguments = ["--out", str(tmp_path / "out"), "--only", *(part.name for part in parts)]
    assert first_gpu.main(arguments) == 0
    lines = (tmp_path / "out" / "summary.txt").read_text().splitlines()
    assert [line.split(" s  ")[1] for line in lines] == ["ok", "stopped", "not run: no time was left"]
    assert "begun" in (tmp_path / "out" / "stopped.txt").read_text()
    with pytest.raises(SystemExit):
        first_gpu.main(arguments)
    assert "has results of first, stopped; name another folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "gpu"], "--only names gpu, which are no parts"),
        (["--minutes", "nan"], "--minutes must be above 0"),
        (["--out", "/dev/null"], "--out is /dev/null, which cannot be made"),
        (["--only", "environment"], "torch sees no GPU"),
    ],
)
def test_the_first_minutes_on_a_gpu_begin_only_where_they_can(tmp_path: Path, monkeypatch, capsys, words, message):
    monkeypatch.setattr(first_gpu, "has_gpu", lambda: False)
    with pytest.raises(SystemExit):
        first_gpu.main(["--out", str(tmp_path), *words])
    assert message in capsys.readouterr().err


def test_the_parts_of_the_first_minutes_name_files_that_exist():
    order = [part.name for part in checks()]
    assert order[:5] == ["environment", "ahead", "eight_bits", "attention", "strategies"]
    named = set(order)
    files = {argument for part in checks() for argument in part.arguments if argument.startswith("tests/gpu/")}
    assert files == {f"tests/gpu/{file.name}" for file in (processes.ROOT / "tests" / "gpu").glob("test_*.py")}
    assert {name for pair in SAME_LOSSES for name in pair[:2]} <= named | {"run_resumed"}


def test_the_measurements_fit_into_nine_minutes_in_the_order_of_their_value():
    parts = first_gpu.measurements(is_long=False)
    order = ["ceilings", "profile", "loops", "ours", "attention_kernels", "heads", "graph_work", "updates"]
    assert [part.name for part in parts] == order
    assert sum(part.limit_seconds for part in parts) <= 9 * 60 - 2 * first_gpu.LEAST_SECONDS
    names = {case.name for case in gpu_cases()}
    trainings = [one.place[1] for one in budget.budget() if one.file in ("loops", "ours")]
    assert set(trainings) <= names
    assert {one.file for one in budget.budget()} <= set(order)
    every = [*checks(), *first_gpu.beside_cpu(), first_gpu.sample("run_resumed"), *first_gpu.measurements(is_long=True)]
    assert len({part.name for part in every}) == len(every), "each part has a file of its own"


def test_a_budget_names_the_wrong_assumption(tmp_path: Path):
    name = budget.case_name(budget.BERT_LARGE, budget.BOTH)
    (tmp_path / "ours.json").write_text(json.dumps({"training": {name: {"step_seconds": 0.0751}}}))
    (tmp_path / "ceilings.json").write_text(json.dumps({"ceilings": {"copy": {"bytes_per_second": 4.2e12}}}))
    (tmp_path / "updates.json").write_text("{")
    shown = list(budget.lines(tmp_path))
    assert "copies: expected 4.11 TB/s, measured 4.2, 1.02 times" in shown
    (line,) = [line for line in shown if "compiled and captured: expected 60 ms" in line]
    assert "measured 75.1, 1.25 times; wrong assumption: compiled layers move 3.18 GB" in line
    assert "AdamW: expected 0.008273 ns a parameter, not measured" in shown


def test_each_measured_time_has_its_expected_value_or_a_line_that_says_none(tmp_path: Path):
    row = {"step_seconds": 0.01, "planned_step_seconds": 0.02}
    parts = {
        "training": {"A": row, "B": {"error": "E"}},
        "compiled": {"A": {"step_seconds": 0.03}},
        "plans": {"A": row},
    }
    (tmp_path / "ours.json").write_text(json.dumps(parts | {"device": "H200"}))
    (tmp_path / "gpu.json").write_text(json.dumps(parts))
    (tmp_path / "ceilings.json").write_text(json.dumps({"ceilings": {"copy": {"seconds": 1.0}}}))
    others = [line for line in budget.lines(tmp_path) if ": expected" not in line]
    assert others == [
        "training, A: planned 20 ms, measured 10 ms",
        "compiled, A: no expected value, measured 30 ms",
    ]


@pytest.mark.slow
def test_a_refused_combination_is_named_and_the_others_run(tmp_path: Path):
    """The recipe of one training is refused; its reason is in the results, and the next one is trained."""
    refused, trained = (
        Case("BERT-base", BASE, 16, 4, variant) for variant in ("keyed dropout, CUDA graphs", "no dropout")
    )
    cases = {case.name: shrunk(case) for case in (refused, trained)}
    errors = run_trainings(cases, True, time.monotonic() + 200, tmp_path / "ours.json", None, ["ours"], 1)
    assert not errors, "on a CPU, rows with CUDA graphs do not fail"
    found = json.loads((tmp_path / "ours.json").read_text())["training"]
    assert "CUDA" in found[refused.name]["error"] or "GPU" in found[refused.name]["error"]
    assert found[trained.name]["step_seconds"] > 0


@pytest.mark.slow
def test_the_first_minutes_on_a_gpu_are_rehearsed_with_tiny_models(tmp_path: Path):
    out = tmp_path / "out"
    assert first_gpu.main(["--tiny", "--minutes", "90", "--only", "ceilings", "graph_work", "--out", str(out)]) == 0
    heading, *lines = (out / "budget.txt").read_text().splitlines()
    assert "rehearsal" in heading
    expected = [line for line in lines if ": expected" in line]
    assert len(expected) == len(list(budget.budget()))
    shown = [line.partition(":")[0] for line in expected if "not measured" not in line]
    assert shown == ["products of BERT-large", "copies", "operations of BERT-base without graphs"]


def test_the_recipes_of_all_trainings_are_valid():
    """No key was renamed: a refused recipe would cost the row on a GPU."""
    for case in gpu_cases():
        case.recipe()


def test_the_makefile_names_trainings_that_exist():
    text = (processes.ROOT / "Makefile").read_text().replace("\\\n", " ")
    named = [shlex.split(words) for words in re.findall(r"--further (.*?)(?= --|$)", text, re.MULTILINE)]
    assert len(named) == 3
    assert {name for names in named for name in names} <= FURTHER.keys()


def test_a_row_that_fails_fails_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    answers = iter([{"device": "H200"}, {"flops": 1}, {"error": "OutOfMemoryError: too much"}])
    monkeypatch.setattr(gpu, "apart", lambda *_: next(answers))
    case = Case("BERT-base", BASE, 16, 4)
    errors = run_trainings({case.name: case}, True, time.monotonic() + 9, tmp_path / "ours.json", None, ["ours"], 1)
    assert errors == [f"training, {case.name}: OutOfMemoryError: too much"]


def test_plans_of_another_device_have_no_times(tmp_path: Path):
    file = tmp_path / "plans.json"
    file.write_text(json.dumps({"device": "NVIDIA H200", "plans": {"one": {"flops": 1, "step_seconds": 2.0}}}))
    assert read_plans(file, "NVIDIA H200") == {"one": {"flops": 1, "step_seconds": 2.0}}
    assert read_plans(file, "NVIDIA A100-SXM4-80GB") == {"one": {"flops": 1}}


def test_all_parts_that_train_are_merged_for_a_page(tmp_path: Path):
    for name, rows in {"loops": {"compiled": {"a": 1}}, "ours": {"device": "H200", "training": {"a": 2}}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    (tmp_path / "heads.json").write_text("")
    assert first_gpu.merged(tmp_path) == {"compiled": {"a": 1}, "device": "H200", "training": {"a": 2}}


@pytest.mark.nightly
def test_attention_blocks_run_in_the_interpreter(tmp_path: Path):
    file = tmp_path / "blocks.json"
    command = [sys.executable, "-m", "tests.benchmarks.attention_blocks", "--json", str(file)]
    done = processes.run(command, timeout_seconds=180, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text())["results"]
    assert not any("error" in result for result in results)
    assert {"torch, both", "present, both", "forward", "of_queries", "of_keys"} < {result["step"] for result in results}
    assert results[-1]["step"] == "fastest, both"
    assert results[-1]["difference"] < 0.02, "other blocks compute the same"


def test_a_page_shows_the_rows_that_failed_or_did_not_run():
    training = {"one": {"error": "OutOfMemoryError: too much\nmore", "seconds": 1.0}, "two": {"not_run": "no time"}}
    shown = gpu_figures([{"device": "H100", "torch": "2.11", "training": training, "transformers": {}}])
    assert "| one | OutOfMemoryError: too much | - |" in shown
    assert "| two | no time | - |" in shown


@pytest.mark.parametrize("file", sorted((processes.ROOT / "docs" / "gpu").glob("*.json")), ids=lambda file: file.stem)
def test_stored_utilisation_counts_the_products_of_the_model(file: Path):
    """MFU by a count of BERT's and Llama's products by hand; HFU has further ones, so it is larger."""
    hidden_layers = {"BERT-base": (768, 12), "BERT-large": (1024, 24)}
    for name, row in json.loads(file.read_text())["training"].items():
        model, rows, length = re.match(r"(.*), (\d+) x (\d+) tokens", name).groups()
        tokens = int(rows) * int(length)
        if model in hidden_layers:
            hidden, layers = hidden_layers[model]
            forward = tokens * layers * (12 * hidden**2 + 2 * int(length) * hidden) + int(rows) * hidden * (hidden + 2)
        elif model == "Llama 1B":
            of_layer = 2 * 2048**2 + 2 * 2048 * 512 + 3 * 2048 * 8192 + 2 * int(length) * 2048
            forward = tokens * (16 * of_layer + 2048 * 128256)
        else:
            continue
        assert row["mfu"] * row["step_seconds"] * 989.5e12 == pytest.approx(3 * 2 * forward), name
        assert row["mfu"] < row["hfu"] < 1.2 * row["mfu"], name


def test_a_page_shows_other_loops_on_the_same_batches_with_their_memory():
    row = {"rows": 1, "rows_per_second": 3.0, "step_seconds": 0.1, "launches": 2, "peak_bytes": 2**30}
    peer = {"rows_per_second": 2.0, "peak_bytes": 3 * 2**30}
    names = ("keyed dropout", "keyed dropout, CUDA graphs", "compiled, CUDA graphs", "no dropout, compiled")
    training = {f"A, bf16, ddp, {name}": row for name in names}
    peers = {"captured": {"A, bf16, ddp, keyed dropout": peer}, "compiled": {"A, bf16, ddp, no dropout": peer}}
    shown = gpu_figures([{"device": "H100", "torch": "2.11", "training": training, **peers}]).splitlines()
    heads = [head.strip() for head in shown[2].split("|")[-3:-1]]
    assert heads == ["of a compiled loop", "of a compiled, captured loop"]
    cells = [[cell.strip() for cell in line.split("|")[-3:-1]] for line in shown[4:]]
    ratio = "1.50 (3.00 GiB)"
    assert cells == [["-", ratio], ["-", ratio], ["-", ratio], [ratio, "-"]]


def test_settings_with_equal_trainings_share_a_table():
    ratio = {"cpu_ratio": [0.9, 1.0, 1.1]}
    alone, both = {"by hand": ratio, "ours": ratio}, {"by hand": ratio, "ours": ratio, "peer": ratio}
    beside = {"ours": ratio | {"default_ratio": [1.8, 2.0, 2.1]}}
    figures = {"A, fp32": alone, "B, fp32": both, "C, fp32": alone, "D, fp32, beside E": beside}
    shown = [[line[:4] for line in table.splitlines()] for table in throughput(figures).split("\n\n")]
    assert shown == [["|  |", "| --", "| A,", "| C,"], ["|  |", "| --", "| B,"]]
    assert throughput_by_default(figures).splitlines() == [
        "|  | D, fp32 |",
        "| --- | --- |",
        "| ours | 2.000 |",
    ]


def test_only_ratios_far_below_the_stored_ones_are_regressions():
    def of(ratio: float) -> dict[str, list[float]]:
        return {"cpu_ratio": [0.0, ratio, 2.0]}

    stored = {"small": {"ours": of(1.0), "gone": of(1.0)}}
    assert not list(regressions({"small": {"ours": of(0.96)}}, stored))
    assert list(regressions({"new": {"ours": of(0.1)}}, stored)) == ["no stored ratio: new"]
    (line,) = regressions({"small": {"ours": of(0.94)}}, stored)
    assert line == "slower than stored: small, ours: ratio 0.940, stored 1.000"


COUNTED = (
    "BERT-base, sequence_classification, bf16, one process",
    "BERT-base, masked_lm, fp32, fsdp",
    "ModernBERT-base, masked_lm, bf16, tensor 2",
    "Llama 1B, causal_lm, fp32, one process",
    "T5-base, seq2seq_lm, bf16, ddp",
)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=pytest.mark.slow if case.name in COUNTED else pytest.mark.nightly)
        for case in cases()
    ],
)
def test_a_step_has_no_more_operations_than_stored(case):
    """The table of docs/benchmarks.md: `python -m tests.benchmarks.operations --store` writes it again."""
    stored = json.loads(STORED.read_text(encoding="utf-8"))[case.name]
    found = ours(case)
    assert sum(found.number.values()) <= stored["operations"]
    assert sum(found.num_bytes.values()) / 1e9 <= stored["gigabytes"] + 0.05
    assert found.waits <= stored.get("waits", 0)


@pytest.mark.nightly
def test_other_loops_have_the_stored_operations():
    (case,) = [case for case in cases() if case.name == COUNTED[0]]
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    assert plain(case).sums[0] == stored[case.name]["plain_operations"]
    own = next(case for case in cases() if case.has_own_form)
    assert own_form(own).sums[0] == stored[own.name]["own_operations"]


def test_no_stored_row_has_more_than_a_plain_loop():
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    assert stored.keys() == {case.name for case in cases()}
    for name, row in stored.items():
        is_goal = name.startswith("BERT-base, sequence_classification, bf16")
        # The loop beside context ranks is one process, which exchanges nothing, and other loops select no masked words.
        most = 1.1 if "context" in name else 1.02 if "masked_lm" in name else 1.0
        assert row["operations_ratio"] <= (0.8 if is_goal else most), name
        assert row["bytes_ratio"] <= (0.9 if is_goal else 1.0), name
        assert row.get("own_bytes_ratio", 0.0) <= 1.03, name


def test_compiled_layers_change_the_counts_of_a_step():
    step = {
        "operations": 100,
        "plain_operations": 200,
        "gigabytes": 10.0,
        "plain_gigabytes": 16.0,
        "bytes_ratio": 0.625,
    }
    one = {"layers": 12, "operations": 4, "compiled_kernels": 3, "gigabytes": 0.5, "compiled_gigabytes": 0.25}
    two = {"layers": 2, "operations": 4, "compiled_kernels": 5, "gigabytes": 0.5, "compiled_gigabytes": 0.0}
    assert compiled_step(step, [one, two]) == (100 - 12 + 2, 10 - 3 - 1)
    rows = {f"A, task, {kind}": step for kind in ("bf16, one process", "bf16, ddp", "fp32, one process")}
    rows["B, task, bf16, one process"] = step | {"own_operations": 150, "own_bytes_ratio": 1.25}
    shown = operations(rows, {"A, local": one, "A, global": two}).splitlines()
    assert "| A, task, bf16 | 100 of 200, 0.62 | 90, 0.38 | 100 of 200, 0.62 |" in shown
    assert "| A, task, fp32 | 100 of 200, 0.62 | - | - |" in shown
    assert "| B, task, bf16 | 100 of 200, 0.62; own form 150, 1.25 | - | - |" in shown


def test_operations_are_summed_over_phases_without_views():
    totals = Totals()
    totals.work[Kind("forward", "other", "add", None, 0, 0)] = Amount(2, 0, 30)
    totals.work[Kind("backward", "other", "add", None, 0, 0)] = Amount(1, 0, 12)
    totals.work[Kind("forward", VIEW, "", None, 0, 0)] = Amount(5, 0, 0)
    totals.work[Kind("forward", VIEW, HOST_WAIT, None, 0, 0)] = Amount(4, 0, 0)
    count = Count.of(totals)
    assert (count.number, count.num_bytes, count.waits) == ({"add": 3}, {"add": 42}, 4)
