from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from tests.helpers.processes import ROOT, environment, finish, kill, start
from trainer import __version__
from trainer.base.errors import INTERRUPTED, DataError, ExitCode, NonFiniteError, RecipeError
from trainer.cli import main
from trainer.launch import local
from trainer.recipe.reading.loading import ResolvedRecipe, load_recipe
from trainer.use.export import exporting

PROGRAM = [sys.executable, "-m", "trainer"]
LIGHT = [
    ["--help"],
    ["--version"],
    ["recipes"],
    ["recipes", "show", "bert_base_mrpc"],
    ["schema"],
    ["check", "bert_base_mrpc", "training.epochs=1", "--quick"],
    ["check", "bert_base_mrpc", "parallel.pipeline.stages=2", "--processes", "8", "--quick"],
    ["export", "--help"],
    ["doctor", "--help"],
    ["run", "bert_base_mrpc", "training.epoch=1"],
]
HEAVY = ("torch", "transformers", "datasets", "accelerate", "numpy", "deepspeed")


MOST_CALLS = 3_000_000  # some half a second of a processor; `schema` makes 2.7 million
COUNTED = (
    "import sys; calls = [0]; sys.argv[1:] = sys.argv[2:]\n"
    "sys.setprofile(lambda *_: calls.__setitem__(0, calls[0] + 1))\n"
    "from trainer.__main__ import main; code = main(); sys.setprofile(None)\n"
    f"assert not set({HEAVY}) & set(sys.modules), set({HEAVY}) & set(sys.modules)\n"
    f"assert calls[0] < {MOST_CALLS}, calls\n"
    "sys.exit(code)"
)


@pytest.mark.parametrize(
    "arguments",
    [
        # The other verbs import all that these do.
        *(pytest.param(words, marks=pytest.mark.slow if words in LIGHT[:4] else ()) for words in LIGHT),
        ["convert", "launchers/accelerate_multi_gpu.yaml"],
    ],
    ids=" ".join,
)
def test_light_verbs_import_nothing_heavy_and_do_little(arguments: list[str]) -> None:
    """Count calls and returns in place of seconds, which depend on the machine, its disk and its neighbours."""
    done = finish(start([sys.executable, "-c", COUNTED, "-", *arguments]))
    assert "AssertionError" not in done.stderr
    assert done.returncode == (2 if arguments[0] == "run" else 0)


@pytest.mark.alone
@pytest.mark.nightly
@pytest.mark.parametrize("arguments", LIGHT[:-1], ids=" ".join)
def test_light_verbs_answer_in_half_a_second(arguments: list[str]) -> None:
    """Take the shortest of four times, in seconds of a processor, on a quiet machine."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*PROGRAM, *arguments], cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(4)) < 0.5


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"trainer {__version__}\n"
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(verb in shown for verb in ("run", "check", "convert", "doctor", "export", "recipes", "schema"))


def layout_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines that `check` showed, without those on data and model."""
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if not line.startswith(("note ", "checked ", "unchecked ", "steps "))]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["export", "run", ""], "the argument after `run` is blank; set the variable that was empty"),
        (["predict", "run", "rows.csv", "--output="], "`--output=` has no value; set the variable that was empty"),
        (["init", "rows.csv", "--model", " "], "the argument after `--model` is blank"),
    ],
)
def test_an_unset_variable_is_no_argument(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert main(arguments) == ExitCode.USER
    assert words in capsys.readouterr().err


def test_check_shows_the_keys_of_the_user_and_derived_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "bert_base_mrpc", "training.epochs=1", "parallel.strategy=zero2", "--processes", "2"]) == 0
    lines = layout_of(capsys)
    assert len(lines) <= 15
    assert "training  epochs=1" in lines
    assert lines[-5].startswith("others    16 keys of recipes/bert_base.json, and defaults: --all shows them")
    assert lines[-3:-1] == [
        "layout    dp_shard 2",
        "batch     32 rows a step = 2 data-parallel ranks x 2 microbatches of at most 8 rows",
    ]


def test_check_shows_every_value_with_its_origin(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "bert_base_mrpc", "training.epochs=1", "--processes", "4", "--all"]) == 0
    lines = layout_of(capsys)
    rows = {line.split()[0]: line for line in lines if line}
    assert rows["training.epochs"].split() == ["training.epochs", "1", "command", "line"]
    assert rows["training.seed"].split()[1] == "42"
    assert "recipes/bert_base.json:" in rows["training.seed"]
    assert rows["data.cache"].split() == ["data.cache", "null", "default"]
    assert lines[-3:] == [
        "layout    dp_replicate 4",
        "batch     32 rows a step = 4 data-parallel ranks x 1 microbatch of at most 8 rows",
        "strategy  ddp: every rank holds the whole model (DistributedDataParallel)",
    ]


def test_check_prints_the_whole_deepspeed_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "bert_base_mrpc", "parallel.strategy=zero2", "--processes", "2", "--json"]) == 0
    config = json.loads(capsys.readouterr().out)["deepspeed"]
    assert config["gradient_clipping"] == 1.0
    assert config["train_batch_size"] == 32
    assert config["zero_optimization"]["stage"] == 2


def test_check_shows_the_numbers_of_ranks_without_spares(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "bert_base_mrpc", "parallel.elastic=data", "--quick"]) == 0
    assert "elastic   data: of up to 16 processes, all train if there are 1, 2, 4, 8, 16\n" in capsys.readouterr().out


def test_check_as_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "bert_base_mrpc", "--json", "--processes", "2"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["recipe"]["data"]["name"] == "nyu-mll/glue"
    assert answer["origins"]["data.cache"] == "default"
    assert answer["layout"] == {"dp_replicate": 2, "dp_shard": 1, "ep": 1, "cp": 1, "tp": 1, "pp": 1}
    assert answer["batch"]["num_microbatches"] == 2


def test_check_draws_the_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["parallel.strategy=fsdp", "parallel.pipeline.stages=2", "parallel.tensor=2"]
    assert main(["check", "bert_base_mrpc", *keys, "--processes", "8", "--quick"]) == 0
    table, layout = "\n".join(layout_of(capsys)).split("\n\n")[-2:]
    assert table.splitlines()[0] == "rank  stage  shard  tensor"
    assert table.splitlines()[-1] == "7     1      1      1"
    assert layout.splitlines() == [
        "layout    pp 2 x dp_shard 2 x tp 2",
        "batch     32 rows a step = 2 data-parallel ranks x 4 microbatches of at most 4 rows",
        "strategy  fsdp: shards parameters, gradients and optimizer state; gathers each layer when needed"
        " (fully_shard)",
        "pipeline  1f1b, 2 ranks, 4 microbatches a pass; bubble 20.0%",
        "          layers are balanced over the stages when the model is loaded",
    ]


def test_check_shows_the_stages_of_a_local_model(capsys: pytest.CaptureFixture[str]) -> None:
    """The parameters are those of transformers' own modules."""
    arguments = ["check", "bert_sample", "parallel.pipeline.stages=2", "--processes", "2"]
    assert main(arguments) == 0
    model = BertForSequenceClassification(BertConfig(**_bert_of_the_sample(), num_labels=7))
    assert layout_of(capsys)[-2:] == [
        f"          stage {stage}  encoder.layer.{stage}  {count:,} parameters  {4 * count / 2**20:.1f} MiB a rank"
        for stage, count in enumerate(_halves(model))
    ]
    assert main([*arguments, "--json"]) == 0
    pipeline = json.loads(capsys.readouterr().out)["pipeline"]
    assert [stage["num_parameters"] for stage in pipeline["stages"]] == list(_halves(model))
    assert [stage["layers"] for stage in pipeline["stages"]] == [["encoder.layer.0"], ["encoder.layer.1"]]


def _bert_of_the_sample() -> dict[str, Any]:
    config = dict(load_recipe("bert_sample").recipe.model.config or {})
    assert config.pop("model_type") == "bert"
    return config


def _halves(model: nn.Module) -> tuple[int, int]:
    """Embeddings and the first layer, and the rest."""
    first = ("bert.embeddings.", "bert.encoder.layer.0.")
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    before = sum(size for name, size in sizes.items() if name.startswith(first))
    return before, sum(sizes.values()) - before


def test_check_reads_the_configuration_of_a_local_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The missing weights are a problem of their own."""
    BertConfig(**_bert_of_the_sample(), architectures=["BertModel"]).save_pretrained(tmp_path)
    model = [f"model.name_or_path={tmp_path}", "parallel.pipeline.stages=2"]
    assert main(["check", "bert_base_mrpc", *model, "--processes", "2"]) == ExitCode.USER
    shown = capsys.readouterr()
    assert "stage 1  encoder.layer.1  215,042 parameters" in shown.out
    assert "which has no weights (model.safetensors)" in shown.err


@pytest.mark.parametrize("recipe", ["bert_sample_mlm", "vit_sample", "embedding_sample"])
def test_check_knows_the_stages_of_every_kind_of_task(capsys: pytest.CaptureFixture[str], recipe: str) -> None:
    """Classes that only the data names are not needed; a head tied to the embedding counts on both stages."""
    assert main(["check", recipe, "parallel.pipeline.stages=2", "--processes", "2"]) == 0
    assert " parameters " in layout_of(capsys)[-1]


def test_check_refuses_more_stages_than_layers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "bert_sample", "parallel.pipeline.stages=4", "--processes", "4"]) == ExitCode.USER
    assert capsys.readouterr().err == (
        "error: `parallel.pipeline` asks for 4 stages, but the model has 2 layers and every stage needs one; use at"
        " most 2\n"
    )


def test_check_as_json_holds_the_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["parallel.pipeline.stages=2", "parallel.pipeline.schedule=interleaved_1f1b"]
    assert main(["check", "bert_base_mrpc", *keys, "--json", "--processes", "2", "--quick"]) == 0
    assert json.loads(capsys.readouterr().out)["pipeline"] == {
        "schedule": "interleaved_1f1b",
        "num_ranks": 2,
        "stages_per_rank": 2,
        "num_stages": 4,
        "num_microbatches": 8,
        "bubble": 1 / 17,
        "stages_of_ranks": [[0, 2], [1, 3]],
        "stages": None,
    }
    assert main(["check", "bert_base_mrpc", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pipeline"] is None


def test_the_output_of_check_can_be_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["check", "bert_base_mrpc", "--json"])
    first = json.loads(capsys.readouterr().out)
    monkeypatch.chdir(tmp_path)
    Path("again.json").write_text(json.dumps(first["recipe"]))
    assert main(["check", "again.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recipe"] == first["recipe"]


def test_recipes_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    assert re.search("bert_base_mrpc +BERT base on MRPC of GLUE", capsys.readouterr().out)
    assert main(["recipes", "show", "bert_base_mrpc.json"]) == 0
    assert capsys.readouterr().out == (ROOT / "recipes/bert_base_mrpc.json").read_text()
    assert main(["recipes", "show", "bert_base_mprc"]) == 2
    near = r"the nearest are bert_base_mrpc, (\w+), (\w+); `trainer recipes` lists all \d+"
    assert re.fullmatch(f"error: no shipped recipe is called 'bert_base_mprc'; {near}\n", capsys.readouterr().err)


def test_no_sentence_of_the_help_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["recipes"]):  # the lists of verbs, which click cuts by itself
        assert main([*arguments, "--help"]) == 0
        assert not re.search(r"[a-z,;]\.\.\.|…", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("trainer sear", ["search"]),
        ("trainer run ner_", ["ner_sample"]),
        ("trainer check nerv", ["nervous.yaml"]),
        ("trainer plan x --gpus 8xA100", ["8xA100-40", "8xA100-80"]),
        ("trainer run x training.ep", ["training.epochs="]),
    ],
)
def test_shells_complete_verbs_recipes_devices_and_keys(
    words: str, found: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nervous.yaml").touch()
    monkeypatch.setenv("_TRAINER_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    main([])
    assert capsys.readouterr().out.split() == found


def test_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert {"$schema", "extends", "task"} <= json.loads(capsys.readouterr().out)["properties"].keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Usage: trainer"),
        (["frobnicate"], "No such command 'frobnicate'"),
        (["train", "my.json"], "error: `train` is no command; to train a recipe: trainer run RECIPE"),
        (["run", "--config", "my.json"], "error: `--config` is no option; name the recipe alone"),
        (["check"], "Missing argument 'RECIPE'"),
        (["check", "bert_base_mrpc", "--processes", "0"], "--processes"),
        (["check", "bert_base_mrpc", "--processes", "two"], "--processes"),
        (["check", "nope"], "error: nope: no such file"),
        (["run", "nope"], "error: nope: no such file"),
        (
            ["run", "bert_base_mrpc", "--epochs", "3"],
            "error: command line: `--epochs` is not an option; as a key it is",
        ),
        (["check", "bert_base_mrpc", "training.epochs=0"], "error: command line: `training.epochs` must be an integer"),
        (["check", "bert_base_mrpc", "--processes", "5"], "error: `training.global_batch_size` must be divisible"),
    ],
)
def test_the_users_mistakes_exit_with_two(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == ExitCode.USER
    captured = capsys.readouterr()
    assert message in captured.err + captured.out
    assert "Traceback" not in captured.err


def test_each_problem_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "bert_base_mrpc", "training.epochs=0", "a=1", "training.seed=-1"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("error: command line: `") for line in lines)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None, int]]:
    """What `run` hands over, in place of a training."""
    handed_over: list[tuple[str, int | None, int]] = []

    def run_or_join(resolved: ResolvedRecipe, processes: int | None, max_restarts: int) -> int:
        handed_over.append((resolved.recipe.name, processes, max_restarts))
        return ExitCode.STOPPED

    monkeypatch.setattr(local, "run_or_join", run_or_join)
    return handed_over


def test_run_hands_over_and_returns_the_exit_code(runs: list[tuple[str, int | None, int]]) -> None:
    assert main(["run", "bert_base_mrpc", "training.epochs=1", "--processes", "2"]) == ExitCode.STOPPED
    assert main(["run", "--processes", "3", "bert_base_sst2", "--max-restarts", "4"]) == ExitCode.STOPPED
    assert main(["run", "bert_base_sst2"]) == ExitCode.STOPPED
    assert runs == [("bert_base_mrpc", 2, 0), ("bert_base_sst2", 3, 4), ("bert_base_sst2", None, 0)]


def test_export_reports_its_folder_and_checkpoint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def export(
        checkpoint: Path, folder: Path, dtype: str, adapter: bool, verification: None, to: str
    ) -> exporting.Exported:
        assert (checkpoint, folder, dtype, verification, to) == (
            Path("runs/a"),
            Path("out"),
            "bf16",
            None,
            "safetensors",
        )
        weights = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
        return exporting.Exported(checkpoint / "step", 1200, folder, weights, 1_234_567, ("one was passed over",))

    monkeypatch.setattr(exporting, "export", export)
    assert main(["export", "runs/a", "out", "--dtype", "bf16"]) == ExitCode.DONE
    shown = capsys.readouterr()
    assert shown.err == "note: one was passed over\n"
    assert shown.out == "exported runs/a/step (step 1,200) to out: 2 files of weights, bf16, 1.2 MB\n"


def test_export_of_nothing_is_the_users_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path / "nowhere"), str(tmp_path / "out")]) == ExitCode.USER
    assert capsys.readouterr().err.startswith("error: `CHECKPOINT` must be the folder of a checkpoint")
    assert main(["export", str(tmp_path), str(tmp_path / "out"), "--dtype", "fp8"]) == ExitCode.USER
    assert "'fp8' is not one of 'fp32', 'bf16', 'fp16'" in capsys.readouterr().err


@pytest.mark.parametrize("rank", [["--local_rank=1"], ["--local-rank=1"], ["--local_rank", "1"], ["--local-rank", "1"]])
@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_the_rank_that_deepspeed_adds_is_taken_anywhere(
    runs: list[tuple[str, int | None, int]], rank: list[str], position: int
) -> None:
    arguments = ["run", "bert_base_mrpc", "training.epochs=1"]
    assert main([*arguments[:position], *rank, *arguments[position:]]) == ExitCode.STOPPED
    assert runs == [("bert_base_mrpc", None, 0)]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (DataError("the column is missing"), 2, "error: the column is missing\n"),
        (NonFiniteError("the loss is nan"), 3, "error: the loss is nan\n"),
        (RecipeError("one", "two"), 2, "error: one\nerror: two\n"),
        (DataError("no column \x1b[2J\u202ea"), 2, "error: no column \\x1b[2J\\u202ea\n"),
        (KeyboardInterrupt(), INTERRUPTED, ""),
    ],
)
def test_errors_become_exit_codes_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, message: str
) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(local, "run_or_join", fail)
    assert main(["run", "bert_base_mrpc"]) == code
    assert capsys.readouterr().err == message


def test_our_own_bugs_show_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(local, "run_or_join", fail)
    with pytest.raises(ZeroDivisionError):
        main(["run", "bert_base_mrpc"])


def test_a_reader_that_stops_reading_is_no_error() -> None:
    process = start([*PROGRAM, "schema"])
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    done = finish(process)
    assert done.stderr == ""


@pytest.mark.parametrize("encoding", [pytest.param("utf-8", marks=pytest.mark.slow), "ascii"])
def test_every_name_can_be_shown(tmp_path: Path, encoding: str) -> None:
    path = os.path.join(os.fsencode(tmp_path), b"\xff\xc3\xa9.json")  # not UTF-8
    Path(os.fsdecode(path)).write_text('{"extends": "bert_base_mrpc"}')
    for override, code in (("training.epochs=1", 0), ("training.epochs=0", 2), ("checkpoint.folder=\xe9", 0)):
        done = subprocess.run(
            [*PROGRAM, "check", path, override, "--quick"],
            env=environment(PYTHONIOENCODING=encoding),
            capture_output=True,
            timeout=60,
        )
        assert b"Traceback" not in done.stderr
        assert done.returncode == code


def test_ctrl_c_at_exit_shows_no_traceback() -> None:
    """The interpreter shuts down for some time after the last output."""
    text = "import atexit, os, signal, sys; from trainer.__main__ import main\n"
    text += "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT)); sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", text, "recipes"], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert "bert_sample" in done.stdout
    assert "Traceback" not in done.stderr
    assert done.returncode == -signal.SIGINT


def test_an_interrupt_that_compiled_code_drops_is_sent_again() -> None:
    program = """
import sys, time
from trainer.__main__ import _interrupt_again

class Dropping:
    def __del__(self):
        raise KeyboardInterrupt

sys.unraisablehook = _interrupt_again
try:
    Dropping()
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(130)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (INTERRUPTED, "")


def test_ctrl_c_shows_no_traceback(tmp_path: Path) -> None:
    """Interrupts at many moments, from the first import on; a recipe of many keys makes the work long enough.

    Moments in processor time: on a busy machine, an early one would be in a start of Python, which shows a traceback.
    """
    (tmp_path / "r.json").write_text(json.dumps({f"key{number}": number for number in range(30_000)}))
    for seconds in (0.2, 0.4, 0.6, 1.0):
        process = start([*PROGRAM, "check", tmp_path / "r.json"])
        try:
            while process.poll() is None and sum(psutil.Process(process.pid).cpu_times()[:2]) < seconds:
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            done = finish(process)
        finally:
            kill(process)
        assert "Traceback" not in done.stderr
        assert done.returncode in (INTERRUPTED, ExitCode.USER, -signal.SIGINT)


def test_export_takes_the_folder_without_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "runs/mine", "--output", "out"]) == ExitCode.USER
    assert "`--output` is no option of `trainer export`; write the folder after the run" in capsys.readouterr().err
