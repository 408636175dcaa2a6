"""The state that an optimizer keeps of each parameter: gathered as full tensors by name, and this rank's part of such tensors.

In: a rank's parameters, and the state of an optimizer over what it stores. Out: on rank 0, CPU tensors as an optimizer of the
unmodified model has them; the other way round, tensors laid out as what a rank stores.

    state = gather_state(params, optimizer.state)                        # {"lm_head.weight": {"exp_avg": <full>, ...}}
    own = local_record(params, spec, state["lm_head.weight"])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autoptd.program.specs import ParamSpec
from autoptd.runtime.params.full_values import gather_full
from autoptd.runtime.params.parameters import RankParameters
from autoptd.runtime.params.parts import shard_of

# By parameter: the optimizer's state of it.
State = dict[str, dict[str, Any]]


def gather_state(params: RankParameters, state: Mapping[torch.Tensor, Mapping[str, Any]]) -> State:
    """Return the optimizer's state with full CPU tensors by name on rank 0, {} elsewhere; a collective of all ranks."""
    world = params.world
    # First all ranks learn which state every parameter has: gathering a tensor is a collective of all of them.
    mine: State = {}
    for spec, x in stored_of(params):
        # Copies of a parameter have equal state: one rank describes it for all.
        if spec.name in params.counted and x in state:
            mine[spec.name] = {key: _described(value, x) for key, value in state[x].items()}
    described: State = {}
    for part in world.everyone().gather_objects(mine, "optimizer state"):
        described |= part
    full: State = {}
    for spec in params.specs:
        own = params.stored.get(spec.name)
        for key, value in described.get(spec.name, {}).items():
            if isinstance(value, Whole):
                shard = None if own is None else state[own][key]
                value = gather_full(params, spec, shard, value.dtype)
            full.setdefault(spec.name, {})[key] = value
    return full if world.rank == 0 else {}


@dataclass(frozen=True)
class Whole:
    """In place of a tensor that is laid out as its parameter, and gathered like it."""

    dtype: torch.dtype


def _described(value: Any, parameter: torch.Tensor) -> Any:
    """Return one entry of a parameter's state, `Whole` in place of a tensor of the parameter's shape."""
    if not isinstance(value, torch.Tensor):
        return value
    # Moments have the parameter's shape; what has another one (a step count, 0-d) is the same on every rank.
    is_like_parameter = value.dim() > 0 and value.shape == parameter.shape
    return Whole(value.dtype) if is_like_parameter else value.detach().to("cpu", copy=True)


def local_record(params: RankParameters, spec: ParamSpec, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's part of one parameter's state, in new tensors."""
    local = {}
    for key, value in record.items():
        if isinstance(value, torch.Tensor):
            # A step count is 0-d, as the moments of a 0-d parameter are.
            if tuple(value.shape) == spec.shape and (value.dim() > 0 or key != "step"):
                value = params.piece_of(spec.name, shard_of(spec, value, params.world))
            value = value.clone(memory_format=torch.contiguous_format)
        local[key] = value
    return local


def stored_of(params: RankParameters) -> list[tuple[ParamSpec, torch.Tensor]]:
    return [(spec, params.stored[spec.name]) for spec in params.specs if spec.name in params.stored]


__all__ = ["State", "gather_state", "local_record", "stored_of"]
