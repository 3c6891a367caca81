"""Checks of the network: interfaces, gloo, NCCL, InfiniBand, and the hub."""

from __future__ import annotations

import ctypes
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Sequence

from trainer import __version__
from trainer.ranks.environment import GLOO_INTERFACE
from trainer.ranks.interfaces import addresses, is_loopback
from trainer.tools.doctor.facts import GlooFacts
from trainer.tools.doctor.finding import Finding, ok, problem, warning
from trainer.tools.doctor.machine import Machine
from trainer.tools.doctor.probe import ProbeError

HUB_SECONDS = 2.0
_VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "lxc", "tun", "podman")
_LAST_OF_NCCL = ("docker", "lo")  # it uses these only without any other
_YES = ("1", "ON", "YES", "TRUE")  # true values of huggingface_hub


def interfaces(machine: Machine) -> Finding:
    """The network interfaces that are up, with their addresses."""
    found = addresses()
    value = ", ".join(f"{name} {' '.join(own)}" for name, own in found.items())
    if all(is_loopback(address) for own in found.values() for address in own):
        return warning(
            f"{value or 'none'}: no other machine can be reached", "check the network of the container or job"
        )
    return ok(value)


def gloo(machine: Machine) -> Finding:
    """A sum over two processes of this machine by gloo, as in a training on CPUs, and the addresses that it used.

    By default, gloo uses the address of the host's name; `GLOO_SOCKET_IFNAME` names another interface. A run sets the
    interface itself.
    """
    found = addresses()
    named = machine.environ.get(GLOO_INTERFACE)
    missing = [name for name in named.split(",") if name not in found] if named else []
    if missing:
        return problem(
            f"GLOO_SOCKET_IFNAME names {', '.join(missing)}, but the interfaces are {', '.join(found)}",
            "set it to one of them, or unset it",
        )
    failed = "two processes of this machine could not connect"
    try:
        facts = machine.probe.facts(GlooFacts)
    except ProbeError as error:
        if error.kind is not GlooFacts:
            raise
        if not found:
            return problem(f"{failed}: {error}", "ip link set lo up")
        return problem(
            f"{failed}: {error}",
            f"set GLOO_SOCKET_IFNAME to one of {', '.join(found)}; the host's name ({socket.gethostname()}) must"
            " resolve to an address of this machine (/etc/hosts), and no firewall may block its own addresses",
        )
    through = f"GLOO_SOCKET_IFNAME={named}" if named else f"the host's name, {socket.gethostname()}"
    where = " and ".join(facts.addresses) or "an unknown address"
    value = f"two processes connected on {where}, by {through}, in {facts.seconds:.2f} s"
    outside = [name for name, own in found.items() if not all(map(is_loopback, own))]
    if facts.addresses and all(map(is_loopback, facts.addresses)) and outside:
        value += "; on several machines, a run uses the interface with the route to the rendezvous"
    return ok(value)


def nccl_interfaces(machine: Machine) -> Finding:
    """The interfaces that NCCL uses between machines, by its own rules and `NCCL_SOCKET_IFNAME`.

    Source: NCCL's documentation of environment variables. Without a GPU, NCCL is not used.
    """
    if not machine.gpus:
        return ok("not used: no GPU")
    found = addresses()
    setting = machine.environ.get("NCCL_SOCKET_IFNAME")
    chosen = nccl_choice(list(found), setting)
    if not chosen:
        return problem(
            f"NCCL_SOCKET_IFNAME={setting} matches none of {', '.join(found)}", "set it to one of them, or unset it"
        )
    value = ", ".join(chosen) + (f" (NCCL_SOCKET_IFNAME={setting})" if setting else "")
    if chosen[0].startswith(_VIRTUAL) or all(is_loopback(address) for address in found[chosen[0]]):
        return warning(
            f"{value}; {chosen[0]} does not reach other machines",
            "for several machines: set NCCL_SOCKET_IFNAME to the interface of their network",
        )
    return ok(value)


def infiniband(machine: Machine) -> Finding:
    """InfiniBand and RoCE adapters, the state of their ports, and the settings of NCCL for them."""
    adapters = sorted(path.name for path in machine.path("/sys/class/infiniband").glob("*"))
    if not adapters:
        return ok("none: several machines communicate over sockets")
    ports = {name: machine.path(f"/sys/class/infiniband/{name}/ports").glob("*/state") for name in adapters}
    active = [name for name in adapters if any("ACTIVE" in port.read_text(encoding="utf-8") for port in ports[name])]
    value = ", ".join(f"{name} {'active' if name in active else 'down'}" for name in adapters)
    if machine.environ.get("NCCL_IB_DISABLE", "0") != "0":
        return warning(f"{value}, but NCCL_IB_DISABLE is set", "unset it, unless a fault of the network needs it")
    if not machine.path("/dev/infiniband").is_dir():
        return warning(f"{value}, but there is no /dev/infiniband", "start the container with --device=/dev/infiniband")
    if not _has_verbs():
        return warning(
            f"{value}, but libibverbs.so.1 cannot be loaded: NCCL uses sockets",
            "apt-get install libibverbs1 ibverbs-providers (Debian), or dnf install rdma-core",
        )
    setting = machine.environ.get("NCCL_IB_HCA", "")
    names = [entry.lstrip("=").split(":")[0] for entry in setting.split(",") if entry]
    if names and not setting.startswith("^") and not any(one.startswith(name) for name in names for one in adapters):
        return problem(
            f"NCCL_IB_HCA={setting} names none of {', '.join(adapters)}", "set it to some of them, or unset it"
        )
    if not active:
        return warning(value, "check `ibstat` and the cable: NCCL uses sockets")
    return ok(value)


def hub(machine: Machine) -> Finding:
    """The answer of the Hugging Face hub within two seconds; training also works offline."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if machine.environ.get(name, "").upper() in _YES:
            return ok(f"not checked: {name} is set; models and data come from folders or the cache")
    endpoint = machine.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    wanted = _wanted_of_hub(machine)
    try:
        status = _head(endpoint)
    except (OSError, ValueError) as error:
        why = str(getattr(error, "reason", None) or error)
    else:
        if status < 400:
            return ok(f"{endpoint} answers")
        why = f"it answers {status}"
    if wanted == []:
        return ok(f"{endpoint} cannot be used ({why}); the recipe needs no file from it")
    named = f"; the recipe names {' and '.join(wanted)}" if wanted else ""
    return warning(
        f"{endpoint} cannot be used ({why}): only files in the cache can be loaded{named}",
        "set HF_HUB_OFFLINE=1 to avoid waiting, HTTPS_PROXY for a proxy, or HF_ENDPOINT for a mirror",
    )


def nccl_choice(names: Sequence[str], setting: str | None) -> list[str]:
    """Return the interfaces that NCCL uses among `names`, for a value of NCCL_SOCKET_IFNAME (None: not set)."""
    if setting:
        excludes, rest = setting.startswith("^"), setting.removeprefix("^")
        exactly, entries = rest.startswith("="), rest.removeprefix("=").split(",")
        hits = [n for n in names if any(n == entry if exactly else n.startswith(entry) for entry in entries if entry)]
        return [name for name in names if name not in hits] if excludes else hits
    fast = [name for name in names if name.startswith("ib")]
    usual = [name for name in names if not name.startswith(_LAST_OF_NCCL)]
    return fast or usual or [name for name in names if name.startswith("docker")] or list(names)


def _has_verbs() -> bool:
    """Return whether the library that NCCL opens at run time is installed."""
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return False
    return True


def _wanted_of_hub(machine: Machine) -> list[str] | None:
    if machine.recipe is None:
        return None
    model, data = machine.recipe.model, machine.recipe.data
    names = [model.name_or_path, model.tokenizer, data.name if data.source == "hub" else None]
    return [name for name in names if name and not os.path.isabs(name)]


def _head(endpoint: str) -> int:
    request = urllib.request.Request(endpoint, method="HEAD", headers={"User-Agent": f"trainer/{__version__}"})
    try:
        with urllib.request.urlopen(request, timeout=HUB_SECONDS) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
