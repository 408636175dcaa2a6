"""Collect a rank's share of a checkpoint: the current parameters and moments.

In: a rank's parameters, and their optimizer state. Out: `Staged`, tensors with their places in full tensors,
which `write.py` writes to files. No communication.

    staged = stage(rank.params, optimizer.state, copied)

With `shown`, tensors are views: training must wait until they are written. `copied` clones them; a caller
with a better copy (to pinned memory, on a stream) passes another function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from autoptd.ir.rectangles import Rectangle, Sizes
from autoptd.program.pieces import Shares, StateKeys, share_stage
from autoptd.runtime.checkpoint.manifest import fqn
from autoptd.runtime.checkpoint.values import encode
from autoptd.runtime.params.guard import unguarded
from autoptd.runtime.params.parameters import RankParameters

# Turns a stored tensor into the one to be written.
Copy = Callable[[torch.Tensor], torch.Tensor]
OptimizerState = Mapping[torch.Tensor, Mapping[str, Any]]
_shares: WeakKeyDictionary[RankParameters, tuple[StateKeys, Shares]] = WeakKeyDictionary()


@dataclass(frozen=True)
class StagedTensor:
    """A rectangle of the tensor that a checkpoint has under `name` and `key`, and that has `shape` in full."""

    name: str
    key: str
    shape: Sizes
    offsets: Sizes
    x: torch.Tensor

    @property
    def fqn(self) -> str:
        return fqn(self.name, self.key)


@dataclass
class Staged:
    """The share of one rank: tensors, and by parameter the other entries of its optimizer state, as JSON."""

    rank: int
    tensors: list[StagedTensor] = field(default_factory=list)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(item.x.nbytes for item in self.tensors)


def shown(x: torch.Tensor) -> torch.Tensor:
    """Return the same memory: for a save that is over before anything changes."""
    return x


def copied(x: torch.Tensor) -> torch.Tensor:
    """Return a copy in the host's memory."""
    return x.to("cpu", copy=True, memory_format=torch.contiguous_format)


@unguarded()
@torch.no_grad()
def stage(params: RankParameters, state: OptimizerState | None, copy: Copy = shown) -> Staged:
    """Collect what this rank writes of parameters, and of the optimizer's `state` if there is one."""
    world = params.world
    params.wait()
    params.absorb_edits()
    staged = Staged(world.rank)
    held = {name: (state or {}).get(x, {}) for name, x in params.stored.items()}
    shares = shares_of(params, keys_of(params, held))
    specs = {spec.name: spec for spec in params.specs}
    for item in shares.items[world.rank]:
        source = held[item.name][item.key] if item.key else params.stored[item.name]
        x = copy(view_of(source, item.rectangle))
        staged.tensors.append(
            StagedTensor(item.name, item.key, specs[item.name].shape, item.rectangle.offsets, x)
        )
    for name, first in shares.first.items():
        if first == world.rank:
            _stage_others(staged, name, params.stored[name], held[name], copy)
    return staged


def _stage_others(
    staged: Staged, name: str, stored: torch.Tensor, state: Mapping[str, Any], copy: Copy
) -> None:
    """Add the entries of a parameter's optimizer state that do not have its shape: step counts, numbers."""
    for key, value in sorted(state.items()):
        if not isinstance(value, torch.Tensor):
            site = f"optimizer state {key!r} of {name}"
            staged.values.setdefault(name, {})[key] = encode(value, site)
        elif not is_like(key, value, stored):
            # Equal on all ranks, as all steps are.
            zero = (0,) * value.dim()
            staged.tensors.append(StagedTensor(name, key, tuple(value.shape), zero, copy(value.detach())))


def shares_of(params: RankParameters, keys: StateKeys) -> Shares:
    """Return what each rank at this place of the pipeline writes; the same at every save, and remembered."""
    known = _shares.get(params)
    if known is None or known[0] != keys:
        known = _shares[params] = (keys, share_stage(params.program, params.world.pipeline_rank, keys))
    return known[1]


def keys_of(params: RankParameters, held: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return, for what this rank stores, the state's tensors of the parameter's shape, with the bytes of an element."""
    keys: dict[str, dict[str, int]] = {}
    for name, state in held.items():
        stored = params.stored[name]
        keys[name] = {
            key: value.element_size()
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and is_like(key, value, stored)
        }
    return keys


def is_like(key: str, value: torch.Tensor, stored: torch.Tensor) -> bool:
    """Tell whether a tensor of an optimizer's state has an element for each of its parameter.

    A step count is 0-d, as the moments of a 0-d parameter are.
    """
    return value.shape == stored.shape and not (key == "step" and value.dim() == 0)


def view_of(x: torch.Tensor, part: Rectangle) -> torch.Tensor:
    """Return the elements of a rectangle in what a rank stores: a view."""
    numel = math.prod(part.block)
    view = x.detach().view(-1).narrow(0, part.start, numel).view(part.block)
    for dim, (at, size) in enumerate(zip(part.at, part.sizes, strict=True)):
        view = view.narrow(dim, at, size)
    return view


def rows_of(x: torch.Tensor, offsets: Sizes, most_bytes: int) -> Iterator[tuple[Sizes, torch.Tensor]]:
    """Yield slices of at most `most_bytes`, with offsets, along the first dim of more than one entry."""
    dim = next((dim for dim, size in enumerate(x.shape) if size > 1), 0)
    if x.nbytes <= most_bytes:
        yield offsets, x
        return
    rows = max(1, most_bytes * x.shape[dim] // x.nbytes)
    for row, part in zip(range(0, x.shape[dim], rows), x.split(rows, dim), strict=True):
        yield (*offsets[:dim], offsets[dim] + row, *offsets[dim + 1 :]), part


__all__ = ["Staged", "StagedTensor", "copied", "is_like", "keys_of", "rows_of", "shown", "stage", "view_of"]
