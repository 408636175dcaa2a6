"""Check that ranks are given the same inputs: batches, sizes of batches, and state dicts.

In: what the script of this rank passes to a call. Out: nothing, or one error on all ranks together, which names the ranks
that differ.

- `BatchCheck`: all ranks of a replica read the same batch, unlike after `torch.manual_seed(1337 + rank)`. Hashes are sent
  before the first forward, over tp and over pp, and compared after the step, so that no rank waits for them.
- `agree_on_sizes`, before each step with batches of several sizes: ranks that run different programs would hang. It costs
  a round of a few bytes along every mesh axis; on CUDA the host waits for it.
- `check_state`: all ranks load the same state dict, as each takes its own shards from the one that it is given. For every
  tensor the shape and 65,536 values, evenly spread, are compared: another checkpoint differs everywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from autoptd.errors import AutoptdError, PlanError, RuntimeFault
from autoptd.ir.mesh import AXES
from autoptd.runtime.checks.agreement import (
    BATCH,
    SIZES,
    STATE,
    agree_on_largest,
    majority,
    merge_over_ranks,
    ranks_text,
)
from autoptd.runtime.params.fingerprint import hash_words
from autoptd.runtime.world.world import World

# The first steps are always checked, whatever `every` is: a wrong data loader shows there.
FIRST_STEPS = 3
# At most this number of tensors or ranks is named.
MOST_TENSORS, MOST_RANKS = 3, 8


def batch_is_due(number: int, every: int) -> bool:
    """Tell whether the batch of call `number` (from 1) is checked; `every=0` disables the check."""
    return every > 0 and (number <= FIRST_STEPS or number % every == 0)


@contextmanager
def batch_checked(
    run: Callable[[str, Callable[[Any], Any]], Any], call: str, count: int, leaves: Sequence[Any]
) -> Iterator[None]:
    """Check around call `count` of `step` or `eval_step` that the ranks of a replica read the same batch.

    `run` calls a function on every rank: see `RunningRanks.run`.
    """

    def start(rank: Any) -> BatchCheck:
        number = rank.executor.steps + 1 if call == "step" else count
        return BatchCheck(rank.world, call, number, leaves)

    what = f"{BATCH} of {call}"
    check = run(what, start)
    yield
    run(what, lambda rank: check.finish())


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
            world.group((axis,)).all_gather_start(self.mine.unsqueeze(0), 0, BATCH) for axis in axes
        ]

    def finish(self) -> None:
        """Compare the hashes; raise RuntimeFault on all ranks if any two differ within a replica."""
        world = self.world
        # [ranks of the group, 1 + tensors] against [1 + tensors].
        differences = [(pending.wait() != self.mine).any() for pending in self.pending]
        differs = torch.stack(differences).any().to(torch.int64)
        # All replicas stop: in the next step they would wait for the failing one.
        if agree_on_largest(world, differs, BATCH):
            raise self._fault()

    def _fault(self) -> RuntimeFault:
        mesh = self.world.mesh
        seen = merge_over_ranks(self.world, {self.world.rank: self.mine.tolist()}, BATCH)
        facts = []
        for number in range(mesh.replicas):
            facts += _differing(
                {rank: seen[rank] for rank in sorted(seen) if mesh.replica_of(rank) == number}
            )
        # Along one axis, the coordinate is the number of the replica.
        axes, own = mesh.batch_axes, "pm.program.mesh.replica_of(rank)"
        if len(axes) == 1:
            own = f"pm.coordinate.{axes[0]}"
        count = "*".join(AXES[axis].degree for axis in axes)
        remedy = f"give all ranks of a replica the same batch: DistributedSampler(num_replicas={count}, rank={own}), "
        remedy += f"and seed random numbers in the data by {own}, not by the rank"
        return RuntimeFault(self.site, "; ".join(facts), remedy)


def _differing(replica: Mapping[int, list[int]]) -> list[str]:
    """Describe the ranks of a replica whose batch differs from most of them (of two, the first is right)."""
    like, others = majority({rank: tuple(hashes) for rank, hashes in replica.items()})
    if not others:
        return []
    # Entry 0 is the number of the call, entry i + 1 the hash of tensor i.
    differing: set[int] = set()
    for rank in others:
        differing |= {i for i, value in enumerate(replica[rank]) if value != replica[like][i]}
    tensors = [str(i - 1) for i in sorted(differing - {0})]
    what = f"tensor {', '.join(tensors)} of the call" if tensors else "the number of the step"
    ranks = ranks_text(others)
    return [f"{ranks} got other inputs or targets than rank {like} of the same replica ({what} differs)"]


@dataclass(frozen=True)
class Sizes:
    """The call, the shape of every tensor of it, by name, and its other arguments, by number, as text.

    `rows` are those of every replica, in an evaluation where they are not equal; `outputs` names what it returns besides
    the loss.
    """

    call: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    constants: tuple[tuple[int, str], ...] = ()
    rows: tuple[int, ...] = ()
    outputs: str = ""

    def __str__(self) -> str:
        texts = [f"{name} {list(shape)}" for name, shape in self.shapes]
        texts += [f"argument {number} = {text}" for number, text in self.constants]
        texts += [f"rows by replica {list(self.rows)}"] if self.rows else []
        return ", ".join(texts + ([f"outputs={self.outputs}"] if self.outputs else []))

    def rows_of(self, batched: Collection[str]) -> int:
        """Return the rows of the first tensor among `batched`; 0 without one."""
        return next((shape[0] for name, shape in self.shapes if name in batched), 0)

    def with_rows(self, rows: int, batched: Collection[str], by_replica: tuple[int, ...] = ()) -> Sizes:
        """Return these sizes with `rows` rows in all tensors of `batched`."""
        shapes = [(name, (rows, *shape[1:]) if name in batched else shape) for name, shape in self.shapes]
        return replace(self, shapes=tuple(shapes), rows=by_replica)

    def number(self) -> int:
        """Return 62 bits of a hash, the same in all processes."""
        return _hash(repr(self)) >> 2


def agree_on_sizes(
    world: World,
    sizes: Sizes | None,
    fault: AutoptdError | None,
    length: int = 0,
    batched: Collection[str] = (),
) -> tuple[int, tuple[int, ...]]:
    """Return the largest `length` of all ranks, and the rows of every replica; a collective.

    Raise the same PlanError on all ranks if one has a `fault` (the first of them), or if their sizes differ. The rows of
    the tensors named in `batched` may differ between replicas.
    """
    rows = sizes.rows_of(batched) if sizes is not None else 0
    number = sizes.with_rows(0, batched).number() if sizes is not None else 0
    # The largest of -x is the smallest of x.
    sent = [int(fault is not None), number, -number, length, rows, -rows]
    mine = torch.tensor(sent, dtype=torch.int64, device=world.device)
    agreed = world.everyone().all_reduce(mine, SIZES, op="max").tolist()
    is_bad, largest, smallest, longest, most, fewest = agreed
    if not is_bad and largest == -smallest:
        of_ranks = [rows] * world.mesh.size
        if most != -fewest:
            of_ranks = world.everyone().gather_objects(rows, SIZES)
        replicas: list[set[int]] = [set() for _ in range(world.mesh.replicas)]
        for rank, its in enumerate(of_ranks):
            replicas[world.mesh.replica_of(rank)].add(its)
        if all(len(its) == 1 for its in replicas):
            return int(longest), tuple(its.pop() for its in replicas)
    own = None if fault is None else (fault.site, fault.fact, fault.remedy)
    call = sizes.call if sizes is not None else ""
    every = world.everyone().gather_objects((own, call, str(sizes)), SIZES)
    for rank, (found, _, _) in enumerate(every):
        if found is not None:
            site, fact, remedy = found
            is_all = all(other == found for other, _, _ in every)
            raise PlanError(site, fact if is_all else f"{fact} (on rank {rank})", remedy) from fault
    raise _difference(world, every)


def _difference(world: World, every: list[tuple[None, str, str]]) -> PlanError:
    """Return the error for ranks whose sizes differ from those of rank 0."""
    calls, texts = [call for _, call, _ in every], [text for _, _, text in every]
    for rank, call in enumerate(calls):
        if call != calls[0]:
            fact = f"rank {rank} calls {call}, rank 0 {calls[0]}"
            return PlanError(f"pm.{calls[0]}", fact, "call both on all ranks, in one order")
    others = [rank for rank, text in enumerate(texts) if text != texts[0]]
    replicas = {world.mesh.replica_of(rank) for rank in others}
    who = ranks_text(others[:MOST_RANKS]) + " ..." * (len(others) > MOST_RANKS)
    fact = f"{who} got {texts[others[0]]}, and rank 0 {texts[0]}"
    remedy = "the same batch for all ranks of a replica"
    if world.mesh.replica_of(0) not in replicas:
        remedy = "equal sizes for all replicas: pad to the longest of the global batch before it is cut; "
        remedy += "shapes='bucket' pads lengths"
    return PlanError(f"pm.{calls[0]}", fact, remedy)


def check_state(world: World, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Raise RuntimeFault on all ranks if any two were given different names, shapes or values; a collective."""
    mine = {name: _digest(name, x) for name, x in state_dict.items() if isinstance(x, torch.Tensor)}
    total = torch.tensor(sum(mine.values()) % (1 << 62), device=world.device)
    # All totals are equal if the largest is the smallest.
    if agree_on_largest(world, total, STATE) != -agree_on_largest(world, -total, STATE):
        raise _fault_of_state(merge_over_ranks(world, {world.rank: mine}, STATE))


def _digest(name: str, x: torch.Tensor) -> int:
    return _hash(f"{name} {list(x.shape)} {int(hash_words(x))}")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _fault_of_state(seen: dict[int, dict[str, int]]) -> RuntimeFault:
    """Name the ranks whose state dict differs from most others; `seen` has all digests by rank and name."""
    given = {rank: frozenset(seen[rank].items()) for rank in sorted(seen)}
    like, others = majority(given)
    names = sorted({name for rank in others for name, _ in given[rank] ^ given[like]})
    which = ", ".join(names[:MOST_TENSORS])
    if len(names) > MOST_TENSORS:
        which += f" and {len(names) - MOST_TENSORS} more"
    verb = "differs" if len(names) == 1 else "differ"
    fact = f"{ranks_text(others)} got another state dict than rank {like}: {which} {verb}"
    remedy = "pass the same state dict on all ranks: each takes its own shards"
    return RuntimeFault("load_state_dict", fact, remedy)
