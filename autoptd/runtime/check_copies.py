"""Check that copies of a parameter stay equal: over dp, on tensor ranks that hold the same of it, and on all owners.

In: a rank's parameters. Out: nothing, or one RuntimeFault on all ranks together, which names parameters and ranks. A
gradient that was changed on some ranks only shows here after the next update. 64-bit fingerprints are compared
(`fingerprint.py`).

    check_copies(rank.params, step=200)            # a collective
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from autoptd.errors import RuntimeFault
from autoptd.ir.layout import copy_axes
from autoptd.program.specs import ParamSpec
from autoptd.runtime.check_batch import agree_on_largest, merge_over_ranks
from autoptd.runtime.fingerprint import fingerprint_of
from autoptd.runtime.parameters import RankParameters, owners
from autoptd.runtime.world.world import Group

SITE = "check of the copies"
MOST_NAMED = 5


def is_due(step: int, every: int) -> bool:
    """Tell whether copies are compared before step number `step`; `every` 0 compares none."""
    # The second step is the first to see an update.
    return every > 0 and (step == 2 or step % every == 0)


def check_copies(params: RankParameters, step: int) -> None:
    """Raise RuntimeFault on all ranks unless all copies of all parameters are equal; a collective."""
    world = params.world
    if world.mesh.size == 1:
        return
    params.wait()
    mine = {spec.name: fingerprint_of(params, spec) for spec in params.specs if spec.name in params.local}
    findings: list[str] = []
    for group, specs in _comparisons(params):
        findings += _compare(group, specs, mine)
    if agree_on_largest(world, torch.tensor(int(bool(findings)), device=world.device), SITE):
        by_rank = merge_over_ranks(world, {world.rank: findings}, SITE)
        # All ranks of a group find the same.
        texts: dict[str, None] = {}
        for rank in sorted(by_rank):
            texts |= dict.fromkeys(by_rank[rank])
        every = list(texts)
        more = f"; and {len(every) - MOST_NAMED} more" if len(every) > MOST_NAMED else ""
        fact = f"copies that must be equal are not: {'; '.join(every[:MOST_NAMED])}{more}"
        remedy = "change gradients and parameters on all ranks alike: pm.clip_grad_norm_, pm.optimizer, pm.load_state_dict"
        raise RuntimeFault(f"step {step}", fact, remedy)


def _comparisons(params: RankParameters) -> Iterator[tuple[Group, list[ParamSpec]]]:
    """Yield (group, parameters of which all its ranks hold the same), in one order on all ranks."""
    world, mesh = params.world, params.world.mesh
    local = [spec for spec in params.specs if spec.name in params.local]
    for axis in mesh.batch_axes:
        yield world.group((axis,)), local
    # The gradient of an R is summed, and equal to the bit. That of an I is computed by each rank for itself: on CUDA,
    # operators whose sums have no fixed order make such copies differ in the last bits.
    kinds = "R" if world.device.type == "cuda" else "IR"
    alike: dict[str, list[ParamSpec]] = {}
    for spec in local:
        for axis in copy_axes(spec.use.layout, mesh):
            if spec.use.layout[axis].kind in kinds:
                alike.setdefault(axis, []).append(spec)
    for axis in sorted(alike):
        yield world.group((axis,)), alike[axis]
    homes = {spec.name: owners(params.program, spec) for spec in local}
    for ranks in sorted({home for home in homes.values() if len(home) > 1}):
        yield world.owners(ranks), [spec for spec in local if homes[spec.name] == ranks]


def _compare(group: Group, specs: Sequence[ParamSpec], mine: dict[str, torch.Tensor]) -> list[str]:
    """Describe what differs between the ranks of a group, each compared with the first one."""
    if group.size == 1 or not specs:
        return []
    own = torch.stack([mine[spec.name] for spec in specs])
    # [rank, parameter]
    prints = group.all_gather(own.unsqueeze(0), 0, SITE).tolist()
    findings = []
    for k, spec in enumerate(specs):
        for i, rank in enumerate(group.ranks):
            if prints[i][k] != prints[0][k]:
                findings.append(f"{spec.name} on rank {rank} is not as on rank {group.ranks[0]}")
    return findings


__all__ = ["check_copies", "is_due"]
