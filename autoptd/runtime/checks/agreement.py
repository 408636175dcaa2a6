"""Find what ranks do not agree on, and name the ranks that differ: what all checks between ranks have in common.

A check first exchanges a few numbers, after which all ranks know whether anything differs. Only then are the details
exchanged, at a round trip per axis, and every rank raises the same fault.

    if agree_on_largest(world, differs, BATCH):
        seen = merge_over_ranks(world, {world.rank: mine}, BATCH)
        like, others = majority(seen)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from autoptd.runtime.world.world import Group, World

# The sites of the collectives of checks. They are not part of a program, and records leave out those of a step.
BATCH, COPIES = "check of the batch", "check of the copies"
SIZES, STATE = "check of the sizes", "check of the state dict"
RANKS = "pm.check_ranks"
# Fingerprints by the name of the compared item.
Prints = dict[str, torch.Tensor]


def agree_on_largest(world: World, value: torch.Tensor, site: str) -> int:
    """Return the largest `value` of all ranks; a collective."""
    for axis in world.mesh.axes:
        value = world.group((axis,)).all_reduce(value, site, op="max")
    return int(value)


def merge_over_ranks(world: World, mine: dict[int, Any], site: str) -> dict[int, Any]:
    """Return the entries of all ranks, `mine` being this rank's; a collective."""
    for axis in world.mesh.axes:
        parts = world.group((axis,)).gather_objects(mine, site)
        mine = {rank: entry for part in parts for rank, entry in part.items()}
    return mine


def compare(group: Group, mine: Prints, site: str) -> list[str]:
    """Describe the fingerprints that differ within a group, and the ranks that differ from the majority; a collective."""
    if group.size == 1 or not mine:
        return []
    own = torch.stack(list(mine.values()))
    # [rank, name]
    prints = group.all_gather(own.unsqueeze(0), 0, site).t().tolist()
    findings = []
    for name, values in zip(mine, prints, strict=True):
        like, others = majority(dict(zip(group.ranks, values, strict=True)))
        if 2 * len(others) >= group.size:
            findings.append(f"{name} differs between {ranks_text(group.ranks)}")
        else:
            findings += [f"{name} on rank {rank} differs from rank {like} and most others" for rank in others]
    return findings


def majority(values: Mapping[int, Hashable]) -> tuple[int, list[int]]:
    """Return the first rank with the most frequent value (of equally frequent ones the first), and the other ranks."""
    usual = Counter(values.values()).most_common(1)[0][0]
    like = next(rank for rank, value in values.items() if value == usual)
    return like, [rank for rank, value in values.items() if value != usual]


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `rank 1`, or `ranks 1, 2`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def listed(texts: Sequence[str], most: int = 5) -> str:
    """Join the first texts, and count the others: `a; b; and 3 more`."""
    more = [f"and {len(texts) - most} more"] if len(texts) > most else []
    return "; ".join([*texts[:most], *more])
