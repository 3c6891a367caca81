"""Nodes on one machine: network namespaces with their own addresses, names, hosts files and optionally folders.

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
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18


@dataclass(frozen=True)
class Node:
    """One of the nodes. It can be pickled, and another process can enter it."""

    name: str
    address: str  # of `eth0`, which connects the nodes
    namespace: str
    hosts: str  # the file that is mounted as /etc/hosts
    own_folders: tuple[str, ...] = ()  # not shared with the other node, and empty at first
    memory: tuple[str, str] | None = None  # a folder, and the place of it that the processes of the node see

    def enter(self) -> None:
        """Move this process and its future children to the node, permanently.

        Raises:
            OSError: The system does not allow it.
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
        if self.memory is not None:
            call("mount", self.memory[0].encode(), self.memory[1].encode(), None, _MS_BIND, None)
        socket.sethostname(self.name)

    def without(self, *folders: Path) -> Node:
        """Return the node with these folders not shared."""
        return replace(self, own_folders=tuple(map(str, folders)))

    def with_memory(self, folder: Path, place: Path) -> Node:
        """Return the node with `folder`, which outlives its processes, at `place`."""
        return replace(self, memory=(str(folder), str(place)))

    def command(self, words: Sequence[str | Path]) -> list[str]:
        """Return the command that runs `words` on the node."""
        return [sys.executable, __file__, json.dumps(asdict(self)), *map(str, words)]

    def ip(self, *words: str) -> None:
        """Run `ip` on the node."""
        _ip("-n", self.namespace, *words)


def problem() -> str | None:
    """Return the reason why this machine cannot create nodes, or None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need Linux, root and iproute2"
    ended = subprocess.run(["ip", "netns", "add", _namespace("probe")], capture_output=True, text=True)
    if ended.returncode:
        return f"network namespaces are not allowed: {ended.stderr.strip()}"
    _ip("netns", "del", _namespace("probe"))
    return None


@contextmanager
def two_nodes(folder: Path) -> Iterator[tuple[Node, Node]]:
    """Create `node0` and `node1`; see `connected_nodes`."""
    with connected_nodes(folder, 2) as (first, second):
        yield first, second


@contextmanager
def connected_nodes(folder: Path, number: int) -> Iterator[list[Node]]:
    """Create `node0`, `node1`, ..., connected by `eth0`: two nodes directly, more by a bridge in its own namespace.

    Each node resolves its own name to 127.0.1.1 first, as on Debian. Each has a second interface, `mgmt`, which is
    connected to no other node.
    """
    nodes: list[Node] = []
    names = "".join(f"10.77.0.{index + 1} node{index}\n" for index in range(number))
    bridge = _namespace("bridge")
    try:
        for index in range(number):
            name, address = f"node{index}", f"10.77.0.{index + 1}"
            hosts = folder / f"hosts{index}"
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{names}")
            nodes.append(Node(name, address, _namespace(name), str(hosts)))
            _ip("netns", "add", nodes[-1].namespace)
        if number == 2:
            nodes[0].ip("link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", nodes[1].namespace)
        else:
            _ip("netns", "add", bridge)
            _ip("-n", bridge, "link", "add", "bridge", "up", "type", "bridge")
            for node in nodes:
                node.ip("link", "add", "eth0", "type", "veth", "peer", "name", node.name, "netns", bridge)
                _ip("-n", bridge, "link", "set", node.name, "up", "master", "bridge")
        for index, node in enumerate(nodes):
            node.ip("addr", "add", f"{node.address}/24", "dev", "eth0")
            node.ip("link", "add", "mgmt", "type", "veth", "peer", "name", "nowhere")
            node.ip("addr", "add", f"192.168.77.{index + 1}/24", "dev", "mgmt")
            # `nowhere` must be up too: without it `mgmt` has no carrier and counts as down.
            for interface in ("lo", "eth0", "mgmt", "nowhere"):
                node.ip("link", "set", interface, "up")
            # The table of local addresses gets a lower priority than by default: the rule of `closed` must precede it.
            node.ip("rule", "add", "pref", "100", "lookup", "local")
            node.ip("rule", "del", "pref", "0")
        # The kernel reports a carrier some time after both ends are up.
        for node in nodes:
            _wait_for("eth0", node)
            _wait_for("mgmt", node)
        yield nodes
    finally:
        for namespace in (*(node.namespace for node in nodes), bridge):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)


@contextmanager
def closed(node: Node, ports: str) -> Iterator[None]:
    """Within the context, drop packets to these ports of the node (`29500` or `32768-60999`) without an answer."""
    rule = ("pref", "50", "iif", "eth0", "ipproto", "tcp", "dport", ports, "blackhole")
    node.ip("rule", "add", *rule)
    try:
        yield
    finally:
        node.ip("rule", "del", *rule)


def _wait_for(interface: str, node: Node, seconds: float = 30.0) -> None:
    """Wait until the interface of the node is running.

    Raises:
        TimeoutError: It is not running after `seconds`.
    """
    end = time.monotonic() + seconds
    while not _ip("-n", node.namespace, "-o", "link", "show", interface, "up").count("state UP"):
        if time.monotonic() > end:
            raise TimeoutError(f"{interface} of {node.name} is not running after {seconds:.0f} s")
        time.sleep(0.05)


def _namespace(name: str) -> str:
    return f"trainer-{os.getpid()}-{name}"


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    described = json.loads(sys.argv[1])
    described["own_folders"] = tuple(described["own_folders"])
    Node(**described).enter()
    os.execvp(sys.argv[2], sys.argv[2:])
