"""Custom autograd functions of a model that a stage calls as they are.

In: a class by its name, and the arguments of its `apply`. Out: what that gives, with the backward that the class has.

    y = apply_function("my.layers:ScaleGradient", x, 0.5)
"""

from __future__ import annotations

from typing import Any

from autoptd.ir.own_functions import class_of


def apply_function(name: str, *args: Any) -> Any:
    """Call `apply` of a class, "module:Outer.Function"."""
    return class_of(name).apply(*args)
