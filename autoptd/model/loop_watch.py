"""Notice loops that are ported by half, and say so once: they train nothing, or something else, without a word.

In: a `ParallelModel`, its optimizers, and the user's own model. Out: a warning where an optimizer steps without gradients,
since the loop calls the model instead of `pm.step`; where gradients of two `pm.step` add up, or no `pm.optimizer` steps; and
where the user's model, which is not trained, is called or asked for a state dict, or a loop clips or averages what it has.

What a loop does with the model is seen while it makes its first update. From the end of a `pm.step` to the next, Python calls
`LoopLook` for each function that starts on this thread (`sys.setprofile`), in libraries as well; later steps cost nothing.

    watch = LoopWatch(speaks=True)
    watch.begin(parameters)                         # by pm.step, before it runs
    watch.end()                                     # and once gradients were added
    watch.follow(optimizer)                         # by pm.optimizer
    watch.guard(model)                              # by parallelize
"""

from __future__ import annotations

import dis
import inspect
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from autoptd.errors import PlanError
from autoptd.ir.buffers import same_entries
from autoptd.model.loop_tensors import Weights
from autoptd.runtime.params.guard import AVERAGES, CLIPPING, unguarded

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
INITIAL = "the model that was handed to parallelize has the weights from before training; ranks train copies. Remedy: "
STATE = (
    f"model.state_dict(): {INITIAL}weights = pm.state_dict() on every rank, which rank 0 saves; or "
    "pm.save_pretrained(folder)"
)
FORWARD = (
    f"model(...): {INITIAL}pm.eval_step(*pm.local_batch(x, y)) for a loss; else weights = pm.state_dict() on every rank, "
    "and on rank 0 model.load_state_dict(weights) first"
)
OTHER_GRADIENTS = (
    "gradients of model.parameters(): the model that was handed to parallelize has none, and nothing is clipped or measured. "
    "Remedy: pm.clip_grad_norm_(max_norm), which returns the norm, or pm.clip_grad_value_(clip_value); pm.gradients() has all"
)
AVERAGE = (
    f"average of weights: {INITIAL}weights = pm.state_dict() on every rank, and on rank 0 model.load_state_dict(weights) "
    "before the average is updated"
)
# Code that asks a model for its state dict on behalf of AutoPTD.
OWN = ("autoptd.", "torch.export.", "torch._export.", "torch._dynamo.", "torch.fx.", "torch._functorch.")
# Calls, of functions of C as well, after which the look ends: less than a tenth of a second.
MOST_EVENTS = 200_000
# What writes to an average in a loop over parameters, and methods of a class that keeps one.
WRITES = {"lerp_", "mul_", "copy_"}
KEEPS_AVERAGE = re.compile(r"(EMA|Ema|Average|SWA)\w*\.\w+$")
# File, line, and module.
Place = tuple[str, int, str]


class LoopWatch:
    """What one loop has called since the last update; `speaks` on one rank of all."""

    def __init__(self, *, speaks: bool) -> None:
        self._speaks = speaks
        # Steps, and updates of all optimizers; steps since gradients were last used or forgotten.
        self.steps = self.updates = self._unused = 0
        self._told = set[str]()
        self._has_optimizer = False
        # Gradients: whether an update has used them, and another step has added to them; whether their values were read.
        self._are_kept = self._are_mixed = self._has_read = False
        self._look: LoopLook | None = None
        # Of the model that was handed over, while it has them.
        self._first: Weights | None = None
        self._model: Callable[[], nn.Module | None] = lambda: None

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

    def guard(self, model: nn.Module) -> None:
        """Warn where the user takes what `model` has for what was trained, after the first update."""
        self._look, self._first, self._model = LoopLook(self, model), Weights(model), weakref.ref(model)
        for handle in (
            model.register_state_dict_pre_hook(AtStateDict(self, model)),  # type: ignore[no-untyped-call]
            model.register_forward_pre_hook(AtForward(self, model)),
        ):
            # A model may be parallelized often.
            weakref.finalize(self, handle.remove).atexit = False

    def is_due(self, text: str) -> bool:
        """Tell whether nobody was told `text`, and the model is stale."""
        return text not in self._told and self.is_stale()

    def is_stale(self) -> bool:
        """Tell whether others were trained while the model kept its weights; what is loaded into it is the user's business."""
        if not self.updates or self._first is None:
            return False
        model = self._model()
        if model is None or self._first.written(model):
            self._first = None
        return self._first is not None

    def tell(self, text: str, place: Place | None = None) -> None:
        """Warn once; of what a line of the user's does, or the one that is running."""
        is_new = text not in self._told
        self._told.add(text)
        if self._speaks and is_new:
            warnings.warn_explicit(text, UserWarning, *(place or _place_of(sys._getframe())))


class LoopLook:
    """What one loop does with the model between two steps; keeps nothing alive."""

    def __init__(self, watch: LoopWatch, model: nn.Module) -> None:
        self._watch, self._model = weakref.ref(watch), weakref.ref(model)
        self._left, self._is_on = MOST_EVENTS, False
        # Where one is made, if the loop does not write to the model instead, which shows later.
        self._average: Place | None = None
        self._itself: LoopLook | None = None

    def start(self) -> None:
        """Look at this thread, unless a profiler does."""
        if sys.getprofile() is None:
            self._is_on = True
            sys.setprofile(self)

    def stop(self) -> bool:
        """End the look, if there was one; tell whether there was."""
        was_on, self._is_on = self._is_on, False
        if sys.getprofile() is self:
            sys.setprofile(None)
        watch = self._watch()
        if self._average is not None and watch is not None and watch.is_stale():
            watch.tell(AVERAGE, self._average)
        self._average = None
        return was_on

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        self._left -= 1
        if self._left < 0 or not self._is_on or self._watch() is None:
            # Python 3.11 may call what it has freed: where the collector runs as it is about to call this, and what runs then
            # ends the look. So this lives until the next collection.
            self._itself = self
            sys.setprofile(None)
        elif event == "call" and (known := SEEN.get(id(frame.f_code))) is not None:
            known[1](self, frame)

    def _reads_parameters(self, frame: FrameType) -> None:
        watch, reader, names = self._watch(), frame, set[str]()
        # It goes on for each of them.
        if watch is None or frame.f_lineno != frame.f_code.co_firstlineno:
            return
        while reader.f_back is not None and (reader.f_code in READS or reader.f_code.co_name == "<genexpr>"):
            reader = reader.f_back
            names |= _names_in_loop(reader)
        home, parameters = _home_of(reader), list(frame.f_locals["self"].parameters())
        is_users = not home.startswith(("torch.", "autoptd."))
        if home == CLIPPING or (is_users and "grad" in names):
            self._reads_gradients(parameters, reader)
            return
        is_average = bool(names & WRITES) or KEEPS_AVERAGE.search(reader.f_code.co_qualname) is not None
        if (is_average if is_users else home == AVERAGES) and watch.is_stale() and self._has_any(parameters):
            self._average = self._average or _place_of(reader)

    def _clips(self, frame: FrameType) -> None:
        given = frame.f_locals.get("parameters")
        # A generator reads them later.
        self._reads_gradients(given if isinstance(given, (list, tuple)) else [], frame)

    def _reads_gradients(self, parameters: Iterable[torch.Tensor], frame: FrameType) -> None:
        watch = self._watch()
        # A model may be trained as well, by `model(...)`.
        if watch is not None and all(x.grad is None for x in parameters) and self._has_any(parameters):
            watch.tell(OTHER_GRADIENTS, _place_of(frame))

    def _goes_backward(self, frame: FrameType) -> None:
        loss = frame.f_locals["self"]
        if not loss.requires_grad and not loss.ndim:
            fact, remedy = "pm.step has run backward already, and its loss has no graph", "leave it out"
            raise PlanError("loss.backward()", fact, remedy)

    def _has_any(self, parameters: Iterable[torch.Tensor]) -> bool:
        model = self._model()
        own = {id(x) for x in model.parameters()} if model is not None else set()
        return any(id(x) in own for x in parameters)


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


def _outside(frame: FrameType, *inner: str) -> FrameType:
    """Return the nearest frame, from this one on, of a module whose name does not begin so."""
    while _home_of(frame).startswith(inner) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _place_of(frame: FrameType) -> Place:
    """Return the line of the user's script that runs."""
    user = _outside(frame, "torch.", "autoptd.", "contextlib", "accelerate.", "transformers.")
    return user.f_code.co_filename, user.f_lineno, _home_of(user)


def _home_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _names_in_loop(frame: FrameType) -> set[str]:
    """Return the attributes that are read in the body of the `for` that a frame is at; `x.data = ...` is a copy."""
    steps = list(dis.get_instructions(frame.f_code))
    end = next((x.argval for x in steps if x.offset == frame.f_lasti and x.opname == "FOR_ITER"), 0)
    body = [x for x in steps if frame.f_lasti < x.offset < end]
    written = {"copy_" for x in body if x.opname == "STORE_ATTR" and x.argval == "data"}
    return written | {x.argval for x in body if x.opname in ("LOAD_ATTR", "LOAD_METHOD")}


def _are_same(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(model.parameters(), other.parameters(), strict=False)
    return all(x.device == y.device and not x.is_meta and same_entries(x, y) for x, y in pairs)


@unguarded()
def _has_gradients(tensors: Iterable[torch.Tensor], by_value: bool = False) -> bool:
    return any(x.grad is not None and (not by_value or bool(x.grad.any())) for x in tensors)


def _is_own_call() -> bool:
    """Tell whether the nearest caller outside of this file and of torch's modules is AutoPTD, or torch on its behalf."""
    return _home_of(_outside(sys._getframe(), __name__, "torch.nn.", "torch.utils.")).startswith(OWN)


READS = (nn.Module.named_parameters.__code__, nn.Module.parameters.__code__)
# By the identity of code that stays alive: code objects hash slowly.
SEEN: dict[int, tuple[CodeType, Callable[[LoopLook, FrameType], None]]] = {
    id(code := inspect.unwrap(function).__code__): (code, see)
    for function, see in (
        (nn.Module.named_parameters, LoopLook._reads_parameters),
        (torch.nn.utils.clip_grad_norm_, LoopLook._clips),
        (torch.nn.utils.clip_grad_value_, LoopLook._clips),
        (torch.Tensor.backward, LoopLook._goes_backward),
    )
}
__all__ = ["LoopWatch"]
