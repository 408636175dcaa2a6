"""Call the custom autograd functions of a model unchanged from a stage.

In: the name of a class, and the arguments of its `apply`. Out: its result, with the backward of the class.

    y = apply_function("my.layers:ScaleGradient", x, 0.5)
"""

from __future__ import annotations

from typing import Any

from autoptd.ir.own_functions import class_of


def apply_function(name: str, *args: Any) -> Any:
    """Call `apply` of a class, "module:Outer.Function"."""
    return class_of(name).apply(*args)
