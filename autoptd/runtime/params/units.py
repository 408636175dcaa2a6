"""Gather the parameters of a layer for its uses, and free them after (ZeRO's stage 3, Rajbhandari et al. 2020, section 5.3).

In: the shared buckets of a rank, whose buffers have memory only while stages use them. Whatever needs a unit demands it, and
waits for its gather: the first read of a parameter in a forward, and autograd where it takes a saved tensor that is, or views,
a parameter. So code may read parameters in any order; `program/gathers.py` decides which are gathered ahead, and freed. All
ranks run the same code, and gather in one order.

    units = Units({unit: [bucket, ...], ...})      # in the model's order
    units.begin(Action(Kind.F, 0, 0), following=Action(Kind.B, 0, 0), waits=False)
    stage.run(...)                       # reads h[0], h[1], ...; while h[1] computes, h[2] is gathered
    units.end(); ...; units.free()

A buffer keeps its memory while a view of it is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from autoptd.ir.actions import Action
from autoptd.program.gathers import Change, Gathers, Unit
from autoptd.runtime.ops.views import View
from autoptd.runtime.params.namespace import Withheld


class Gathered(Protocol):
    """A `SharedBucket`."""

    use: torch.Tensor
    read: Withheld

    def gather_start(self) -> None: ...
    def wait(self) -> None: ...
    def free(self, demand: Callable[[], object]) -> None: ...
    def note_idle(self) -> None: ...
    def abandon(self) -> None: ...


class Lent(View):
    """A tensor that autograd saved, in the buffer of a unit, which may be freed before it is taken."""

    __slots__ = ("_demand", "_use")

    def __init__(self, x: torch.Tensor, use: torch.Tensor, demand: Callable[[], None]) -> None:
        # Not the tensor: a view keeps the buffer from being freed.
        super().__init__(x)
        self._use, self._demand = use, demand

    def take(self) -> torch.Tensor:
        """Return the tensor; its unit is gathered first."""
        self._demand()
        return self.of(self._use)


class Units:
    """The units of a rank, and their buffers."""

    def __init__(self, buckets: Mapping[Unit, Sequence[Gathered]]) -> None:
        self._buckets = buckets
        # By the address of a buffer's storage, which lives as long as its bucket.
        self._places: dict[int, tuple[torch.Tensor, Unit]] = {}
        for unit, own in buckets.items():
            for bucket in own:
                self._places[bucket.use.untyped_storage()._cdata] = bucket.use, unit
        self._demand = {unit: self._demander(unit) for unit in self._buckets}
        self._is_begun = False
        self._forget()

    def _forget(self) -> None:
        """Start with nothing gathered."""
        self._gathers = Gathers(list(self._buckets))
        # What can be read, and the last one that was demanded.
        self._here: set[Unit] = set()
        self._current: Unit | None = None
        for unit, buckets in self._buckets.items():
            for bucket in buckets:
                bucket.read.withhold(self._demand[unit])

    def _demander(self, unit: Unit) -> Callable[[], None]:
        return lambda: self.demand(unit)

    def begin(self, action: Action, following: Action | None, waits: bool) -> None:
        """Begin an F, B or W; `following` is the next of these on this rank. `waits`: for all that the stage reads."""
        if not self._is_begun:
            self._is_begun = True
            for buckets in self._buckets.values():
                for bucket in buckets:
                    bucket.note_idle()
        self._current = None
        # Those that have stayed are demanded again, which tells what to gather next.
        for unit in self._here:
            for bucket in self._buckets[unit]:
                bucket.read.withhold(self._demand[unit])
        self._here.clear()
        self._follow(self._gathers.begin(action, following))
        for unit in list(self._gathers.there) if waits else ():
            if action.stage in unit.stages:
                self.demand(unit)

    def end(self) -> None:
        """End the action: free the units that the following one does not read, or not soon."""
        self._follow(self._gathers.end())

    def demand(self, unit: Unit) -> None:
        """Wait until a unit can be read; start to gather the next one."""
        # Autograd demands a layer for every tensor that it takes.
        if unit is self._current:
            return
        self._current = unit
        self._follow(self._gathers.demand(unit))
        if unit not in self._here:
            self._here.add(unit)
            for bucket in self._buckets[unit]:
                bucket.wait()
                bucket.read.give_back()

    def _follow(self, change: Change) -> None:
        for unit in change.free:
            self._here.discard(unit)
            for bucket in self._buckets[unit]:
                bucket.free(self._demand[unit])
        for unit in change.start:
            for bucket in self._buckets[unit]:
                bucket.gather_start()

    def free(self) -> None:
        """Free all units, after the last action."""
        self._current = None
        self._follow(self._gathers.finish())

    def abandon(self) -> None:
        """Forget all gathers after a failure: one may still write, and its buffer stays."""
        for buckets in self._buckets.values():
            for bucket in buckets:
                bucket.abandon()
        self._forget()

    def lend(self, x: torch.Tensor) -> torch.Tensor | Lent:
        """Return what autograd saves for a tensor: where it lies in the buffer of a unit, or the tensor."""
        found = self._places.get(x.untyped_storage()._cdata)
        if found is None:
            return x
        use, unit = found
        return Lent(x, use, self._demand[unit])

    def take(self, saved: torch.Tensor | Lent) -> torch.Tensor:
        """Return the tensor that `lend` was given."""
        return saved.take() if isinstance(saved, Lent) else saved
