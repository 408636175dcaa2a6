"""Training text without a download: the bytes of a file, or Python's help topics, one token per byte.

In: a path. Out: ids from 0 to 255, and batches of them.

    for x, y in batches(load_tokens(None), batch=8, length=64, steps=10, seed=0):
        ...                                                  # [8, 64] each; y is x one byte later
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from autoptd.errors import PlanError


def load_tokens(path: str | None) -> torch.Tensor:
    """Return the bytes of a file (or of all help topics) as a 1-D tensor; PlanError if the file cannot be
    read.
    """
    if path is None:
        from pydoc_data.topics import topics

        data = "\n".join(topics[name] for name in sorted(topics)).encode()
    else:
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise PlanError(f"--data {path}", f"cannot be read: {error}", "pass a text file") from error
    # A bytearray, because torch warns about read-only memory.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def batches(
    tokens: torch.Tensor, batch: int, length: int, steps: int, seed: int, start: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield [batch, length] pairs of ids for steps `start` to `steps`. Positions depend on the seed alone, so
    all ranks and a resumed run see the same batches.
    """
    if len(tokens) <= length:
        fact = f"{len(tokens)} bytes of text are too few for rows of {length}"
        raise PlanError("--data", fact, f"a longer text, or --seq {max(1, len(tokens) // 2)}")
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(length + 1, device="cpu")
    for step in range(steps):
        # [batch, 1] + [length + 1]: a window at a random position for each row.
        places = torch.randint(len(tokens) - length, (batch, 1), generator=generator, device="cpu")
        if step < start:
            continue
        rows = tokens[places + window]
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


__all__ = ["batches", "load_tokens"]
