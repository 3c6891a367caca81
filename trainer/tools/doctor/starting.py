"""Checks of the start of a run: the launcher, accelerate's configuration, and the layout of the recipe."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.base.errors import RecipeError, TrainerError, UsageError
from trainer.base.processes import child_variables
from trainer.ranks.environment import ACCELERATE_ENGINES, LaunchEnvironment, check_agrees, detect
from trainer.ranks.interfaces import is_loopback
from trainer.tools.doctor.finding import Finding, ok, problem, warning
from trainer.tools.doctor.folders import hugging_face_home
from trainer.tools.doctor.machine import Machine

PARTS_SECONDS = 300.0
"""Time limit for the check of data and model."""


def launcher(machine: Machine) -> Finding:
    """The launcher that started this process, by its variables."""
    try:
        environment = detect(machine.environ)
    except TrainerError as error:
        value, _, remedy = str(error).partition("; ")
        return problem(value, remedy or "start the ranks with one launcher, or unset the variables of another one")
    if environment.has_ranks:
        return _joined(environment)
    if environment.launcher == "sbatch":
        return warning(f"a Slurm batch script of {environment.world_size} tasks", "start the run with srun")
    if environment.launcher == "accelerate-single":
        return ok("accelerate launch --cpu, which starts one process: `trainer run` starts the others")
    nodes = machine.environ.get("SLURM_NNODES", "1")
    if nodes != "1":
        return warning(
            f"none, in a Slurm allocation of {nodes} machines",
            "start the run with srun; it would train on this one alone",
        )
    return ok("none: `trainer run` starts its own ranks")


def accelerate_configuration(machine: Machine) -> Finding:
    """The settings of `accelerate launch` in its `default_config.yaml`, which may contradict a recipe."""
    try:
        file = hugging_face_home(machine) / "accelerate" / "default_config.yaml"
        text = file.read_text(encoding="utf-8")
    except (OSError, UsageError):
        return ok("none: `accelerate launch` uses its defaults")
    remedy = "pass --config_file launchers/accelerate_multi_gpu.yaml to `accelerate launch`, or run `accelerate config`"
    import yaml

    try:
        variables = _variables(yaml.safe_load(text))
    except (yaml.YAMLError, AttributeError, TypeError) as error:
        return warning(f"{file} is not a configuration of accelerate ({type(error).__name__})", remedy)
    if machine.recipe is None:
        asked = [f"{name.removeprefix('ACCELERATE_').lower()} {value}" for name, value in variables.items()]
        if asked:
            return warning(f"{file} sets {', '.join(asked)}: a recipe that differs is refused", remedy)
        return ok(f"{file} contradicts no recipe")
    try:
        check_agrees(
            LaunchEnvironment("accelerate", accelerate=variables),
            precision=machine.recipe.precision,
            strategy=machine.recipe.parallel.strategy,
        )
    except UsageError as error:
        return warning(f"{str(error).split(';')[0]} by {file}", remedy)
    return ok(f"{file} does not contradict the recipe")


def recipe(machine: Machine) -> Finding:
    """With a recipe: its layout on the ranks of this machine, or on the number that `--processes` sets."""
    if machine.recipe is None:
        return ok("none named: `trainer doctor RECIPE` also checks its needs")
    from trainer.recipe.plan import plan_run

    number, local = _ranks(machine)
    try:
        plan = plan_run(machine.recipe, number, local)
    except RecipeError as error:
        value, _, remedy = error.problems[0].partition("; ")
        return problem(f"{value} ({number} ranks)", remedy or "pass --processes")
    return ok(f"{machine.recipe.name}: {plan.strategy.name}, {plan.layout}, {plan.batch}")


def parts(machine: Machine) -> Finding:
    """With a recipe: its data and model, if they are on this machine, as `trainer check` looks at them."""
    if machine.recipe is None:
        return ok("none named: `trainer doctor RECIPE` also checks its data and model")
    from trainer.recipe.local_parts import LocalParts

    parts = LocalParts.of(machine.recipe)
    if parts.is_empty:
        return ok("; ".join(f"not checked: {part}" for part in parts.unchecked))
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        file = Path(folder) / "recipe.json"
        file.write_text(machine.recipe.model_dump_json(), encoding="utf-8")
        # In a process of its own, because the probe forks this one, which must not import torch meanwhile.
        keys = [str(file), "--json", "--processes", str(_ranks(machine)[0])]
        command = [sys.executable, "-m", "trainer", "check", *keys]
        done = subprocess.run(
            command, env=child_variables(), capture_output=True, text=True, timeout=PARTS_SECONDS, check=False
        )
    try:
        found = json.loads(done.stdout)
    except json.JSONDecodeError:
        return warning("not checked", "fix the check `recipe` first, and run `trainer check`")
    if not found["problems"]:
        unchecked = (f"not checked: {part}" for part in found["unchecked"])
        return ok("; ".join(["no problem", *found["notes"], *unchecked]))
    numbered = [f"({number}) {text}" for number, text in enumerate(found["problems"], start=1)]
    return problem(" ".join(numbered), "fix them; `trainer check` with the same recipe shows one on each line")


def _ranks(machine: Machine) -> tuple[int, int]:
    assert machine.strategy is not None
    if machine.processes is not None:
        return machine.processes, machine.processes
    environment = detect(machine.environ)
    if environment.has_ranks:
        return environment.world_size, environment.local_world_size
    number = machine.strategy.local_ranks(len(machine.gpus))
    return number, number


def _joined(environment: LaunchEnvironment) -> Finding:
    value = f"{environment}, to meet at {environment.master_addr}:{environment.master_port}"
    if environment.world_size == environment.local_world_size:
        return ok(value)
    remedy = "set MASTER_ADDR to an address of rank 0's machine that the others can reach"
    try:
        found = socket.getaddrinfo(environment.master_addr, None)
    except OSError as error:
        return problem(f"{value}, which does not resolve ({error.strerror})", remedy)
    alone = all(is_loopback(str(entry[4][0])) for entry in found)
    if alone and environment.rank >= environment.local_world_size:  # on rank 0's machine it may be
        return problem(f"{value}, which is this machine itself", remedy)
    return ok(value)


def _variables(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that `accelerate launch` sets by this configuration and that a recipe may contradict."""
    variables = {}
    precision = str(config.get("mixed_precision") or "no").lower()
    if precision != "no":
        variables["ACCELERATE_MIXED_PRECISION"] = precision
    dynamo = str((config.get("dynamo_config") or {}).get("dynamo_backend") or "no").lower()
    if dynamo != "no":
        variables["ACCELERATE_DYNAMO_BACKEND"] = dynamo
    engine = str(config.get("distributed_type") or "").upper()
    if engine in ACCELERATE_ENGINES:
        variables[f"ACCELERATE_USE_{engine}"] = "true"
    return variables
