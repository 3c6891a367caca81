"""Checks of the network: gloo and the hub."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Mapping

from trainer import __version__
from trainer.ranks.environment import GLOO_INTERFACE
from trainer.ranks.interfaces import addresses, is_loopback
from trainer.tools.doctor.facts import GlooFacts
from trainer.tools.doctor.finding import Finding, ok, problem, warning
from trainer.tools.doctor.machine import Machine
from trainer.tools.doctor.probe import ProbeError

HUB_SECONDS = 2.0
_YES = ("1", "ON", "YES", "TRUE")  # true values of huggingface_hub


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


def hub(machine: Machine) -> Finding:
    """The answer of the Hugging Face hub within two seconds; training also works offline."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if machine.environ.get(name, "").upper() in _YES:
            return ok(f"not checked: {name} is set; models and data come from folders or the cache")
    endpoint = endpoint_of(machine.environ)
    try:
        status = answer_of(endpoint)
    except (OSError, ValueError) as error:
        why = str(getattr(error, "reason", None) or error)
    else:
        if status < 400:
            return ok(f"{endpoint} answers")
        why = f"it answers {status}"
    return warning(
        f"{endpoint} cannot be used ({why}): only files in the cache can be loaded",
        "set HF_HUB_OFFLINE=1 to avoid waiting, HTTPS_PROXY for a proxy, or HF_ENDPOINT for a mirror",
    )


def endpoint_of(environ: Mapping[str, str]) -> str:
    """Return the address of the hub."""
    return environ.get("HF_ENDPOINT") or "https://huggingface.co"


def answer_of(endpoint: str) -> int:
    """Return the status with which an address answers.

    Raises:
        OSError, ValueError: it does not answer in time, or is none.
    """
    request = urllib.request.Request(endpoint, method="HEAD", headers={"User-Agent": f"trainer/{__version__}"})
    try:
        with urllib.request.urlopen(request, timeout=HUB_SECONDS) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
