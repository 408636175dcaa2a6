"""Notice loops that are ported by half, and say so once: they train nothing, or something else, without a word.

In: a `ParallelModel`, its optimizers, and the user's own model. Out: a warning where an optimizer steps without gradients,
since the loop calls the model instead of `pm.step`; where gradients of two `pm.step` add up, or no `pm.optimizer` steps; and
where the user's model, which is not trained, is written to, called or asked for a state dict, or a loop clips or averages what
it has (`loop_look.py`).

    watch = LoopWatch(model, speaks=True)           # by parallelize
    watch.started()                                 # once the ranks have its weights
    watch.begin(parameters)                         # by pm.step, before it runs
    watch.end()                                     # and once gradients were added
    watch.follow(optimizer)                         # by pm.optimizer
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from autoptd.ir.buffers import same_entries
from autoptd.model.loop_look import AVERAGE, INITIAL, LoopLook, Place, home_of, outside, place_of
from autoptd.model.loop_tensors import Weights
from autoptd.model.optimizer_request import OwnParameters
from autoptd.runtime.params.guard import unguarded

NO_GRADIENTS = (
    "optimizer.step(): there are no gradients, and nothing is trained: the loop calls the model, not pm.step. "
    "Remedy: loss = pm.step(*pm.local_batch(x, y)) in place of the forward and loss.backward()"
)
ADDS_UP = (
    "pm.step: the gradients of two steps add up, as neither optimizer.step() nor zero_grad() came between. Remedy: one pm.step "
    "of the whole batch, which parallelize(..., num_microbatches=) divides, in place of accumulation in the loop; or nothing, "
    "if sums over calls are meant"
)
KEPT = (
    "optimizer.step(): gradients still have those of the last update in them; model.zero_grad() only forgets those of the "
    "model that was handed to parallelize. Remedy: opt.zero_grad() of opt = pm.optimizer(torch.optim.AdamW, lr=...)"
)
NO_OPTIMIZER = (
    "pm.step: the gradients of two steps add up, and pm.optimizer was never called: an optimizer over model.parameters() steps "
    "the model that was handed to parallelize, and ranks train copies. Remedy: opt = pm.optimizer(torch.optim.AdamW, lr=...)"
)
STATE = (
    f"model.state_dict(): {INITIAL}weights = pm.state_dict() on every rank, which rank 0 saves; or "
    "pm.save_pretrained(folder)"
)
FORWARD = (
    f"model(...): {INITIAL}pm.eval_step(*pm.local_batch(x, y)) for a loss; else weights = pm.state_dict() on every rank, "
    "and on rank 0 model.load_state_dict(weights) first"
)
WRITTEN = (
    "of the model that was handed to parallelize: the loop has written to them, which the ranks do not see: they train copies. "
    "Remedy: write to pm.parameters() under torch.no_grad(), or pm.load_state_dict(...)"
)
# How many names it lists.
MOST_NAMED = 8
# Code that asks a model for its state dict on behalf of AutoPTD.
OWN = ("autoptd.", "torch.export.", "torch._export.", "torch._dynamo.", "torch.fx.", "torch._functorch.")


class LoopWatch:
    """What one loop has called since the last update, and done to `model`, its own; `speaks` on one rank of all."""

    def __init__(self, model: nn.Module | None = None, *, speaks: bool = False) -> None:
        self._speaks = speaks
        self.names = OwnParameters(model)
        # Steps, and updates of all optimizers; steps since gradients were last used or forgotten.
        self.steps = self.updates = self._unused = 0
        self._told = set[str]()
        self._has_optimizer = False
        # Gradients: whether an update has used them, and another step has added to them; whether their values were read.
        self._are_kept = self._are_mixed = self._has_read = False
        self._look: LoopLook | None = None
        # Those that the ranks have copies of, and how often weights had gone from them to the user or back at the last check.
        self._weights: Weights | None = None
        self._exchanges = 0
        # Whether the user has written to them, and the names that were not reported yet.
        self._are_the_users, self._written = False, dict[str, None]()
        self._model: Callable[[], nn.Module | None] = lambda: None
        if model is not None:
            self._look, self._model = LoopLook(self, model), weakref.ref(model)
            for handle in (
                model.register_state_dict_pre_hook(AtStateDict(self, model)),  # type: ignore[no-untyped-call]
                model.register_forward_pre_hook(AtForward(self, model)),
            ):
                # A model may be parallelized often.
                weakref.finalize(self, handle.remove).atexit = False

    def started(self) -> None:
        """Note that the ranks have copies of the model's weights."""
        if (model := self._model()) is not None:
            self._weights = Weights(model)

    def begin(self, tensors: Iterable[torch.Tensor]) -> None:
        """Look before `pm.step` runs; `tensors` of this process have the gradients, and are seldom looked at."""
        if self._look is not None and self._look.stop() and self.updates:
            self._look = None
        # A loop may set them to None by hand.
        text = ADDS_UP if self._has_optimizer else NO_OPTIMIZER
        if self._unused and text not in self._told and _has_gradients(tensors):
            self.tell(text)
        # Or to zero: values are read once.
        elif self._are_kept and not self._has_read:
            self._has_read, self._are_mixed = True, _has_gradients(tensors, by_value=True)

    def end(self) -> None:
        """Note that `pm.step` has added gradients."""
        self.steps, self._unused = self.steps + 1, self._unused + 1
        if self._look is not None:
            self._look.start()

    def close(self) -> None:
        """Note that the loop is over."""
        if self._look is not None:
            self._look.stop()

    def clear(self) -> None:
        """Note that an optimizer forgets gradients."""
        self._unused, self._are_kept, self._are_mixed = 0, False, False

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
        if self._are_mixed:
            self.tell(KEPT)
        self.updates, self._unused, self._are_kept = self.updates + bool(self.steps), 0, self.steps > 0

    def is_due(self, text: str) -> bool:
        """Tell whether `text` was not reported yet, and the model is stale."""
        return text not in self._told and self.is_stale()

    def is_stale(self) -> bool:
        """Tell whether others were trained while the model kept its weights; one that the user has loaded is not stale."""
        return self.updates > 0 and self._has_weights() and not self._are_the_users

    def _has_weights(self) -> bool:
        """Tell whether the model is alive and has values; note writes to them."""
        if (model := self._model()) is None or self._weights is None:
            return False
        self._written |= dict.fromkeys(self._weights.written(model))
        self._are_the_users |= bool(self._written)
        return True

    def check_weights(self, site: str, exchanges: int) -> None:
        """Warn once where the loop has written to the model since the last check, unless weights of the ranks."""
        if not self._speaks or WRITTEN in self._told or not self._has_weights():
            return
        written, self._written = list(self._written), {}
        if written and exchanges == self._exchanges:
            self._told.add(WRITTEN)
            self.tell(f"{site}: {', '.join(written[:MOST_NAMED])} {WRITTEN}")
        self._exchanges = exchanges

    def tell(self, text: str, place: Place | None = None) -> None:
        """Warn once; of what a line of the user's does, or the one that is running."""
        is_new = text not in self._told
        self._told.add(text)
        if self._speaks and is_new:
            warnings.warn_explicit(text, UserWarning, *(place or place_of(sys._getframe())))


class AtForward:
    """The hook on the user's model: keeps nothing alive, and a copy of the model, or one that is pickled, has it no more."""

    text = FORWARD

    def __init__(self, watch: LoopWatch, given: nn.Module) -> None:
        self._watch, self._given = weakref.ref(watch), weakref.ref(given)

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        watch, given = self._watch(), self._given()
        if watch is None or given is None or not watch.is_due(self.text) or _is_own_call():
            return
        if self._is_taken(module, given):
            watch.tell(self.text)

    def _is_taken(self, module: nn.Module, given: nn.Module) -> bool:
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        # `{}.get(module, args)`: what such a hook returns are the arguments of the forward.
        return getattr, ({}, "get")


class AtStateDict(AtForward):
    """The same for state dicts, on copies as well: early ones, from before training, are averages once they were written to."""

    def __init__(self, watch: LoopWatch, given: nn.Module, is_early: bool = False) -> None:
        super().__init__(watch, given)
        self.text, self._is_early = AVERAGE if is_early else STATE, is_early

    def _is_taken(self, module: nn.Module, given: nn.Module) -> bool:
        can_be = not self._is_early or any(x._version for x in module.parameters() if not x.is_inference())
        return can_be and (module is given or _are_same(module, given))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        watch, given = self._watch(), self._given()
        if watch is None or given is None:
            return partial(slice)
        return AtStateDict(watch, given, self._is_early or not watch.updates)

    def __reduce__(self) -> tuple[Any, ...]:
        # Something that takes the arguments of a hook, does nothing, and is known where AutoPTD is not installed.
        return partial, (slice,)


def _are_same(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(model.parameters(), other.parameters(), strict=False)
    return all(x.device == y.device and not x.is_meta and same_entries(x, y) for x, y in pairs)


@unguarded()
def _has_gradients(tensors: Iterable[torch.Tensor], by_value: bool = False) -> bool:
    return any(x.grad is not None and (not by_value or bool(x.grad.any())) for x in tensors)


def _is_own_call() -> bool:
    """Tell whether the nearest caller outside of this file and of torch's modules is AutoPTD, or torch on its behalf."""
    return home_of(outside(sys._getframe(), __name__, "torch.nn.", "torch.utils.")).startswith(OWN)


__all__ = ["LoopWatch"]
