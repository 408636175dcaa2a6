"""Distinct layers compiled by torch's compiler (`fuse="inductor"`): one compile for all layers alike, whatever their number.

What communicates, draws random numbers or hangs a hook on a backward is left as it is, so a layer is compiled in the pieces
between. Its sites name layers by a star (`Stage.is_compiled`): another text for every layer would be another compile. The
compiler runs at the first step; how long that took is told once, on stderr.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch


def compile_layers(owner: type[Any], module: types.ModuleType, *, is_whole: bool = False) -> None:
    """Compile the layers among the methods of an emitted class in place; `is_whole`: its forward, where it has no layer.

    `module` is the emitted one, whose name `rt` is the runtime.
    """
    runtime = types.SimpleNamespace(**vars(module.rt))
    for name, function in vars(module.rt).items():
        if isinstance(function, types.FunctionType):
            setattr(runtime, name, torch.compiler.disable(function))
    module.rt = runtime  # type: ignore[attr-defined]
    methods = [name for name, value in vars(owner).items() if isinstance(value, types.FunctionType)]
    layers = [name for name in methods if name.startswith("layer")]
    base = owner.__mro__[1]
    for name in layers:
        setattr(owner, name, _compiled(vars(owner)[name], base))
    if is_whole and not layers:
        owner.forward = torch.compile(owner.forward, dynamic=False)


def _compiled(method: Callable[..., Any], base: type[Any]) -> Callable[..., Any]:
    """A method compiled once for all stages: for each type of `self` the compiler would begin again, so it sees their base."""
    made = torch.compile(method, dynamic=False)

    @functools.wraps(method)
    def call(self: Any, *args: Any) -> Any:
        stage = object.__new__(base)
        stage.__dict__ = self.__dict__
        return made(stage, *args)

    return call
