"""Several runs of `trainer` in one process that records its use of the network.

`python watched_run.py REPORT ARGUMENTS...`: each of ARGUMENTS is a JSON list of words. The file REPORT gets a JSON
object with the exit codes, Python's network calls, and the setting of each library's usage reports. It also has the
kernel's counts of network attempts by all processes, since this network namespace began.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

_EVENTS = ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr")
_COUNTERS = ("ActiveOpens", "OutDatagrams", "OutNoRoutes", "OutRequests", "Ip6OutNoRoutes", "Udp6OutDatagrams")


def counters() -> dict[str, int]:
    """Return the counts of connections begun, datagrams sent, and attempts of either without a route."""
    found = {}
    lines = Path("/proc/net/snmp").read_text().splitlines()
    for names, values in zip(lines[::2], lines[1::2], strict=True):
        protocol = names.partition(":")[0]
        found |= {f"{protocol}.{n}": int(v) for n, v in zip(names.split()[1:], values.split()[1:], strict=True)}
    found |= {
        f"Ip6.{name}": int(value) for name, value in map(str.split, Path("/proc/net/snmp6").read_text().splitlines())
    }
    return {name: value for name, value in found.items() if name.partition(".")[2] in _COUNTERS}


def silenced() -> dict[str, bool]:
    """Return for each library whether its usage reports are off, by its own API."""
    import datasets.config
    import huggingface_hub.constants
    import mlflow.telemetry.utils as mlflow
    import wandb.env

    assert not mlflow._IS_IN_CI_ENV_OR_TESTING, "it reports nothing where it believes to be tested"
    return {
        "huggingface_hub": huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY,
        "datasets": not datasets.config.HF_UPDATE_DOWNLOAD_COUNTS,
        "mlflow": mlflow.is_telemetry_disabled(),
        "wandb": not wandb.env.error_reporting_enabled(),
    }


def main(report: str, *runs: str) -> None:
    asked: list[str] = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _EVENTS:
            local = isinstance(arguments[0], socket.socket) and arguments[0].family == socket.AF_UNIX
            if not local:
                asked.append(f"{event} {arguments[1:] if event == 'socket.connect' else arguments[:2]}")

    sys.addaudithook(watch)
    from trainer.cli import main as trainer

    codes = [int(trainer(json.loads(words))) for words in runs]
    found = {"codes": codes, "asked": asked, "counters": counters(), "silenced": silenced()}
    Path(report).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
