"""Convert state dicts of torch's optimizers, which number parameters, to the model's names.

In: a state dict of an optimizer over `model.parameters()`, or over groups of them in that order. Out: the
same, with names instead of numbers: parameters are numbered in the order of the groups, and in a group in
that of the model.

    named({"state": {0: {...}}, "param_groups": [{"params": [0, 1]}]}, specs, [("up.weight", "up.bias")])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autoptd.errors import PlanError
from autoptd.program.specs import ParamSpec

SITE = "optimizer.load_state_dict"


def is_numbered(state_dict: Mapping[str, Any]) -> bool:
    return any(isinstance(name, int) for group in state_dict["param_groups"] for name in group["params"])


def named(
    state_dict: Mapping[str, Any], specs: Sequence[ParamSpec], groups: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Return a state dict with names; raise PlanError if its groups or shapes differ from `groups`."""
    by_name = {spec.name: spec for spec in specs}
    saved = state_dict["param_groups"]
    fact = f"is a torch optimizer's own, with {[len(group['params']) for group in saved]} numbered parameters in its groups"
    remedy = "make this optimizer with the same groups, each in the order of model.named_parameters()"
    if len(saved) != len(groups):
        raise PlanError(SITE, f"{fact}, and this one has {list(map(len, groups))}", remedy)
    name_of: dict[int, str] = {}
    for group, names in zip(saved, groups, strict=True):
        trained = [name for name in names if by_name[name].requires_grad]
        # Frozen parameters may have been left out.
        fits = next((some for some in (names, trained) if len(some) == len(group["params"])), None)
        if fits is None:
            raise PlanError(SITE, f"{fact}, and this one has {list(map(len, groups))}", remedy)
        name_of |= dict(zip(group["params"], fits, strict=True))
    for number, record in state_dict["state"].items():
        shape = by_name[name_of[number]].shape
        for key, value in record.items():
            if isinstance(value, torch.Tensor) and value.dim() and tuple(value.shape) != shape:
                text = f"{key} of parameter {number} has shape {tuple(value.shape)}, and {name_of[number]} {shape}"
                raise PlanError(SITE, f"{fact}: {text}", remedy)
    named_groups = [{**group, "params": list(names)} for group, names in zip(saved, groups, strict=True)]
    state = {name_of[number]: record for number, record in state_dict["state"].items()}
    return {**state_dict, "state": state, "param_groups": named_groups}


__all__ = ["is_numbered", "named"]
