"""Two machines on one: network namespaces with addresses, names, hosts files and, where asked, folders of their own.

They need Linux, root and `ip` (iproute2). `python nodes.py JSON COMMAND ...` runs a command on a node.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18


@dataclass(frozen=True)
class Node:
    """One of the machines; as it stands here it can be pickled, and entered in another process."""

    name: str
    address: str  # on `eth0`, which leads to the other
    namespace: str
    hosts: str  # the file that it has as /etc/hosts
    own_folders: tuple[str, ...] = ()  # which it does not share: they are empty here

    def enter(self) -> None:
        """Makes this process, and what it starts, be on the node; for ever.

        Raises:
            OSError: the system does not allow it.
        """
        libc = ctypes.CDLL(None, use_errno=True)

        def call(name: str, *arguments: object) -> None:
            if getattr(libc, name)(*arguments):
                raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")

        with open(f"/run/netns/{self.namespace}") as namespace:
            call("setns", namespace.fileno(), _CLONE_NEWNET)
        call("unshare", _CLONE_NEWNS | _CLONE_NEWUTS)
        call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        call("mount", self.hosts.encode(), b"/etc/hosts", None, _MS_BIND, None)
        for folder in self.own_folders:
            call("mount", b"tmpfs", folder.encode(), b"tmpfs", 0, None)
        socket.sethostname(self.name)

    def without(self, *folders: Path) -> Node:
        """The node with these folders not shared."""
        return replace(self, own_folders=tuple(map(str, folders)))

    def command(self, words: Sequence[str | Path]) -> list[str]:
        """The command that runs `words` on the node."""
        return [sys.executable, __file__, json.dumps(asdict(self)), *map(str, words)]

    def ip(self, *words: str) -> None:
        """Runs `ip` on the node."""
        _ip("-n", self.namespace, *words)


def problem() -> str | None:
    """Why there can be no nodes here; None: there can."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need Linux, root and iproute2"
    ended = subprocess.run(["ip", "netns", "add", _namespace("probe")], capture_output=True, text=True)
    if ended.returncode:
        return f"network namespaces are not allowed: {ended.stderr.strip()}"
    _ip("netns", "del", _namespace("probe"))
    return None


@contextmanager
def two_nodes(folder: Path) -> Iterator[tuple[Node, Node]]:
    """`node0` and `node1`, joined by `eth0`; each finds its own name at 127.0.1.1 first, as Debian sets it up.

    Each has a second interface, `mgmt`, that leads nowhere.
    """
    nodes = []
    try:
        for number in range(2):
            name, address = f"node{number}", f"10.77.0.{number + 1}"
            hosts = folder / f"hosts{number}"
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n10.77.0.1 node0\n10.77.0.2 node1\n")
            nodes.append(Node(name, address, _namespace(name), str(hosts)))
            _ip("netns", "add", nodes[-1].namespace)
        first, second = nodes
        first.ip("link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second.namespace)
        for number, node in enumerate(nodes):
            node.ip("addr", "add", f"{node.address}/24", "dev", "eth0")
            node.ip("link", "add", "mgmt", "type", "veth", "peer", "name", "nowhere")
            node.ip("addr", "add", f"192.168.77.{number + 1}/24", "dev", "mgmt")
            # `nowhere` is up too: an interface whose other end is down has no carrier, and so counts as down.
            for interface in ("lo", "eth0", "mgmt", "nowhere"):
                node.ip("link", "set", interface, "up")
            # The table of own addresses comes later than it does by default, so that `closed` can stand before it.
            node.ip("rule", "add", "pref", "100", "lookup", "local")
            node.ip("rule", "del", "pref", "0")
        yield first, second
    finally:
        for node in nodes:
            subprocess.run(["ip", "netns", "del", node.namespace], capture_output=True)


@contextmanager
def closed(node: Node, ports: str) -> Iterator[None]:
    """Inside, what comes to these ports of the node (`29500` or `32768-60999`) is dropped without an answer."""
    rule = ("pref", "50", "iif", "eth0", "ipproto", "tcp", "dport", ports, "blackhole")
    node.ip("rule", "add", *rule)
    try:
        yield
    finally:
        node.ip("rule", "del", *rule)


def _namespace(name: str) -> str:
    return f"trainer-{os.getpid()}-{name}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


if __name__ == "__main__":
    described = json.loads(sys.argv[1])
    Node(**{**described, "own_folders": tuple(described["own_folders"])}).enter()
    os.execvp(sys.argv[2], sys.argv[2:])
