"""Load a checkpoint into the storage of all ranks: one rank reads each byte and sends it to the others.

In: a checkpoint whose contents were checked, a rank's parameters, and the optimizer. Out: the parameters, in
storage and as stages use them, and the optimizer's state. A collective of all ranks, in three steps: every
rank reads the share that it would write; ranks agree that all succeeded; then the shares are sent to the
ranks with copies and to the other owners of tied parameters.

    plan = Restoration(checkpoint, params, optimizer.state)
    plan.read()                                      # may raise: see `agree`
    plan.spread()

Tensors are read directly into their storage, without a second copy in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch

from autoptd.errors import AutoptdError, PlanError, RuntimeFault
from autoptd.ir.rectangles import Item
from autoptd.program.pieces import Shares, holder_axes, holders, share_stage
from autoptd.program.specs import ParamSpec
from autoptd.runtime.checkpoint.manifest import Manifest, fqn
from autoptd.runtime.checkpoint.read import Checkpoint, Want
from autoptd.runtime.checkpoint.stage import rows_of, view_of
from autoptd.runtime.checkpoint.values import decode, encode
from autoptd.runtime.checks.batch import merge_over_ranks
from autoptd.runtime.params.parameters import RankParameters, owners
from autoptd.runtime.params.parts import dtype_of
from autoptd.runtime.params.storage import alias
from autoptd.runtime.world.world import World

SITE = "pm.load"
# Bytes that are handed on at once: the host gives back small memory that is freed, and keeps larger.
MOST_BYTES = 4 << 20
Result = TypeVar("Result")
OptimizerState = MutableMapping[torch.Tensor, dict[str, Any]]


class Restoration:
    """What one rank does to load a checkpoint; `state` is the optimizer's, None to leave it alone."""

    def __init__(self, checkpoint: Checkpoint, params: RankParameters, state: OptimizerState | None) -> None:
        self.checkpoint, self.params, self.state = checkpoint, params, state
        self._specs = {spec.name: spec for spec in params.specs}
        self._reader = checkpoint.reader()
        manifest = checkpoint.manifest
        self._keys: dict[str, list[str]] = {}
        self._others: dict[str, list[str]] = {}
        for spec in params.specs if state is not None else ():
            self._keys[spec.name], self._others[spec.name] = split_keys(manifest, spec)
        # By parameter and key: what this rank stores of it.
        self._into: dict[tuple[str, str], torch.Tensor] = {}
        self._small: dict[tuple[str, str], torch.Tensor] = {}
        self._shares = lru_cache(self._share)

    @property
    def nbytes(self) -> int:
        """The bytes that this rank has read."""
        return self._reader.nbytes

    def read(self) -> None:
        """Read this rank's share into what it stores; RuntimeFault where a file was changed."""
        # A pending gather would overwrite the loaded values.
        self.params.wait()
        for name, stored in self.params.stored.items():
            # Not counted as edits by the user, which differ from rank to rank here.
            self._into[name, ""] = alias(stored)
            for key in self._keys.get(name, ()):
                self._into[name, key] = self._moment(name, key, stored)
        shares = self._shares(self.params.world.pipeline_rank)
        mine = self.params.world.rank
        wants = [self._want(item) for item in shares.items[mine] if self._has(item)]
        small = []
        for name, first in shares.first.items():
            for key in self._others.get(name, ()) if first == mine else ():
                record = self.checkpoint.manifest.tensors[fqn(name, key)]
                x = torch.empty(record.shape, dtype=dtype_of(record.dtype), device="cpu")
                self._small[name, key] = x
                small.append(Want(fqn(name, key), (0,) * x.dim(), x))
        self._reader.fill([*wants, *small])

    def spread(self) -> None:
        """Send the tensors read to the other ranks, and update parameters and optimizer; a collective."""
        world = self.params.world
        self._spread_copies()
        self._spread_tied()
        # Most are single numbers: as such they are sent in a fraction of the time.
        numbers = {name: x if x.dim() else encode(x, SITE) for name, x in self._small.items()}
        for some in merge_over_ranks(world, {world.rank: numbers}, SITE).values():
            for name, value in some.items():
                self._small[name] = value if isinstance(value, torch.Tensor) else decode(value)
        self._set_state()
        # Update the values that stages use, so that the load is not mistaken for an edit by the user.
        self.params.publish()
        self.params.wait()
        self.params.absorb_edits()

    def _has(self, item: Item) -> bool:
        return fqn(item.name, item.key) in self.checkpoint.manifest.tensors

    def _share(self, pipeline_rank: int) -> Shares:
        # In bytes of the file, so that all ranks divide it alike.
        tensors = self.checkpoint.manifest.tensors
        keys = {}
        for name, names in self._keys.items():
            keys[name] = {key: dtype_of(tensors[fqn(name, key)].dtype).itemsize for key in names}
        return share_stage(self.params.program, pipeline_rank, keys)

    def _moment(self, name: str, key: str, stored: torch.Tensor) -> torch.Tensor:
        """Return the tensor of the optimizer's state to fill: the one that is there, or a new one."""
        assert self.state is not None
        own = self.state.get(stored, {}).get(key)
        if isinstance(own, torch.Tensor) and own.shape == stored.shape and own.is_contiguous():
            return own
        # In the dtype that was saved, with the same bits: NAdam's products are float32 whatever the parameter is. One that
        # was the parameter's goes with it to a wider one, as torch's optimizers load it.
        tensors = self.checkpoint.manifest.tensors
        saved, parameter = tensors[fqn(name, key)].dtype, tensors.get(fqn(name, ""))
        is_own = parameter is not None and parameter.dtype == saved
        dtype = stored.dtype if is_own else dtype_of(saved)
        return torch.zeros(stored.shape, dtype=dtype, device=stored.device)

    def _want(self, item: Item) -> Want:
        part = item.rectangle
        view = view_of(self._into[item.name, item.key], part)
        return Want(fqn(item.name, item.key), part.offsets, view)

    def _spread_copies(self) -> None:
        """Let each share be handed on by the rank that read it, to those that store the same."""
        world = self.params.world
        mesh = world.mesh
        for rank, items in sorted(self._shares(world.pipeline_rank).items.items()):
            views: dict[tuple[str, ...], list[torch.Tensor]] = {}
            for item in items:
                spec = self._specs[item.name]
                axes = holder_axes(spec, mesh)
                if axes and self._has(item) and rank in holders(spec, mesh, world.rank):
                    view = view_of(self._into[item.name, item.key], item.rectangle)
                    views.setdefault(axes, []).extend(
                        part for _, part in rows_of(view, item.rectangle.offsets, MOST_BYTES)
                    )
            for axes, some in views.items():
                for together in batches_of(some):
                    hand_on(world, axes, rank, together)

    def _spread_tied(self) -> None:
        """Let the first owner of a tied parameter hand it to the others, which store the same of it."""
        world = self.params.world
        for spec in self.params.specs:
            places = owners(self.params.program, spec)
            if len(places) < 2 or world.pipeline_rank not in places:
                continue
            group = world.owners(places)
            source = group.ranks.index(world.mesh.at_stage(world.rank, places[0]))
            for key in ["", *self._keys.get(spec.name, ())]:
                x = self._into.get((spec.name, key))
                if x is None or fqn(spec.name, key) not in self.checkpoint.manifest.tensors:
                    continue
                for part in x.view(-1).split(MOST_BYTES // x.element_size()):
                    part.copy_(group.broadcast(part, source, f"load {spec.name}"))

    def _set_state(self) -> None:
        """Give the optimizer the state of this rank's parameters, and take away what the checkpoint has not."""
        if self.state is None:
            return
        for name, stored in self.params.stored.items():
            own: dict[str, Any] = {}
            for key in self.checkpoint.manifest.state.get(name, ()):
                if key in self._keys[name]:
                    own[key] = self._into[name, key]
                else:
                    own[key] = self._small[name, key].clone()
            values = self.checkpoint.manifest.values.get(name, {})
            own |= {key: decode(value) for key, value in values.items()}
            if own:
                self.state[stored] = own
            else:
                self.state.pop(stored, None)


def split_keys(manifest: Manifest, spec: ParamSpec) -> tuple[list[str], list[str]]:
    """Return the keys of a parameter's state: of tensors of its shape, and of others, such as a step count."""
    like: list[str] = []
    others: list[str] = []
    for key in manifest.state.get(spec.name, ()):
        record = manifest.tensors[fqn(spec.name, key)]
        is_like = record.shape == spec.shape and not (key == "step" and not record.shape)
        (like if is_like else others).append(key)
    return like, others


def batches_of(views: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield tensors in groups of about `MOST_BYTES`, in order: a call for each of them would mostly wait."""
    batch: list[torch.Tensor] = []
    nbytes = 0
    for view in views:
        if batch and nbytes + view.nbytes > MOST_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(view)
        nbytes += view.nbytes
    if batch:
        yield batch


def hand_on(world: World, axes: tuple[str, ...], source: int, views: Sequence[torch.Tensor]) -> None:
    """Give what rank `source` has in `views` to the ranks that differ from it along `axes` only; a collective of them."""
    sizes = [view.nbytes for view in views]
    packed = torch.empty(sum(sizes), dtype=torch.uint8, device=views[0].device)
    if world.rank == source:
        torch.cat([view.reshape(-1).view(torch.uint8) for view in views], out=packed)
    received = broadcast_from(world, axes, source, packed, f"{SITE}: copies")
    for view, part in zip(views, received.split(sizes), strict=True) if world.rank != source else ():
        # Copied: it may begin at a byte at which no such element can.
        view.copy_(part.clone().view(view.dtype).view(view.shape))


def broadcast_from(
    world: World, axes: tuple[str, ...], source: int, x: torch.Tensor, site: str
) -> torch.Tensor:
    """Return the `x` of rank `source` on all ranks that differ from it along `axes` only, over one axis after the other."""
    mesh = world.mesh
    for number, axis in enumerate(axes):
        later = axes[number + 1 :]
        # The line of the source first; then each of its ranks serves the line through it.
        if all(mesh.place(world.rank, other) == mesh.place(source, other) for other in later):
            x = world.group((axis,)).broadcast(x, mesh.place(source, axis), site)
    return x


def agree(world: World, site: str, act: Callable[[], Result]) -> Result:
    """Return what `act` returns; if it fails on any rank, the same error is raised on all ranks. A collective.

    For what ranks do for themselves, between calls that all of them make.
    """
    result, fault = None, None
    error: Exception | None = None
    try:
        result = act()
    except AutoptdError as caught:
        error = caught
        fault = (type(caught) is PlanError, caught.site, caught.fact, caught.remedy)
    except Exception as caught:
        error, fact = caught, f"{type(caught).__name__}: {caught}"
        fault = (False, site, fact, "see to the folder and its disk")
    faults = world.everyone().gather_objects(fault, site)
    first = next(((rank, found) for rank, found in enumerate(faults) if found is not None), None)
    if first is not None:
        rank, (is_plan, where, fact, remedy) = first
        kind = PlanError if is_plan else RuntimeFault
        if all(found == faults[0] for found in faults):
            raise kind(where, fact, remedy) from error
        raise kind(where, f"{fact} (on rank {rank})", remedy) from error
    return result  # type: ignore[return-value]


def attempted(act: Callable[[], Any]) -> Callable[[], Any]:
    """Call a function now; return one that returns what it returned, or raises what it raised, as often as asked."""
    try:
        result = act()
    except Exception as error:
        caught = error

        def fail() -> Any:
            raise caught

        return fail
    return lambda: result


__all__ = ["Restoration", "agree", "attempted", "split_keys"]
