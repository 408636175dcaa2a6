"""Agree on the sizes of a batch before each step: ranks that run different programs would hang.

In: the sizes of one call on this rank, or the error that prevents it. Out: the rows of every replica, which
may differ in evaluations only; or the same PlanError on all ranks: the first rank's error, else the sizes on
each rank. It costs a round of a few bytes along every mesh axis, before each step; on CUDA the host waits for
it.

    agree_on_sizes(world, Sizes("step", (("ids", (8, 96)),), ()), fault=None)
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from autoptd.errors import AutoptdError, PlanError
from autoptd.runtime.world.world import World

SITE = "check of the sizes"


@dataclass(frozen=True)
class Sizes:
    """The call, the shape of every tensor of it, by name, and its other arguments, by number, as text.

    `rows`: those of every replica, in an evaluation where they are not equal.
    """

    call: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    constants: tuple[tuple[int, str], ...] = ()
    rows: tuple[int, ...] = ()

    def __str__(self) -> str:
        texts = [f"{name} {list(shape)}" for name, shape in self.shapes]
        texts += [f"argument {number} = {text}" for number, text in self.constants]
        return ", ".join(texts + ([f"rows by replica {list(self.rows)}"] if self.rows else []))

    def rows_of(self, batched: Collection[str]) -> int:
        """Return the rows of the first tensor among `batched`; 0 without one."""
        return next((shape[0] for name, shape in self.shapes if name in batched), 0)

    def with_rows(self, rows: int, batched: Collection[str], by_replica: tuple[int, ...] = ()) -> Sizes:
        """Return these sizes with `rows` rows in all tensors of `batched`."""
        shapes = [(name, (rows, *shape[1:]) if name in batched else shape) for name, shape in self.shapes]
        return replace(self, shapes=tuple(shapes), rows=by_replica)

    def number(self) -> int:
        """Return 62 bits of a hash, the same in all processes."""
        digest = hashlib.blake2b(repr(self).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 2


def agree_on_sizes(
    world: World,
    sizes: Sizes | None,
    fault: AutoptdError | None,
    length: int = 0,
    batched: Collection[str] = (),
) -> tuple[int, tuple[int, ...]]:
    """Raise PlanError on all ranks unless all have the same sizes, and none a `fault`; return their largest `length`, and the
    rows of every replica, which may differ where `batched` has names of tensors.

    A collective.
    """
    rows = sizes.rows_of(batched) if sizes is not None else 0
    number = sizes.with_rows(0, batched).number() if sizes is not None else 0
    # The largest of -x is the smallest of x.
    told_to_all = [int(fault is not None), number, -number, length, rows, -rows]
    mine = torch.tensor(told_to_all, dtype=torch.int64, device=world.device)
    agreed = world.everyone().all_reduce(mine, SITE, op="max").tolist()
    is_bad, largest, smallest, longest, most, fewest = agreed
    if not is_bad and largest == -smallest:
        of_ranks = [rows] * world.mesh.size
        if most != -fewest:
            of_ranks = world.everyone().gather_objects(rows, SITE)
        replicas: list[set[int]] = [set() for _ in range(world.mesh.replicas)]
        for rank, its in enumerate(of_ranks):
            replicas[world.mesh.replica_of(rank)].add(its)
        if all(len(its) == 1 for its in replicas):
            return int(longest), tuple(its.pop() for its in replicas)
    told = None if fault is None else (fault.site, fault.fact, fault.remedy)
    call = sizes.call if sizes is not None else ""
    # Objects take a round trip per axis, so they are exchanged only once it is known that something is wrong.
    every = world.everyone().gather_objects((told, call, str(sizes)), SITE)
    for rank, (found, _, _) in enumerate(every):
        if found is not None:
            site, fact, remedy = found
            is_all = all(other == found for other, _, _ in every)
            raise PlanError(site, fact if is_all else f"{fact} (on rank {rank})", remedy) from fault
    raise _difference(world, every)


def _difference(world: World, every: list[tuple[None, str, str]]) -> PlanError:
    """Return the error of ranks that have other sizes than rank 0."""
    calls, texts = [call for _, call, _ in every], [text for _, _, text in every]
    for rank, call in enumerate(calls):
        if call != calls[0]:
            fact = f"rank {rank} calls {call}, rank 0 {calls[0]}"
            return PlanError(f"pm.{calls[0]}", fact, "call both on all ranks, in one order")
    others = [rank for rank, text in enumerate(texts) if text != texts[0]]
    replicas = {world.mesh.replica_of(rank) for rank in others}
    who = f"rank{'s' * (len(others) > 1)} {', '.join(map(str, others[:8]))}{' ...' * (len(others) > 8)}"
    fact = f"{who} got {texts[others[0]]}, rank 0 {texts[0]}"
    remedy = "the same batch for all ranks of a replica"
    if world.mesh.replica_of(0) not in replicas:
        remedy = "equal sizes for all replicas: pad to the longest of the global batch before it is cut; "
        remedy += "shapes='bucket' pads lengths"
    return PlanError(f"pm.{calls[0]}", fact, remedy)
