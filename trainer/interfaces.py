"""The network interfaces of this machine: which one leads to another machine, and what they are called in messages."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator

import psutil

from trainer.errors import LaunchError

_ANY_PORT = 9  # for a route, which no port changes; nothing is sent


def is_loopback(address: str) -> bool:
    """Whether only this machine itself can reach it."""
    return ipaddress.ip_address(address).is_loopback


def route_to(address: str) -> str:
    """The address of this machine from which packets to `address` leave.

    Raises:
        OSError: no route leads there.
    """
    family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, _ANY_PORT))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The name of the interface that has an address; None where none has."""
    return next((name for name, own in _addresses() if own == address), None)


def address_of(interface: str, variable: str) -> str:
    """The first address of an interface, as gloo takes it.

    Args:
        interface: its name, the first of a list with commas.
        variable: that named it, for the message.

    Raises:
        LaunchError: this machine has no such interface.
    """
    wanted = interface.split(",")[0]
    found = next((own for name, own in _addresses() if name == wanted), None)
    if found is None:
        raise LaunchError(
            f"{variable} is {interface}, but {socket.gethostname()} has {interfaces()}; name one of these"
        )
    return found


def interfaces() -> str:
    """All interfaces with their addresses, for messages, without those that lead nowhere else."""
    shown = [f"{name} ({address})" for name, address in _addresses() if not is_loopback(address)]
    return ", ".join(shown) or "loopback interfaces alone"


def _addresses() -> Iterator[tuple[str, str]]:
    """Name and address: version 4 first, then version 6 without link-local ones."""
    found = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for name, addresses in found.items():
            for address in addresses:
                if address.family == family and not address.address.startswith("fe80"):
                    yield name, address.address
