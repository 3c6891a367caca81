"""A reader of the transaction log of W&B, which parses it with the library's own messages."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK_BYTES, _HEADER_BYTES = 1 << 15, 7
_WHOLE, _LAST = 1, 4


def _records(data: bytes) -> Iterator[bytes]:
    """Iterate over the records of a log in LevelDB's format (its `log_format.md`) with a file header of 7 bytes."""
    place, record = _HEADER_BYTES, b""
    while place + _HEADER_BYTES <= len(data):
        left = _BLOCK_BYTES - place % _BLOCK_BYTES
        if left < _HEADER_BYTES:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        if kind == 0:  # nothing was written after this place
            return
        record += data[place + _HEADER_BYTES : place + _HEADER_BYTES + size]
        place += _HEADER_BYTES + size
        if kind in (_WHOLE, _LAST):
            yield record
            record = b""


class OfflineRun:
    """One `.wandb` file."""

    def __init__(self, file: Path) -> None:
        from wandb.proto import wandb_internal_pb2 as messages

        self.records = []
        for data in _records(file.read_bytes()):
            record = messages.Record()
            record.ParseFromString(data)
            self.records.append(record)
        of_kind = {kind: [r for r in self.records if r.HasField(kind)] for kind in ("run", "history", "summary")}
        self.run = of_kind["run"][0].run
        self.config = {item.key: json.loads(item.value_json) for item in self.run.config.update}
        rows = [_values(record.history.item) for record in of_kind["history"]]
        self.history: dict[int, dict[str, Any]] = {row["_step"]: row for row in rows}
        assert len(rows) == len(self.history), "a step has one row"
        self.summary = {k: v for record in of_kind["summary"] for k, v in _values(record.summary.update).items()}
        self.kinds = {record.WhichOneof("record_type") for record in self.records}
        self.exit_code = next((r.exit.exit_code for r in self.records if r.HasField("exit")), None)


def _values(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def offline_runs(run_folder: Path) -> list[OfflineRun]:
    """Return the offline parts of a run in the order of writing."""
    files = (run_folder / "wandb").glob("offline-run-*/*.wandb")
    return [OfflineRun(file) for file in sorted(files, key=lambda file: file.stat().st_mtime_ns)]
