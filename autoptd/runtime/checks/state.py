"""Check that all ranks load the same state dict: each takes its own shards from the one that it is given.

In: this rank's state dict. Out: nothing, or one RuntimeFault on all ranks together, which names the ranks and the
tensors that differ. Of every tensor the shape and 65,536 values, evenly spread, are compared: another checkpoint differs
everywhere.

    check_state(world, state_dict)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from hashlib import blake2b

import torch

from autoptd.errors import RuntimeFault
from autoptd.runtime.checks.batch import agree_on_largest, merge_over_ranks
from autoptd.runtime.params.fingerprint import hash_words
from autoptd.runtime.world.world import World

SITE = "check of the state dict"
# How many tensors a fault names.
MOST_NAMED = 3


def check_state(world: World, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Raise RuntimeFault on all ranks where any two were given different names, shapes or values; a collective."""
    mine = {name: _digest(name, x) for name, x in state_dict.items() if isinstance(x, torch.Tensor)}
    total = torch.tensor(sum(mine.values()) % (1 << 62), device=world.device)
    # All totals are equal if the largest is the smallest.
    if agree_on_largest(world, total, SITE) != -agree_on_largest(world, -total, SITE):
        raise _fault(merge_over_ranks(world, {world.rank: mine}, SITE))


def _digest(name: str, x: torch.Tensor) -> int:
    text = f"{name} {list(x.shape)} {int(hash_words(x))}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def _fault(seen: dict[int, dict[str, int]]) -> RuntimeFault:
    """Name the ranks whose state dict is not the one that most ranks have; `seen` has all digests by rank and name."""
    usual = Counter(frozenset(given.items()) for given in seen.values()).most_common(1)[0][0]
    others = {
        rank: set(given.items()) ^ usual for rank, given in sorted(seen.items()) if given.items() != usual
    }
    names = sorted({name for differing in others.values() for name, _ in differing})
    like = next(rank for rank in sorted(seen) if rank not in others)
    which = ", ".join(names[:MOST_NAMED])
    if len(names) > MOST_NAMED:
        which += f" and {len(names) - MOST_NAMED} more"
    ranks = f"rank{'s' * (len(others) > 1)} {', '.join(map(str, others))}"
    fact = f"{ranks} got another state dict than rank {like}: {which} differ{'s' * (len(names) == 1)}"
    return RuntimeFault(
        "load_state_dict", fact, "pass the same state dict on all ranks: each takes its own shards"
    )
