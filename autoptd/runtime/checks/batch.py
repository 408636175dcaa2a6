"""Check that all ranks of a replica read the same batch, unlike after `torch.manual_seed(1337 + rank)`.

In: the arguments of a `step` or an `eval_step` on this rank. Out: nothing, or one RuntimeFault on all ranks together,
which names the ranks whose inputs or targets differ. Hashes are sent before the first forward, over tp and over pp, and
compared after the step, so that no rank waits for them.

    check = BatchCheck(world, "step", number=1, leaves=[ids, targets])
    ...                                            # the step
    check.finish()
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from autoptd.errors import RuntimeFault
from autoptd.ir.mesh import AXES
from autoptd.runtime.params.fingerprint import hash_words
from autoptd.runtime.step.launch import Rank, RunningRanks
from autoptd.runtime.world.world import World

# The first steps are always checked, whatever `every` is: a wrong data loader shows there.
FIRST_STEPS = 3
SITE = "check of the batch"


def is_due(number: int, every: int) -> bool:
    """Tell whether step `number` (from 1) is checked; `every=0` disables the check."""
    return every > 0 and (number <= FIRST_STEPS or number % every == 0)


class BatchCheck:
    """The check of call `number` of `step` or `eval_step`, started by its creation; that and `finish` are collectives."""

    def __init__(self, world: World, call: str, number: int, leaves: Sequence[Any]) -> None:
        self.world, self.site = world, f"{call} {number}"
        hashes = [hash_words(leaf).to(world.device) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        # The call comes first, so that a rank that lags by a step is not mistaken for one with another
        # batch. Steps and evaluations are counted separately: the sign tells step 3 from evaluation 3.
        which = number if call == "step" else -number
        self.mine = torch.stack([torch.tensor(which, device=world.device), *hashes])
        # Ranks along the axes that do not split the batch read the same rows.
        axes = [axis for axis in world.mesh.axes if axis not in world.mesh.batch_axes]
        # Started in one order on all ranks, before the step's own calls over these groups.
        self.pending = [
            world.group((axis,)).all_gather_start(self.mine.unsqueeze(0), 0, SITE) for axis in axes
        ]

    def finish(self) -> None:
        """Compare the hashes; raise RuntimeFault on all ranks if any two differ within a replica."""
        world = self.world
        # [ranks of the group, 1 + tensors] against [1 + tensors].
        differences = [(pending.wait() != self.mine).any() for pending in self.pending]
        differs = torch.stack(differences).any().to(torch.int64)
        # All replicas stop: in the next step they would wait for the failing one.
        if agree_on_largest(world, differs, SITE):
            raise self._fault()

    def _fault(self) -> RuntimeFault:
        mesh = self.world.mesh
        # Objects take a round trip per axis, so all hashes are exchanged only once a difference is known.
        seen = merge_over_ranks(self.world, {self.world.rank: self.mine.tolist()}, SITE)
        facts = []
        for number in range(mesh.replicas):
            replica = [rank for rank in sorted(seen) if mesh.replica_of(rank) == number]
            facts += _differing(replica, seen)
        # Along one axis, the coordinate is the number of the replica.
        axes, own = mesh.batch_axes, "pm.program.mesh.replica_of(rank)"
        if len(axes) == 1:
            own = f"pm.coordinate.{axes[0]}"
        count = "*".join(AXES[axis].degree for axis in axes)
        remedy = f"give all ranks of a replica the same batch: DistributedSampler(num_replicas={count}, rank={own}), "
        remedy += f"and seed what is random in the data by {own}, not by the rank"
        return RuntimeFault(self.site, "; ".join(facts), remedy)


@contextmanager
def batch_checked(ranks: RunningRanks, call: str, count: int, leaves: Sequence[Any]) -> Iterator[None]:
    """Check around call `count` of `step` or `eval_step` that the ranks of a replica read the same batch."""

    def start(rank: Rank) -> BatchCheck:
        number = rank.executor.steps + 1 if call == "step" else count
        return BatchCheck(rank.world, call, number, leaves)

    what = f"{SITE} of {call}"
    check = ranks.unrecorded.run(what, start)
    yield
    ranks.unrecorded.run(what, lambda rank: check.finish())


def _differing(replica: Sequence[int], seen: dict[int, list[int]]) -> list[str]:
    """Describe the ranks of a replica whose batch differs from most of them (of two, the first is right)."""
    usual = Counter(tuple(seen[rank]) for rank in replica).most_common(1)[0][0]
    like = next(rank for rank in replica if tuple(seen[rank]) == usual)
    others = [rank for rank in replica if tuple(seen[rank]) != usual]
    if not others:
        return []
    # Entry 0 is the number of the call, entry i + 1 the hash of tensor i.
    differing: set[int] = set()
    for rank in others:
        differing |= {i for i, value in enumerate(seen[rank]) if value != usual[i]}
    tensors = [str(i - 1) for i in sorted(differing - {0})]
    what = f"tensor {', '.join(tensors)} of the call" if tensors else "which step it is"
    ranks = f"rank{'s' * (len(others) > 1)} {', '.join(map(str, others))}"
    return [f"{ranks} got other inputs or targets than rank {like} of the same replica ({what} differs)"]


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
