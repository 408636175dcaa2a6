"""Custom autograd functions that a graph keeps as they are, each as one operator: forward and backward are the user's own.

In: a node of such an operator (`trace/own_functions.py` makes them). Out: the class, the name by which an emitted file calls
it, and all that its `apply` takes.

    own_function(node).name                                 # "my.layers:ScaleGradient"
    class_of("my.layers:ScaleGradient").apply(x, 0.5)
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from autoptd.errors import PlanError

# Of this process: classes by name, and what the operators made of them stand for.
CLASSES: dict[str, Any] = {}
OWN: dict[Any, Own] = {}


@dataclass(frozen=True)
class Own:
    """What an operator stands for: a class, under which name, with which fixed arguments by place."""

    function: Any
    name: str
    fixed: tuple[tuple[int, Any], ...]

    def arguments(self, given: Any) -> list[Any]:
        """Put the fixed arguments between those that are given."""
        args = list(given)
        for place, value in self.fixed:
            args.insert(place, value)
        return args


def own_function(node: Node) -> Own | None:
    """Return what a node calls, None where that is no custom autograd function."""
    return OWN.get(node.target)


def class_of(name: str) -> Any:
    """Return the class of a name, "module:Outer.Function": one that was traced here, else imported."""
    if name not in CLASSES:
        module, _, path = name.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            fact = f"cannot be imported: {error}"
            raise PlanError(f"autograd.Function {name}", fact, "define it at the top of a module") from None
        CLASSES[name] = found
    return CLASSES[name]


def name_of(function: Any) -> str:
    """Return the name of a class; functions make classes anew, which then have numbers."""
    plain = name = f"{function.__module__}:{function.__qualname__}"
    number = 1
    while CLASSES.setdefault(name, function) is not function:
        number += 1
        name = f"{plain}#{number}"
    return name
