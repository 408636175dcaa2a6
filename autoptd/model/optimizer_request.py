"""What `pm.optimizer` is asked for, in the words of the ranks: a class, names of parameters, keywords.

In: what scripts pass: a class or a functools.partial of one, and the parameters of the user's own model or groups of them, as
`configure_optimizers` makes them. Out: the class, names instead of those parameters, and all keywords.

    own = OwnParameters(model)
    cls, params, keywords = resolved(partial(AdamW, lr=1e-3), model.parameters(), {}, own)
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from autoptd.errors import PlanError, a_type

SITE = "pm.optimizer"
Request = tuple[type[torch.optim.Optimizer], Iterable[Any] | None, dict[str, Any]]


class OwnParameters:
    """The names of a model's parameters, by which tensor they are; keeps none of them alive."""

    def __init__(self, model: nn.Module | None = None) -> None:
        named = [] if model is None else model.named_parameters()
        self._names = {id(x): (weakref.ref(x), name) for name, x in named}

    def name_of(self, x: torch.Tensor) -> str | None:
        """Return the name of one of them; None for any other tensor."""
        found = self._names.get(id(x))
        # Another tensor may have come to the place of one that is gone.
        return found[1] if found is not None and found[0]() is x else None

    def in_names(self, params: Iterable[Any], trained: Collection[str]) -> list[Any]:
        """Return parameters, pairs or groups with names for those of the model; without those that are not `trained`."""
        if isinstance(params, (str, torch.Tensor)):
            params = [params]
        found: list[Any] = []
        for item in params:
            if isinstance(item, Mapping):
                found.append({**item, "params": self.in_names(item["params"], trained)})
                continue
            x = item[1] if isinstance(item, tuple) and len(item) == 2 else item
            name = self.name_of(x) if isinstance(x, torch.Tensor) else None
            if name is None:
                found.append(item)
            elif name in trained:
                found.append(name)
        return found


def resolved(
    cls: Any,
    params: Iterable[Any] | None,
    keywords: Mapping[str, Any],
    own: OwnParameters,
    trained: Collection[str],
) -> Request:
    """Return the class, the parameters and the keywords that are meant; PlanError if `cls` is not an optimizer class.

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


__all__ = ["OwnParameters", "resolved"]
