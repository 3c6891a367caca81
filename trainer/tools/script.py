"""Launch scripts of jobs: files of `launchers/` with the numbers, recipe and overrides of one job.

Only those files hold the text of the scripts. The shell scripts run unchanged; their values are assignments
(`NODES=...`) and `#SBATCH` lines. The others are Jinja templates. They share the pod, and `ranks.sh`, which starts the
ranks of a node.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from trainer.base.errors import UsageError
from trainer.base.templates import templates
from trainer.base.text import for_terminal
from trainer.ranks.environment import LaunchEnvironment
from trainer.recipe.elastic_launch import elastic_launch
from trainer.recipe.plan import plan_run
from trainer.recipe.reading.loading import ResolvedRecipe, load_recipe
from trainer.recipe.reading.parser import DEFAULT
from trainer.recipe.reading.shipped import is_shipped, shipped_folder, shipped_recipes

RUNS = "/runs"
"""The folder of pods, and of SkyPilot's nodes, where the shared claim is mounted."""

_POD_JOIN_TIMEOUT = "parallel.join_timeout=15 minutes"  # a node may first have to pull the image
_FOLDER_KEY = "checkpoint.folder"
_MEMORY_PER_GPU_GIB = 32
_MOST_LETTERS = 40  # of a name: a JobSet adds 23 at most, and a pod may have 63
_POD_NAME = re.compile(rf"[a-z]([-a-z0-9]{{0,{_MOST_LETTERS - 2}}}[a-z0-9])?")
_ACCELERATOR = re.compile(r"[A-Za-z][\w.-]*")
_HF_TIME = re.compile(r"[1-9][0-9]*[smhd]")
_HF_BUCKET = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_MIRROR_KEY = "checkpoint.mirror"
_HF_FLAVORS = {
    **{"t4-small": ("t4", 1), "t4-medium": ("t4", 1), "l4x1": ("l4", 1), "l4x4": ("l4", 4)},
    **{"l40sx1": ("l40s", 1), "l40sx4": ("l40s", 4), "l40sx8": ("l40s", 8)},
    **{"a10g-small": ("a10g", 1), "a10g-large": ("a10g", 1), "a10g-largex2": ("a10g", 2), "a10g-largex4": ("a10g", 4)},
    **{"a100-large": ("a100", 1), "a100x4": ("a100", 4), "a100x8": ("a100", 8)},
    **{"h200": ("h200", 1), "h200x2": ("h200", 2), "h200x4": ("h200", 4), "h200x8": ("h200", 8)},
    **{f"rtx-pro-6000{end}": ("rtxpro6000", number) for end, number in (("", 1), ("x2", 2), ("x4", 4), ("x8", 8))},
}
"""The flavors of Hugging Face Jobs with GPUs: the name of the GPU, without hyphens, and their number."""
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
    queue: str | None = None
    accelerator: str | None = None


@dataclass(frozen=True)
class _Kind:
    """One target: its launcher file, its options, the function that fills the file, and the start command."""

    file: str
    options: frozenset[str]
    write: Callable[[str, _Job], str]
    start: str

    def command(self, job: _Job) -> str:
        """Return the command that starts the script of a job."""
        start = self.start
        if self is KINDS["torchrun"] and (job.is_elastic or job.options.restarts):  # c10d numbers the nodes itself
            start = _ANY_TIME if job.is_elastic else _TOGETHER
        has_address = self.start is not _BY_HAND or job.options.hosts is not None
        return start if has_address else f"MASTER_ADDR=NODE0 {start}"


@dataclass(frozen=True)
class _Job:
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
        found = {}
        for key, value in self.resolved.values.items():
            paths = [path for path in (value if isinstance(value, list) else [value]) if isinstance(path, str)]
            if key.startswith(("data.", "model.")) and any(map(os.path.isabs, paths)):
                found[key] = [path for path in paths if not is_shipped(path)]
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
    for name, value in vars(options).items():
        if value is not None and name not in kind.options:
            users = ", ".join(other for other, row in KINDS.items() if name in row.options)
            raise UsageError(f"--{name} has no effect with --on {target}; drop it (it is for {users})")
    resolved = load_recipe(source, overrides, is_whole=True)
    for one in resolved.chain.stages.values() if resolved.chain else (resolved,):
        plan_run(one.recipe, most * gpus, gpus)
    if least < most:
        elastic_nodes = least, most
        environment = LaunchEnvironment(
            "torchrun", world_size=most * gpus, local_world_size=gpus, elastic_nodes=elastic_nodes
        )
        elastic_launch(elastic_nodes).check(resolved.recipe, environment)
    job = _Job(source, overrides, resolved, most, gpus, options, least)
    text = kind.write(kind.file, job)
    # Names and paths enter the script, where a control character could hide a command.
    if for_terminal(text) != text:
        raise UsageError("the script must hold no control characters, but a name or path in it does; rename that")
    return text, kind.command(job)


def _parse_nodes(text: str) -> tuple[int, int]:
    match = _NODES.fullmatch(text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if least > most:
        raise UsageError(f"--nodes must be a number or MIN:MAX, such as 4 or 2:4, but is {text}")
    return least, most


class _File:
    """The text of a shell script, with named places to fill; a missing place is a bug."""

    def __init__(self, text: str) -> None:
        self.text = text

    def assign(self, **values: object) -> None:
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

    def usage(self, *lines: str) -> None:
        """Replace the comment at the top, which describes the use of the file for any job."""
        comment = "".join(f"# {line}".rstrip() + "\n" for line in lines)
        self._replace(r"\A(#!.*\n)?(?:#(?!SBATCH).*\n)+", lambda match: f"{match[1] or ''}{comment}")

    def _replace(self, pattern: str, value: str | Callable[..., str]) -> None:
        # A function, because `re.sub` would read the backslashes of a text.
        replacement = value if callable(value) else lambda match: value
        self.text, number = re.subn(pattern, replacement, self.text, flags=re.MULTILINE)
        assert number == 1, f"{pattern} occurs {number} times"


# Shell scripts


def _shell(fill: Callable[[_File, _Job], None], name: str, job: _Job) -> str:
    file = _File((shipped_folder("launchers") / name).read_text(encoding="utf-8"))
    fill(file, job)
    return file.text


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
        if not os.path.exists(options.container) and ":" in options.container:  # the path of a file may begin with /
            _image(options.container)
        run_folder = job.resolved.recipe.checkpoint.folder
        # The folder above that of the run, which need not exist yet.
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


# Templates


def _rendered(file: str, job: _Job, **values: Any) -> str:
    """Return a template of `launchers/` with the values that all of them have, and with those of one."""
    folder = shipped_folder("launchers")
    engine = templates(folder / "templates", keep_trailing_newline=True)
    ranks = (folder / "ranks.sh").read_text(encoding="utf-8").strip()
    numbers = {"nodes": job.nodes, "gpus": job.gpus, "cpus": job.cpus, "memory": _MEMORY_PER_GPU_GIB * job.gpus}
    ranks = ranks[ranks.index("set -u") :]  # without its own usage
    return engine.get_template(file).render(title=job.title, ranks=ranks, **numbers, **values)


def _manifest(file: str, job: _Job) -> str:
    values = _pod_values(job)
    queue = job.options.queue
    return _rendered(
        file,
        job,
        **values | {"arguments": [_yaml(word) for word in values["arguments"]]},
        queue=f"\n    kueue.x-k8s.io/queue-name: {_yaml(queue)}" if queue else "",
    )


def _pytorchjob(file: str, job: _Job) -> str:
    if job.nodes < 2:
        raise UsageError(f"--nodes must be at least 2 with --on pytorchjob, but is {job.nodes}; use --on kubernetes")
    return _manifest(file, job)


def _skypilot(file: str, job: _Job) -> str:
    accelerators = (job.options.accelerator or "").split(",")
    if not all(map(_ACCELERATOR.fullmatch, accelerators)) or len(set(accelerators)) < len(accelerators):
        raise UsageError(
            "--on skypilot needs the name of the GPU, or several different ones with commas between them: --accelerator"
            f" L40S,H100, but has {job.options.accelerator or 'none'}; `sky gpus list` shows the names"
        )
    values = _pod_values(job)
    values |= {"image": _yaml(f"docker:{json.loads(values['image'])}"), "arguments": shlex.join(values["arguments"])}
    return _rendered(file, job, **values, accelerators=accelerators, restarts=job.options.restarts or 0)


def _ray(file: str, job: _Job) -> str:
    venv = job.options.venv and os.path.abspath(os.path.expanduser(job.options.venv))
    return _rendered(
        file,
        job,
        arguments=repr([job.recipe, *job.overrides]),
        folder=repr(os.getcwd()),
        venv=repr(venv or ""),
        restarts=job.options.restarts or 0,
    )


def _hf_job(file: str, job: _Job) -> str:
    options, folder = job.options, job.resolved.recipe.checkpoint.folder
    if job.nodes > 1:
        raise UsageError(f"--nodes must be 1 with --on hf-jobs, but is {job.nodes}; use another target for more")
    if options.time is None or not _HF_TIME.fullmatch(options.time):
        raise UsageError(
            f"--on hf-jobs needs a time limit such as --time 4h, in s, m, h or d, but has {options.time or 'none'};"
            " without one, Hugging Face chooses it"
        )
    if options.claim is None or not _HF_BUCKET.fullmatch(options.claim):
        raise UsageError(
            "--on hf-jobs needs a bucket of the hub for the checkpoints and the model: --claim OWNER/BUCKET, but has"
            f" {options.claim or 'none'}; `hf buckets create` makes one"
        )
    recipe, arguments = _recipe_for_pods(job, _maps(options.map or ()))
    there = _shared_folder(folder)
    # A bucket may lack locks and renames, so the run has a folder of the machine.
    arguments[arguments.index(f"{_FOLDER_KEY}={there}")] = f"{_FOLDER_KEY}=/tmp{there}"
    if job.resolved.origins.get(_MIRROR_KEY, DEFAULT) == DEFAULT:
        arguments.append(f"{_MIRROR_KEY}={there}")
    words = {
        "name": options.name or _shortened(job, r"[^a-z0-9]+"),
        "flavor": _flavor(options.accelerator, job.gpus),
        "time": options.time,
        "volume": f"hf://buckets/{options.claim}:{RUNS}",
        "image": _image(options.container or ""),
        "recipe": recipe,
    }
    quoted = {name: shlex.quote(word) for name, word in words.items()}
    return _rendered(file, job, **quoted, arguments=shlex.join(arguments), restarts=options.restarts or 0)


def _flavor(accelerator: str | None, gpus: int) -> str:
    """Return the flavor of Hugging Face Jobs with so many GPUs of a name, or the flavor that is named itself."""
    name = re.sub(r"[^a-z0-9]", "", (accelerator or "").lower())
    of_name = {
        flavor: number for flavor, (gpu, number) in _HF_FLAVORS.items() if name in (gpu, flavor.replace("-", ""))
    }
    found = [flavor for flavor, number in of_name.items() if number == gpus]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{flavor} ({number})" for flavor, number in of_name.items()) or ", ".join(_HF_FLAVORS)
    raise UsageError(
        f"--accelerator must name one flavor of Hugging Face Jobs with --gpus {gpus}, but is {accelerator or 'none'};"
        f" {'those with their GPUs' if of_name else 'flavors'}: {known}"
    )


def _pod_values(job: _Job) -> dict[str, Any]:
    """Return the values of the nodes that share no folder with this machine, but a claim."""
    options, name = job.options, job.options.name or _shortened(job, r"[^a-z0-9]+")
    for option, value in (("name", name), ("claim", options.claim), ("queue", options.queue)):
        if value is not None and not _POD_NAME.fullmatch(value):
            raise UsageError(
                f"--{option} must be at most {_MOST_LETTERS} lowercase letters, digits and hyphens, with a letter"
                f" first, but is {value}"
            )
    recipe, arguments = _recipe_for_pods(job, _maps(options.map or ()))
    return {
        "name": name,
        "image": _yaml(_image(options.container or "trainer:cuda")),
        "claim": options.claim or "trainer-runs",
        "recipe": recipe,
        "arguments": arguments,
    }


def _recipe_for_pods(job: _Job, maps: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return the recipe as text and the overrides for pods, which share no folder with this machine."""
    mapped = {key: [_mapped(key, path, maps) for path in paths] for key, paths in job.paths.items()}
    folder = _shared_folder(job.resolved.recipe.checkpoint.folder)
    added = [f"{_FOLDER_KEY}={folder}"]
    if job.resolved.origins["parallel.join_timeout"] == DEFAULT:
        added.append(_POD_JOIN_TIMEOUT)
    # The image has the shipped recipe, so its name is enough; its files are mapped as any others.
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
    # The command of the pods has these keys as arguments, which take precedence over the file.
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
    # The longest first, because a folder may lie in another one of the list.
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
    # The cut at the limit may leave a hyphen at the end, which names of pods must not have.
    name = re.sub(not_allowed, "-", job.resolved.recipe.name.lower()).strip("-.")[:_MOST_LETTERS].strip("-.")
    return name if re.match(r"[a-z]", name) else f"trainer-{name}"[:_MOST_LETTERS].strip("-.")


def _plain(option: str, value: str | None) -> str | None:
    if value is not None and not _PLAIN.fullmatch(value):
        raise UsageError(f"--{option} must be one word without quotes, but is {value!r}")
    return value


def _image(name: str) -> str:
    """Return the name of an image; refuse one without its registry, or with an empty tag."""
    if name.startswith("/") or name.endswith((":", "/")):
        raise UsageError(
            f"--container must be an image such as registry/trainer:cuda, but is {name}, as from a variable that is not"
            " set; set the variable, or write the whole name"
        )
    return name


def _folder(path: str) -> str:
    return path if os.path.isdir(path) else os.path.dirname(path)


def _outermost(folders: Sequence[str]) -> list[str]:
    """Return the folders without those inside another folder."""
    distinct = sorted(set(folders))
    return [one for one in distinct if not any(one != other and Path(one).is_relative_to(other) for other in distinct)]


_SLURM_OPTIONS = frozenset({"name", "cpus", "time", "partition", "account", "container", "venv", "restarts"})
_NODE_OPTIONS = frozenset({"name", "cpus", "container", "claim", "map"})
_POD_OPTIONS = _NODE_OPTIONS | {"queue"}
_SHELL_OPTIONS = frozenset({"venv", "hosts"})
_APPLY = "kubectl apply -f {file}"

KINDS: dict[str, _Kind] = {
    "slurm": _Kind("slurm.sbatch", _SLURM_OPTIONS, partial(_shell, _fill_slurm), "sbatch {file}"),
    "kubernetes": _Kind("kubernetes_job.yaml.j2", _POD_OPTIONS, _manifest, _APPLY),
    "jobset": _Kind("jobset.yaml.j2", _POD_OPTIONS, _manifest, _APPLY),
    "trainjob": _Kind("trainjob.yaml.j2", _POD_OPTIONS, _manifest, _APPLY),
    "pytorchjob": _Kind("pytorchjob.yaml.j2", _POD_OPTIONS, _pytorchjob, _APPLY),
    "skypilot": _Kind(
        "skypilot.yaml.j2", _NODE_OPTIONS | {"accelerator", "restarts"}, _skypilot, "sky jobs launch {file}"
    ),
    "ray": _Kind("ray_job.py.j2", frozenset({"cpus", "venv", "restarts"}), _ray, "ray job submit -- python {file}"),
    "hf-jobs": _Kind(
        "hf_job.sh.j2",
        frozenset({"name", "time", "container", "claim", "map", "accelerator", "restarts"}),
        _hf_job,
        "bash {file}",
    ),
    "torchrun": _Kind(
        "torchrun_multi_node.sh", _SHELL_OPTIONS | {"restarts"}, partial(_shell, _fill_torchrun), _BY_HAND
    ),
    "deepspeed": _Kind("deepspeed.sh", _SHELL_OPTIONS, partial(_shell, _fill_deepspeed), _BY_HAND),
    "accelerate": _Kind("accelerate_multi_node.sh", _SHELL_OPTIONS, partial(_shell, _fill_nodes), _BY_HAND),
}
