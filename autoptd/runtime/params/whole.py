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
from typing import Any, NoReturn

import torch
from torch import optim

from autoptd.errors import PlanError
from autoptd.ir.buffers import bytes_of
from autoptd.ir.rectangles import Rectangle
from autoptd.program.pieces import flat_places, stored_by_groups, view_of
from autoptd.program.specs import ParamSpec
from autoptd.runtime.params.guard import GuardedParameter, unguarded
from autoptd.runtime.params.parameters import RankParameters, owners
from autoptd.runtime.params.parts import dtype_of
from autoptd.runtime.params.storage import Edits, alias
from autoptd.runtime.world.world import World

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
    """Return the multiplications of a product with its own transpose, of which most of these optimizers consist."""
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


class Exchange:
    """Messages of fixed sizes between the ranks along some axes, all at once: one all-to-all for each axis.

    `sizes` has the bytes from each rank to each other one, by (source, target). A message first moves along the first
    axis, to the place of its target, then along the next one.
    """

    def __init__(
        self, world: World, axes: Sequence[str], sizes: Mapping[tuple[int, int], int], site: str
    ) -> None:
        self._world, self._sizes, self._site = world, sizes, site
        # By hop: the axis, and the messages to, and from, each rank along it.
        self._hops: list[tuple[str, list[list[tuple[int, int]]], list[list[tuple[int, int]]]]] = []
        for number, axis in enumerate(axes if sizes else ()):
            peers = world.group((axis,)).ranks
            to = [self._passed(axes, number, world.rank, peer) for peer in peers]
            from_ = [self._passed(axes, number, peer, world.rank) for peer in peers]
            self._hops.append((axis, to, from_))

    def _passed(self, axes: Sequence[str], number: int, rank: int, peer: int) -> list[tuple[int, int]]:
        """Return the messages that `rank` passes to `peer` in hop `number`."""
        place = self._world.mesh.place
        found = []
        for source, target in sorted(self._sizes):
            # They have moved along the axes before, and are still at their source along this and later ones.
            at = [target] * number + [source] * (len(axes) - number)
            is_here = all(place(end, axis) == place(rank, axis) for end, axis in zip(at, axes, strict=True))
            if is_here and place(target, axes[number]) == place(peer, axes[number]):
                found.append((source, target))
        return found

    def __call__(self, messages: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Send bytes by target; return those that were sent here, by source. A collective of these ranks."""
        rank = self._world.rank
        held = {(rank, target): message for target, message in messages.items()}
        none = torch.empty(0, dtype=torch.uint8, device=self._world.device)
        for axis, to, from_ in self._hops:
            sent = [torch.cat([none, *(held.pop(pair) for pair in pairs)]) for pairs in to]
            sizes = [[self._sizes[pair] for pair in pairs] for pairs in from_]
            received = self._world.group((axis,)).all_to_all(sent, self._site, list(map(sum, sizes)))
            for pairs, parts, data in zip(from_, sizes, received, strict=True):
                held |= dict(zip(pairs, data.split(parts), strict=True))
        return {source: message for (source, _), message in held.items()}


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
        collected, spread = dict[tuple[int, int], int](), dict[tuple[int, int], int]()
        for leg in legs:
            pair = leg.source, leg.home
            # A flag, values and gradient.
            collected[pair] = collected.get(pair, 0) + 1 + 2 * leg.nbytes
            for holder in leg.holders:
                spread[leg.home, holder] = spread.get((leg.home, holder), 0) + leg.nbytes
        axes = [axis for axis in mesh.axes if axis not in mesh.stage_axes and mesh.degree(axis) > 1]
        self._collect = Exchange(self.world, axes, collected, COLLECT)
        self._spread = Exchange(self.world, axes, spread, SPREAD)
        rank = self.world.rank
        self._out = _by(lambda leg: leg.home, [leg for leg in legs if leg.source == rank])
        self._home = [leg for leg in legs if leg.home == rank]
        self._held = _by(lambda leg: leg.home, [leg for leg in legs if rank in leg.holders])
        self._edits = Edits(self.stored)
        # A constructor may read the values.
        params.wait()
        params.absorb_edits()
        self.collect()
        self.forget()

    def _new(self, spec: ParamSpec) -> GuardedParameter:
        dtype, device = dtype_of(spec.storage.dtype), self.world.device
        if not spec.requires_grad:
            # Never updated: it takes no memory.
            return GuardedParameter(torch.zeros((), dtype=dtype, device=device).expand(spec.shape), False)
        return GuardedParameter(torch.zeros(spec.shape, dtype=dtype, device=device))

    def _legs(self, specs: Sequence[ParamSpec], homes: Mapping[str, int], ranks: Sequence[int]) -> list[Leg]:
        program, mesh = self.params.program, self.world.mesh
        places = flat_places(program, self.world.pipeline_rank)
        groups: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
        legs = []
        for spec in specs:
            home = homes[spec.name]
            for holders, parts in stored_by_groups(spec, mesh, ranks, places, groups):
                # The copy that has the shortest way.
                apart = [
                    sum(mesh.place(rank, a) != mesh.place(home, a) for a in mesh.axes) for rank in holders
                ]
                source = holders[apart.index(min(apart))]
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
        for source, legs in _by(lambda leg: leg.source, self._home).items():
            message = received[source]
            start = len(legs)
            for leg, has_gradient in zip(legs, message[:start].tolist(), strict=True):
                name, x = leg.spec.name, alias(self.stored[leg.spec.name])
                leg.of_whole(x).copy_(leg.read(message, start))
                if name not in gradients:
                    gradients[name] = torch.zeros_like(x) if has_gradient else None
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
        messages: dict[int, list[torch.Tensor]] = {}
        for leg in self._home:
            data = bytes_of(leg.of_whole(self.stored[leg.spec.name]))
            for holder in leg.holders:
                messages.setdefault(holder, []).append(data)
        received = self._spread({holder: torch.cat(data) for holder, data in messages.items()})
        for home, legs in self._held.items():
            start = 0
            for leg in legs:
                view_of(alias(self.params.stored[leg.spec.name]), leg.part).copy_(
                    leg.read(received[home], start)
                )
                start += leg.nbytes
        self._spread_tied()

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


def _by(end: Callable[[Leg], int], legs: Iterable[Leg]) -> dict[int, list[Leg]]:
    """Group legs by a rank, in order."""
    groups: dict[int, list[Leg]] = {}
    for leg in legs:
        groups.setdefault(end(leg), []).append(leg)
    return groups
