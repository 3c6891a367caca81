from __future__ import annotations

import http.server
import socket
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.tools.doctor.machines import answers, machine, without_torch
from trainer.tools.doctor import network
from trainer.tools.doctor.facts import GlooFacts
from trainer.tools.doctor.probe import ProbeError

Address = namedtuple("Address", "family address")
OFTEN = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.7", "fe80::1%eth0"]}


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The interfaces that are up, which a test may change; another one is down."""
    up = dict(OFTEN)

    def addresses() -> dict[str, list[Address]]:
        families = {False: socket.AF_INET, True: socket.AF_INET6}
        found = {name: [Address(families[":" in one], one) for one in up[name]] for name in up}
        mac = Address(psutil.AF_LINK, "02:00:00:00:00:01")
        return {"down0": [Address(socket.AF_INET, "10.9.9.9")], **{name: [mac, *found[name]] for name in found}}

    states = {"down0": SimpleNamespace(isup=False)}
    monkeypatch.setattr(psutil, "net_if_addrs", addresses)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: states | {name: SimpleNamespace(isup=True) for name in up})
    monkeypatch.setattr(socket, "gethostname", lambda: "node0")
    return up


def test_gloo_on_an_address_of_the_network(interfaces):
    value = "two processes connected on 10.0.0.7, by the host's name, node0, in 0.03 s"
    assert answers(network.gloo, machine()) == ("ok", value)
    value = "two processes connected on 10.0.0.7, by GLOO_SOCKET_IFNAME=eth0, in 0.03 s"
    assert answers(network.gloo, machine(GLOO_SOCKET_IFNAME="eth0")) == ("ok", value)
    unseen = machine(Path(), GlooFacts(0.03, ()))
    assert answers(network.gloo, unseen)[1].startswith("two processes connected on an unknown address")


@pytest.mark.parametrize("address", ["127.0.1.1", "::1", "::ffff:127.0.0.1"])
def test_gloo_on_the_loopback_is_for_this_machine(interfaces, address: str):
    alone = GlooFacts(0.03, (address,))
    status, value = answers(network.gloo, machine(Path(), alone))
    assert status == "ok"
    assert value.endswith("; on several machines, a run uses the interface with the route to the rendezvous")
    del interfaces["eth0"]
    assert answers(network.gloo, machine(Path(), alone))[0] == "ok"


def test_gloo_that_does_not_work(interfaces):
    status, value = answers(network.gloo, machine(GLOO_SOCKET_IFNAME="eth0,ib0"))
    assert (status, value) == ("problem", "GLOO_SOCKET_IFNAME names ib0, but the interfaces are lo, eth0")
    apart = machine(Path(), ProbeError("RuntimeError: timed out", GlooFacts))
    value = "two processes of this machine could not connect: RuntimeError: timed out"
    assert answers(network.gloo, apart) == ("problem", value)
    assert "one of lo, eth0;" in str(network.gloo(apart).remedy)
    interfaces.clear()
    assert network.gloo(apart).remedy == "ip link set lo up"
    with pytest.raises(ProbeError, match="no torch"):
        network.gloo(without_torch())


@pytest.fixture
def site() -> Iterator[tuple[str, list[int]]]:
    """A local web server, and its HTTP status, which a test may change."""
    status = [200]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status[0])
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", status
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_a_hub_that_answers(site):
    endpoint, status = site
    assert answers(network.hub, machine(HF_ENDPOINT=endpoint)) == ("ok", f"{endpoint} answers")
    status[0] = 403
    finding = answers(network.hub, machine(HF_ENDPOINT=endpoint))
    assert finding == (
        "warning",
        f"{endpoint} cannot be used (it answers 403): only files in the cache can be loaded",
    )


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "no address"])
def test_a_hub_that_is_not_reached_is_no_problem(endpoint: str):
    assert answers(network.hub, machine(HF_ENDPOINT=endpoint))[0] == "warning"


@pytest.mark.alone
def test_a_hub_that_keeps_silent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(network, "HUB_SECONDS", 0.2)
    begun = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        status, value = answers(network.hub, machine(HF_ENDPOINT=f"http://127.0.0.1:{silent.getsockname()[1]}"))
    assert status == "warning"
    assert "timed out" in value
    assert time.monotonic() - begun < 4


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_mode_makes_no_request(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(network, "answer_of", None)
    status, value = answers(network.hub, machine(**{name: "1"}))
    assert (status, value.split(";")[0]) == ("ok", f"not checked: {name} is set")
