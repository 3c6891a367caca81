"""Ranks and flags of `accelerate launch`: by torchrun's agent, by mpirun, or as one process on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainer.base.errors import LaunchError, UsageError
from trainer.base.terminal import say
from trainer.ranks.environment import LaunchEnvironment, LauncherFeature, environment_of

_ENGINES: Mapping[str, tuple[str, ...]] = {
    "FSDP": ("fsdp", "hsdp"),
    "DEEPSPEED": (),
    "MEGATRON_LM": (),
}
"""Our strategies for each engine of `accelerate launch`, by its `distributed_type`, without those of packages."""


@dataclass(frozen=True)
class Accelerate(LauncherFeature):
    """`accelerate launch`; `flags` are its `ACCELERATE_*` variables."""

    flags: Mapping[str, str] = field(default_factory=dict)

    def detect(self, environ: Mapping[str, str], known: LaunchEnvironment | None) -> LaunchEnvironment | None:
        feature = Accelerate({name: value for name, value in environ.items() if name.startswith("ACCELERATE_")})
        if known is not None:
            # It starts ranks by torchrun's agent, and adds variables of its own.
            launcher = "accelerate" if known.launcher == "torchrun" else known.launcher
            return replace(known, launcher=launcher, feature=feature)
        if "ACCELERATE_USE_CPU" not in environ:  # set by the launcher that starts a single process, or one `mpirun`
            return None
        # It starts a single process, however many it was asked for.
        alone = LaunchEnvironment("accelerate-single", is_alone=True)
        return replace(_from_mpi(environ) or alone, feature=feature)

    def check(self, precision: str, strategy: str, packages: Mapping[str, str]) -> None:
        mixed = self.flags.get("ACCELERATE_MIXED_PRECISION", "no").lower()
        # The launcher sets "no" by default too, so this value asks for nothing.
        if mixed not in ("no", precision):
            raise UsageError(
                f"`precision` is {precision}, but `accelerate launch` got --mixed_precision {mixed};"
                f" the recipe decides: drop the flag, or set `precision` in the recipe"
            )
        dynamo = self.flags.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
        if dynamo != "no":
            raise UsageError(f"`accelerate launch` got --dynamo_backend {dynamo}; the recipe decides: drop the flag")
        for engine, own in _ENGINES.items():
            strategies = [*own, *(name for name, package in packages.items() if package == engine.lower())]
            if self.flags.get(f"ACCELERATE_USE_{engine}", "false").lower() == "true" and strategy not in strategies:
                raise UsageError(
                    f"`parallel.strategy` is {strategy}, but `accelerate launch` got --use_{engine.lower()};"
                    f" the recipe decides: drop the flag"
                    + (f", or set `parallel.strategy` to one of {', '.join(strategies)}" if strategies else "")
                )

    def local_ranks(self, environment: LaunchEnvironment) -> int:
        """Return the number of processes that was requested from `accelerate launch --cpu`.

        accelerate starts a single process without that number, so it is read from the command line and configuration
        file of accelerate.
        """
        from accelerate.commands.config.config_args import load_config_from_file
        from accelerate.commands.launch import launch_command_parser

        arguments = _arguments()
        if arguments is None:
            raise LaunchError(
                "`accelerate launch` started one process, but the requested number is unknown here; pass --processes to"
                " `trainer run`, or --multi_gpu to `accelerate launch`, which starts all, on CPU too"
            )
        asked = launch_command_parser().parse_args(arguments)
        number, machines = asked.num_processes, asked.num_machines
        if asked.config_file is not None or not asked.cpu:
            with suppress(FileNotFoundError):  # no file: accelerate uses its defaults
                config = load_config_from_file(asked.config_file)
                number, machines = number or config.num_processes, machines or config.num_machines
        if (machines or 1) > 1:
            raise LaunchError(
                "`accelerate launch` on CPU gives no ranks to several machines; add --multi_gpu, which does, on CPU too"
            )
        if (number or 1) > 1:
            say(f"accelerate started one of the {number} requested processes: starting them here", err=True)
        return number or 1


def _from_mpi(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    families = (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"),
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
    )
    for names in families:
        if names[0] in environ:
            return environment_of("mpirun", environ, names)
    return None


def _arguments() -> list[str] | None:
    """Return the arguments of accelerate, the nearest ancestor with its name; None: there is none."""
    import psutil  # here, because the doctor runs without it

    names = ("accelerate", "accelerate-launch", "accelerate.commands.launch", "accelerate.commands.accelerate_cli")
    for ancestor in psutil.Process().parents():
        with suppress(psutil.Error):
            command: list[str] = ancestor.cmdline()
            # with `python -m` the command line holds the module's name or, after a re-exec, its file
            for index, word in enumerate(command[:4]):
                if Path(word).name in names or word.endswith(("accelerate/commands/launch.py", "accelerate_cli.py")):
                    rest = command[index + 1 :]
                    return rest[1:] if rest[:1] == ["launch"] else rest
    return None
