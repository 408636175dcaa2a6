"""Check that ranks have the same settings in the groups of their optimizers: learning rates, betas, weight decay; and that all
have made as many updates.

In: a rank's world, and the optimizers of this process by their number. Out: nothing, or one RuntimeFault on all ranks together,
which names ranks, group and key. With zero=1, t or p no copies of weights would differ: each rank steps what it alone has.

    check_settings(world, {0: optimizer}, step=200)            # a collective
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from autoptd.errors import RuntimeFault
from autoptd.runtime.checks.copies import SITE
from autoptd.runtime.params.optimizer import NamedOptimizer
from autoptd.runtime.params.trial import ELEMENTWISE, IGNORED
from autoptd.runtime.world.world import World

# What schedulers keep in groups for themselves, where only one rank may have a scheduler that logs.
OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})
MOST_ELEMENTS = 64
MOST_NAMED = 5
# By number of the group and key, as text; of no group, how often `step` has run.
Settings = dict[tuple[int, str], str]
UPDATES = (-1, "optimizer.step() has run")


def check_settings(world: World, optimizers: Mapping[int, torch.optim.Optimizer], step: int) -> None:
    """Raise RuntimeFault on all ranks unless optimizers that all ranks have are set alike; a collective."""
    if world.mesh.size == 1:
        return
    mine = {number: settings_of(optimizer) for number, optimizer in optimizers.items()}
    counts = {number: _updates_of(optimizer) for number, optimizer in optimizers.items()}
    prints = {number: (_print_of(settings), counts[number]) for number, settings in mine.items()}
    everywhere = world.everyone().gather_objects(prints, SITE)
    # Python may free one that is not used any more sooner on one rank than on another.
    common = set(prints).intersection(*everywhere)
    differing = []
    for number in sorted(common):
        found = [prints[number] for prints in everywhere]
        if len({text for text, _ in found}) > 1 or len({count for _, count in found} - {None}) > 1:
            differing.append(number)
            mine[number] |= {} if counts[number] is None else {UPDATES: str(counts[number])}
    if not differing:
        return
    told = world.everyone().gather_objects({number: mine[number] for number in differing}, SITE)
    findings: list[str] = []
    for number in differing:
        findings += _findings([settings[number] for settings in told])
    more = f"; and {len(findings) - MOST_NAMED} more" if len(findings) > MOST_NAMED else ""
    fact = f"the optimizer is not set alike on all ranks: {'; '.join(findings[:MOST_NAMED])}{more}"
    remedy = "step optimizers and schedulers on every rank, and give those that take a number, as ReduceLROnPlateau does, the "
    remedy += "same one everywhere: the loss that pm.step returns"
    raise RuntimeFault(f"step {step}", fact, remedy)


def _updates_of(optimizer: torch.optim.Optimizer) -> int | None:
    """Return the number of steps of an optimizer; None if it has no parameter on this rank."""
    has_parameters = any(group["params"] for group in optimizer.param_groups)
    return getattr(optimizer, "updates", None) if has_parameters else None


def settings_of(optimizer: torch.optim.Optimizer) -> Settings:
    """Return what an optimizer computes with, of all groups; what has no plain value is left out."""
    # torch's own read nothing else in their groups.
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
