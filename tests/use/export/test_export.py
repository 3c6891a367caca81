"""`trainer export`: from a checkpoint alone to the folder that the run itself exports."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import stat
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForMaskedLM, pipeline

from tests.helpers import processes, warm
from tests.helpers.checkpoints import reseal, write_checkpoint
from tests.helpers.families import CONFIGS
from tests.helpers.hostile import Trap
from tests.helpers.memory import LARGE_BERT, LARGEST_BYTES, needs_peak, peak_growth
from tests.helpers.tiny_run import WORDS, write_tiny_image_run, write_tiny_run
from tests.helpers.training import TINY_RESNET
from trainer.base import disk
from trainer.base.errors import ExitCode, TrainerError, UsageError
from trainer.models.weight_files import WeightFiles, plan_files
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.reading.loading import load_recipe
from trainer.training.run import run
from trainer.use.export.exporting import export

MASKED_LM = {"type": "masked_lm", "text": "text", "metrics": ["accuracy", "perplexity"]}
PLAN_FILES = "trainer.use.export.exporting.plan_files"


def train(recipe: Path, *overrides: str) -> None:
    assert run(load_recipe(str(recipe), overrides), LaunchEnvironment("none")) == ExitCode.DONE


def built(model_type: str, head: str, **keys: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(CONFIGS.get(model_type, {}) | keys))
    return getattr(transformers, head).from_config(config)


@pytest.fixture(scope="module")
def bert() -> Any:
    return built("bert", "AutoModelForMaskedLM")


@pytest.fixture
def checkpoint(tmp_path: Path, bert: Any) -> Path:
    return write_checkpoint(tmp_path / "run", bert)


def assert_same_folder(one: Path, other: Path) -> None:
    assert {path.name for path in one.iterdir()} == {path.name for path in other.iterdir()}
    for path in one.iterdir():
        assert path.read_bytes() == (other / path.name).read_bytes(), path.name


def nothing_was_left(folder: Path) -> bool:
    return not folder.exists() and not list(folder.parent.glob(".saving-*"))


class TestAsTheRun:
    @pytest.mark.parametrize(
        ("write", "sections"),
        [
            (write_tiny_run, {}),
            (write_tiny_run, {"task": MASKED_LM}),
            (write_tiny_image_run, {"model": {"config": {**TINY_RESNET, "num_channels": 3}}}),
        ],
        ids=["classes", "tied weights", "buffers"],
    )
    def test_the_final_checkpoint_gives_every_file_of_the_run(self, tmp_path, write, sections):
        train(write(tmp_path, **sections))
        done = export(tmp_path / "run", tmp_path / "out")
        assert (done.step, done.weights, done.notes) == (8, ("model.safetensors",), ())
        assert_same_folder(tmp_path / "out", tmp_path / "run" / "model")

    def test_nothing_but_the_checkpoint_is_needed(self, tmp_path):
        write_tiny_run(tmp_path / "made", task=MASKED_LM)
        first = {"config": None, "name_or_path": str(tmp_path / "made" / "run" / "model")}
        train(tmp_path / "made" / "recipe.json", "training.max_steps=1")
        train(write_tiny_run(tmp_path / "tuned", task=MASKED_LM, model=first), "training.max_steps=2")
        shutil.move(tmp_path / "tuned" / "run", tmp_path / "kept")
        for folder in ("made", "tuned"):
            shutil.rmtree(tmp_path / folder)
        export(tmp_path / "kept", tmp_path / "out")
        assert_same_folder(tmp_path / "out", tmp_path / "kept" / "model")
        guesses = pipeline("fill-mask", str(tmp_path / "out"))(f"{WORDS[0]} [MASK] {WORDS[2]}")
        assert len(guesses) == 5

    def test_an_adapter_is_merged_into_the_weights_of_its_origin(self, tmp_path):
        train(write_tiny_run(tmp_path / "base"), "training.max_steps=1")
        origin = tmp_path / "base" / "run" / "model"
        first = {"config": None, "name_or_path": str(origin), "adapter": {"type": "lora", "rank": 4}}
        train(write_tiny_run(tmp_path / "tuned", model=first))
        export(tmp_path / "tuned" / "run", tmp_path / "out")
        assert_same_folder(tmp_path / "out", tmp_path / "tuned" / "run" / "model")

        other = {name: tensor + 1e-6 for name, tensor in load_file(origin / "model.safetensors").items()}
        save_file(other, origin / "model.safetensors", {"format": "pt"})
        with pytest.raises(UsageError, match=r"must hold the frozen weights of the training"):
            export(tmp_path / "tuned" / "run", tmp_path / "again")

    @pytest.mark.slow
    @pytest.mark.usefixtures("warm_python")
    def test_two_ranks_and_both_verbs_as_a_user_has_them(self, tmp_path):
        recipe = write_tiny_run(tmp_path, task=MASKED_LM, parallel={"strategy": "fsdp"})
        program = [sys.executable, "-m", "trainer"]
        ended = processes.run([*program, "run", recipe, "--processes", "2"])
        assert ended.returncode == 0, ended.stderr
        ended = processes.run([*program, "export", tmp_path / "run", tmp_path / "out", "--dtype", "bf16"])
        assert (ended.returncode, ended.stderr) == (0, "")
        assert f"(step 8) to {tmp_path / 'out'}: model.safetensors, bf16, 0." in ended.stdout
        model, loading = AutoModelForMaskedLM.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        trained = load_file(tmp_path / "run" / "model" / "model.safetensors")
        assert model.dtype == torch.bfloat16
        assert all(torch.equal(model.state_dict()[name], weight.bfloat16()) for name, weight in trained.items())


@pytest.mark.parametrize(
    ("model_type", "head"),
    [
        ("bert", "AutoModelForMaskedLM"),
        ("gpt2", "AutoModelForCausalLM"),
        ("t5", "AutoModelForSeq2SeqLM"),
        ("mixtral", "AutoModelForCausalLM"),
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_opens_without_a_key_too_few_or_too_many(tmp_path, monkeypatch, model_type, head, dtype):
    monkeypatch.setattr(PLAN_FILES, partial(plan_files, largest_file_bytes=30_000))
    keys = {**CONFIGS["llama"], "num_local_experts": 4} if model_type == "mixtral" else {}
    model = built(model_type, head, **keys)
    export(write_checkpoint(tmp_path / "run", model), tmp_path / "out", dtype)
    opened, loading = getattr(transformers, head).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    type_ = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert opened.dtype == opened.config.dtype == type_
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    for name, tensor in model.state_dict().items():
        same = opened.state_dict()[name]
        assert torch.equal(same, tensor.to(same.dtype)), name
    assert opened.can_generate() == (tmp_path / "out" / "generation_config.json").exists()


class TestWhich:
    def test_a_folder_of_one_is_exported_though_it_is_not_the_newest(self, tmp_path, checkpoint, bert):
        write_checkpoint(tmp_path / "run", bert, step=20)
        assert export(checkpoint, tmp_path / "one").step == 12
        assert export(tmp_path / "run", tmp_path / "newest").step == 20

    def test_damaged_checkpoints_of_a_run_are_skipped_and_reported(self, tmp_path, checkpoint, bert):
        for step, name in ((20, "state-00001-of-00002.safetensors"), (30, "model/config.json")):
            file = write_checkpoint(tmp_path / "run", bert, step) / name
            file.write_bytes(file.read_bytes()[:-1] + b"?")
        done = export(tmp_path / "run", tmp_path / "out")
        assert done.step == 12
        assert [note.count("skipped") for note in done.notes] == [1, 1]
        assert "step-00000030 is not: it is damaged: model/config.json does not match its checksum" in done.notes[0]
        assert "step-00000020 is not: it is damaged: state-00001-of-00002" in done.notes[1]

    def test_a_damaged_one_that_was_asked_for_is_refused(self, tmp_path, checkpoint):
        (checkpoint / "state-00000-of-00002.safetensors").unlink()
        for asked, words in ((checkpoint, "must be whole, but"), (tmp_path / "run", "must hold a whole checkpoint")):
            with pytest.raises(UsageError, match=words) as error:
                export(asked, tmp_path / "out")
            assert error.value.exit_code == ExitCode.USER
            assert "state-00000-of-00002.safetensors" in str(error.value)
        assert nothing_was_left(tmp_path / "out")

    @pytest.mark.parametrize(("place", "words"), [("nowhere", "does not exist"), ("", "is neither")])
    def test_a_folder_without_a_checkpoint_is_refused(self, tmp_path, place, words):
        with pytest.raises(UsageError, match=rf"`CHECKPOINT` must be the folder of a checkpoint.*{words}"):
            export(tmp_path / place, tmp_path / "out")

    def test_a_run_that_has_not_saved_yet_is_refused(self, tmp_path):
        (tmp_path / "run" / "checkpoints" / ".saving-step-00000004").mkdir(parents=True)
        with pytest.raises(UsageError, match=r"must hold a whole checkpoint, but .*/run holds none\. Name another"):
            export(tmp_path / "run", tmp_path / "out")


class TestWhere:
    def test_a_folder_with_files_is_refused_and_stays(self, tmp_path, checkpoint):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").touch()
        with pytest.raises(UsageError, match=r"`FOLDER` must be empty .*, but .*/out holds files; name another"):
            export(checkpoint, tmp_path / "out")
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]

    def test_a_file_is_refused(self, tmp_path, checkpoint):
        (tmp_path / "out").touch()
        with pytest.raises(UsageError, match=r"but .*/out is a file"):
            export(checkpoint, tmp_path / "out")

    def test_an_empty_folder_and_one_in_a_new_place_are_filled(self, tmp_path, checkpoint, monkeypatch):
        (tmp_path / "empty").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "empty")
        monkeypatch.chdir(tmp_path)
        for folder in ("link", "new/place"):
            export(checkpoint, Path(folder))
            assert (tmp_path / folder / "config.json").exists()
        assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == stat.S_IMODE((tmp_path / "new/place").stat().st_mode)

    def test_files_of_a_killed_export_are_replaced(self, tmp_path, checkpoint):
        (tmp_path / ".saving-out").mkdir()
        (tmp_path / ".saving-out" / "model-00001-of-00002.safetensors").touch()
        export(checkpoint, tmp_path / "out")
        assert sorted(path.name for path in (tmp_path / "out").glob("model*")) == ["model.safetensors"]

    @pytest.mark.parametrize("error", [OSError("no space left"), SafetensorError("no space left"), KeyboardInterrupt()])
    def test_a_disk_that_is_full_leaves_nothing(self, tmp_path, checkpoint, monkeypatch, error):
        write = WeightFiles.write

        def fail(*args: Any) -> None:
            write(*args)
            raise error

        monkeypatch.setattr(WeightFiles, "write", fail)
        expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else TrainerError
        with pytest.raises(expected) as raised:
            export(checkpoint, tmp_path / "out")
        assert expected is KeyboardInterrupt or "no space left; make room" in str(raised.value)
        assert nothing_was_left(tmp_path / "out")

    def test_all_is_on_the_disk_before_the_folder_has_its_name(self, tmp_path, checkpoint, monkeypatch):
        synced: list[str] = []

        def sync(path: Path) -> None:
            assert (tmp_path / "out").exists() == (path == tmp_path)
            synced.append(path.name)

        monkeypatch.setattr(disk, "sync", sync)
        export(checkpoint, tmp_path / "out")
        assert sorted(synced[:-2]) == sorted(path.name for path in (tmp_path / "out").iterdir())
        assert synced[-2:] == [".saving-out", tmp_path.name]


class TestHostile:
    @pytest.mark.parametrize("sealed", [False, True])
    @pytest.mark.parametrize(
        "name",
        [
            "state.json",
            "SHA256SUMS",
            "state-00000-of-00002.safetensors",
            "state-00001-of-00002.safetensors",
            "model/config.json",
        ],
    )
    @pytest.mark.parametrize("kind", ["pickle", "torch"])
    def test_a_pickle_in_place_of_a_file_is_never_read(
        self, tmp_path, checkpoint, monkeypatch, capfd, name, sealed, kind
    ):
        monkeypatch.chdir(tmp_path)
        if kind == "pickle":
            (checkpoint / name).write_bytes(Trap(tmp_path / "marker").pickled())
        else:
            torch.save(Trap(tmp_path / "marker"), checkpoint / name)
        if sealed and name != "SHA256SUMS":
            reseal(checkpoint)
        with pytest.raises(UsageError):
            export(checkpoint, tmp_path / "out")
        assert not (tmp_path / "marker").exists()
        assert nothing_was_left(tmp_path / "out")

    @pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json", "tokenizer_config.json"])
    def test_one_in_place_of_a_copied_file_is_not_read_here_either(self, tmp_path, monkeypatch, name):
        monkeypatch.chdir(tmp_path)
        model = built("gpt2", "AutoModelForCausalLM")
        checkpoint = write_checkpoint(tmp_path / "run", model, extra={name: Trap(tmp_path / "marker").pickled()})
        export(checkpoint, tmp_path / "out")
        assert not (tmp_path / "marker").exists()

    def test_the_bomb_works(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        pickle.loads(Trap(tmp_path / "marker").pickled())
        assert (tmp_path / "marker").exists()

    @pytest.mark.parametrize(
        "name",
        [
            "pytorch_model.bin",
            "model.safetensors",
            "model.safetensors.index.json",
            "adapter_config.json",
            "a.pkl",
            "b.py",
        ],
    )
    def test_pickles_and_code_are_not_exported(self, tmp_path, bert, name):
        checkpoint = write_checkpoint(tmp_path / "run", bert, extra={name: Trap(tmp_path / "marker").pickled()})
        with pytest.raises(UsageError, match=rf"must hold only configurations .* has {name} there"):
            export(checkpoint, tmp_path / "out")
        assert nothing_was_left(tmp_path / "out")

    @pytest.mark.parametrize(
        ("config", "words"),
        [
            ("[]", "config.json cannot be read: it is no object"),
            ("[" * 100_000, "config.json cannot be read"),
            ('{"model_type": "bert", "architectures": ["os.system"]}', "no model of transformers"),
            (
                '{"model_type": "bert", "architectures": ["BertForMaskedLM"]}',
                "there is no bert.encoder.layer.*and 157 more",
            ),
        ],
    )
    def test_a_configuration_that_describes_no_such_model(self, tmp_path, checkpoint, config, words):
        (checkpoint / "model" / "config.json").write_text(config)
        reseal(checkpoint)
        with pytest.raises(UsageError, match=words) as error:
            export(checkpoint, tmp_path / "out")
        assert "; " in str(error.value)
        assert nothing_was_left(tmp_path / "out")

    def test_a_configuration_of_another_size(self, tmp_path, checkpoint):
        file = checkpoint / "model" / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "vocab_size": 7}))
        reseal(checkpoint)
        with pytest.raises(UsageError, match=r"word_embeddings\.weight has the shape \(211, 32\), and there \(7, 32\)"):
            export(checkpoint, tmp_path / "out")

    def test_without_a_configuration(self, tmp_path, checkpoint):
        shutil.rmtree(checkpoint / "model")
        sums = (checkpoint / "SHA256SUMS").read_text().splitlines(keepends=True)
        (checkpoint / "SHA256SUMS").write_text("".join(line for line in sums if "model/" not in line))
        facts = json.loads((checkpoint / "state.json").read_text())
        facts["files"] = {name: size for name, size in facts["files"].items() if "model/" not in name}
        (checkpoint / "state.json").write_text(json.dumps(facts))
        reseal(checkpoint)
        with pytest.raises(UsageError, match=r"has no model/config\.json; name a checkpoint that trainer saved"):
            export(checkpoint, tmp_path / "out")


@needs_peak
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=[pytest.mark.slow, pytest.mark.alone])])
def test_no_more_than_a_file_of_the_model_is_in_memory(tmp_path, monkeypatch, bert, dtype):
    export(write_checkpoint(tmp_path / "tiny", bert), tmp_path / "warm", dtype)  # whatever is imported once
    model = built(head="AutoModelForMaskedLM", **LARGE_BERT)
    whole_bytes = sum(parameter.nbytes for parameter in model.parameters())
    checkpoint = write_checkpoint(tmp_path / "run", model)
    del model
    file_bytes = 12_000_000
    # malloc may keep what an export freed: the least growth counts
    folders = iter([tmp_path / "parts", tmp_path / "parts again"])
    with monkeypatch.context() as patch:
        patch.setattr(PLAN_FILES, partial(plan_files, largest_file_bytes=file_bytes))
        parts = min(peak_growth(lambda: export(checkpoint, next(folders), dtype)) for _ in range(2))
    whole = peak_growth(lambda: export(checkpoint, tmp_path / "whole", dtype))
    if os.environ.get("SHOW_MEMORY"):
        print(f"model {whole_bytes:,}, in files of {file_bytes:,}: {parts:,}; in one file: {whole:,}")
    # Beside the file's tensors the one that is read, in both types, and its mapped pages; malloc keeps some of it.
    assert parts < file_bytes + 3 * LARGEST_BYTES < 0.8 * whole_bytes
    written_bytes = whole_bytes if dtype == "fp32" else whole_bytes / 2
    assert 0.9 * written_bytes < whole < written_bytes + 3 * LARGEST_BYTES, "never twice"


@pytest.mark.parametrize("what", ["export", pytest.param("run", marks=pytest.mark.slow)])
def test_a_kill_before_each_change_of_the_file_system_leaves_a_whole_folder(tmp_path: Path, bert: Any, what: str):
    if what == "export":
        source, place = write_checkpoint(tmp_path / "run", bert), tmp_path / "folder"
    else:
        source, place = write_tiny_run(tmp_path, evaluation={"every": "9 steps"}), tmp_path / "run" / "model"
    killing = warm.start([what, source, place], program="tests.use.export.killed_export:main")
    shown, errors = killing.communicate(timeout=300)
    assert killing.returncode == 0, errors
    *states, last = shown.splitlines()
    assert last == "done"
    assert len(states) > 10, "there are so many changes at least"
    assert set(states) == ({"none", "new"} if what == "export" else {"old", "old aside", "new"})
    assert states == sorted(states, key=lambda state: state == "new"), "once complete it stays so"


def test_a_format_that_no_folder_registers(checkpoint, tmp_path):
    message = r"`--to` must be a registered format, safetensors, onnx, but is 'gguf'; name another"
    with pytest.raises(UsageError, match=message):
        export(checkpoint, tmp_path / "out", to="gguf")
    assert not (tmp_path / "out").exists()
