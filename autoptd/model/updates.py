"""What happens to gradients after a step: optimizers over the local parameters, and clipping by the norm of
all of them.

In: the running ranks. Out: optimizers of torch, over groups of the model's own names or parameters. All calls
are collective.

    updates = Updates(run)
    optimizer = updates.optimizer(torch.optim.AdamW, lr=3e-4)
    updates.clip_grad_norm_(1.0)
    optimizer.step()
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from math import inf
from typing import Any

import torch

from autoptd.errors import PlanError, a_type
from autoptd.model.loop_watch import OwnParameters
from autoptd.model.run import Run
from autoptd.runtime.params.grad_norm import (
    check_finite,
    checked_clip_value,
    checked_norm_type,
    clip_gradients,
    clip_values,
    grad_norm,
)
from autoptd.runtime.params.optimizer import make_optimizer


class Updates:
    """Makes optimizers, and clips gradients."""

    def __init__(self, run: Run) -> None:
        self._run, self._loop = run, run.loop

    def optimizer(
        self,
        cls: type[torch.optim.Optimizer] | partial[torch.optim.Optimizer],
        params: Iterable[Any] | None = None,
        **keywords: Any,
    ) -> torch.optim.Optimizer:
        """Return a real `cls` over the local parameters: learning-rate schedulers work on it. Collective.

        `cls` may be a functools.partial of a class. `params` takes names, globs, tensors (those of the model
        that was handed to parallelize as well) and (name, tensor) pairs, or group dicts of such; None is all.
        Elementwise classes step what ranks store; Muon, Adafactor and classes with `whole = True` step each
        matrix at its home rank (docs/howto/optimizers.md). Its `state_dict` speaks original names and full tensors,
        and is collective.
        In local it steps all ranks at once. Adam, AdamW and SGD take torch's fused form unless `fused=`,
        `foreach=`, `capturable=` or `differentiable=` is given. With precision="fp16", `step` changes nothing
        where a gradient of any rank is not finite: `step_was_skipped` of the optimizer says so, and `skipped`
        counts.
        """
        ranks = self._run.started("optimizer")

        def run(fn: Callable[[Any], Any]) -> Any:
            return ranks.run("optimizer", lambda rank: fn(rank.params))

        held = [rank.params for rank in ranks.here]
        trained = {name for spec in held[0].specs for name in (spec.name, *spec.aliases)}
        cls, params, keywords = resolved(cls, params, keywords, self._loop.names, trained)
        optimizer = make_optimizer(cls, held, run, params, self._run.loss_scale, **keywords)
        self._run.add_optimizer(optimizer)
        self._loop.follow(optimizer)
        optimizer.on_zero = self._loop.clear
        return optimizer

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return `optimizer.state_dict()`: full tensors by original names on rank 0, {} elsewhere.
        Collective.
        """
        return optimizer.state_dict()

    def load_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
    ) -> None:
        """Load what `optimizer_state_dict` returned; every rank passes all of it."""
        optimizer.load_state_dict(dict(state_dict))

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the global norm of all gradients, each parameter counted once; return the norm before.

        `norm_type` is 2, inf (the largest entry), 1, or the p of any other p-norm. With `error_if_nonfinite`,
        a norm that is NaN or infinite is a RuntimeFault on all ranks, and nothing is changed. Collective.
        """
        # As torch does: a number of a config file may be text.
        ranks, limit, p = self._run.started("clip_grad_norm_"), float(max_norm), checked_norm_type(norm_type)
        if error_if_nonfinite:
            check_finite(ranks.run("clip_grad_norm_", lambda rank: grad_norm(rank.params, p)))
        norm = ranks.run("clip_grad_norm_", lambda rank: clip_gradients(rank.params, limit, p))
        # Powers of finite gradients may overflow.
        if self._run.loss_scale is not None and p in (1, 2, inf):
            self._run.loss_scale.saw(norm)
        return norm

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp every entry of all gradients to [-clip_value, clip_value], as
        `torch.nn.utils.clip_grad_value_` does. All ranks call it.
        """
        ranks, value = self._run.started("clip_grad_value_"), checked_clip_value(clip_value)
        # An infinity would be a number afterwards, and the update not skipped.
        if self._run.loss_scale is not None:
            self._run.loss_scale.saw(ranks.run("clip_grad_value_", lambda rank: grad_norm(rank.params, inf)))
        ranks.run("clip_grad_value_", lambda rank: clip_values(rank.params, value))


SITE = "pm.optimizer"
Request = tuple[type[torch.optim.Optimizer], Iterable[Any] | None, dict[str, Any]]


def resolved(
    cls: Any,
    params: Iterable[Any] | None,
    keywords: Mapping[str, Any],
    own: OwnParameters,
    trained: Collection[str],
) -> Request:
    """Return the class, the parameters and the keywords that are meant; PlanError if `cls` is not an
    optimizer class.

    `trained` are the names of the parameters that ranks have.
    """
    keywords = dict(keywords)
    if isinstance(cls, functools.partial):
        keywords = {**cls.keywords, **keywords}
        if cls.args and params is None:
            params = cls.args[0]
        cls = cls.func
    if isinstance(cls, torch.optim.Optimizer):
        fact = f"{type(cls).__name__}(...) has its own tensors, and the ranks have others: copies, or parts"
        raise PlanError(SITE, fact, f"the class: {_call_text(cls)}")
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        what = repr(cls) if isinstance(cls, (str, type)) else a_type(cls)
        remedy = "pm.optimizer(torch.optim.AdamW, params, lr=1e-3): the class, or a functools.partial of it"
        raise PlanError(SITE, f"{what} is not an optimizer class", remedy)
    return cls, None if params is None else own.in_names(params, trained), keywords


def _call_text(made: torch.optim.Optimizer) -> str:
    """Return the call that makes an optimizer like this one."""
    known = inspect.signature(type(made)).parameters
    given = [
        f"{name}={value!r}"
        for name, value in made.defaults.items()
        if name in known and value is not None and value != known[name].default
    ]
    module = "torch.optim." if type(made).__module__.startswith("torch.optim.") else ""
    groups = ["params=...  (the groups that it was made of)"] if len(made.param_groups) > 1 else []
    return f"pm.optimizer({', '.join([module + type(made).__name__, *given, *groups])})"
