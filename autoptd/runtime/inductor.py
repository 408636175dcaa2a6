"""Distinct layers compiled by torch's compiler (`fuse="inductor"`): one compile for all layers alike, whatever their number.

What communicates, draws random numbers or hangs a hook on a backward is left as it is, so a layer is compiled in the pieces
between. The compiler runs at the first step; how long that took is told once, on stderr.
"""

from __future__ import annotations

import types
from typing import Any

import torch


def compile_layers(stage: type[Any], module: types.ModuleType) -> None:
    """Compile the layers of an emitted stage class in place; its forward, where it has no layer that repeats.

    `module` is the emitted one, whose name `rt` is the runtime.
    """
    runtime = types.SimpleNamespace(**vars(module.rt))
    for name, function in vars(module.rt).items():
        if isinstance(function, types.FunctionType):
            setattr(runtime, name, torch.compiler.disable(function))
    module.rt = runtime  # type: ignore[attr-defined]
    layers = [name for name in vars(stage) if name.startswith("layer")] or ["forward"]
    for name in layers:
        setattr(stage, name, torch.compile(vars(stage)[name], dynamic=False))
