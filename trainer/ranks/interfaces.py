"""The network interfaces of this machine: which one leads to another machine, and what they are called in messages."""

from __future__ import annotations

import ipaddress
import socket

from trainer.base.errors import LaunchError
from trainer.ranks.environment import GLOO_INTERFACE

_ANY_PORT = 9  # for a route, which no port changes; nothing is sent


def is_loopback(address: str) -> bool:
    """Whether only this machine itself can reach it."""
    return ipaddress.ip_address(address.split("%")[0].removeprefix("::ffff:")).is_loopback


def route_to(address: str) -> str:
    """The address of this machine from which packets to `address` leave.

    Raises:
        OSError: no route leads there.
    """
    family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, _ANY_PORT))
        return str(probe.getsockname()[0])


def listening_address(host: str, one_machine: bool) -> str:
    """Return the address of this machine to listen on, so that only the other ranks' network can connect.

    Args:
        host: name or address that the ranks connect to.
        one_machine: whether all ranks are on this machine.

    Returns:
        An address, or an empty string for all interfaces: `host` has no address of this machine, or several.
    """
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return ""
    local = {address for own in addresses().values() for address in own}
    usable = [address for address in found if is_loopback(address) or address in local]
    if one_machine:
        return usable[0] if usable else ""
    # A name that is a loopback address here, as in Debian's /etc/hosts, is another one for the other machines.
    return usable[0] if len(found) == len(usable) == 1 and not is_loopback(usable[0]) else ""


def interface_of(address: str) -> str | None:
    """The name of the interface that has an address; None where none has."""
    return next((name for name, own in addresses().items() if address in own), None)


def address_of(interface: str) -> str:
    """The first address of the interface that `GLOO_SOCKET_IFNAME` names, as gloo takes it.

    Args:
        interface: its name, the first of a list with commas.

    Raises:
        LaunchError: this machine has no such interface.
    """
    found = addresses().get(interface.split(",")[0])
    if found is None:
        raise LaunchError(
            f"{GLOO_INTERFACE} is {interface}, but {socket.gethostname()} has {interfaces()}; name one of these"
        )
    return found[0]


def interfaces() -> str:
    """All interfaces that are up with their addresses, for messages, without those that lead nowhere else."""
    shown = [f"{name} ({address})" for name, own in addresses().items() for address in own if not is_loopback(address)]
    return ", ".join(shown) or "loopback interfaces alone"


def addresses() -> dict[str, list[str]]:
    """The addresses of each interface that is up, version 4 first; those that hold on one link alone are left out."""
    import psutil  # here, because `trainer doctor` must be able to say that it is missing

    states, found = psutil.net_if_stats(), psutil.net_if_addrs()
    up: dict[str, list[str]] = {}
    for name, entries in found.items():
        usable = [
            entry.address
            for family in (socket.AF_INET, socket.AF_INET6)
            for entry in entries
            if entry.family == family and not entry.address.startswith("fe80:")
        ]
        if usable and states[name].isup:
            up[name] = usable
    return up
