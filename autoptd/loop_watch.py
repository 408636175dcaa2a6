"""Notice loops that are ported by half, and say so once: they train nothing, or something else, without a word.

In: a `ParallelModel`, its optimizers, and the user's own model. Out: a warning where an optimizer steps without gradients,
since the loop calls the model instead of `pm.step`; where gradients of two `pm.step` add up, or no `pm.optimizer` steps; and
where the user's model, which has the weights from before training, is called or asked for a state dict.

    watch = LoopWatch(speaks=True)
    watch.begin(parameters)                         # by pm.step, before it runs
    watch.end()                                     # and once gradients were added
    watch.follow(optimizer)                         # by pm.optimizer
    watch.guard(model)                              # by parallelize
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from autoptd.runtime.guard import unguarded

NO_GRADIENTS = (
    "optimizer.step(): there are no gradients, and nothing is trained: the loop calls the model, not pm.step. "
    "Remedy: loss = pm.step(*pm.local_batch(x, y)) in place of the forward and loss.backward()"
)
ADDS_UP = (
    "pm.step: the gradients of two steps add up, as neither optimizer.step() nor zero_grad() came between. Remedy: one pm.step "
    "of the whole batch, which parallelize(..., num_microbatches=) divides, in place of accumulation in the loop; or nothing, "
    "if sums over calls are meant"
)
NO_OPTIMIZER = (
    "pm.step: the gradients of two steps add up, and pm.optimizer was never called: an optimizer over model.parameters() steps "
    "the model that was handed to parallelize, and ranks train copies. Remedy: opt = pm.optimizer(torch.optim.AdamW, lr=...)"
)
INITIAL = "the model that was handed to parallelize has the weights from before training; ranks train copies. Remedy: "
STATE = (
    f"model.state_dict(): {INITIAL}weights = pm.state_dict() on every rank, which rank 0 saves; or "
    "pm.save_pretrained(folder)"
)
FORWARD = (
    f"model(...): {INITIAL}pm.eval_step(*pm.local_batch(x, y)) for a loss; else weights = pm.state_dict() on every rank, "
    "and on rank 0 model.load_state_dict(weights) first"
)
# Code that asks a model for its state dict on behalf of AutoPTD.
OWN = ("autoptd.", "torch.export.", "torch._export.", "torch._dynamo.", "torch.fx.", "torch._functorch.")


class LoopWatch:
    """What one loop has called since the last update; `speaks` on one rank of all."""

    def __init__(self, *, speaks: bool) -> None:
        self._speaks = speaks
        # Steps, and updates of all optimizers; steps since gradients were last used or forgotten.
        self.steps = self.updates = self._unused = 0
        self._told = set[str]()
        self._has_optimizer = False

    def begin(self, tensors: Iterable[torch.Tensor]) -> None:
        """Look before `pm.step` runs; `tensors` of this process have the gradients, and are seldom looked at."""
        # A loop may set them to None by hand.
        text = ADDS_UP if self._has_optimizer else NO_OPTIMIZER
        if self._unused and text not in self._told and _has_gradients(tensors):
            self.tell(text)

    def end(self) -> None:
        """Note that `pm.step` has added gradients."""
        self.steps, self._unused = self.steps + 1, self._unused + 1

    def clear(self) -> None:
        """Note that an optimizer forgets gradients."""
        self._unused = 0

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Take notice of the steps of an optimizer; after what else is hooked to them."""
        self._has_optimizer = True
        optimizer.register_step_pre_hook(self._before_update)

    def _before_update(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        # A step that is skipped does not see its gradients, and a closure makes them only now.
        is_skipped = getattr(optimizer, "step_was_skipped", False)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not self._unused and not is_skipped and closure is None and NO_GRADIENTS not in self._told:
            tensors = [x for group in optimizer.param_groups for x in group["params"]]
            # A rank may hold none of the optimizer's parameters.
            if tensors and not _has_gradients(tensors):
                self.tell(NO_GRADIENTS)
        self.updates, self._unused = self.updates + bool(self.steps), 0

    def guard(self, model: nn.Module) -> None:
        """Warn where the user calls `model`, or asks it for its state dict, after the first update."""
        for handle in (
            model.register_state_dict_pre_hook(AtStateDict(self, model, STATE)),  # type: ignore[no-untyped-call]
            model.register_forward_pre_hook(AtForward(self, model, FORWARD)),
        ):
            # A model may be parallelized often.
            weakref.finalize(self, handle.remove).atexit = False

    def is_due(self, text: str) -> bool:
        """Tell whether there were updates, and nobody was told `text`."""
        return bool(self.updates) and text not in self._told

    def tell(self, text: str) -> None:
        """Warn once, with the line of the user's script."""
        if text not in self._told:
            self._told.add(text)
            if self._speaks:
                warnings.warn(text, stacklevel=_depth_of_caller())


class AtStateDict:
    """The hook on the user's model: keeps nothing alive, and a copy of the model, or one that is pickled, has it no more."""

    def __init__(self, watch: LoopWatch, model: nn.Module, text: str) -> None:
        self._watch, self._versions, self._text = weakref.ref(watch), _versions(model), text

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        watch = self._watch()
        if watch is None or not watch.is_due(self._text):
            return
        # Weights that were loaded into it since are the user's business.
        if _versions(module) == self._versions and not _is_own_call():
            watch.tell(self._text)

    def __reduce__(self) -> tuple[Any, ...]:
        # Something that takes the arguments of a hook, does nothing, and is known where AutoPTD is not installed.
        return partial, (slice,)


class AtForward(AtStateDict):
    """The same, where it is called."""

    def __reduce__(self) -> tuple[Any, ...]:
        # `{}.get(module, args)`: what such a hook returns are the arguments of the forward.
        return getattr, ({}, "get")


def _versions(model: nn.Module) -> int:
    return sum(x._version for x in model.parameters() if not x.is_inference())


@unguarded()
def _has_gradients(tensors: Iterable[torch.Tensor]) -> bool:
    return any(x.grad is not None for x in tensors)


def _names_of_callers() -> list[str]:
    """Return the names of the modules whose functions are under way, the innermost first."""
    names, frame = [], sys._getframe(1)
    while frame is not None:
        names.append(str(frame.f_globals.get("__name__", "")))
        frame = frame.f_back  # type: ignore[assignment]
    return names


def _is_own_call() -> bool:
    """Tell whether the nearest caller outside of this file and of torch's modules is AutoPTD, or torch on its behalf."""
    inner = (__name__, "torch.nn.", "torch.utils.")
    caller = next((name for name in _names_of_callers() if not name.startswith(inner)), "")
    return caller.startswith(OWN)


def _depth_of_caller() -> int:
    """Return the `stacklevel` at which `tell` warns: the line of the user's script."""
    names = _names_of_callers()[1:]
    inner = ("autoptd.", "torch.", "contextlib")
    return next((depth for depth, name in enumerate(names, 1) if not name.startswith(inner)), 1)


__all__ = ["LoopWatch"]
