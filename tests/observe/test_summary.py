from pathlib import Path

import pytest

from tests.observe.samples import end_record, run_info, step_record
from trainer.observe.records import BestMetric, EvaluationRecord, MajorityClass
from trainer.observe.summary import (
    end_summary,
    evaluation_lines,
    format_bytes,
    format_decimal,
    format_rate,
    format_seconds,
    start_summary,
    step_line,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0000"),
        (0.69314, "0.6931"),
        (-1.5, "-1.5000"),
        (9999.5, "9999.5000"),
        (1e-5, "1.00e-05"),
        (1e4, "1.00e+04"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_format_decimal(value, text):
    assert format_decimal(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (437_935_112, "417.6 MiB"),
        (80 << 30, "80.0 GiB"),
        (3 << 40, "3.0 TiB"),
    ],
)
def test_format_bytes(value, text):
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.01234, "0.0123"),
        (8.123, "8.12"),
        (81.23, "81.2"),
        (812.3, "812"),
        (999.4, "999"),
        (999.9, "1.00k"),
        (33123, "33.1k"),
        (331_230, "331k"),
        (1.2e6, "1.20M"),
        (3.4e9, "3.40G"),
    ],
)
def test_format_rate(value, text):
    assert format_rate(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.4, "0:00:00"), (59.6, "0:01:00"), (3661, "1:01:01"), (360_000, "100:00:00")]
)
def test_format_seconds(value, text):
    assert format_seconds(value) == text


def test_summaries_fit_eighty_columns_except_copied_texts():
    folder = Path("/data/projects/with/a/rather/long/path/to/the/place/where/all/runs/of/it/lie/small")
    run = run_info(
        folder,
        device="NVIDIA A100-SXM4-80GB",
        layout="pp 2 x dp_replicate 4 x dp_shard 8 x tp 8",
        batch="4096 rows a step = 32 ranks x 16 microbatches of at most 8 " * 2,
        majority=MajorityClass("a label of several words that are not short at all", 0.5),
        resumed_from=120_000,
    )
    command = "torchrun --nnodes 16 --nproc-per-node 8 -m trainer run " + "x" * 80
    end = end_record(folder, outcome="stopped", exit_code=75, resume_command=command)
    started, ended = start_summary(run), end_summary(end, run)
    assert len(started) == 8
    long = [line for line in [*started, *ended] if len(line) > 80]
    assert all(str(folder) in line or "resume " in line or line.startswith("  batch ") for line in long)
    assert f"  resume      {end.resume_command}" in long


def test_a_label_cannot_write_to_the_terminal():
    lines = start_summary(run_info(Path("runs/small"), positive="\x1b[2Jgone\n"))
    assert len(lines) == 8
    assert all(line.isprintable() for line in lines)


def test_no_majority_is_claimed_beside_another_metric():
    run = run_info(Path("runs/small"))
    lines = end_summary(end_record(Path("runs/small"), best=BestMetric("f1", 0.9, 3)), run)
    assert "  best        f1 0.9000 at step 3" in lines


def test_a_regression_without_validation_shows_no_baseline():
    lines = start_summary(run_info(Path("runs/small"), majority=None, num_validation_rows=None, world_size=1))
    assert "  data        3,668 training rows" in lines
    assert any("1 rank on cpu" in line for line in lines)


def test_no_rate_of_tokens_is_shown_where_there_are_none():
    line = step_line(step_record(1, tokens=None, tokens_per_second=None), 345, None)
    assert "samples/s" in line
    assert "tokens" not in line


def test_lines_below_each_other_are_aligned():
    lines = [
        step_line(step_record(step, grad_norm=norm, loss_scale=65536.0, skipped_steps=2, mfu=mfu), 345, None)
        for step, norm, mfu in [(1, 0.5, 0.05), (345, 10.25, 0.412)]
    ]
    assert lines[0].index("samples/s") == lines[1].index("samples/s")
    assert lines[0].index("memory") == lines[1].index("memory")
    assert lines[0].endswith("loss_scale 65536  skipped 2")


def test_metrics_of_parts_are_a_table():
    metrics = {"loss": 0.5, "f1": 0.25, "f1/LOC": 0.5, "f1/a person": 0.0}
    assert evaluation_lines(EvaluationRecord(3, metrics)) == [
        "evaluation at step 3: loss 0.5000  f1 0.2500",
        "            f1",
        "  LOC       0.5000",
        "  a person  0.0000",
    ]
