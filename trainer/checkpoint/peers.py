"""Messages and files between ranks, in a process group beside that of the training, so that threads can use it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

_CHUNK_BYTES = 1 << 26
_ABSENT = -1  # the size of a file that its rank could not write
_FILES = 3  # a tag of its own, so that files and messages do not mix


class Peers:
    """Point-to-point transport over one gloo group of all ranks; the group need not be registered with torch."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def send(self, message: bytes, rank: int, tag: int) -> None:
        """Send a message to a rank, and wait until it is taken."""
        self._group.send([torch.tensor([len(message)])], rank, tag).wait()
        if message:
            self._group.send([torch.frombuffer(bytearray(message), dtype=torch.uint8)], rank, tag).wait()

    def receive(self, rank: int | None, tag: int) -> tuple[int, bytes]:
        """Wait for a message of a rank, or of any (None); return its sender and the message."""
        size = torch.zeros(1, dtype=torch.int64)
        pending = self._group.recv([size], rank, tag) if rank is not None else self._group.recv_anysource([size], tag)
        pending.wait()
        sender = pending._source_rank() if rank is None else rank
        message = torch.empty(int(size), dtype=torch.uint8)
        if len(message):
            self._group.recv([message], sender, tag).wait()
        return sender, message.numpy().tobytes()

    def begin_send(self, files: Sequence[Path], rank: int) -> list[dist.Work]:
        """Begin to send files to a rank, which calls `take` and reports files that are missing; return the sends."""
        parts: list[Tensor] = []
        try:
            sizes = [file.stat().st_size if file.exists() else _ABSENT for file in files]
            for file, size in zip(files, sizes, strict=True):
                if size > 0:
                    parts += torch.split(torch.from_file(str(file), size=size, dtype=torch.uint8), _CHUNK_BYTES)
        except (OSError, RuntimeError):  # they cannot be read; the other rank still waits for this one
            sizes, parts = [_ABSENT] * len(files), []
        return [self._group.send([part], rank, _FILES) for part in (torch.tensor(sizes), *parts)]

    def take(self, files: Sequence[Path], rank: int, refusal: OSError | None = None) -> None:
        """Write the files that a rank sends. All of them are received, also after an error.

        Args:
            files: the files.
            rank: the sender.
            refusal: why no file can be written; it is raised.

        Raises:
            FileNotFoundError: the rank has sent none.
            OSError: a file cannot be written.
        """
        sizes = self._received(torch.zeros(len(files), dtype=torch.int64), rank).tolist()
        error = refusal
        for file, size in zip(files, sizes, strict=True):
            for start in range(0, size, _CHUNK_BYTES):
                chunk = self._received(torch.empty(min(_CHUNK_BYTES, size - start), dtype=torch.uint8), rank)
                try:
                    if error is None:
                        with file.open("ab") as opened:
                            opened.write(chunk.numpy().data)
                except OSError as raised:
                    error = raised
        if error is not None:
            raise error
        if _ABSENT in sizes:
            raise FileNotFoundError(f"rank {rank} has no part to send")

    def _received(self, tensor: Tensor, rank: int) -> Tensor:
        self._group.recv([tensor], rank, _FILES).wait()
        return tensor
