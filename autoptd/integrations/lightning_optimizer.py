"""The optimizer of `configure_optimizers`, which becomes one of the ranks.

In: an optimizer over the parameters of a module, which schedulers and callbacks hold already. Out: one of the same class
and settings over what ranks have; and the first object is made to be this one.

    made = optimizer_of_ranks(pm, module, given)
    become(given, made)
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from autoptd.errors import PlanError, a_type

SITE = "configure_optimizers"
# Settings of how an update is computed, which is chosen for the ranks unless they were set.
HOW = ("foreach", "fused", "capturable", "differentiable")


def optimizer_of_ranks(pm: Any, module: nn.Module, given: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer of the ranks with the class and the groups of `given`; PlanError for what they cannot have.

    Collective.
    """
    own = dict(module.named_parameters())
    names, groups = {id(x): name for name, x in own.items()}, []
    for group in given.param_groups:
        options = {key: x for key, x in _chosen(group).items() if key != "params"}
        groups.append({**options, "params": [names.pop(id(x), "") for x in group["params"]]})
    if given.state or any("" in group["params"] for group in groups):
        fact = f"returns {a_type(given)} that has state, or tensors which are not the module's"
        raise PlanError(SITE, fact, "a new optimizer over self.parameters()")
    # Lightning would clip without these; their gradients are a part of the ranks' norm.
    if left := [name for name in names.values() if own[name].requires_grad]:
        more = f" and {len(left) - 1} more" * (len(left) > 1)
        raise PlanError(
            SITE, f"{left[0]}{more}: trained, and in no group", "requires_grad_(False) before trainer.fit"
        )
    known = inspect.signature(type(given)).parameters
    keywords = {key: x for key, x in _chosen(given.defaults).items() if key in known}
    return pm.optimizer(type(given), groups, **keywords)


def _chosen(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: x for key, x in settings.items() if x or key not in HOW}


def become(given: torch.optim.Optimizer, made: torch.optim.Optimizer) -> None:
    """Let `given` be `made`, for all who hold it: schedulers, callbacks, Lightning."""
    # A scheduler counts the calls of `step`, by a method of the instance.
    steps = {name: x for name, x in vars(given).items() if name == "step"}
    given.__class__, given.__dict__ = type(made), vars(made)
    vars(made).update(steps)
