"""Custom autograd functions that a graph keeps, each as one operator with the user's forward and backward.

In: a node of such an operator (made by `trace/functions.py`). Out: the class, its name in emitted files,
and the arguments of its `apply`.

    own_function(node).name                                 # "my.layers:ScaleGradient"
    class_of("my.layers:ScaleGradient").apply(x, 0.5)
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from autoptd.errors import PlanError

# In this process: classes by name, and the functions that operators call.
CLASSES: dict[str, Any] = {}
OWN: dict[Any, Own] = {}


@dataclass(frozen=True)
class Own:
    """The function that an operator calls: its class, name, and fixed arguments by position."""

    function: Any
    name: str
    fixed: tuple[tuple[int, Any], ...]

    def arguments(self, given: Any) -> list[Any]:
        """Merge the fixed arguments with the given ones."""
        args = list(given)
        for place, value in self.fixed:
            args.insert(place, value)
        return args


def own_function(node: Node) -> Own | None:
    """Return the custom autograd function that a node calls, or None."""
    return OWN.get(node.target)


def apply_function(name: str, *args: Any) -> Any:
    """Call `apply` of the class called "module:Outer.Function"; emitted for custom autograd functions of a model."""
    return class_of(name).apply(*args)


def class_of(name: str) -> Any:
    """Return the class called "module:Outer.Function": one that was traced in this process, else imported."""
    if name not in CLASSES:
        module, _, path = name.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            fact = f"cannot be imported: {error}"
            raise PlanError(f"autograd.Function {name}", fact, "define it at module level") from None
        CLASSES[name] = found
    return CLASSES[name]


def name_of(function: Any) -> str:
    """Return the name of a class; classes created by a function on each call get numbers."""
    plain = name = f"{function.__module__}:{function.__qualname__}"
    number = 1
    while CLASSES.setdefault(name, function) is not function:
        number += 1
        name = f"{plain}#{number}"
    return name
