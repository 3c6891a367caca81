"""What the README and the pages say is so: each shell command is run as it stands, or is named here with its test.

A block of commands runs in a folder that looks like a clone after `make`, but whose `.venv/bin` shortens each training.
"""

from __future__ import annotations

import json
import re
import socket
import stat
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from docs.generate import pages, with_blocks
from tests.helpers.processes import ROOT, run
from trainer.cli import main
from trainer.errors import ExitCode
from trainer.recipe.reading import Origin, parse
from trainer.recipe.schema import Parallel
from trainer.recipe.strategies import STRATEGIES

README = ROOT / "README.md"
BIN = Path(sys.executable).parent
STEPS = 4  # of each training here

ELSEWHERE = {
    "make test": 'Makefile::pytest -m "not slow"',
    "make test-all": ".ci/run::make test-all",
    "make check": ".ci/run::make check",
    "python docs/generate.py": "tests/test_readme.py::test_generated_blocks_are_up_to_date",
    "python -m tests.parity.measure": "tests/parity/test_measure.py::test_the_table_is_within_the_promise",
    "srun --ntasks=2 trainer run bert_sample": 'tests/launch/test_launchers.py::"srun": Case',
    "sbatch launchers/slurm.sbatch bert_base_mrpc": 'tests/launch/test_launchers.py::"slurm.sbatch": Case',
    "NODES=2 NODE_RANK=0 MASTER_ADDR=node0 launchers/torchrun_multi_node.sh bert_base_mrpc": (
        'tests/launch/test_launchers.py::"torchrun_multi_node.sh": Case'
    ),
    "accelerate launch --config_file launchers/accelerate_multi_node.yaml --machine_rank 0 -m trainer run"
    " bert_base_mrpc": 'tests/launch/test_launchers.py::"accelerate_multi_node.yaml": Case',
    "NODE_RANK=0 MASTER_ADDR=node0 launchers/deepspeed.sh bert_base_mrpc": (
        'tests/launch/test_launchers.py::"deepspeed.sh": Case'
    ),
}
"""Commands that need a cluster, or would run these tests again: the file that covers each, and where in it."""

QUICK = re.compile(r"cat > |trainer (check|convert|recipes|schema)\b")
TRAINS = re.compile(r"make train$|trainer run |launchers/")
OTHERS = re.compile(r"source \.venv/bin/activate$|python - <<|\(cd runs/|trainer export ")  # need what a training left


@dataclass(frozen=True)
class Block:
    """A fenced block of shell commands, a here-document being part of its command."""

    place: str
    commands: tuple[str, ...]

    def to_run(self, pattern: re.Pattern[str] | None = None) -> list[str]:
        """The commands that are not covered elsewhere, of those that match."""
        chosen = [command for command in self.commands if command not in ELSEWHERE]
        return [command for command in chosen if pattern is None or pattern.search(command)]


def shell_blocks() -> list[Block]:
    blocks = []
    for page in [*pages(), ROOT / "CONTRIBUTING.md"]:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^```(?:bash|sh|shell|console)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            line = text[: match.start()].count("\n") + 1
            blocks.append(Block(f"{page.name}:{line}", commands_of(match[1])))
    return blocks


def commands_of(text: str) -> tuple[str, ...]:
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
    return tuple(found)


BLOCKS = shell_blocks()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder as a user has it after `make train`, with data of their own and a small model under a hub's name."""
    for path in ROOT.iterdir():
        if path.name not in (".venv", "runs", ".git"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / ".installed").touch()
    (tmp_path / ".venv" / "bin" / "activate").touch()
    for name, text in shims().items():
        shim = tmp_path / ".venv" / "bin" / name
        shim.write_text(f"#!/bin/sh\n{text}\n")
        shim.chmod(stat.S_IRWXU)
    rows = "".join(f"it was {word},{word}\n" for word in ("good", "bad") * 30)
    for split in ("train", "validation"):
        (tmp_path / f"{split}.csv").write_text(f"review,verdict\n{rows}")
    return tmp_path


def shims() -> dict[str, str]:
    """Programs that hand their arguments on, with fewer steps and a free port; a launcher trains anew."""
    port, steps = free_port(), f"training.max_steps={STEPS}"
    return {
        "python": f'exec {sys.executable} "$@"',
        "trainer": f'[ "$1" = run ] && set -- "$@" {steps}\nexec {sys.executable} -m trainer "$@"',
        "torchrun": f'rm -rf runs\nexec {BIN}/torchrun "$@" {steps}',
        "accelerate": f'rm -rf runs\nshift\nexec {BIN}/accelerate launch --main_process_port {port} "$@" {steps}',
        "deepspeed": f'rm -rf runs\nexec {BIN}/deepspeed --master_port {port} "$@" {steps}',
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_small_bert(folder: Path) -> None:
    """A BERT of random weights where the README's recipe names a pretrained one."""
    from transformers import AutoTokenizer, BertConfig, BertModel

    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
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
        f"{block.place}: {command}"
        for block in BLOCKS
        for command in block.to_run()
        if not any(pattern.search(command) for pattern in (QUICK, TRAINS, OTHERS))
    ]
    assert unknown == [], "run it here, or name in ELSEWHERE the test that covers it"


def test_what_covers_a_command_is_there():
    written = {command for block in BLOCKS for command in block.commands}
    for command, cover in ELSEWHERE.items():
        file, _, text = cover.partition("::")
        assert text in (ROOT / file).read_text(encoding="utf-8"), f"{command} is covered by nothing: {cover}"
        assert command in written or file == Path(__file__).name or "generate.py" in command, f"{command} is nowhere"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.to_run(QUICK)], ids=lambda block: block.place)
def test_commands_that_train_nothing(block: Block, clone: Path):
    assert run_commands(clone, block.to_run(QUICK), 60)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", [b for b in BLOCKS if b.to_run(TRAINS)], ids=lambda block: block.place)
def test_commands_that_train(block: Block, clone: Path):
    write_small_bert(clone / "google-bert" / "bert-base-uncased")
    shown = run_commands(clone, block.to_run(), 800)
    ends = re.findall(rf"^(?:finished after {STEPS}|stopped after [1-{STEPS - 1}]) steps in", shown, re.MULTILINE)
    assert len(ends) == len(block.to_run(TRAINS)), "each training came to its end"
    (folder,) = (clone / "runs").iterdir()
    assert (folder / "model" / "config.json").exists()


METHODS = re.findall(r"`trainer run ([^`]+)`", (ROOT / "docs" / "methods.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("command", METHODS)
def test_the_command_of_each_method_is_one_that_would_start(command: str, capsys: pytest.CaptureFixture[str]):
    """Training under each of their keys is the business of the parity tests."""
    assert main(["check", *command.split()]) == ExitCode.DONE


def test_the_methods_have_a_row_for_every_strategy():
    named = set(re.findall(r"parallel\.strategy=(\w+)", " ".join(METHODS)))
    assert named == set(STRATEGIES) - {Parallel().strategy}


def test_generated_blocks_are_up_to_date():
    for page in pages():
        text = page.read_text(encoding="utf-8")
        assert text == with_blocks(text), f"{page.name} is out of date: run `python docs/generate.py`"


def test_generated_blocks_follow_the_code():
    filled = with_blocks("<!-- generated: strategies -->\nOUTDATED\n<!-- end -->")
    assert "`ddp`" in filled
    assert "OUTDATED" not in filled


def test_the_recipe_of_the_readme_is_the_shipped_one():
    (block,) = re.findall(r"^```jsonc\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    shipped = (ROOT / "recipes" / "bert_sample.json").read_text(encoding="utf-8")
    one, other = (parse(text, Origin("recipe")) for text in (block, shipped))
    assert one[0].plain() == other[0].plain()


def test_the_exit_codes_of_the_readme_are_those_of_the_program():
    codes = re.findall(r"^\| (\d+) \| ", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert codes == [str(int(code)) for code in ExitCode]


def test_the_majority_rate_of_the_readme_is_that_of_the_sample():
    rows = (ROOT / "recipes" / "sample" / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    commonest = Counter(json.loads(row)["label"] for row in rows).most_common(1)[0][1]
    stated = f"{commonest / len(rows):.1%}".replace("%", " %")
    assert f"right in {stated} of the {len(rows)} validation rows" in README.read_text(encoding="utf-8")


def test_the_files_of_the_readme_are_all_there():
    text = README.read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `([\w./]+)` \|", text, re.MULTILINE))
    assert {path for path in named if "/" in path and not (ROOT / path).exists()} == set()
    rooms = {f"trainer/{path.parent.name}/" for path in (ROOT / "trainer").glob("*/__init__.py")}
    assert rooms <= named


@pytest.mark.parametrize("page", [*pages(), ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://", "#")):
            assert (page.parent / target.partition("#")[0]).exists(), target
