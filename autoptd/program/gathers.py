"""Decide when parameters that replicas divide are gathered and freed, and their gradients reduced (ZeRO's stages 2 and 3,
Rajbhandari et al. 2020, section 5), by names alone.

In: the *units* of a pipeline rank, which are parameters that are gathered together: those of a layer, or all others of a
stage; and what happens on it: actions begin and end, and demand units. Out: the units to start gathering and to free. The
runtime follows it, and `gathers_of` counts by it, so that the two agree.

- Scope "use": in a forward, and in a backward in the reverse order, the layer in use and the next one are there: across
  actions too, so that where a B follows its F, the last layer stays. Outside of layers (embeddings, heads), parameters are
  there while the rank runs their stage.
  Layers are expected in the model's order. Others are gathered when they are read, though not ahead, so more often.
- Scope "run": all parameters of a stage are there while the rank runs it, however many of its actions follow each other.
- Scope "step": each is gathered once, when its stage is run first.

    gathers = Gathers(units)
    gathers.begin(Action(Kind.F, 0, 0), following=Action(Kind.B, 0, 0))
    gathers.demand(unit)       # Change(start=[unit, the next layer], free=[the layer before])
    gathers.end()"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoptd.ir.actions import BACKWARD, COMPUTES, Action, Kind


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered and freed together: those of a layer, or with layer "" all else of some stages."""

    stages: tuple[int, ...]
    layer: str
    scope: str


class Change(NamedTuple):
    """What to free, and then to start gathering."""

    free: Sequence[Unit]
    start: Sequence[Unit]


class Gathers:
    """The units of a pipeline rank that are there, or on their way."""

    def __init__(self, units: Sequence[Unit]) -> None:
        # In the model's order, in which a forward demands layers.
        self.units = units
        self._layers: dict[int, list[Unit]] = {}
        for unit in self.units:
            for stage in unit.stages if unit.layer else ():
                self._layers.setdefault(stage, []).append(unit)
        self.there: set[Unit] = set()
        self._action: Action | None = None
        self._following: Action | None = None

    def _order(self, action: Action | None) -> list[Unit]:
        """Return the layers that an action demands, in order."""
        if action is None or action.kind is Kind.W:
            return []
        layers = self._layers.get(action.stage, [])
        return layers[::-1] if action.kind is Kind.B else layers

    def begin(self, action: Action, following: Action | None) -> Change:
        """Begin an F, B or W; `following` is the next of these on this rank."""
        self._action, self._following = action, following
        others = [unit for unit in self.units if not unit.layer and action.stage in unit.stages]
        return self._change((), others if action.kind is not Kind.W else ())

    def demand(self, unit: Unit) -> Change:
        """Have a unit that is about to be read."""
        if not unit.layer:
            return self._change((), [unit])
        order = self._order(self._action)
        after = order[order.index(unit) + 1 :] if unit in order else []
        kept = [unit, *(after or self._order(self._following))[:1]]
        return self._change([other for other in self.there if other.layer and other not in kept], kept)

    def end(self) -> Change:
        """End the action: free what the next one does not read, or not soon, and have the first of what it does."""
        action, following = self._action, self._following
        assert action is not None
        stage = -1 if following is None else following.stage
        soon = self._order(following)[:2]
        if following is not None and following.kind is Kind.W:
            # It reads no parameters: what its B has left stays for what comes after.
            soon = [unit for unit in self._layers.get(stage, ()) if unit in self.there]
        freed = []
        for unit in self.there:
            is_kept = unit in soon if unit.layer else unit.scope == "step" or stage in unit.stages
            if not is_kept:
                freed.append(unit)
        return self._change(freed, soon)

    def finish(self) -> Change:
        """Free all, after the last action."""
        self._action = self._following = None
        return self._change(list(self.there), ())

    def _change(self, free: Iterable[Unit], start: Iterable[Unit]) -> Change:
        # In the model's order, so that all ranks make their calls in one order.
        gone = set(free)
        freed = [unit for unit in self.units if unit in gone] if gone else []
        started = [unit for unit in start if unit not in self.there]
        self.there = (self.there - gone) | set(started)
        return Change(freed, started)


def gathers_of(units: Sequence[Unit], order: Sequence[Action]) -> Counter[Unit]:
    """Return how often each unit of a pipeline rank is gathered in a step, or in an evaluation, with this order."""
    gathers, found = Gathers(units), Counter[Unit]()
    computes = [action for action in order if action.kind in COMPUTES]
    for action, following in zip(computes, [*computes[1:], None], strict=False):
        found.update(gathers.begin(action, following).start)
        for unit in gathers._order(action):
            found.update(gathers.demand(unit).start)
        found.update(gathers.end().start)
    return found


def sums_of(stages: Collection[int], scope: str, order: Sequence[Action]) -> int:
    """Return how often the gradients of parameters of some stages are reduced in a step with this order."""
    computes, count, is_touched = [action for action in order if action.kind in COMPUTES], 0, False
    if scope == "use":
        # After the last action of a microbatch that adds to them.
        return sum(action.kind is Kind.B and action.stage in stages for action in computes)
    for action, following in zip(computes, [*computes[1:], None], strict=False):
        is_touched |= action.kind in BACKWARD and action.stage in stages
        if is_touched and (following is None or following.stage not in stages):
            count, is_touched = count + 1, False
    return count if scope == "run" else 1
