"""`trainer` with the fault of a plan: the program that the campaign starts for each attempt.

`main([ORDER, *WORDS])`: ORDER is a JSON object with the file of a `plan`. `moment` names the moment of a kill: the
rank, the number of the activity that it reports, the seconds after it, and the process. Without it, the plan alone
acts. `moments` names a file that gets each rank's activities instead.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import threading
from collections.abc import Sequence
from typing import Any

import psutil

from tests.chaos.plan import Target
from trainer.cli import main as trainer
from trainer.observe.observer import Observers

_WORKER = "worker"


def main(words: Sequence[str]) -> int:
    """Run the program with the arguments behind the order."""
    order = json.loads(words[0])
    library = ctypes.CDLL(None)
    code = library.chaos_arm(order["plan"].encode())
    assert code == 0, os.strerror(code)
    if order.get("moment") or order.get("moments"):
        _hook(library, order)
    return trainer(list(words[1:]))


def _hook(library: Any, order: dict[str, Any]) -> None:
    """Call `_reached` at each activity that a rank reports."""
    state: dict[str, Any] = {"number": 0, "last": ""}

    def reached(activity: str) -> None:
        if activity == state["last"]:
            return
        state["last"] = activity
        state["number"] += 1
        rank = int(os.environ.get("RANK", "0"))
        if file := order.get("moments"):
            with open(file, "a") as lines:
                lines.write(json.dumps([rank, state["number"], re.sub(r"\d+|/\S+", "N", activity)]) + "\n")
            return
        moment = order["moment"]
        if (moment["rank"], moment["number"]) == (rank, state["number"]):
            timer = threading.Timer(moment["seconds"], _kill, [library, moment["target"]])
            timer.daemon = True  # the process may end before
            timer.start()

    def hooked(name: str) -> None:
        original = getattr(Observers, name)

        def call(self: Observers, *arguments: Any, **options: Any) -> Any:
            reached(str(arguments[1] if name == "doing" else arguments[0]))
            return original(self, *arguments, **options)

        setattr(Observers, name, call)

    for name in ("preparing", "doing"):
        hooked(name)


def _kill(library: Any, target: str) -> None:
    if target == _WORKER:
        children = psutil.Process().children()
        if children:
            library.chaos_kill(int(Target.ITSELF), children[-1].pid)
        return
    library.chaos_kill(int(Target[target]), 0)
