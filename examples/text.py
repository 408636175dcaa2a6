"""Real English text without a download: Python's own help topics (or your own file), one token per byte.

In: nothing, or a path. Out: token ids in [0, 256), and a stream of (x, y) batches that is the same on every rank.

    tokens = load_tokens()
    for x, y in batches(tokens, batch=16, length=64, steps=10, seed=0):
        ...                                                  # x, y: [16, 64], y is x one byte later
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

VOCAB_SIZE = 256


def load_tokens(path: str | Path | None = None) -> Tensor:
    """Return the bytes of a file, or of all help topics in the order of their names, as a 1-D int64 tensor."""
    data = Path(path).read_bytes() if path else "\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def batches(
    tokens: Tensor, batch: int, length: int, steps: int, seed: int, start: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs (x, y) of shape [batch, length] for steps `start` to `steps`, at positions that depend only on the seed."""
    if len(tokens) <= length:
        raise ValueError(f"a text of {len(tokens)} bytes is too short for length={length}")
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(length + 1)
    for step in range(steps):
        starts = torch.randint(len(tokens) - length, (batch, 1), generator=generator)
        if step < start:
            continue
        rows = tokens[starts + window]
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def unigram_entropy(tokens: Tensor) -> float:
    """Return, in nats, the loss of the best guess without context: a model that learns must get below it."""
    share = torch.bincount(tokens, minlength=VOCAB_SIZE).double() / len(tokens)
    share = share[share > 0]
    return float(-(share * share.log()).sum())
