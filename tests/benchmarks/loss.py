"""The loss of a large vocabulary: peak bytes and seconds with the whole logits, and in blocks of the vocabulary.

Peaks are counted on tensors without values, at full size, as in `trainer plan`. Seconds are the least of several
forward and backward passes in turns on the CPU, of smaller sizes. From the root of the repository:

    python -m tests.benchmarks.loss --tokens 4096 --vocabulary 128256 --hidden 4096
    python -m tests.benchmarks.loss --seconds --tokens 1024 --vocabulary 50257 --hidden 768
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from trainer.features.chunked_head.head import ChunkedHead
from trainer.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from trainer.tools.plan.ledger import Ledger

WHOLE, BLOCKS = "whole logits", "in blocks"


def passes(
    tokens: int, vocabulary: int, hidden: int, labelled: float, trained: bool, bf16: bool
) -> dict[str, Callable[[], None]]:
    """Return a forward and backward pass of the loss with the whole logits, and in blocks."""
    x = torch.randn(1, tokens, hidden, requires_grad=True)
    labels = torch.randint(vocabulary, (1, tokens))
    num_labels = int(labelled * tokens)
    labels[:, num_labels:] = -100
    head = nn.Linear(hidden, vocabulary, bias=False).requires_grad_(trained)
    with torch.no_grad():
        head.weight.mul_(0.02)

    def scores(logits: Tensor, labels: Tensor) -> Tensor:
        losses = vocab_parallel_cross_entropy(logits, labels, None, logits.shape[-1], reduction="none")
        return torch.stack([losses, torch.zeros_like(losses)], -1)

    def run(loss: Callable[[], Tensor]) -> None:
        x.grad = head.weight.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            total = loss()
        total.backward()  # type: ignore[no-untyped-call]

    whole = head.forward
    chunked = ChunkedHead(head, max(4096, 2**24 // tokens), None, scores)

    def in_blocks() -> Tensor:
        with chunked.use(labels, num_labels):
            found: Tensor = head(x)
        return found[..., 0].sum()

    def at_once() -> Tensor:
        return scores(whole(x), labels)[..., 0].sum()

    return {WHOLE: lambda: run(at_once), BLOCKS: lambda: run(in_blocks)}


def peaks(tokens: int, vocabulary: int, hidden: int, trained: bool, bf16: bool) -> dict[str, tuple[int, int]]:
    """Return the most bytes of each pass beside the inputs and weights, and those of the gradients that it leaves."""
    found = {}
    with FakeTensorMode(), Ledger() as ledger:
        for name, function in passes(tokens, vocabulary, hidden, 1.0, trained, bf16).items():
            function()
            gradients = 4 * hidden * (tokens + vocabulary * trained)
            before = sum(ledger.alive.values()) - gradients
            ledger.restart()
            function()
            found[name] = ledger.peak.num_bytes - before, gradients
    return found


def seconds(run: dict[str, Callable[[], None]], turns: int) -> dict[str, float]:
    """Return the least seconds of each function, in turns."""
    found: dict[str, list[float]] = {name: [] for name in run}
    for _ in range(turns):
        for name, function in run.items():
            start = time.perf_counter()
            function()
            found[name].append(time.perf_counter() - start)
    return {name: min(values) for name, values in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--labelled", type=float, default=1.0, help="the share of tokens with a label")
    parser.add_argument("--fp32", action="store_true", help="products in fp32; default: bf16")
    parser.add_argument("--seconds", action="store_true", help="measure seconds on real tensors")
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args(arguments)
    size = (given.tokens, given.vocabulary, given.hidden)
    for trained in (True, False):
        kind = "trained weight" if trained else "frozen weight"
        if given.seconds:
            least = seconds(passes(*size, given.labelled, trained, not given.fp32), given.turns)
            times = ", ".join(f"{name} {value:.3f} s" for name, value in least.items())
            print(f"{kind}: {times}, ratio {least[BLOCKS] / least[WHOLE]:.2f}")
            continue
        found = peaks(*size, trained, not given.fp32)
        for name, (peak, gradients) in found.items():
            print(f"{kind}, {name}: {peak / 2**20:,.0f} MiB, with {gradients / 2**20:,.0f} MiB of gradients")


if __name__ == "__main__":
    main()
