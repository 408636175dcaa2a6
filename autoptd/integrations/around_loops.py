"""What the loops of other libraries expect around a run on ranks: errors in one, random numbers that compiling does not
draw, and the trained weights in the model.

In: findings, a running model. Out: one PlanError for all of them; the model with the weights of the ranks.

    raise_all("Trainer", [("gradient_clip_val=1.0", "is set in a callback", "the argument of the Trainer")])
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from autoptd.errors import PlanError
from autoptd.runtime.checkpoint.extra import random_state, set_random_state


def raise_all(site: str, found: list[tuple[str, str, str]]) -> None:
    """Raise one PlanError for all that was found: names, facts and remedies."""
    if found:
        facts = "; ".join(f"{name}: {fact}" for name, fact, _ in found)
        remedies = "; ".join(dict.fromkeys(f"{name}: {remedy}" for name, _, remedy in found))
        raise PlanError(site, facts, remedies)


@contextmanager
def kept_random_state(state: Callable[..., Any] = random_state) -> Iterator[None]:
    """Restore the random states of torch, Python and NumPy after a `with` block."""
    before = state(torch.device("cpu"))
    try:
        yield
    finally:
        set_random_state(before, torch.device("cpu"))


def fetch_weights(pm: Any, model: torch.nn.Module, what: str, device: torch.device) -> None:
    """Write the weights of the ranks into the model of every process, which messages call `what`. Collective.

    `pm` is a `ParallelModel`, `device` where processes exchange tensors.
    """
    weights = pm.state_dict()
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    own = dict(named)
    if any(x.is_meta for x in own.values()):
        warnings.warn(f"{what} is on meta, and stays without weights", stacklevel=3)
        return
    for name in pm.run.names:
        value = weights.get(name, own[name]).detach().to(device)
        if pm.run.is_process:
            torch.distributed.broadcast(value, src=0)
        with torch.no_grad():
            own[name].copy_(value)
