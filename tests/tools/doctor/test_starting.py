from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.tools.doctor.machines import CUDA, H100, answers, machine
from trainer.ranks.environment import detect
from trainer.tools.doctor import starting
from trainer.tools.doctor.facts import GpuFacts

RANKS = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}


@pytest.mark.parametrize(
    ("environ", "status", "value"),
    [
        ({}, "ok", "none: `trainer run` starts its own ranks"),
        (RANKS, "ok", "rank 3 of 4, started by variables, to meet at 127.0.0.1:29500"),
        ({"ACCELERATE_USE_CPU": "True"}, "ok", "accelerate launch --cpu, which starts one process"),
        ({"RANK": "0"}, "problem", "RANK set, but LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE not"),
        (RANKS | {"RANK": "9"}, "problem", "RANK must be below WORLD_SIZE, which is 4, but is 9"),
        (SLURM, "warning", "none, in a Slurm allocation of 2 machines"),
        (SLURM | {"SLURM_NNODES": "1"}, "ok", "none: `trainer run` starts its own ranks"),
        (SLURM | {"SLURM_PROCID": "0", "SLURM_TASK_PID": "5"}, "warning", "a Slurm batch script of 4 tasks"),
        # two machines: rank 3 is on the second one, where the loopback leads nowhere
        (RANKS | {"LOCAL_WORLD_SIZE": "2"}, "problem", "rank 3 of 4, started by variables, to meet at 127.0.0.1:29500"),
        (RANKS | {"LOCAL_WORLD_SIZE": "2", "RANK": "1"}, "ok", "rank 1 of 4, started by variables"),
        (RANKS | {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.7"}, "ok", "rank 3 of 4, started by variables"),
    ],
)
def test_the_launcher(environ: dict[str, str], status: str, value: str):
    found = answers(starting.launcher, machine(**environ))
    assert (found[0], found[1][: len(value)]) == (status, value)


def test_a_meeting_place_that_means_nothing(monkeypatch: pytest.MonkeyPatch):
    def unknown(host: str, port: None) -> None:
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr(starting.socket, "getaddrinfo", unknown)
    status, value = answers(starting.launcher, machine(**RANKS | {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node0"}))
    assert status == "problem"
    assert value.endswith("node0:29500, which does not resolve (Name or service not known)")


@pytest.mark.parametrize(
    ("text", "recipe", "status", "value"),
    [
        (None, None, "ok", "none: `accelerate launch` uses its defaults"),
        ("distributed_type: MULTI_GPU\nmixed_precision: 'no'\n", None, "ok", "FILE contradicts no recipe"),
        (
            "distributed_type: FSDP\nmixed_precision: fp16\ndynamo_config: {dynamo_backend: INDUCTOR}\n",
            None,
            "warning",
            "FILE sets mixed_precision fp16, dynamo_backend inductor, use_fsdp true: a recipe that differs is refused",
        ),
        (
            "mixed_precision: fp16",
            "precision=bf16",
            "warning",
            "`precision` is bf16, but `accelerate launch` got --mixed_precision fp16 by FILE",
        ),
        ("mixed_precision: bf16", "precision=bf16", "ok", "FILE does not contradict the recipe"),
        (
            "distributed_type: DEEPSPEED",
            "parallel.strategy=fsdp",
            "warning",
            "`parallel.strategy` is fsdp, but `accelerate launch` got --use_deepspeed by FILE",
        ),
        ("- a\n- list", None, "warning", "FILE is not a configuration of accelerate (AttributeError)"),
        ("{", None, "warning", "FILE is not a configuration of accelerate (ParserError)"),
    ],
)
def test_the_configuration_of_accelerate(tmp_path: Path, text: str | None, recipe: str | None, status: str, value: str):
    file = tmp_path / "accelerate" / "default_config.yaml"
    if text is not None:
        file.parent.mkdir()
        file.write_text(text)
    named = {} if recipe is None else {"recipe": "bert_sample", "overrides": (recipe,)}
    found = answers(starting.accelerate_configuration, machine(HF_HOME=str(tmp_path), **named))
    assert found == (status, value.replace("FILE", str(file)))


def test_the_names_are_those_that_accelerate_sets():
    """Our variables must be those that accelerate's launcher sets from a configuration."""
    variables = starting._variables(
        {"distributed_type": "FSDP", "mixed_precision": "bf16", "dynamo_config": {"dynamo_backend": "INDUCTOR"}}
    )
    source = Path(str(distribution("accelerate").locate_file("accelerate/utils/launch.py"))).read_text(encoding="utf-8")
    assert all(f'current_env["{name}"]' in source for name in variables)
    assert detect(variables).launcher == "none"


def test_a_recipe_on_the_ranks_that_are_here():
    assert answers(starting.recipe, machine())[0] == "ok"
    status, value = answers(starting.recipe, machine(recipe="bert_sample"))
    assert (status, value) == (
        "ok",
        "bert_sample: ddp, one process, 48 rows a step = 1 data-parallel rank x 2 microbatches of at most 24 rows",
    )
    gpus = (CUDA, GpuFacts((H100,) * 5))
    status, value = answers(starting.recipe, machine(Path(), *gpus, recipe="bert_sample"))
    assert status == "problem"
    assert value == "`training.global_batch_size` must be divisible by the data-parallel size 5, but is 48 (5 ranks)"
    assert answers(starting.recipe, machine(Path(), *gpus, recipe="bert_sample", processes=4))[0] == "ok"
    assert answers(starting.recipe, machine(Path(), *gpus, recipe="bert_sample", **RANKS))[0] == "ok"
    assert "problem" in answers(starting.recipe, machine(recipe="bert_sample", overrides=("parallel.tensor=2",)))
