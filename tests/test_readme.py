"""What the README and the pages say is so: each shell command is run as it stands, or is named here with its test.

A page is read from its top to its end: its commands run in that order, in a folder that looks like a clone after
`make`, whose `.venv/bin` shortens each training and starts from processes that have imported already. What starts cold
is tested by the tests of the launchers and of the command line.
"""

from __future__ import annotations

import json
import re
import shlex
import stat
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from docs.generate import pages, with_blocks
from tests.helpers import warm
from tests.helpers.processes import ROOT, run
from tests.launch.test_launchers import CASES, PORT
from trainer.base.errors import ExitCode
from trainer.cli import main
from trainer.recipe.reading.loading import load_recipe
from trainer.recipe.reading.parser import Origin, parse
from trainer.recipe.reading.shipped import shipped_recipes
from trainer.recipe.schema import Parallel
from trainer.recipe.strategies import STRATEGIES

README, COMMAND_LINE, COMING_FROM = ROOT / "README.md", ROOT / "docs" / "cli.md", ROOT / "docs" / "coming_from.md"
BIN = Path(sys.executable).parent
STEPS = 4  # of each training here

ELSEWHERE = {
    "make test": 'Makefile::pytest $(WORKERS) -m "not slow and not nightly"',
    "make test-all": ".ci/run::make test-all",
    "make check": ".ci/run::check bench-quick",
    "make bench": "tests/benchmarks/test_benchmarks.py::def test_throughput",
    "make gpu": "tests/benchmarks/test_benchmarks.py::def test_gpu_runs_in_small_on_a_cpu",
    "make docs": "tests/test_site.py::def test_the_site_builds",
    "python -m docs.generate": "tests/test_readme.py::test_generated_blocks_are_up_to_date",
    "trainer run bert_sample --processes 2": 'tests/launch/test_launchers.py::"trainer": Case',
    "python -m tests.benchmarks.host": "tests/benchmarks/test_host.py::def test_each_strategy_has_its_time",
    "python -m tests.benchmarks.choices": "tests/benchmarks/test_host.py::def test_choices_have_host_times",
    "python -m tests.benchmarks.memory": "tests/benchmarks/test_benchmarks.py::def test_memory",
    'python -m tests.benchmarks.compiled_layers --names "96 rows" --plan H100 modernbert_base_pretraining'
    " model.tokenizer=none training.batch_size_warmup=null": (
        "tests/benchmarks/test_compiled_layers.py::def test_a_plan_with_counted_kernels"
    ),
    "python -m tests.benchmarks.compiled_layers --store": (
        "tests/benchmarks/test_compiled_layers.py::def test_a_layer_has_no_more_kernels_and_bytes_than_stored"
    ),
    "python -m tests.parity.measure --weights": "tests/parity/test_measure.py::test_weights_in_bf16_are_within_the",
    "python -m tests.parity.fuzz --seed 21 --cases 1000": "tests/parity/test_fuzz.py::test_a_drawn_case_is_one_process",
    "python -m tests.parity.fuzz --seed 21 --case 505": "tests/parity/test_fuzz.py::test_a_drawn_case_is_one_process",
    "trainer run stages_sample --processes 2": (
        "tests/features/stages/test_sample.py::def test_the_sample_on_two_processes"
    ),
    "trainer run pretraining_sample --processes 2": (
        "tests/features/stages/test_pretraining.py::def test_pretrained_weights_beat_random_ones"
    ),
    "trainer run ner_sample training.epochs=1 optimizer.learning_rate=5e-4 --processes 2": (
        "tests/features/stages/test_pretraining.py::def test_pretrained_weights_beat_random_ones"
    ),
    "trainer plan stages_sample --gpus 1x80GiB stage=long": (
        "tests/features/stages/test_sample.py::def test_a_plan_adds_up"
    ),
    "trainer compare bert_sample --processes 2": "tests/tools/compare/test_compare.py::def test_on_two_ranks",
    "trainer compare bert_sample optimizer.learning_rate=1e-3,2e-3 training.micro_batch_size=12,24 --processes 2"
    " --steps 10": "tests/tools/compare/test_compare.py::def test_values_make_a_grid",
    'trainer certify bert_sample --layouts "fsdp; tensor=2; zero3" --steps 8': (
        "tests/tools/certificate/test_certifying.py::def test_as_a_user"
    ),
    "torchrun --nproc-per-node 8 -m trainer certify bert_sample"
    ' --layouts "fsdp; tensor=2; fsdp processes=4" --steps 8': (
        "tests/tools/certificate/test_job.py::def test_launchers"
    ),
    'srun trainer certify bert_sample --layouts "hsdp shard=8; tensor=8" --against-first': (
        "tests/tools/certificate/test_job.py::def test_three_ranks"
    ),
    "trainer certify runs/before runs/after": "tests/tools/certificate/test_certifying.py::def test_two_recorded_runs",
    "trainer run bert_sample training.max_steps=4 logging.fingerprints=true checkpoint.folder=runs/before": (
        "tests/tools/certificate/test_certifying.py::def test_two_recorded_runs"
    ),
    "trainer run bert_sample training.max_steps=4 logging.fingerprints=true checkpoint.folder=runs/after": (
        "tests/tools/certificate/test_certifying.py::def test_two_recorded_runs"
    ),
    "trainer run bert_sample --processes 2 logging.fingerprints=true training.max_steps=4"
    " checkpoint.folder=runs/recorded": "tests/tools/certificate/test_certifying.py::def test_two_recorded_runs",
    "trainer search bert_sample optimizer.learning_rate=1e-4..1e-2,log model.dropout=0,0.1 training.max_steps=24"
    " --trials 6": "tests/tools/search/test_search.py::def test_a_search_is_stopped_in_a_trial",
    "trainer audit bert_sample --write rows.csv -o audit.html": (
        "tests/tools/audit/test_data_audit.py::def test_the_file_of_rows_feeds_the_key"
    ),
    "trainer run bert_sample logging.rows=true": (
        "tests/tools/audit/test_run_audit.py::def test_flipped_labels_of_pairs"
    ),
    "trainer audit runs/bert_sample --write rows.csv -o audit.html": (
        "tests/tools/audit/test_run_audit.py::def test_flipped_labels_of_pairs"
    ),
    "trainer suite sample --seeds 1 training.max_steps=4": (
        "tests/tools/suite/test_suite.py::def test_the_sample_suite_trains_over_a_tiny_model"
    ),
    "trainer why runs/bert_sample": "tests/tools/test_why.py::def test_a_planted_cause_is_the_largest",
    "trainer run bert_sample compile=true": "tests/training/test_compiled.py::def test_a_compiled_run",
    "trainer rehearse bert_sample --ranks 64 --rank 37 parallel.tensor=2 training.global_batch_size=64": (
        "tests/tools/plan/test_rehearsal.py::def test_a_rank_of_many_is_shown"
    ),
    "sbatch mine.sbatch": 'tests/launch/test_launchers.py::"launch-script"',
    "trainer export runs/bert_sample exported/verified --verify": (
        "tests/tools/certify/test_verifying.py::def test_as_a_user"
    ),
    "trainer export runs/bert_sample exported/onnx --to onnx --verify": (
        "tests/tools/certify/test_verifying.py::def test_as_a_user"
    ),
    "trainer export runs/bert_sample exported/calibrated --calibrate --verify": (
        "tests/tools/test_calibrating.py::def test_a_pipeline_of_transformers_gives_calibrated_probabilities"
    ),
    'trainer evaluate runs/bert_sample "task.metrics=accuracy,ece,brier,best_threshold_per_class"': (
        "tests/features/calibration/test_metrics.py::def test_the_picture_has_the_points_of_the_curve"
    ),
    "trainer tokenizer recipes/sample/train.jsonl tokenizers/mine --size 4000": (
        "tests/tools/tokenizer/test_tokenizer.py::def test_data_of_several_formats"
    ),
    "trainer tokenizer bert_sample_mlm tokenizers/sample --size 3000 --recipe": (
        "tests/tools/tokenizer/test_tokenizer.py::def test_the_texts_of_a_recipe_give_the_tokenizer_of_its_files"
    ),
    "trainer encode bert_sample_mlm shards/mlm": (
        "tests/tools/encode/test_encode.py::def test_the_verb_shows_figures_and_the_next_command"
    ),
    "trainer run shards/mlm/recipe.json": (
        "tests/tools/encode/test_encode.py::def test_a_training_from_shards_has_the_losses_of_one_from_texts"
    ),
    "trainer push exported/bert_sample me/bert-sample": "tests/tools/test_push.py::def test_the_verb_sends",
    "kubectl apply --server-side -f launchers/cluster_training_runtime.yaml": (
        "tests/tools/test_script.py::def test_the_runtime_of_a_whole_cluster_starts_the_pods_of_a_trainjob"
    ),
    "kubectl get trainjob reviews -o jsonpath='{.status.trainerStatus}'": (
        "tests/features/kubeflow/test_progress.py::def test_a_run_reports_by_its_environment_alone"
    ),
    "trainer doctor": "tests/tools/doctor/test_doctor.py::test_this_machine_has_no_problem",
    "trainer doctor --verbose": "tests/tools/doctor/test_finding.py::test_lines",
    "trainer doctor --json": "tests/tools/doctor/test_doctor.py::test_this_machine_has_no_problem",
}
"""Commands that would run these tests again, or take long: the file that covers each, and where in it."""

QUICK = re.compile(r"cat > |trainer (init|check|plan|preview|convert|recipes|schema|launch-script)\b")
TRAINS = re.compile(r"make train$|trainer run ")
OTHERS = re.compile(
    r"source \.venv/bin/activate$|trainer runs$|python - <<|\(cd runs/|trainer (export|evaluate|predict|mine) "
    r"|trainer (report|why) |echo '|(head|tail) -n \d+ "
)


@dataclass(frozen=True)
class Page:
    """The fenced shell commands of a page, a here-document being part of its command."""

    path: Path
    commands: tuple[str, ...]

    def __str__(self) -> str:
        return name_of(self.path)

    def to_run(self) -> list[str]:
        """The commands that nothing else covers; a training that an earlier page has is not done again."""
        trained = {command for page in earlier_pages(self) for command in page.commands if TRAINS.search(command)}
        return [command for command in self.commands if not is_covered(command) and command not in trained]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def shell_pages() -> list[Page]:
    found = []
    for path in pages():
        shown = re.sub(r"<!--.*?-->", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        fences = re.findall(r"^```(?:bash|sh|shell|console)\n(.*?)^```$", shown, re.DOTALL | re.MULTILINE)
        found.append(Page(path, tuple(command for fence in fences for command in commands_of(fence))))
    return found


def commands_of(text: str) -> list[str]:
    found: list[str] = []
    end: str | None = None
    for line in text.splitlines():
        if end is not None:
            found[-1] += f"\n{line}"
            end = None if line == end else end
        elif command := re.sub(r"\s+#.*", "", line).strip():
            found.append(command)
            document = re.search(r"<<'(\w+)'", command)
            end = document[1] if document else None
    return found


PAGES = shell_pages()


def earlier_pages(page: Page) -> list[Page]:
    return PAGES[: PAGES.index(page)]


def is_covered(command: str) -> bool:
    return command in ELSEWHERE or launcher_case(command) is not None


def launcher_case(command: str) -> str | None:
    """The case of `tests/launch/test_launchers.py` that starts what the command starts, with another recipe."""
    words = [word for word in shlex.split(command.partition("\n")[0]) if not re.fullmatch(r"[A-Z_]+=\S+", word)]
    files = [Path(word).name for word in words if word.startswith("launchers/")]
    if words[0] == "srun":
        return "srun"
    for name, case in CASES.items():
        (first, *_), from_file = case.commands, [file for file in files if file in map(file_name, case.commands[0])]
        if from_file or words[: len(first) - first.count(PORT) * 2] == without_port(first):
            return name
    return None


def file_name(word: str | Path) -> str:
    return Path(word).name


def without_port(words: list[str | Path]) -> list[str]:
    """The words of a case as a page writes them: no folder before a program, and the port that the launcher takes."""
    port = words.index(PORT) if PORT in words else len(words) + 1
    kept = [word for place, word in enumerate(words) if place not in (port - 1, port)]
    return [file_name(word) if isinstance(word, Path) else word for word in kept]


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Path]:
    """A folder as a user has it after `make train`, with small models under the names of the hub's."""
    for path in ROOT.iterdir():
        if path.name not in (".venv", "runs", "site", ".git"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / ".installed").touch()
    (tmp_path / ".venv" / "bin" / "activate").touch()
    with warm.door() as programs:
        for name, text in shims(programs).items():
            shim = tmp_path / ".venv" / "bin" / name
            shim.write_text(f"#!/bin/sh\n{text}\n")
            shim.chmod(stat.S_IRWXU)
        yield tmp_path


def shims(programs: dict[str, str]) -> dict[str, str]:
    """Programs that hand their arguments to warm ones; a training has few steps."""
    few = f'[ "$1" = run ] && set -- "$@" training.max_steps={STEPS}\n'
    return {"trainer": f'{few}exec {programs["trainer"]} "$@"', "python": f'exec {programs["python"]} "$@"'}


def write_small_bert(folder: Path) -> None:
    """A BERT of random weights where a recipe names a pretrained one."""
    from transformers import AutoTokenizer, BertConfig, BertModel

    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=3000, **size)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "recipes" / "sample" / "tokenizer").save_pretrained(folder)


def run_commands(clone: Path, commands: list[str], timeout_seconds: float) -> str:
    """What the commands wrote; 75 (stopped, saved) is no failure."""
    on_failure = "trap 'code=$?; [ $code = 75 ] || exit $code' ERR"
    script = "\n".join([f"cd {clone}", on_failure, *commands])
    path = f"{clone}/.venv/bin:{BIN}:/usr/local/bin:/usr/bin:/bin"
    ended = run(["bash", "-c", script], timeout_seconds, PATH=path, XDG_CACHE_HOME=str(clone / "cache"))
    print(ended.stdout, ended.stderr, sep="\n")
    assert ended.returncode in (0, ExitCode.STOPPED)
    return ended.stdout


def test_every_command_is_run_or_covered():
    unknown = [
        f"{page}: {command}"
        for page in PAGES
        for command in page.to_run()
        if not any(pattern.search(command) for pattern in (QUICK, TRAINS, OTHERS))
    ]
    assert unknown == [], "run it here, or name in ELSEWHERE the test that covers it"


def test_the_named_test_of_a_command_exists():
    written = {command for page in PAGES for command in page.commands}
    for command, cover in ELSEWHERE.items():
        file, _, text = cover.partition("::")
        assert text in (ROOT / file).read_text(encoding="utf-8"), f"{command} is covered by nothing: {cover}"
        assert command in written or "docs.generate" in command, f"{command} is nowhere"


def test_a_launcher_of_a_page_is_one_that_is_tested():
    assert launcher_case("torchrun --standalone --nproc-per-node 2 --no-python trainer run bert_sample") == "torchrun"
    assert launcher_case("torchrun --nproc-per-node 2 --no-python trainer run bert_sample") is None
    assert launcher_case("deepspeed --num_accelerators 2 --no_python trainer run any") == "deepspeed --no_python"
    assert launcher_case("PROCESSES=2 launchers/torchrun_single_node.sh any") == "torchrun_single_node.sh"
    assert launcher_case("trainer run bert_sample --processes 2") is None
    launching = next(page for page in PAGES if page.path.name == "launching.md")
    assert len({launcher_case(command) for command in launching.commands} - {None}) > 9


def quick_commands(page: Page) -> list[str]:
    return [command for command in page.to_run() if QUICK.search(command)]


def trains(page: Page) -> bool:
    """Whether the whole page is run, and not its quick commands alone."""
    return any(not QUICK.search(command) for command in page.to_run())


@pytest.mark.parametrize("page", [page for page in PAGES if quick_commands(page) and not trains(page)], ids=str)
def test_commands_that_train_nothing(page: Page, clone: Path):
    run_commands(clone, quick_commands(page), 240)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", filter(trains, PAGES), ids=str)
@pytest.mark.usefixtures("warm_python")
def test_a_page_can_be_followed(page: Page, clone: Path):
    write_small_bert(clone / "google-bert" / "bert-base-uncased")
    shown = run_commands(clone, page.to_run(), 500)
    ends = re.findall(rf"^(?:finished after {STEPS}|stopped after [1-{STEPS - 1}]) steps in", shown, re.MULTILINE)
    assert len(ends) == len([command for command in page.to_run() if TRAINS.search(command)]), "each came to its end"


SHOWN = sorted(
    {
        command
        for page in PAGES
        for command in re.findall(
            r"(?:`|^)trainer (?:run|check) ([^`\n]+)",
            page.path.read_text(encoding="utf-8"),
            re.MULTILINE,
        )
        if command.split()[0].removesuffix(".json").removeprefix("recipes/") in shipped_recipes()
        and "data.train=" not in command  # a file of the page, on which `test_a_page_can_be_followed` trains
    }
)
METHODS = re.findall(r"`trainer run ([^`]+)`", (ROOT / "docs" / "methods.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("command", SHOWN)
def test_a_command_that_is_shown_is_one_that_would_start(command: str, capsys: pytest.CaptureFixture[str]):
    """Also those that are not run: training under each of their keys is the business of the parity tests."""
    words = shlex.split(re.sub(r"--max-restarts \d+", "", command), comments=True)
    assert main(["check", "--quick", *words]) == ExitCode.DONE


def test_the_methods_have_a_row_for_every_strategy():
    named = set(re.findall(r"parallel\.strategy=(\w+)", " ".join(METHODS)))
    assert named == set(STRATEGIES) - {Parallel().strategy}


def test_generated_blocks_are_up_to_date():
    for page in pages():
        text = page.read_text(encoding="utf-8")
        assert text == with_blocks(text), f"{name_of(page)} is out of date: run `python -m docs.generate`"


def test_generated_blocks_follow_the_code():
    filled = with_blocks("<!-- generated: strategies -->\nOUTDATED\n<!-- end -->")
    assert "`ddp`" in filled
    assert "OUTDATED" not in filled


RECIPES = [
    pytest.param(text, id=name_of(page))
    for page in pages()
    for text in re.findall(r"^```jsonc?\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    if '"task"' in text and page not in (README, COMING_FROM)
]


@pytest.mark.parametrize("text", RECIPES)
def test_a_recipe_of_a_page_is_valid(text: str, tmp_path: Path):
    """That of the README is a shipped one, those of COMING_FROM are what `convert` writes (`recipe/converting`)."""
    (tmp_path / "flowers").mkdir()
    for name in ("train.jsonl", "validation.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "recipe.json").write_text(text)
    assert load_recipe(str(tmp_path / "recipe.json"), is_whole=True).recipe.name == json.loads(text)["name"]


def test_the_recipe_of_the_readme_equals_the_shipped_recipe():
    (block,) = re.findall(r"^```jsonc\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    shipped = (ROOT / "recipes" / "bert_sample.json").read_text(encoding="utf-8")
    one, other = (parse(text, Origin("recipe")) for text in (block, shipped))
    assert one[0].plain() == other[0].plain()


def test_exit_codes_of_the_pages_equal_the_program():
    codes = re.findall(r"^\| (\d+) \| ", COMMAND_LINE.read_text(encoding="utf-8"), re.MULTILINE)
    assert codes == [str(int(code)) for code in ExitCode]


def test_the_majority_rate_of_the_readme_is_that_of_the_sample():
    rows = (ROOT / "recipes" / "sample" / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    commonest = Counter(json.loads(row)["label"] for row in rows).most_common(1)[0][1]
    stated = f"{commonest / len(rows):.1%}".replace("%", " %")
    assert f"right in {stated} of the {len(rows)} validation rows" in README.read_text(encoding="utf-8")


def test_the_files_of_the_pages_are_all_there():
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([\w.]*/[\w./]*)`", row)}
    assert {path for path in named if not (ROOT / path).exists()} == set()
    folders = {f"{path.name}/" for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    assert folders & {"recipes/", "launchers/", "docker/", "docs/", "tests/"} <= named


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://", "#")):
            assert (page.parent / target.partition("#")[0]).exists(), target
