"""Step whole matrices of a sharded model: every parameter has one home rank, which alone has its optimizer's state.

In: a rank's parameters, and the names that an optimizer such as Muon steps. Out: on each rank the original tensors
whose home it is, as in the user's model: shards joined, blocks of fused projections in place, without padding.

    homes = Homes(params, ["h.0.attn.c_attn.weight", ...])
    optimizer = torch.optim.Muon([{"params": list(homes.stored.values())}])
    homes.collect()                      # values and gradients of all pieces travel home
    optimizer.step()
    homes.spread()                       # new values travel to all ranks that store a piece

Homes are balanced over all ranks of a pipeline rank, so each update is computed once. A tied parameter has its home at
its first owner, from which the others get the new values. Pieces are rectangles of full tensors (`program/pieces.py`),
as in checkpoints, so it does not matter how ranks divide a parameter.

A class is known to need whole tensors (`WHOLE`), or says so by `whole = True`. Its update of a tensor must depend on
nothing but that tensor's own values, gradient and state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import optim

from autoptd.errors import PlanError
from autoptd.ir.buffers import bytes_of
from autoptd.ir.mesh import Mesh
from autoptd.ir.rectangles import Rectangle
from autoptd.program.pieces import flat_places, stored_by_groups, view_of
from autoptd.program.specs import ParamSpec
from autoptd.runtime.params.guard import GuardedParameter, unguarded
from autoptd.runtime.params.parameters import RankParameters, owners
from autoptd.runtime.params.parts import dtype_of
from autoptd.runtime.params.storage import Edits, alias
from autoptd.runtime.world.exchange import Exchange, Pair

WHOLE: tuple[type[optim.Optimizer], ...] = (optim.Muon, optim.Adafactor)
COLLECT, SPREAD = "optimizer: pieces to homes", "optimizer: updates from homes"
STATE = "optimizer state"


def is_whole(cls: type[optim.Optimizer]) -> bool:
    """Tell whether a class updates matrices as a whole, so that it cannot step pieces of them."""
    return issubclass(cls, WHOLE) or getattr(cls, "whole", False)


def place_homes(specs: Sequence[ParamSpec], ranks: Sequence[int]) -> dict[str, int]:
    """Return the home of each parameter: the largest first, each on the rank that has the least to compute."""
    loads = dict.fromkeys(ranks, 0)
    homes: dict[str, int] = {}
    for spec in sorted(specs, key=_cost, reverse=True):
        homes[spec.name] = rank = min(ranks, key=lambda rank: loads[rank])
        loads[rank] += _cost(spec)
    return homes


def _cost(spec: ParamSpec) -> int:
    """Return the multiplications of a product with the transpose: most of these optimizers compute little else."""
    size = math.prod(spec.shape)
    return size * (min(spec.shape) if len(spec.shape) > 1 else 1) * spec.requires_grad


@dataclass(frozen=True)
class Leg:
    """A rectangle of a parameter that rank `source` sends home; it is stored by all of `holders`."""

    spec: ParamSpec
    home: int
    source: int
    holders: tuple[int, ...]
    part: Rectangle

    @property
    def nbytes(self) -> int:
        return self.part.numel * dtype_of(self.spec.storage.dtype).itemsize

    def of_whole(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rectangle in a tensor of the parameter's shape, as a view."""
        for dim, (start, size) in enumerate(zip(self.part.offsets, self.part.sizes, strict=True)):
            x = x.narrow(dim, start, size)
        return x

    def read(self, message: torch.Tensor, start: int) -> torch.Tensor:
        """Return the rectangle that begins at byte `start` of a message."""
        # Cloned, as an element may not begin at any byte.
        data = message[start : start + self.nbytes].clone()
        return data.view(dtype_of(self.spec.storage.dtype)).view(self.part.sizes)


class Homes:
    """The whole tensors of one rank, by name in `stored`; creating it is a collective of all ranks."""

    @unguarded()
    def __init__(self, params: RankParameters, names: Iterable[str]) -> None:
        self.params, self.world, self.specs = params, params.world, params.specs
        mesh, wanted = self.world.mesh, set(names)
        self._named = [spec for spec in self.specs if spec.name in wanted]
        ranks = mesh.ranks_at(self.world.pipeline_rank)
        here = [spec for spec in self._named if params.is_first_owner(spec)]
        homes = place_homes(here, ranks)
        self.stored: dict[str, GuardedParameter] = {}
        for spec in here:
            if homes[spec.name] == self.world.rank:
                self.stored[spec.name] = self._new(spec)
        legs = self._legs([spec for spec in here if spec.requires_grad], homes, ranks)
        rank = self.world.rank
        # By the other end, in one order at both ends.
        self._out = _by(lambda leg: leg.home, [leg for leg in legs if leg.source == rank])
        self._home = _by(lambda leg: leg.source, [leg for leg in legs if leg.home == rank])
        self._copied: dict[int, list[Leg]] = {}
        copies = [leg for leg in legs if rank in leg.holders and rank != leg.source]
        self._copies = _by(lambda leg: leg.source, copies)
        collected, spread, copied = dict[Pair, int](), dict[Pair, int](), dict[Pair, int]()
        for leg in legs:
            # A flag, values and gradient.
            _add(collected, leg.source, leg.home, 1 + 2 * leg.nbytes)
            _add(spread, leg.home, leg.source, leg.nbytes)
            for holder in set(leg.holders) - {leg.source}:
                _add(copied, leg.source, holder, leg.nbytes)
                if leg.source == rank:
                    self._copied.setdefault(holder, []).append(leg)
        axes = [axis for axis in mesh.axes if axis not in mesh.stage_axes]
        self._collect = Exchange(self.world, axes, collected, COLLECT)
        self._spread = Exchange(self.world, axes, spread, SPREAD)
        self._copy = Exchange(self.world, axes, copied, SPREAD)
        self._edits = Edits(self.stored)
        # A constructor may read the values.
        params.wait()
        params.absorb_edits()
        self.collect()
        self.forget()

    def _new(self, spec: ParamSpec) -> GuardedParameter:
        x = torch.zeros((), dtype=dtype_of(spec.storage.dtype), device=self.world.device).expand(spec.shape)
        # A frozen one is never updated, and takes no memory.
        home = GuardedParameter(
            x.clone(memory_format=torch.contiguous_format) if spec.requires_grad else x, spec.requires_grad
        )
        home.is_home, home.bears_gradient, home.arrival = True, False, _nothing
        return home

    def _legs(self, specs: Sequence[ParamSpec], homes: Mapping[str, int], ranks: Sequence[int]) -> list[Leg]:
        program, mesh = self.params.program, self.world.mesh
        places = flat_places(program, self.world.pipeline_rank)
        groups: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
        legs = []
        for spec in specs:
            home = homes[spec.name]
            for holders, parts in stored_by_groups(spec, mesh, ranks, places, groups):
                # The copy that has the shortest way.
                source = min(holders, key=partial(_distance, mesh, home))
                legs += [Leg(spec, home, source, holders, part) for part in parts]
        return legs

    @unguarded()
    @torch.no_grad()
    def collect(self) -> None:
        """Bring values and gradients of all pieces home. A collective."""
        if edited := self._edits.found():
            fact = "was changed through optimizer.param_groups between two steps, where it is a copy of what ranks use"
            remedy = "change pm.parameters(), or do it in optimizer.register_step_post_hook(...)"
            self._refuse(edited[0], fact, remedy)
        received = self._collect({home: self._message(legs) for home, legs in self._out.items()})
        gradients: dict[str, torch.Tensor | None] = {}
        for source, legs in self._home.items():
            message = received[source]
            start = len(legs)
            for leg, has_gradient in zip(legs, message[:start].tolist(), strict=True):
                name = leg.spec.name
                self._at_home(leg).copy_(leg.read(message, start))
                if name not in gradients:
                    gradients[name] = torch.zeros_like(self.stored[name]) if has_gradient else None
                gradient = gradients[name]
                if (gradient is not None) != has_gradient:
                    fact = "has a gradient on some ranks only"
                    self._refuse(name, fact, "change gradients in the same way on all ranks")
                if gradient is not None:
                    leg.of_whole(gradient).copy_(leg.read(message, start + leg.nbytes))
                start += 2 * leg.nbytes
        for name, x in self.stored.items():
            x.grad = gradients.get(name)

    def _message(self, legs: Sequence[Leg]) -> torch.Tensor:
        """Return this rank's pieces of whole tensors as bytes: which have gradients, then values and gradients."""
        stored = self.params.stored
        flags = [stored[leg.spec.name].grad is not None for leg in legs]
        message = [torch.tensor(flags, dtype=torch.uint8, device=self.world.device)]
        for leg in legs:
            x = stored[leg.spec.name]
            grad = torch.zeros_like(x) if x.grad is None else x.grad.to(x.dtype).contiguous()
            message += [bytes_of(view_of(x, leg.part)), bytes_of(view_of(grad, leg.part))]
        return torch.cat(message)

    @unguarded()
    @torch.no_grad()
    def spread(self) -> None:
        """Send the updated values to all ranks that store them. A collective."""
        self._move(self._spread, self._home, self._at_home, self._out)
        self._move(self._copy, self._copied, self._in_store, self._copies)
        self._spread_tied()

    def _move(
        self,
        exchange: Exchange,
        sent: Mapping[int, list[Leg]],
        read: Callable[[Leg], torch.Tensor],
        received: Mapping[int, list[Leg]],
    ) -> None:
        """Send what `read` returns, by target, and write what comes, by source, to where it is stored."""
        messages = {}
        for target, legs in sent.items():
            messages[target] = torch.cat([bytes_of(read(leg)) for leg in legs])
        found = exchange(messages)
        for source, legs in received.items():
            start = 0
            for leg in legs:
                self._in_store(leg).copy_(leg.read(found[source], start))
                start += leg.nbytes

    def _at_home(self, leg: Leg) -> torch.Tensor:
        return leg.of_whole(alias(self.stored[leg.spec.name]))

    def _in_store(self, leg: Leg) -> torch.Tensor:
        # An alias, so that this is not mistaken for edits by the user.
        return view_of(alias(self.params.stored[leg.spec.name]), leg.part)

    def _spread_tied(self) -> None:
        """Send tied parameters from their first owner to the others, which store the same pieces."""
        for spec in self._named:
            places = owners(self.params.program, spec)
            if len(places) < 2 or self.world.pipeline_rank not in places or not spec.requires_grad:
                continue
            if (x := self.params.stored.get(spec.name)) is not None:
                group = self.world.owners(places)
                source = group.ranks.index(self.world.mesh.at_stage(self.world.rank, places[0]))
                alias(x).copy_(group.broadcast(x, source, SPREAD))

    @unguarded()
    def forget(self) -> None:
        """Free the gradients, and note the values: a later change of them would be lost."""
        for x in self.stored.values():
            x.grad = None
        self._edits.note()

    def gather_state(self, state: Mapping[torch.Tensor, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the optimizer's state with CPU tensors by name on rank 0, {} elsewhere; a collective of all ranks."""
        world = self.world
        mine: dict[str, dict[str, Any]] = {}
        for name, x in self.stored.items():
            if x in state:
                mine[name] = {key: _described(value) for key, value in state[x].items()}
        described: dict[str, tuple[int, dict[str, Any]]] = {}
        for rank, found in enumerate(world.everyone().gather_objects(mine, STATE)):
            described |= {name: (rank, record) for name, record in found.items()}
        full: dict[str, dict[str, Any]] = {}
        for spec in self._named:
            home, record = described.get(spec.name, (0, {}))
            for key, value in record.items():
                if isinstance(value, Large):
                    own = torch.empty(value.shape, dtype=value.dtype, device=world.device)
                    if home == world.rank:
                        own = state[self.stored[spec.name]][key].to(world.device)
                    value = world.broadcast_from(home, own, world.mesh.axes, f"{STATE} of {spec.name}")
                    value = value.to("cpu", copy=True)
                full.setdefault(spec.name, {})[key] = value
        return full if world.rank == 0 else {}

    def _refuse(self, name: str, fact: str, remedy: str) -> NoReturn:
        error = PlanError(name, fact, remedy)
        # The others would wait for this rank.
        self.world.report_fault(error)
        raise error


@dataclass(frozen=True)
class Large:
    """A placeholder for a tensor that is sent by itself."""

    shape: torch.Size
    dtype: torch.dtype


def _described(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return Large(value.shape, value.dtype) if value.dim() else value.detach().to("cpu", copy=True)


def _distance(mesh: Mesh, one: int, other: int) -> int:
    """Return along how many axes two ranks differ."""
    return sum(mesh.place(one, axis) != mesh.place(other, axis) for axis in mesh.axes)


def _nothing() -> None:
    """Wait for no gather."""


def _add(sizes: dict[Pair, int], source: int, target: int, nbytes: int) -> None:
    sizes[source, target] = sizes.get((source, target), 0) + nbytes


def _by(end: Callable[[Leg], int], legs: Iterable[Leg]) -> dict[int, list[Leg]]:
    """Group legs by a rank, in order."""
    groups: dict[int, list[Leg]] = {}
    for leg in legs:
        groups.setdefault(end(leg), []).append(leg)
    return groups
