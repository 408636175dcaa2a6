"""docs/howto/data.md is run; a script with its sampler is run for every replica."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

PAGE = Path(__file__).parents[2] / "docs/howto/data.md"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"<!-- run: {kind} -->\n```python\n(.*?)```", PAGE.read_text(), re.S)


def test_the_page_is_run() -> None:
    """Each way reads all rows once."""
    found: dict[str, Any] = {}
    setup, *ways = blocks("data")
    exec(compile(setup, str(PAGE), "exec"), found)
    update, seen = found["update"], list[torch.Tensor]()

    def noted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        assert torch.equal(x[:, 1:], y[:, :-1]) and len(x) == 8
        seen.append(x)
        return update(x, y)

    found["update"] = noted
    for way in ways:
        # `Batches` counts by pm.steps, and begins in the middle of a run.
        exec(compile(way, str(PAGE), "exec"), found)
        rows = torch.cat(seen)
        assert len(rows) == 64 and sorted(rows.tolist()) == sorted(found["rows"][:, :-1].tolist())
        seen.clear()
    found["pm"].close()


def test_replicas_of_the_sampler_read_other_rows() -> None:
    found: dict[str, Any] = {}
    exec(compile(blocks("data")[0], str(PAGE), "exec"), found)
    found["pm"].close()
    (block,) = blocks("sampler")
    read: list[list[torch.Tensor]] = []
    for replica in range(2):
        read.append([])
        place = SimpleNamespace(options=SimpleNamespace(d=2), coordinate=SimpleNamespace(dp=replica))
        known = found | {"pm": place, "update": lambda x, y: read[-1].append(x)}
        exec(compile(block, str(PAGE), "exec"), known)
    for epoch in range(2):
        rows = [
            x
            for of_replica in read
            for batch in of_replica[8 * epoch : 8 * epoch + 8]
            for x in batch.tolist()
        ]
        assert sorted(rows) == sorted(found["rows"][:, :-1].tolist())
