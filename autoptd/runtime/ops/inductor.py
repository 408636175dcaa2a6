"""Distinct layers compiled by torch's compiler (`fuse="inductor"`): one compilation for all equal layers.

In: an emitted class. Out: the same class with compiled layers. Functions of the runtime (communication, random numbers,
hooked backwards) are not compiled, so a layer is compiled in the pieces between them. Its sites name layers by a star
(`Stage.is_compiled`): every different text would cause another compilation. The compiler runs at the first step; the
time that takes is printed once, on stderr.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch


def compile_layers(owner: type[Any], module: types.ModuleType, *, is_whole: bool = False) -> None:
    """Compile the layers among the methods of an emitted class, in place; with `is_whole`, its forward if it has none.

    `module` is the emitted one, whose name `rt` is the runtime.
    """
    # A copy of the runtime for this module only, with functions that the compiler skips.
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
    """Compile a method once for all stages: `self` becomes an object of their base class.

    Otherwise the compiler would recompile for every type of `self`.
    """
    compiled = torch.compile(method, dynamic=False)

    @functools.wraps(method)
    def call(self: Any, *args: Any) -> Any:
        stage = object.__new__(base)
        stage.__dict__ = self.__dict__
        return compiled(stage, *args)

    return call
