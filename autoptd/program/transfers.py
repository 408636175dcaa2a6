"""Plan the messages between stages at compile time, from sizes alone.

In: the crossings of a program, the pipeline rank of every stage, the mesh, `p2p` and a `Machine`. Out:
`TransferBuffer`s.

A *message* is the data that one stage sends another for one microbatch: the values of the crossings between
them or, on the way back, their gradients. A *transfer buffer* is one tensor of a message. Small crossings of
one dtype are packed into one buffer, end to end, because every send has a fixed cost. A buffer is sent whole
by every tensor rank to its peer, or *scattered* (SC'21, section 4.1): each sends 1/t of it, and the receivers
all-gather over tp. Only a value that is equal on all tensor ranks can be scattered:

| type over tp | value | gradient |
|---|---|---|
| I | equal | equal |
| R | equal | a partial sum on each: whole |
| P | a partial sum on each: whole | equal |
| S | a shard on each: whole | a shard on each: whole |

`p2p="direct"` sends all buffers whole, `"scatter_gather"` scatters all that can be, and `"auto"` scatters
where it is faster. Scattering trades n(t-1)/t bytes on a link between stages for as many within the tensor
group plus one more call. With equal link speeds that is slower; between nodes, with links slower than those
inside, it is faster for all but small values.

    plan_transfers(program.crossings, ranks=(0, 1), mesh=Mesh(t=4, p=2), p2p="scatter_gather", machine=Machine())
    # (TransferBuffer(source=0, target=1, names=("x_from_0",), ..., numel=4096, parts=4),
    #  TransferBuffer(source=1, target=0, ...))
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat

import torch

from autoptd.ir.machine import Machine
from autoptd.ir.mesh import Mesh
from autoptd.ir.types import wire_bytes
from autoptd.program.specs import CrossingSpec, TransferBuffer

EQUAL_VALUE, EQUAL_GRADIENT = ("I", "R"), ("I", "P")


@dataclass(frozen=True)
class _Planner:
    """Plan one buffer at a time."""

    ranks: Sequence[int]
    mesh: Mesh
    p2p: str
    machine: Machine

    def parts(self, source: int, target: int, nbytes: int, is_equal: bool) -> tuple[int, str]:
        """Return (t, why) to scatter a buffer of `nbytes`, (1, why) to send it whole."""
        t = self.mesh.value_ranks
        if t == 1:
            return 1, f"whole: {self.mesh.product_text(self.mesh.value_axes)}"
        if not is_equal:
            return 1, "whole: differs from tensor rank to tensor rank"
        if self.p2p == "direct":
            return 1, "whole: p2p='direct'"
        if self.p2p == "scatter_gather":
            return t, f"1/{t} each: p2p='scatter_gather'"
        # All peers send at once, so the slowest pair decides.
        place, other = self.ranks[source], self.ranks[target]
        link = self._bandwidth(list(zip(self._rows[place], self._rows[other], strict=True)))
        gather = self._gathers[other]
        # Compare the seconds of both; scattering has one more call.
        whole = nbytes / link
        scattered = nbytes / t / link + wire_bytes("all-gather", nbytes, t) / gather + self.machine.message
        times = f"{1e6 * whole:.3g} us whole, {1e6 * scattered:.3g} us as 1/{t} per rank and an all-gather"
        return (t, f"1/{t} each: {times}") if scattered < whole else (1, f"whole: {times}")

    def is_small(self, nbytes: int) -> bool:
        """Tell whether copying a crossing into a shared buffer (read and write) is faster than a separate
        send.
        """
        return 2 * nbytes / self.machine.memory_bandwidth < self.machine.message

    @cached_property
    def _rows(self) -> list[list[int]]:
        """The ranks at every pipeline rank, ordered so that those of two of them pair up as peers."""
        return [self.mesh.ranks_at(place) for place in range(self.mesh.pipeline_ranks)]

    @cached_property
    def _gathers(self) -> list[float]:
        """The bytes per second of a gather at every pipeline rank."""
        group, axes = self.mesh.group, self.mesh.value_axes
        return [self._bandwidth([*map(group, row, repeat(axes))]) for row in self._rows]

    def _bandwidth(self, groups: Sequence[Sequence[int]]) -> float:
        """Return the bytes per second of the slowest of some groups of ranks."""
        machine = self.machine
        for group in groups:
            nodes = {rank // machine.ranks_per_node for rank in group}
            if len(nodes) > 1:
                return machine.network_bandwidth
        return machine.link_bandwidth


def plan_transfers(
    crossings: Sequence[CrossingSpec], ranks: Sequence[int], mesh: Mesh, p2p: str, machine: Machine
) -> tuple[TransferBuffer, ...]:
    """Return everything that one microbatch sends between pipeline ranks, message by message.

    `ranks` is the pipeline rank of every stage; stages of the same rank pass tensors on without sending them.
    """
    planner = _Planner(ranks, mesh, p2p, machine)
    # By (source stage, target stage).
    links: dict[tuple[int, int], list[CrossingSpec]] = {}
    for spec in crossings:
        for target in spec.targets:
            if ranks[spec.source] != ranks[target]:
                links.setdefault((spec.source, target), []).append(spec)
    buffers: list[TransferBuffer] = []
    for (source, target), specs in sorted(links.items()):
        buffers += _message(planner, source, target, specs, is_gradient=False)
        # The same crossings on the way back, except those without a gradient, such as masks.
        returning = [spec for spec in specs if spec.has_grad]
        buffers += _message(planner, target, source, returning, is_gradient=True)
    return tuple(buffers)


def _message(
    planner: _Planner, source: int, target: int, specs: Sequence[CrossingSpec], is_gradient: bool
) -> Iterator[TransferBuffer]:
    """Yield the buffers of one message, in the order of their first crossings."""
    equal = EQUAL_GRADIENT if is_gradient else EQUAL_VALUE
    # Small crossings share a key, and so a buffer; a large one has a separate key.
    packs: dict[tuple[str, bool, str], list[CrossingSpec]] = {}
    for spec in specs:
        # No crossing is named "".
        alone = "" if planner.is_small(_nbytes(spec)) else spec.name
        packs.setdefault((spec.dtype, spec.type in equal, alone), []).append(spec)
    for (dtype, is_equal, _), pack in packs.items():
        parts, why = planner.parts(source, target, sum(map(_nbytes, pack)), is_equal)
        numel = sum(math.prod(spec.shape) for spec in pack)
        names = tuple(spec.name for spec in pack)
        yield TransferBuffer(source, target, is_gradient, names, dtype, numel, parts, why)


def _nbytes(spec: CrossingSpec) -> int:
    return math.prod(spec.shape) * int(getattr(torch, spec.dtype).itemsize)


__all__ = ["TransferBuffer", "plan_transfers"]
