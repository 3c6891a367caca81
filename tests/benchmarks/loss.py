"""The loss of a large vocabulary: bytes, products, peak bytes and seconds of torch's loss and of the head's.

Bytes, products and peaks are counted on tensors without values, at full size, with the operations of a GPU, as in
`trainer plan`. Seconds are the least of several forward and backward passes in turns on the CPU, of smaller sizes. From
the root of the repository:

    python -m tests.benchmarks.loss --tokens 4096 --vocabulary 128256 --hidden 2048
    python -m tests.benchmarks.loss --seconds --fp32 --tokens 1024 --vocabulary 30522 --hidden 768
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainer.features.chunked_head.head import ChunkedHead, Way
from trainer.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from trainer.tools.plan.ledger import Ledger
from trainer.tools.plan.simulated_rank import shapes_only

PLAIN, HEAD, CHUNKS = "torch's loss", "whole logits", "four chunks"


class Counts(NamedTuple):
    """The counts of a forward and backward pass; `peak_bytes` are beside the inputs, the weight and their gradients."""

    num_bytes: int
    flops: int
    peak_bytes: int


def passes(
    tokens: int, vocabulary: int, hidden: int, labelled: float, trained: bool, bf16: bool
) -> dict[str, Callable[[], None]]:
    """Return a forward and backward pass of each loss."""
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
            total = loss() / num_labels
        total.backward()  # type: ignore[no-untyped-call]

    def of_head(way: Way) -> Callable[[], None]:
        own = nn.Linear(hidden, vocabulary, bias=False)
        own.weight = head.weight
        chunked = ChunkedHead(own, way, None, scores)

        def loss() -> Tensor:
            with chunked.use(labels, num_labels):
                found: Tensor = own(x)
            return found[..., 0].sum()

        return lambda: run(loss)

    def of_torch() -> Tensor:
        return scores(head(x), labels)[..., 0].sum()

    return {
        PLAIN: lambda: run(of_torch),
        HEAD: of_head(Way(tokens)),
        CHUNKS: of_head(Way(-(-tokens // 4), sums=True)),
    }


def counts(tokens: int, vocabulary: int, hidden: int, trained: bool, bf16: bool) -> dict[str, Counts]:
    """Return the counts of each loss."""
    found = {}
    with shapes_only(cuda=True, autocast=False), Ledger() as ledger:
        for name, function in passes(tokens, vocabulary, hidden, 1.0, trained, bf16).items():
            function()
            before = sum(ledger.alive.values())
            ledger.restart()
            function()
            num_bytes = sum(amount.num_bytes for amount in ledger.totals.work.values())
            found[name] = Counts(num_bytes, sum(ledger.totals.flops.values()), ledger.peak.num_bytes - before)
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
    parser.add_argument("--hidden", type=int, default=2048)
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
            for name, value in least.items():
                print(f"{kind}, {name}: {value:.3f} s, ratio {value / least[PLAIN]:.2f}")
            continue
        for name, found in counts(*size, trained, not given.fp32).items():
            print(
                f"{kind}, {name}: {found.num_bytes / 1e9:.2f} GB, {found.flops / 1e12:.2f} TFLOP, peak"
                f" {found.peak_bytes / 2**20:,.0f} MiB"
            )


if __name__ == "__main__":
    main()
