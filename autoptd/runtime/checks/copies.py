"""Check that copies of parameters, masters and optimizer state stay equal, and that optimizers are set alike on all ranks.

In: a rank's parameters, and its optimizers. Out: nothing, or one RuntimeFault on all ranks together.

- `check_copies`: copies over dp, tensor ranks and owners have equal 64-bit fingerprints (`runtime/params/fingerprint.py`).
  A gradient that was changed on only some ranks is found after the next update, as is a flipped bit in memory.
- `check_settings`: optimizers have the same learning rates, betas and weight decay, and have made the same number of
  updates. With zero=1, t or p no copies of weights would differ: each rank steps what it alone has.

    check_copies(rank.params, [optimizer.state], step=200)            # a collective
    check_settings(world, {0: optimizer}, step=200)                   # a collective
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from autoptd.errors import RuntimeFault
from autoptd.ir.layout import copy_axes
from autoptd.ir.mesh import Role, role_of
from autoptd.program.specs import ParamSpec
from autoptd.runtime.checks.agreement import (
    COPIES,
    Prints,
    agree_on_largest,
    compare,
    listed,
    merge_over_ranks,
)
from autoptd.runtime.params.fingerprint import fingerprint, fingerprint_of
from autoptd.runtime.params.optimizer import NamedOptimizer
from autoptd.runtime.params.parameters import RankParameters, owners
from autoptd.runtime.params.trial import ELEMENTWISE, IGNORED
from autoptd.runtime.world.world import Group, World

# The optimizer state by stored parameter.
OptimizerState = Mapping[Any, Mapping[str, Any]]
# Entries that schedulers add to groups: only one rank may have a scheduler that logs.
OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})
MOST_ELEMENTS = 64
# Texts by number of the group, and key; UPDATES, of no group, counts the calls of `step`.
Settings = dict[tuple[int, str], str]
UPDATES = (-1, "optimizer.step() has run")


def copies_are_due(step: int, every: int) -> bool:
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
        findings += compare(group, copies, COPIES)
    if agree_on_largest(world, torch.tensor(int(bool(findings)), device=world.device), COPIES):
        by_rank = merge_over_ranks(world, {world.rank: findings}, COPIES)
        # All ranks of a group have the same findings.
        texts: dict[str, None] = {}
        for rank in sorted(by_rank):
            texts |= dict.fromkeys(by_rank[rank])
        fact = f"copies that must be equal are not: {listed(list(texts))}"
        remedy = "change gradients and parameters on all ranks alike: pm.clip_grad_norm_, pm.optimizer, pm.load_state_dict; "
        remedy += "if nothing else changed them, go back to a checkpoint, and suspect the memory of the rank that differs"
        raise RuntimeFault(f"step {step}", fact, remedy)


def _comparisons(params: RankParameters, states: Sequence[OptimizerState]) -> Iterator[tuple[Group, Prints]]:
    """Yield each group and the fingerprints that must agree on its ranks, in one order on all ranks."""
    world, mesh = params.world, params.world.mesh
    local = [spec for spec in params.specs if spec.name in params.local]
    used = {spec.name: fingerprint_of(params, spec) for spec in local if not spec.is_apart}
    stored = {spec.name: _print_of_stored(params, spec, states) for spec in local}
    # The gradient of an R is summed, and equal to the bit. That of an I is computed by each rank for itself: on CUDA,
    # operators whose sums have no fixed order make such copies differ in the last bits.
    kinds = "R" if world.device.type == "cuda" else "IR"
    along: dict[str, Prints] = {}
    for spec in local:
        copied = {axis for axis in copy_axes(spec.use.layout, mesh) if spec.use.layout[axis].kind in kinds}
        for axis in (*mesh.batch_axes, *sorted(copied)) if spec.name in used else ():
            along.setdefault(axis, {})[spec.name] = used[spec.name]
        # With shared storage each replica stores a different part.
        for axis in _axes_of_copies(params, spec, copied):
            along.setdefault(axis, {})[f"the optimizer's state of {spec.name}"] = stored[spec.name]
    for axis in sorted(along):
        yield world.group((axis,)), along[axis]
    homes = {spec.name: owners(params.program, spec) for spec in local}
    for ranks in sorted({home for home in homes.values() if len(home) > 1}):
        tied = [spec.name for spec in local if homes[spec.name] == ranks]
        # Owners divide the same layout.
        yield world.owners(ranks), {name: used.get(name, stored[name]) for name in tied}


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


def check_settings(world: World, optimizers: Mapping[int, torch.optim.Optimizer], step: int) -> None:
    """Raise RuntimeFault on all ranks unless optimizers that all ranks have are set alike; a collective."""
    if world.mesh.size == 1:
        return
    mine = {number: settings_of(optimizer) for number, optimizer in optimizers.items()}
    counts = {number: _updates_of(optimizer) for number, optimizer in optimizers.items()}
    prints = {number: (_print_of(settings), counts[number]) for number, settings in mine.items()}
    everywhere = world.everyone().gather_objects(prints, COPIES)
    # Python may free an unused optimizer earlier on one rank than on another.
    common = set(prints).intersection(*everywhere)
    differing = []
    for number in sorted(common):
        found = [prints[number] for prints in everywhere]
        if len({text for text, _ in found}) > 1 or len({count for _, count in found} - {None}) > 1:
            differing.append(number)
            mine[number] |= {} if counts[number] is None else {UPDATES: str(counts[number])}
    if not differing:
        return
    of_ranks = world.everyone().gather_objects({number: mine[number] for number in differing}, COPIES)
    findings: list[str] = []
    for number in differing:
        findings += _findings([settings[number] for settings in of_ranks])
    fact = f"optimizer settings differ between ranks: {listed(findings)}"
    remedy = "step optimizers and schedulers on every rank, and pass schedulers that take a number, such as ReduceLROnPlateau, "
    remedy += "the same one everywhere: the loss that pm.step returns"
    raise RuntimeFault(f"step {step}", fact, remedy)


def _updates_of(optimizer: torch.optim.Optimizer) -> int | None:
    """Return the number of steps of an optimizer; None if it has no parameter on this rank."""
    has_parameters = any(group["params"] for group in optimizer.param_groups)
    return getattr(optimizer, "updates", None) if has_parameters else None


def settings_of(optimizer: torch.optim.Optimizer) -> Settings:
    """Return the settings in all groups that an optimizer computes with, except those that are not plain values."""
    # torch's own classes read only their defaults.
    cls = type(optimizer).__mro__[2] if isinstance(optimizer, NamedOptimizer) else type(optimizer)
    is_own = cls in ELEMENTWISE
    found: Settings = {}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key in IGNORED or key in OF_SCHEDULERS or (is_own and key not in optimizer.defaults):
                continue
            if (text := _text_of(value)) is not None:
                found[number, key] = text
    return found


def _text_of(value: Any) -> str | None:
    """Return a value as text that is equal on all ranks and devices; None if it is not plain."""
    if isinstance(value, torch.Tensor):
        return repr(value.tolist()) if value.numel() <= MOST_ELEMENTS else None
    if isinstance(value, (list, tuple)):
        texts = [_text_of(item) for item in value]
        return None if None in texts else f"({', '.join(map(str, texts))})"
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    return None


def _print_of(settings: Settings) -> str:
    return hashlib.blake2b(repr(sorted(settings.items())).encode(), digest_size=8).hexdigest()


def _findings(everywhere: list[Settings]) -> list[str]:
    """Describe each setting of one optimizer that differs: which ranks have which value."""
    findings = []
    for place in sorted(set().union(*everywhere)):
        ranks: dict[str, list[str]] = {}
        for rank, settings in enumerate(everywhere):
            ranks.setdefault(settings.get(place, "not there"), []).append(str(rank))
        number, key = place
        if place == UPDATES:
            ranks.pop("not there", None)
        if len(ranks) > 1 and place == UPDATES:
            texts = [f"{value} times on rank {', '.join(some)}" for value, some in ranks.items()]
            findings.append(f"{key} {' and '.join(texts)}")
        elif len(ranks) > 1:
            texts = [f"{value} on rank {', '.join(some)}" for value, some in ranks.items()]
            findings.append(f"{key} of group {number} is {' and '.join(texts)}")
    return findings
