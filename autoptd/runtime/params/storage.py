"""Store a range of a flat parameter buffer on each rank (ZeRO), and notice what the user writes to separate storage.

In: a planned bucket and this rank's parts of its parameters. Out: one flat buffer of the parameters that stages use, and
this rank's range of it in *pieces*: one tensor for each parameter that overlaps the range, which the optimizer steps. A
piece has as many dims as its parameter, all of size 1 but the last, since many optimizers treat matrices and vectors
differently. After an update all ranks gather the ranges into the buffer.

    bucket = SharedBucket(plan, world, {"h.0.ln_1.weight": x, ...})
    bucket.pieces["h.0.ln_1.weight"].tensor           # stepped by the optimizer; absent if stored elsewhere
    bucket.gather_start(); ...; bucket.wait()         # after an update, before the next use

With 2 replicas, and parameters a of 5 elements and b of 4 (aligned to 4 here, actually to 64):

    the flat buffer     a a a a | a - - - || b b b b | - - - -
    stored by               replica 0      ||     replica 1

`Edits` finds the stored tensors that were written to since the last update was published, because weights are clipped or
projected through `optimizer.param_groups` or in a hook after its step:

    edits = Edits(stored)
    edits.note()                    # after an update was published, or values were loaded
    edits.found()                   # ["h.0.attn.weight"]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from autoptd.compat import uses_of
from autoptd.errors import InternalError, PlanError
from autoptd.program.buckets import BucketPlan, Place
from autoptd.program.specs import ParamSpec
from autoptd.runtime.params.guard import GuardedParameter, unguarded
from autoptd.runtime.params.namespace import Withheld
from autoptd.runtime.world.world import Group, Pending, World


@dataclass(frozen=True)
class Piece:
    """The part of a parameter that this rank stores: elements `start` to `end` of its local part, flattened."""

    start: int
    end: int
    tensor: GuardedParameter

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """Return the same part of a tensor laid out like the parameter's local part, in the piece's shape."""
        return local.reshape(-1)[self.start : self.end].view(self.tensor.shape)


class SharedBucket:
    """Parameters in one flat buffer; every rank of an axis stores an equal range of it."""

    def __init__(self, plan: BucketPlan, world: World, parts: Mapping[str, torch.Tensor]) -> None:
        mesh, first = world.mesh, plan.params[0]
        self.plan, self.places = plan, plan.places(mesh)
        self.group = world.group(plan.sharing_axes)
        # Padding is zero: it is reduced and gathered with the rest.
        dtype = getattr(torch, first.use.dtype)
        self.use = torch.zeros(plan.numel(mesh), dtype=dtype, device=world.device)
        width = self.use.numel() // self.group.size
        self.start = self.group.index * width
        self.end = self.start + width
        # What this rank stores: of the buffer itself where stages use the storage's own numbers at all times.
        self.range = self.use[self.start : self.end]
        self.is_apart = first.has_master or plan.is_apart
        if self.is_apart:
            self.range = torch.zeros(width, dtype=getattr(torch, first.storage.dtype), device=world.device)
        self._nbytes = self.use.untyped_storage().nbytes()
        for spec, start, end in () if plan.is_apart else self.places:
            self.use[start:end].copy_(parts[spec.name].reshape(-1))
        self.pieces: dict[str, Piece] = {}
        for spec, start, end in self.places:
            begin, stop = max(start, self.start), min(end, self.end)
            if begin >= stop:
                continue
            part = parts[spec.name]
            own = alias(as_piece(self.range[begin - self.start : stop - self.start], part.dim()))
            piece = Piece(begin - start, stop - start, GuardedParameter(own, first.requires_grad))
            if self.is_apart:
                own.copy_(piece.of(part))
            else:
                # A pending gather may write to it.
                piece.tensor.arrival = self.wait
            self.pieces[spec.name] = piece
        self._pending: Pending | None = None
        self._idle_uses = 0
        # Called with the buffer's memory when its size has changed.
        self.on_resize: Callable[[torch.UntypedStorage], None] | None = None
        # Its parameters in the namespaces of stages, withheld while a gather is pending.
        self.read = Withheld()

    def split(self, range_: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return by name the pieces of a tensor laid out like this rank's range."""
        pieces = {}
        for spec, start, end in self.places:
            if (piece := self.pieces.get(spec.name)) is not None:
                part = range_[max(start, self.start) - self.start : min(end, self.end) - self.start]
                pieces[spec.name] = part.view(piece.tensor.shape)
        return pieces

    def local(self, place: Place, shape: torch.Size) -> torch.Tensor:
        """Return the tensor that stages use for a parameter: a view of the buffer."""
        return alias(self.use[place.start : place.end].view(shape))

    def empty(self) -> None:
        """Give the buffer's memory back before any use, once `local` has been called for all parameters."""
        self._resize(0)

    def _resize(self, nbytes: int) -> None:
        memory = self.use.untyped_storage()
        memory.resize_(nbytes)
        if self.on_resize is not None:
            self.on_resize(memory)

    def gather_start(self) -> None:
        """Start gathering the updates of all ranks into the buffer, which must not be read before `wait`."""
        # After two updates in a row, two gathers must not overlap.
        self.wait()
        if self.plan.is_apart:
            self._resize(self._nbytes)
        if self.is_apart:
            self.use[self.start : self.end].copy_(self.range)
        self._pending = start_gather(self.group, self.use, self.plan.gather_site)
        if not self.plan.is_apart:
            self.read.withhold(self.wait)

    def free(self, demand: Callable[[], object]) -> None:
        """Give the buffer's memory back; the first read of one of its parameters calls `demand`."""
        self.wait()
        self.read.withhold(demand)
        # A view that is still used, such as a transposed weight in a local variable, keeps the memory, which the next gather
        # fills with the same values.
        if uses_of(self.use) <= self._idle_uses:
            self._resize(0)

    def note_idle(self) -> None:
        """Count what refers to the memory while no stage runs."""
        self._idle_uses = uses_of(self.use)

    def abandon(self) -> None:
        """Forget a gather that has failed, which may write to the buffer until it ends."""
        self._pending = None

    def wait(self) -> None:
        """Wait until the buffer has the last update."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def whole(self, name: str, piece: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """Return the flat local part of parameter `name`, whose pieces the ranks hold; a collective of the group.

        `piece` is this rank's, of `dtype` and laid out as `pieces[name]`; None where this rank stores none of it.
        """
        place = next(place for place in self.places if place.spec.name == name)
        width = self.end - self.start
        parts = []
        # The ranks whose ranges overlap it, and the size of each overlap.
        for index in range(place.start // width, (place.end - 1) // width + 1):
            size = min(place.end, (index + 1) * width) - max(place.start, index * width)
            x = torch.empty(size, dtype=dtype, device=self.use.device)
            if index == self.group.index:
                if piece is None:
                    fact = "has a gradient on other ranks, but not on this one"
                    raise PlanError(
                        name, fact, "change gradients in the same way on all ranks: optimizer.zero_grad()"
                    )
                x = piece.detach().view(-1)
            parts.append(self.group.broadcast(x, index, f"gather {name}"))
        return torch.cat(parts)


def start_gather(group: Group, flat: torch.Tensor, site: str) -> Pending:
    """Start gathering a flat buffer that holds this rank's range."""
    # Looked up at each call, since a recording replaces the group's methods.
    return group.all_gather_start_(flat, site)


def as_piece(flat: torch.Tensor, ndim: int) -> torch.Tensor:
    """Return a flat range of a parameter in the shape of a piece: as many dims as the parameter, the last one long."""
    return flat.view(*[1] * (ndim - 1), -1) if ndim else flat.view(())


def alias(x: torch.Tensor) -> torch.Tensor:
    """Return the same memory with a separate version counter, to distinguish the user's edits from ours."""
    return x.data


def check_use(spec: ParamSpec) -> None:
    """Raise InternalError unless this runtime can convert the storage of a parameter to its used form."""
    rows = [step for step in spec.conversions if step.axis not in spec.sharing_axes]
    work = [f"{step.row.forward} over {step.axis}" for step in rows if step.row.forward != "none"]
    is_cast = spec.use.dtype != spec.storage.dtype
    if work or (is_cast and not spec.has_master):
        what = ", ".join([*work, f"{spec.storage.dtype} to {spec.use.dtype} once per {spec.scope}"])
        raise InternalError(
            spec.name, f"cannot be converted from its storage to the form that stages use: {what}"
        )


def is_first_holder(spec: ParamSpec, world: World) -> bool:
    """Tell whether this rank is the first of those that store the same part of a parameter."""
    return all(world.group((axis,)).index == 0 for axis in spec.copy_axes(world.mesh))


class Edits:
    """The versions of stored tensors when they were last published.

    torch counts the writes to a tensor, except those through its `.data` or memory handed to numpy or C (`detach`,
    `data_ptr`): once one of these was taken, the values themselves are compared.
    """

    def __init__(self, stored: Mapping[str, GuardedParameter]) -> None:
        self.stored = dict(stored)
        self._versions: dict[str, int] = {}
        # Values of tensors whose `.data` or similar was taken: writes through it leave the version.
        self._values: dict[str, torch.Tensor] = {}
        self.note()

    @unguarded()
    @torch.no_grad()
    def note(self, names: Iterable[str] | None = None) -> None:
        """Record the current values of all, or of the named tensors as published."""
        for name in self.stored if names is None else names:
            if (x := self.stored.get(name)) is not None:
                self._versions[name] = x._version
                if _was_exposed(x):
                    self._values[name] = x.detach().clone()

    @unguarded()
    def found(self) -> list[str]:
        """Return the names of the tensors that were written to since the last `note`."""
        versions = self._versions
        return [
            name
            for name, x in self.stored.items()
            if x._version != versions[name] or (_was_exposed(x) and self._differs(name, x))
        ]

    def _differs(self, name: str, x: torch.Tensor) -> bool:
        known = self._values.get(name)
        # The first time there is no earlier value to compare with.
        return known is None or not torch.equal(known, x)


def _was_exposed(x: torch.Tensor) -> bool:
    # A tensor exchanged by torch.utils.swap_tensors has another class.
    return getattr(x, "was_exposed", True)
