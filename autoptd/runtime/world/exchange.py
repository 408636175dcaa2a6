"""Exchange messages of different sizes between all ranks along several axes, by one all-to-all for each axis.

In: the bytes from each rank to each other one, the same on all ranks. Out: messages by their source.

    exchange = Exchange(world, ("tp", "dp"), {(0, 3): 64, (3, 0): 16}, "optimizer")
    exchange({3: torch.zeros(64, dtype=torch.uint8)})         # on rank 0: {3: the 16 bytes of rank 3}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from autoptd.ir.mesh import Mesh
from autoptd.runtime.world.world import World

# Source and target of a message.
Pair = tuple[int, int]


class Exchange:
    """Messages between ranks that differ along `axes` only; `sizes` has their bytes, by (source, target).

    A message first moves along the first axis, to the place of its target, then along the next one.
    """

    def __init__(self, world: World, axes: Sequence[str], sizes: Mapping[Pair, int], site: str) -> None:
        self._world, self._sizes, self._site = world, sizes, site
        at = {rank: _places(world.mesh, rank, axes) for rank in {world.rank}.union(*sizes)}
        own = at[world.rank]
        # By axis, the messages to each rank along it, and from each.
        self._hops: list[tuple[str, list[list[Pair]], list[list[Pair]]]] = []
        for number, axis in enumerate(axes):
            if all(at[source][number] == at[target][number] for source, target in sizes):
                continue
            degree = world.mesh.degree(axis)
            to: list[list[Pair]] = [[] for _ in range(degree)]
            from_: list[list[Pair]] = [[] for _ in range(degree)]
            for pair in sorted(sizes):
                source, target = at[pair[0]], at[pair[1]]
                # They have moved along the axes before, and are still at their source along later ones.
                if target[:number] == own[:number] and source[number + 1 :] == own[number + 1 :]:
                    if source[number] == own[number]:
                        to[target[number]].append(pair)
                    if target[number] == own[number]:
                        from_[source[number]].append(pair)
            self._hops.append((axis, to, from_))

    def __call__(self, messages: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Send bytes by target; return those that were sent here, by source. A collective of these ranks."""
        rank = self._world.rank
        held = {(rank, target): message for target, message in messages.items()}
        none = torch.empty(0, dtype=torch.uint8, device=self._world.device)
        for axis, to, from_ in self._hops:
            sent = []
            for pairs in to:
                sent.append(torch.cat([none, *(held.pop(pair) for pair in pairs)]))
            totals = [self._total(pairs) for pairs in from_]
            received = self._world.group((axis,)).all_to_all(sent, self._site, totals)
            for pairs, data in zip(from_, received, strict=True):
                parts = data.split([self._sizes[pair] for pair in pairs])
                held |= dict(zip(pairs, parts, strict=True))
        return {source: message for (source, _), message in held.items()}

    def _total(self, pairs: Sequence[Pair]) -> int:
        return sum(self._sizes[pair] for pair in pairs)


def _places(mesh: Mesh, rank: int, axes: Sequence[str]) -> list[int]:
    return [mesh.place(rank, axis) for axis in axes]
