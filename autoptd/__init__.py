"""Write the model for one device; AutoPTD trains it on any (t, p, d).

pm = autoptd.parallelize(model, t=2, p=2, d=2, example_inputs=(x, y))
opt = pm.optimizer(torch.optim.AdamW, lr=3e-4)
loss = pm.step(*pm.local_batch(x, y)); opt.step(); opt.zero_grad()

Public names are loaded at their first use, so that `autoptd --help` need not wait for torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoptd.api import Machine, ParallelModel, Program, compile, parallelize, verify
    from autoptd.compiler.peak_memory import peak_memory
    from autoptd.errors import AutoptdError, InternalError, PlanError, RuntimeFault, TraceError
    from autoptd.model.batches import Batches, ignore_signals
    from autoptd.options import (
        ContextParallel,
        Fuse,
        LinearHooks,
        LossScale,
        RankOptions,
        Recompute,
        Shapes,
        Zero,
    )
    from autoptd.options.buckets import Buckets
    from autoptd.passes.ops.unlisted import register_rule
    from autoptd.subject.initial.deferred import deferred, materialize
    from autoptd.wings.planner.plan import plan
    from autoptd.wings.planner.predict import predict
    from autoptd.wings.planner.traced import predict_program
    from autoptd.wings.reports.diff import diff
    from autoptd.wings.reports.progress import Progress

__version__ = "0.1.0"

HOMES = {  # module -> the public names that it has
    "api": ("Machine", "ParallelModel", "Program", "compile", "parallelize", "verify"),
    "model.batches": ("Batches", "ignore_signals"),
    "subject.initial.deferred": ("deferred", "materialize"),
    "errors": ("AutoptdError", "InternalError", "PlanError", "RuntimeFault", "TraceError"),
    "options": (
        "Buckets",
        "ContextParallel",
        "Fuse",
        "LinearHooks",
        "LossScale",
        "RankOptions",
        "Recompute",
        "Shapes",
        "Zero",
    ),
    "passes.ops.unlisted": ("register_rule",),
    "subject.per_microbatch": ("per_microbatch",),
    "wings.planner.plan": ("plan",),
    "wings.planner.predict": ("predict",),
    "wings.planner.traced": ("predict_program",),
    "compiler.peak_memory": ("peak_memory",),
    "wings.reports.diff": ("diff",),
    "wings.reports.progress": ("Progress",),
}
HOME_OF = {name: home for home, names in HOMES.items() for name in names}

__all__ = [
    "AutoptdError",
    "Batches",
    "Buckets",
    "ContextParallel",
    "Fuse",
    "InternalError",
    "LinearHooks",
    "LossScale",
    "Machine",
    "ParallelModel",
    "PlanError",
    "Program",
    "Progress",
    "RankOptions",
    "Recompute",
    "RuntimeFault",
    "Shapes",
    "TraceError",
    "Zero",
    "compile",
    "deferred",
    "diff",
    "ignore_signals",
    "materialize",
    "parallelize",
    "peak_memory",
    "per_microbatch",
    "plan",
    "predict",
    "predict_program",
    "register_rule",
    "verify",
]


class _Face(ModuleType):
    """This package as a module: a public name is always what its home says, a submodule of the same name never hides it."""

    def __getattr__(self, name: str) -> Any:
        if name not in HOME_OF:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        # The modules of a compiler, and torch's own for tracing, are made of objects that stay.
        # Imported here: it loads `logging`, which `import autoptd` does without.
        from autoptd.ir.scopes import paused_collection

        with paused_collection():
            found = getattr(import_module(f"{self.__name__}.{HOME_OF[name]}"), name)
        super().__setattr__(name, found)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        """The import system files the submodule `verify` here: the function of that name stays."""
        if not (name in HOME_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        """By its name, as modules are for pickles of functions that use it: cloudpickle's, of Ray and submitit."""
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Face
