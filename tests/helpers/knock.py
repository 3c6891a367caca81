"""The client of `warm.door`: `knock.py DOOR PROGRAM ARGUMENT ...` behaves like that program in a shell.

It imports only the standard library, because every command of the documentation pages starts it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys


def main(door: str, arguments: list[str]) -> int:
    """Send arguments, environment, working directory and streams, and return the exit code as a shell reports it."""
    asked = {
        "arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd(), "parent": os.getppid(),
    }  # fmt: skip
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(door)
        text = json.dumps(asked).encode() + b"\n"
        signal.signal(signal.SIGTERM, lambda number, _: caller.send(bytes([number])))  # the program may save and stop
        sent = socket.send_fds(caller, [text], [0, 1, 2])
        caller.sendall(text[sent:])
        code = int(caller.recv(16))
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback
    sys.exit(main(sys.argv[1], sys.argv[2:]))
