"""The network interfaces of this machine and the routes to other machines."""

from __future__ import annotations

import ipaddress
import socket

from trainer.base.errors import LaunchError
from trainer.ranks.environment import GLOO_INTERFACE

_ANY_PORT = 9  # the route does not depend on it; nothing is sent


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach the address."""
    return ipaddress.ip_address(address.split("%")[0].removeprefix("::ffff:")).is_loopback


def route_to(address: str) -> str:
    """Return the address of this machine from which packets to `address` leave.

    Raises:
        OSError: no route leads there.
    """
    family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # For datagrams, this chooses the route and sends nothing.
        probe.connect((address, _ANY_PORT))
        return str(probe.getsockname()[0])


def listening_address(host: str, one_machine: bool) -> str:
    """Return the address of this machine to listen on, so that only the other ranks' network can connect.

    Args:
        host: name or address that the ranks connect to.

    Returns:
        An address, or an empty string for all interfaces: `host` has no address of this machine, or several.
    """
    try:
        resolved = [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return ""
    local = {address for ips in addresses().values() for address in ips}
    usable = [address for address in resolved if is_loopback(address) or address in local]
    if one_machine:
        return usable[0] if usable else ""
    # A name that is a loopback address here, as in Debian's /etc/hosts, is another one for the other machines.
    return usable[0] if len(resolved) == len(usable) == 1 and not is_loopback(usable[0]) else ""


def interface_of(address: str) -> str | None:
    """Return the name of the interface with that address, or None."""
    return next((name for name, ips in addresses().items() if address in ips), None)


def address_of(interface: str) -> str:
    """Return the first address of the interface in `GLOO_SOCKET_IFNAME`, as gloo chooses it.

    Args:
        interface: name, or a list with commas; gloo takes the first.

    Raises:
        LaunchError: this machine has no such interface.
    """
    ips = addresses().get(interface.split(",")[0])
    if ips is None:
        raise LaunchError(
            f"{GLOO_INTERFACE} is {interface}, but {socket.gethostname()} has {interfaces()}; name one of these"
        )
    return ips[0]


def interfaces() -> str:
    """Return the interfaces that are up with their addresses, for messages, without loopback addresses."""
    shown = [f"{name} ({address})" for name, ips in addresses().items() for address in ips if not is_loopback(address)]
    return ", ".join(shown) or "only loopback interfaces"


def addresses() -> dict[str, list[str]]:
    """Return the addresses of each interface that is up, IPv4 first, without link-local ones."""
    import psutil  # here, because `trainer doctor` must be able to say that it is missing

    states, by_interface = psutil.net_if_stats(), psutil.net_if_addrs()
    up: dict[str, list[str]] = {}
    for name, entries in by_interface.items():
        usable = [
            entry.address
            for family in (socket.AF_INET, socket.AF_INET6)
            for entry in entries
            if entry.family == family and not entry.address.startswith("fe80:")
        ]
        if usable and states[name].isup:
            up[name] = usable
    return up
