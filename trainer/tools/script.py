"""Launch scripts of jobs: files of `launchers/` with the numbers, recipe and overrides of one job.

Only those files hold the text of the scripts, and they run unchanged. In a shell script the values are assignments
(`NODES=...`) and `#SBATCH` lines; in a manifest they are on lines that end with a mark (`# set: nodes`).
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path

from trainer.base.errors import UsageError
from trainer.recipe.elastic import check_nodes
from trainer.recipe.plan import plan_run
from trainer.recipe.reading.loading import ResolvedRecipe, load_recipe
from trainer.recipe.reading.parser import DEFAULT
from trainer.recipe.reading.shipped import shipped_folder, shipped_recipes

RUNS = "/runs"
"""The folder of the pods where the manifests mount the shared claim."""

_POD_JOIN_TIMEOUT = "parallel.join_timeout=15 minutes"  # a node may first have to pull the image
_FOLDER_KEY = "checkpoint.folder"
_MEMORY_PER_GPU_GIB = 32
_POD_NAME = re.compile(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?")
_BY_HAND = "NODE_RANK=0 bash {file}  # on each node, with its own number"
_TOGETHER = "bash {file}  # on each node"
_ANY_TIME = "bash {file}  # on each node, now or later"
_NODES = re.compile(r"([1-9][0-9]*)(?::([1-9][0-9]*))?")
_ELASTIC_RESTARTS = 10  # torchrun counts each node that leaves as a failure of those that stay
_PLAIN = re.compile(r"[\w.:+,@/=-]+")  # values that an #SBATCH line accepts without quotes
_SLURM_TIME = re.compile(r"([0-9]+-)?[0-9]+(:[0-9]+){0,2}")


@dataclass(frozen=True)
class Options:
    """Options of the job on the command line; None: not given."""

    name: str | None = None
    cpus: int | None = None  # for each GPU
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    container: str | None = None
    venv: str | None = None
    hosts: str | None = None
    claim: str | None = None
    map: Sequence[str] | None = None
    restarts: int | None = None


@dataclass(frozen=True)
class _Kind:
    """One target: its launcher file, its options, the function that fills the file, and the start command."""

    file: str
    options: frozenset[str]
    fill: Callable[[_File, _Job], None]
    start: str


@dataclass(frozen=True)
class _Job:
    """The values of one job."""

    source: str  # the recipe on the command line
    overrides: Sequence[str]
    resolved: ResolvedRecipe
    nodes: int  # the most
    gpus: int  # of each node, and ranks
    options: Options
    least_nodes: int

    @property
    def is_elastic(self) -> bool:
        return self.least_nodes < self.nodes

    @property
    def recipe(self) -> str:
        """The recipe argument for machines that share the folders of this machine."""
        return self.source if self.is_shipped else os.path.abspath(self.resolved.file)

    @property
    def title(self) -> str:
        name = self.resolved.recipe.name
        nodes = f"{self.least_nodes} to {self.nodes}" if self.is_elastic else self.nodes
        return f"{name} on {nodes} nodes with {self.gpus} GPUs each, written by `trainer launch-script`."

    @property
    def is_shipped(self) -> bool:
        return self.resolved.file in shipped_recipes().values()

    @property
    def cpus(self) -> int:
        return self.options.cpus or 8

    @property
    def paths(self) -> dict[str, list[str]]:
        """The files and folders of the recipe by their keys (`data.train`), without those shipped with trainer."""
        shipped, found = f"{shipped_folder()}{os.sep}", {}
        for key, value in self.resolved.values.items():
            paths = [path for path in (value if isinstance(value, list) else [value]) if isinstance(path, str)]
            if key.startswith(("data.", "model.")) and any(map(os.path.isabs, paths)):
                found[key] = [path for path in paths if not path.startswith(shipped)]
        return found


def write_launch_script(
    source: str, overrides: Sequence[str], target: str, nodes: str, gpus: int, options: Options
) -> tuple[str, str]:
    """Return the script or manifest, and the command that starts it, with `{file}` for the path of the script.

    Args:
        source: a recipe file, or the name of a shipped recipe.
        overrides: overrides of the recipe, as `key=value`.
        target: the launcher, a key of `KINDS`.
        nodes: the number of machines, or `MIN:MAX` if they may join and leave.
        gpus: the number of GPUs, and of ranks, of each machine.
        options: further options of the job.

    Raises:
        RecipeError: the recipe is not valid, or does not fit on that many ranks.
        UsageError: the target does not use an option, or does not accept its value; the recipe is not ready for nodes
            that join and leave.
    """
    kind = KINDS[target]
    least, most = _parse_nodes(nodes)
    if least < most and kind is not KINDS["torchrun"]:
        raise UsageError(f"--nodes must be one number with --on {target}, but is {nodes}; only torchrun has MIN:MAX")
    given = {field.name: getattr(options, field.name) for field in fields(options)}
    for name, value in given.items():
        if value is not None and name not in kind.options:
            users = ", ".join(other for other, row in KINDS.items() if name in row.options)
            raise UsageError(f"--{name} has no use with --on {target}; drop it (it is for {users})")
    resolved = load_recipe(source, overrides)
    plan_run(resolved.recipe, most * gpus, gpus)
    if least < most:
        check_nodes(resolved.recipe, (least, most), gpus)
    file = _File((shipped_folder("launchers") / kind.file).read_text(encoding="utf-8"))
    kind.fill(file, _Job(source, overrides, resolved, most, gpus, options, least))
    start = kind.start
    if kind is KINDS["torchrun"] and (least < most or options.restarts):  # c10d numbers the nodes itself
        start = _ANY_TIME if least < most else _TOGETHER
    has_address = kind.start is not _BY_HAND or options.hosts is not None
    return file.text, start if has_address else f"MASTER_ADDR=NODE0 {start}"


def _parse_nodes(text: str) -> tuple[int, int]:
    match = _NODES.fullmatch(text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if least > most:
        raise UsageError(f"--nodes must be a number or MIN:MAX, such as 4 or 2:4, but is {text}")
    return least, most


class _File:
    """The text of a launcher file, with named places to fill; a missing place is a bug."""

    def __init__(self, text: str) -> None:
        self.text = text

    def assign(self, **values: object) -> None:
        """Replace the values of shell variables by quoted texts."""
        for name, value in values.items():
            self._replace(rf"^{name}=.*$", f"{name}={value}")

    def directives(self, values: Mapping[str, object]) -> None:
        """Set `#SBATCH` options; one that the file lacks is inserted before `nodes`."""
        for name, value in values.items():
            line = f"#SBATCH --{name}={value}"
            if f"#SBATCH --{name}=" in self.text:
                self._replace(rf"^#SBATCH --{name}=.*$", line)
            else:
                self._replace(r"^(?=#SBATCH --nodes=)", f"{line}\n")

    def mark(self, values: Mapping[str, object]) -> None:
        """Replace the value, after a key or a dash, on each line with the mark, and remove the mark."""
        for name, value in values.items():
            pattern = rf"^( *(?:- |[^\s#]+: )+).*? # set: {name}$"
            self._replace(pattern, lambda match, value=value: f"{match[1]}{value}", several=True)

    def mark_lines(self, name: str, values: Sequence[str]) -> None:
        """Replace all lines of a list that have the mark."""
        pattern = rf"(?:^( *- ).* # set: {name}\n)+"
        self._replace(pattern, lambda match: "".join(f"{match[1]}{value}\n" for value in values))

    def mark_block(self, name: str, text: str) -> None:
        """Replace the text of a literal block (`|`)."""

        def filled(match: re.Match[str]) -> str:
            return f"{match[1]}\n" + "".join(f"{match[2]}{line}\n" for line in text.splitlines())

        self._replace(rf"^(.*\|) # set: {name}\n( +).*\n(?:\2.*\n)*", filled)

    def usage(self, *lines: str) -> None:
        """Replace the comment at the top, which describes the use of the file for any job."""
        comment = "".join(f"# {line}".rstrip() + "\n" for line in lines)
        self._replace(r"\A(#!.*\n)?(?:#(?!SBATCH).*\n)+", lambda match: f"{match[1] or ''}{comment}")

    def _replace(self, pattern: str, value: str | Callable[..., str], several: bool = False) -> None:
        replacement = value if callable(value) else lambda match: value
        self.text, number = re.subn(pattern, replacement, self.text, flags=re.MULTILINE)
        assert number == 1 or (several and number), f"{pattern} occurs {number} times"


# Shell scripts


def _fill_slurm(file: _File, job: _Job) -> None:
    options = job.options
    if options.venv and options.container:
        raise UsageError("--venv and --container exclude each other; drop one")
    if options.time and not _SLURM_TIME.fullmatch(options.time):
        raise UsageError(f"--time must be a time of Slurm, such as 04:00:00 or 2-00:00:00, but is {options.time}")
    words = {name: _plain(name, getattr(options, name)) for name in ("name", "partition", "account")}
    values = {
        "job-name": words.pop("name") or _shortened(job, r"[^\w.-]+"),
        "nodes": job.nodes,
        "ntasks-per-node": job.gpus,
        "gpus-per-node": job.gpus,
        "cpus-per-task": job.cpus,
        "time": options.time,
        **words,
    }
    file.directives({name: value for name, value in values.items() if value})
    _fill_shell(file, job)
    if options.restarts:
        file.assign(RESTARTS=options.restarts)
    if options.container:
        run_folder = job.resolved.recipe.checkpoint.folder
        folders = [os.getcwd(), os.path.dirname(run_folder), *map(_folder, chain(*job.paths.values()))]
        if not job.is_shipped:
            folders.append(os.path.dirname(job.recipe))
        mounts = ",".join(_outermost(folders))
        file.assign(CONTAINER=shlex.quote(options.container), MOUNTS=shlex.quote(mounts))


def _fill_torchrun(file: _File, job: _Job) -> None:
    restarts = job.options.restarts
    if job.is_elastic or restarts:
        times = _ELASTIC_RESTARTS if restarts is None else restarts
        file.assign(RENDEZVOUS="c10d", RESTARTS=f"${{RESTARTS:-{times}}}")  # only c10d announces a change
    _fill_nodes(file, job)


def _fill_nodes(file: _File, job: _Job) -> None:
    file.assign(NODES=f"{job.least_nodes}:{job.nodes}" if job.is_elastic else job.nodes, PROCESSES=job.gpus)
    _fill_shell(file, job)
    _fill_first_host(file, job)


def _fill_deepspeed(file: _File, job: _Job) -> None:
    if job.options.hosts is None:
        raise UsageError("--on deepspeed needs the names of all machines: --hosts node0,node1,...")
    _fill_shell(file, job)
    hosts = _fill_first_host(file, job)
    file.assign(PROCESSES=job.gpus, HOSTS=f"({shlex.join(hosts)})")


def _fill_shell(file: _File, job: _Job) -> None:
    file.assign(ARGUMENTS=f'({shlex.join([job.recipe, *job.overrides])} "$@")', FOLDER=shlex.quote(os.getcwd()))
    if job.options.venv:
        file.assign(VENV=shlex.quote(os.path.abspath(os.path.expanduser(job.options.venv))))
    file.usage(job.title, "More overrides may follow the name of this file.")


def _fill_first_host(file: _File, job: _Job) -> list[str]:
    """Set the address of the rendezvous, if the hosts are given; return the hosts."""
    if job.options.hosts is None:
        return []
    hosts = job.options.hosts.split(",")
    too_few_or_many = not job.least_nodes <= len(hosts) <= job.nodes
    if too_few_or_many or len(set(hosts)) != len(hosts) or not all(re.fullmatch(r"[\w.:-]+", host) for host in hosts):
        number = f"{job.least_nodes} to {job.nodes}" if job.is_elastic else job.nodes
        raise UsageError(f"--hosts must name {number} machines with commas between them, but is {job.options.hosts}")
    file.assign(MASTER_ADDR=f"${{MASTER_ADDR:-{hosts[0]}}}")
    return hosts


# Manifests


def _fill_kubernetes(file: _File, job: _Job) -> None:
    name = _fill_pod(file, job)
    file.mark({"nodes": job.nodes, "nodes text": f'"{job.nodes}"', "master": f"{name}-0.{name}"})


def _fill_pytorchjob(file: _File, job: _Job) -> None:
    if job.nodes < 2:
        raise UsageError(f"--nodes must be at least 2 with --on pytorchjob, but is {job.nodes}; use --on kubernetes")
    _fill_pod(file, job)
    file.mark({"workers": job.nodes - 1, "threads text": f'"{job.cpus}"'})


def _fill_pod(file: _File, job: _Job) -> str:
    """Fill the common parts of both manifests; return the name of the job."""
    options, name = job.options, job.options.name or _shortened(job, r"[^a-z0-9]+")
    for option, value in (("name", name), ("claim", options.claim)):
        if value is not None and not _POD_NAME.fullmatch(value):
            raise UsageError(
                f"--{option} must be at most 50 small letters, digits and hyphens, with a letter first, but is {value}"
            )
    recipe, arguments = _recipe_for_pods(job, _maps(options.map or ()))
    values = {
        "name": name,
        "gpus": job.gpus,
        "gpus text": f'"{job.gpus}"',
        "cpus text": f'"{job.cpus * job.gpus}"',
        "memory": f"{_MEMORY_PER_GPU_GIB * job.gpus}Gi",
        "image": _yaml(options.container) if options.container else None,
        "claim": options.claim,
    }
    file.mark({mark: value for mark, value in values.items() if value})
    file.mark_block("recipe", recipe)
    file.mark_lines("argument", [_yaml(word) for word in arguments])
    file.text = re.sub(r" # set: (image|claim)$", "", file.text, flags=re.MULTILINE)
    file.usage(job.title)
    return name


def _recipe_for_pods(job: _Job, maps: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return the recipe as text and the overrides for pods, which share no folder with this machine."""
    mapped = {key: [_mapped(key, path, maps) for path in paths] for key, paths in job.paths.items()}
    folder = _shared_folder(job.resolved.recipe.checkpoint.folder)
    added = [f"{_FOLDER_KEY}={folder}"]
    if job.resolved.origins["parallel.join_timeout"] == DEFAULT:
        added.append(_POD_JOIN_TIMEOUT)
    if job.is_shipped:
        words = []
        for override in job.overrides:
            key, _, _ = override.partition("=")
            if mapped.get(key):
                value = _all_mapped(job, key, mapped[key])
                override = f"{key}={json.dumps(value) if isinstance(value, list) else value}"
            if key != _FOLDER_KEY:
                words.append(override)
        return json.dumps({"extends": job.resolved.file.stem}), [*words, *added]
    recipe = job.resolved.recipe.model_dump(mode="json")
    for key, paths in mapped.items():
        section, _, name = key.partition(".")
        recipe[section][name] = _all_mapped(job, key, paths)
    del recipe["checkpoint"]["folder"]
    if _POD_JOIN_TIMEOUT in added:
        del recipe["parallel"]["join_timeout"]
    return json.dumps(recipe, indent=2), added  # ASCII: YAML breaks lines at U+0085 and U+2028 too


def _all_mapped(job: _Job, key: str, paths: list[str]) -> str | list[str]:
    value = job.resolved.values[key]
    if len(paths) < (len(value) if isinstance(value, list) else 1):
        raise UsageError(
            f"`{key}` is a file of this installation of trainer, and pods may lack it; copy it, and map the copy with"
            " --map, or use the shipped recipe by its name"
        )
    return paths if isinstance(value, list) else paths[0]


def _shared_folder(folder: str) -> str:
    """Return the folder of the run in the claim, which replaces the local folder `runs`."""
    here = os.path.join(os.getcwd(), "runs") + os.sep
    there = f"{RUNS}/{folder[len(here) :]}" if folder.startswith(here) else folder
    if not there.startswith(f"{RUNS}/"):
        raise UsageError(f"`{_FOLDER_KEY}` must lie in {RUNS}, which the pods share, but is {folder}; use {RUNS}/NAME")
    return there


def _maps(words: Sequence[str]) -> dict[str, str]:
    """Return the folders of a pod by the folders of this machine.

    Raises:
        UsageError: a word is not HERE=THERE, or pods do not have the folder.
    """
    maps = {}
    for word in words:
        here, equals, there = word.partition("=")
        if not equals or not here or not there.startswith(f"{RUNS}/"):
            raise UsageError(
                f"--map must be HERE=THERE, such as ./data={RUNS}/data, with THERE in {RUNS}, which the pods share,"
                f" but is {word}"
            )
        maps[os.path.abspath(os.path.expanduser(here))] = os.path.normpath(there)
    return maps


def _mapped(key: str, path: str, maps: Mapping[str, str]) -> str:
    for here in sorted(maps, key=len, reverse=True):
        if path == here or path.startswith(f"{here}{os.sep}"):
            return maps[here] + path[len(here) :]
    raise UsageError(
        f"`{key}` is {path}, which pods do not have; copy it into the claim, and give its folder there with"
        f" --map {shlex.quote(f'{_folder(path)}={RUNS}/data')}"
    )


def _yaml(word: str) -> str:
    """Quote a word for YAML, which includes JSON, and escape `$(NAME)`, which Kubernetes would expand."""
    return json.dumps(word.replace("$(", "$$("))


# Names


def _shortened(job: _Job, not_allowed: str) -> str:
    """Return a job name made from the recipe's name, without the characters of `not_allowed`."""
    name = re.sub(not_allowed, "-", job.resolved.recipe.name.lower()).strip("-.")[:50].strip("-.")
    return name if re.match(r"[a-z]", name) else f"trainer-{name}"[:50].strip("-.")


def _plain(option: str, value: str | None) -> str | None:
    if value is not None and not _PLAIN.fullmatch(value):
        raise UsageError(f"--{option} must be one word without quotes, but is {value!r}")
    return value


def _folder(path: str) -> str:
    return path if os.path.isdir(path) else os.path.dirname(path)


def _outermost(folders: Sequence[str]) -> list[str]:
    """Return the folders without those inside another folder."""
    distinct = sorted(set(folders))
    return [one for one in distinct if not any(one != other and Path(one).is_relative_to(other) for other in distinct)]


_SLURM_OPTIONS = frozenset({"name", "cpus", "time", "partition", "account", "container", "venv", "restarts"})
_POD_OPTIONS = frozenset({"name", "cpus", "container", "claim", "map"})
_SHELL_OPTIONS = frozenset({"venv", "hosts"})
_APPLY = "kubectl apply -f {file}"

KINDS: dict[str, _Kind] = {
    "slurm": _Kind("slurm.sbatch", _SLURM_OPTIONS, _fill_slurm, "sbatch {file}"),
    "kubernetes": _Kind("kubernetes_job.yaml", _POD_OPTIONS, _fill_kubernetes, _APPLY),
    "pytorchjob": _Kind("pytorchjob.yaml", _POD_OPTIONS, _fill_pytorchjob, _APPLY),
    "torchrun": _Kind("torchrun_multi_node.sh", _SHELL_OPTIONS | {"restarts"}, _fill_torchrun, _BY_HAND),
    "deepspeed": _Kind("deepspeed.sh", _SHELL_OPTIONS, _fill_deepspeed, _BY_HAND),
    "accelerate": _Kind("accelerate_multi_node.sh", _SHELL_OPTIONS, _fill_nodes, _BY_HAND),
}
