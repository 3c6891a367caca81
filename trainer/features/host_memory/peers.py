"""Files between ranks, and blocks of them, in a process group beside that of the training, for use by threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.checkpoint.format import FACTS, SUMS
from trainer.checkpoint.reading import BlockReader, verify
from trainer.checkpoint.store import CheckpointStore
from trainer.parallel.mesh import ParallelMesh
from trainer.ranks.messages import decode, encode

_CHUNK_BYTES = 1 << 26
_ABSENT = -1  # the size of a file that its rank could not write
_QUESTION, _ANSWER, _FILES = 1, 2, 3  # tags, so that messages and files do not mix
Opener = Callable[[Path], AbstractContextManager[BlockReader]]


class Peers:
    """Point-to-point transport over one gloo group of all ranks, which need not be registered with torch."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    @contextmanager
    def open_blocks(self, file: Path, rank: int) -> Iterator[BlockReader]:
        """Open a file of another rank for reading, which is `serving` it."""

        def read(key: str, bounds: Sequence[Sequence[int]]) -> Tensor:
            self._send(encode([str(file), key, [list(one) for one in bounds]]), rank, _QUESTION)
            answer = decode(self._receive(rank, _ANSWER)[1])
            if not isinstance(answer, Tensor):
                raise OSError(f"rank {rank} cannot read {file}: {answer}")
            return answer

        yield read

    @contextmanager
    def serving(self, open_local: Opener, mesh: ParallelMesh) -> Iterator[None]:
        """Answer questions of other ranks for blocks of this rank's files in the block; all ranks must enter it."""
        # A daemon, because after an error in the block no rank sends the message that ends it.
        thread = threading.Thread(target=self._serve, args=(open_local,), name="shares", daemon=True)
        thread.start()
        yield
        mesh.barrier()  # no rank has a question left
        self._send(b"", (mesh.rank + 1) % mesh.world_size, _QUESTION)  # ends the thread there
        thread.join()

    def _serve(self, open_local: Opener) -> None:
        while True:
            sender, question = self._receive(None, _QUESTION)
            if not question:
                return
            name, key, bounds = decode(question)
            answer: Any
            try:
                with open_local(Path(name)) as read:
                    answer = read(key, bounds)
            except Exception as error:
                # A text is a refusal; without an answer, the rank that asks would wait for ever.
                answer = str(error)
            self._send(encode(answer), sender, _ANSWER)

    def begin_send_share(self, folder: Path, name: str, rank: int) -> list[dist.Work]:
        """Begin to send a share to a rank, which calls `take_share`; return the sends.

        If files are missing, the sizes tell it: the rank waits for this one.
        """
        files = [folder / file for file in (FACTS, SUMS, name)]
        parts: list[Tensor] = []
        try:
            sizes = [file.stat().st_size if file.exists() else _ABSENT for file in files]
            for file, size in zip(files, sizes, strict=True):
                if size > 0:
                    # The files are mapped, so that sending needs no copy of them in memory.
                    parts += torch.split(torch.from_file(str(file), size=size, dtype=torch.uint8), _CHUNK_BYTES)
        except (OSError, RuntimeError):  # they cannot be read
            sizes, parts = [_ABSENT] * len(files), []
        # The sizes come first; messages of one tag between two ranks keep their order.
        return [self._group.send([part], rank, _FILES) for part in (torch.tensor(sizes), *parts)]

    def take_share(self, begin: Callable[[], object], place: CheckpointStore, step: int, name: str, rank: int) -> None:
        """Take a share that a rank sends into its place.

        Args:
            begin: creates the temporary folder; after an error of it, the files are received and dropped.

        Raises:
            FileNotFoundError: the rank has sent none.
            OSError, ValueError: the share cannot be written, or is damaged.
        """
        refusal: OSError | None = None
        try:
            begin()
        except OSError as error:
            refusal = error
        folder = place.unfinished_path(step)
        try:
            self._take([folder / file for file in (FACTS, SUMS, name)], rank, refusal)
            verify(folder)
            place.adopt(step)
        except (OSError, ValueError, RuntimeError):
            place.discard(step)
            raise

    def _take(self, files: Sequence[Path], rank: int, refusal: OSError | None) -> None:
        """Write the files that a rank sends. All of them are received, also after an error, such as `refusal`."""
        sizes = self._received(torch.zeros(len(files), dtype=torch.int64), rank).tolist()
        error = refusal
        for file, size in zip(files, sizes, strict=True):
            # A file that is absent has the size -1, and so no chunk.
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

    def _send(self, message: bytes, rank: int, tag: int) -> None:
        self._group.send([torch.tensor([len(message)])], rank, tag).wait()
        if message:
            self._group.send([torch.frombuffer(bytearray(message), dtype=torch.uint8)], rank, tag).wait()

    def _receive(self, rank: int | None, tag: int) -> tuple[int, bytes]:
        """Wait for a message of a rank, or of any (None); return its sender and the message."""
        # Two messages: the receiver must know the length before it can allocate the second one.
        size = torch.zeros(1, dtype=torch.int64)
        pending = self._group.recv([size], rank, tag) if rank is not None else self._group.recv_anysource([size], tag)
        pending.wait()
        sender = pending._source_rank() if rank is None else rank
        message = torch.empty(int(size), dtype=torch.uint8)
        if len(message):
            self._group.recv([message], sender, tag).wait()
        return sender, message.numpy().tobytes()
