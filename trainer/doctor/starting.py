"""Checks of how a run would be started: the launcher, accelerate's configuration, and whether the recipe fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.base.errors import RecipeError, TrainerError, UsageError
from trainer.doctor.facts import GpuFacts, TorchFacts
from trainer.doctor.finding import Finding, ok, problem, warning
from trainer.doctor.folders import hugging_face_home
from trainer.doctor.machine import Machine
from trainer.doctor.network import is_loopback_name, on_several_machines
from trainer.ranks.environment import ACCELERATE_ENGINES, LaunchEnvironment, check_agrees, detect


def launcher(machine: Machine) -> Finding:
    """The launcher that started this process, by its variables.

    Problem: variables are missing or contradict each other, or several machines are to meet at a loopback address
    or at a name that means nothing. The line says which.

    Warning: an allocation of Slurm of several machines or tasks, but no `srun`: a run would train on this one
    alone. Start it with `srun`.
    """
    try:
        environment = detect(machine.environ)
    except TrainerError as error:
        value, _, remedy = str(error).partition("; ")
        return problem(value, remedy or "start the ranks with one launcher, or unset what another one left")
    if environment.has_ranks:
        return _joined(environment)
    if environment.launcher == "sbatch":
        return warning(f"a batch script of Slurm of {environment.world_size} tasks", "start the run with srun")
    if environment.launcher == "accelerate-single":
        return ok("accelerate launch --cpu, which starts one process: `trainer run` starts the others")
    nodes = machine.environ.get("SLURM_NNODES", "1")
    if nodes != "1":
        return warning(
            f"none, in an allocation of Slurm of {nodes} machines", "start the run with srun, or it trains on this one"
        )
    return ok("none: `trainer run` starts its own ranks")


def accelerate_configuration(machine: Machine) -> Finding:
    """What `accelerate launch` is told by its `default_config.yaml`, which no recipe is asked about.

    Warning: it asks for a precision, an engine or a compiler, which is refused where the recipe says otherwise.
    Pass `--config_file launchers/accelerate_multi_gpu.yaml`, or run `accelerate config` again.
    """
    try:
        file = hugging_face_home(machine) / "accelerate" / "default_config.yaml"
        text = file.read_text(encoding="utf-8")
    except (OSError, UsageError):
        return ok("none: `accelerate launch` has its defaults")
    remedy = "pass --config_file launchers/accelerate_multi_gpu.yaml to `accelerate launch`, or run `accelerate config`"
    import yaml

    try:
        said = _variables(yaml.safe_load(text))
    except (yaml.YAMLError, AttributeError, TypeError) as error:
        return warning(f"{file} is not what accelerate writes ({type(error).__name__})", remedy)
    if machine.recipe is None:
        asked = [f"{name.removeprefix('ACCELERATE_').lower()} {value}" for name, value in said.items()]
        if asked:
            return warning(f"{file} says {', '.join(asked)}: a recipe that says otherwise is refused", remedy)
        return ok(f"{file} contradicts no recipe")
    try:
        check_agrees(
            LaunchEnvironment("accelerate", accelerate=said),
            precision=machine.recipe.precision,
            strategy=machine.recipe.parallel.strategy,
        )
    except UsageError as error:
        return warning(f"{str(error).split(';')[0]} by {file}", remedy)
    return ok(f"{file} does not contradict the recipe")


def recipe(machine: Machine) -> Finding:
    """With a recipe: its layout on the ranks that are here, or that `--processes` says.

    Problem: it does not fit on them. The line says which numbers do.
    """
    if machine.recipe is None:
        return ok("none named: `trainer doctor RECIPE` looks at what it needs, too")
    from trainer.recipe.plan import plan_run

    number, local = _ranks(machine)
    try:
        plan = plan_run(machine.recipe, number, local)
    except RecipeError as error:
        value, _, remedy = error.problems[0].partition("; ")
        return problem(f"{value} ({number} ranks)", remedy or "pass --processes")
    return ok(f"{machine.recipe.name}: {plan.strategy.name}, {plan.layout}, {plan.batch}")


def _ranks(machine: Machine) -> tuple[int, int]:
    """Of the run, and of it those on this machine."""
    assert machine.strategy is not None
    if machine.processes is not None:
        return machine.processes, machine.processes
    environment = detect(machine.environ)
    if environment.has_ranks:
        return environment.world_size, environment.local_world_size
    has_gpus = not machine.probe.facts(TorchFacts).is_cpu_build
    number = machine.strategy.local_ranks(len(machine.probe.facts(GpuFacts).gpus) if has_gpus else 0)
    return number, number


def _joined(environment: LaunchEnvironment) -> Finding:
    value = f"{environment}, to meet at {environment.master_addr}:{environment.master_port}"
    if not on_several_machines(environment):
        return ok(value)
    remedy = "set MASTER_ADDR to an address of the machine of rank 0 that the others reach"
    try:
        alone = is_loopback_name(environment.master_addr)
    except OSError as error:
        return problem(f"{value}, which means no address ({error.strerror})", remedy)
    if alone and environment.rank >= environment.local_world_size:  # on rank 0's own machine the name may mean that
        return problem(f"{value}, which is this machine itself", remedy)
    return ok(value)


def _variables(config: Mapping[str, Any]) -> dict[str, str]:
    """What `accelerate launch` would set by this configuration, of what a recipe may contradict."""
    said = {}
    precision = str(config.get("mixed_precision") or "no").lower()
    if precision != "no":
        said["ACCELERATE_MIXED_PRECISION"] = precision
    dynamo = str((config.get("dynamo_config") or {}).get("dynamo_backend") or "no").lower()
    if dynamo != "no":
        said["ACCELERATE_DYNAMO_BACKEND"] = dynamo
    engine = str(config.get("distributed_type") or "").upper()
    if engine in ACCELERATE_ENGINES:
        said[f"ACCELERATE_USE_{engine}"] = "true"
    return said
