"""Check that copies of parameters, masters and optimizer state stay equal over dp, tensor ranks and owners.

In: a rank's parameters, and the states of its optimizers. Out: nothing, or one RuntimeFault on all ranks
together, which names parameters and ranks. A gradient that was changed on only some ranks is found after the
next update, as is a flipped bit in memory. 64-bit fingerprints are compared
(`runtime/params/fingerprint.py`).

    check_copies(rank.params, [optimizer.state], step=200)            # a collective
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from autoptd.errors import RuntimeFault
from autoptd.ir.layout import copy_axes
from autoptd.ir.mesh import Role, role_of
from autoptd.program.specs import ParamSpec
from autoptd.runtime.checks.batch import agree_on_largest, merge_over_ranks
from autoptd.runtime.params.fingerprint import fingerprint, fingerprint_of
from autoptd.runtime.params.parameters import RankParameters, owners
from autoptd.runtime.world.world import Group

SITE = "check of the copies"
MOST_NAMED = 5
# The optimizer state by stored parameter.
OptimizerState = Mapping[Any, Mapping[str, Any]]
# Hashes by the compared item.
Prints = dict[str, torch.Tensor]


def is_due(step: int, every: int) -> bool:
    """Tell whether copies are compared before step `step`; `every=0` disables the check."""
    # The second step is the first to see an update.
    return every > 0 and (step == 2 or step % every == 0)


def check_copies(params: RankParameters, states: Sequence[OptimizerState], step: int) -> None:
    """Raise RuntimeFault on all ranks unless all copies are equal; a collective."""
    world = params.world
    if world.mesh.size == 1:
        return
    params.wait()
    findings: list[str] = []
    for group, copies in _comparisons(params, states):
        findings += compare(group, copies, SITE)
    if agree_on_largest(world, torch.tensor(int(bool(findings)), device=world.device), SITE):
        by_rank = merge_over_ranks(world, {world.rank: findings}, SITE)
        # All ranks of a group have the same findings.
        texts: dict[str, None] = {}
        for rank in sorted(by_rank):
            texts |= dict.fromkeys(by_rank[rank])
        every = list(texts)
        more = f"; and {len(every) - MOST_NAMED} more" if len(every) > MOST_NAMED else ""
        fact = f"copies that must be equal are not: {'; '.join(every[:MOST_NAMED])}{more}"
        remedy = "change gradients and parameters on all ranks alike: pm.clip_grad_norm_, pm.optimizer, pm.load_state_dict; "
        remedy += "if nothing else changed them, go back to a checkpoint, and suspect the memory of the rank that differs"
        raise RuntimeFault(f"step {step}", fact, remedy)


def _comparisons(params: RankParameters, states: Sequence[OptimizerState]) -> Iterator[tuple[Group, Prints]]:
    """Yield each group and the fingerprints that must agree on its ranks, in one order on all ranks."""
    world, mesh = params.world, params.world.mesh
    local = [spec for spec in params.specs if spec.name in params.local]
    used = {spec.name: fingerprint_of(params, spec) for spec in local}
    stored = {spec.name: _print_of_stored(params, spec, states) for spec in local}
    # The gradient of an R is summed, and equal to the bit. That of an I is computed by each rank for itself: on CUDA,
    # operators whose sums have no fixed order make such copies differ in the last bits.
    kinds = "R" if world.device.type == "cuda" else "IR"
    along: dict[str, Prints] = {}
    for spec in local:
        copied = {axis for axis in copy_axes(spec.use.layout, mesh) if spec.use.layout[axis].kind in kinds}
        for axis in (*mesh.batch_axes, *sorted(copied)):
            along.setdefault(axis, {})[spec.name] = used[spec.name]
        # With shared storage each replica stores a different part.
        for axis in _axes_of_copies(params, spec, copied):
            along.setdefault(axis, {})[f"the optimizer's state of {spec.name}"] = stored[spec.name]
    for axis in sorted(along):
        yield world.group((axis,)), along[axis]
    homes = {spec.name: owners(params.program, spec) for spec in local}
    for ranks in sorted({home for home in homes.values() if len(home) > 1}):
        tied = [spec.name for spec in local if homes[spec.name] == ranks]
        yield world.owners(ranks), {name: used[name] for name in tied}


def _axes_of_copies(params: RankParameters, spec: ParamSpec, copied: Collection[str]) -> list[str]:
    """Return the axes along which ranks store equal parts of a parameter that is equal along `copied`."""
    mesh = params.world.mesh
    axes = spec.copy_axes(mesh) if params.is_shared(spec.name) else [*mesh.batch_axes, *sorted(copied)]
    return [axis for axis in axes if axis in copied or role_of(axis) is Role.BATCH]


def _print_of_stored(
    params: RankParameters, spec: ParamSpec, states: Sequence[OptimizerState]
) -> torch.Tensor:
    """Return the fingerprint of this rank's stored part of a parameter, and of its optimizer state."""
    total = torch.zeros((), dtype=torch.int64, device=params.world.device)
    own = params.stored.get(spec.name)
    if own is None:
        return total
    if own is not params.local[spec.name]:
        total += fingerprint(own, "")
    for state in states:
        for key, value in state.get(own, {}).items():
            if isinstance(value, torch.Tensor):
                total += fingerprint(value, key).to(total.device)
    return total


def compare(group: Group, mine: Prints, site: str) -> list[str]:
    """Describe the differences within a group, and the ranks that differ from the majority."""
    if group.size == 1 or not mine:
        return []
    own = torch.stack(list(mine.values()))
    # [rank, name]
    prints = group.all_gather(own.unsqueeze(0), 0, site).t().tolist()
    findings = []
    for name, values in zip(mine, prints, strict=True):
        usual, count = Counter(values).most_common(1)[0]
        if count == group.size:
            continue
        if 2 * count <= group.size:
            findings.append(f"{name} is not the same on ranks {', '.join(map(str, group.ranks))}")
            continue
        like = group.ranks[values.index(usual)]
        others = [rank for rank, value in zip(group.ranks, values, strict=True) if value != usual]
        findings += [f"{name} on rank {rank} is not as on rank {like} and most others" for rank in others]
    return findings
