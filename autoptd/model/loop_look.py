"""Look at what a loop does with the user's model between two steps, while it makes its first update.

In: the model, and the `LoopWatch` of its loop. Out: a warning where the loop clips, measures or averages what the model has,
which is not trained; an error where it runs backward from the loss of `pm.step`.

From the end of a `pm.step` to the next, Python calls `LoopLook` for each function that starts on this thread
(`sys.setprofile`), in libraries as well; later steps cost nothing.
"""

from __future__ import annotations

import dis
import inspect
import re
import sys
import weakref
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Protocol

import torch
from torch import nn

from autoptd.errors import PlanError
from autoptd.runtime.params.guard import AVERAGES, CLIPPING

INITIAL = "the model that was handed to parallelize has the weights from before training; ranks train copies. Remedy: "
OTHER_GRADIENTS = (
    "gradients of model.parameters(): the model that was handed to parallelize has none, and nothing is clipped or measured. "
    "Remedy: pm.clip_grad_norm_(max_norm), which returns the norm, or pm.clip_grad_value_(clip_value); pm.gradients() has all"
)
AVERAGE = (
    f"average of weights: {INITIAL}weights = pm.state_dict() on every rank, and on rank 0 model.load_state_dict(weights) "
    "before the average is updated"
)
# Calls, of functions of C as well, after which the look ends: less than a tenth of a second.
MOST_EVENTS = 200_000
# What writes to an average in a loop over parameters, and methods of a class that keeps one.
WRITES = {"lerp_", "mul_", "copy_"}
KEEPS_AVERAGE = re.compile(r"(EMA|Ema|Average|SWA)\w*\.\w+$")
# File, line, and module.
Place = tuple[str, int, str]


class Listener(Protocol):
    """Receives the findings of a look."""

    def is_stale(self) -> bool:
        """Tell whether others were trained while the model kept its weights."""

    def tell(self, text: str, place: Place | None = None) -> None:
        """Warn once."""


class LoopLook:
    """What one loop does with the model between two steps; keeps nothing alive."""

    def __init__(self, watch: Listener, model: nn.Module) -> None:
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
            # Python 3.11 may call what it has freed: if the collector runs just before the call, and code that runs then
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
        home, parameters = home_of(reader), list(frame.f_locals["self"].parameters())
        is_users = not home.startswith(("torch.", "autoptd."))
        if home == CLIPPING or (is_users and "grad" in names):
            self._reads_gradients(parameters, reader)
            return
        is_average = bool(names & WRITES) or KEEPS_AVERAGE.search(reader.f_code.co_qualname) is not None
        if (is_average if is_users else home == AVERAGES) and watch.is_stale() and self._has_any(parameters):
            self._average = self._average or place_of(reader)

    def _clips(self, frame: FrameType) -> None:
        given = frame.f_locals.get("parameters")
        # A generator reads them later.
        self._reads_gradients(given if isinstance(given, (list, tuple)) else [], frame)

    def _reads_gradients(self, parameters: Iterable[torch.Tensor], frame: FrameType) -> None:
        watch = self._watch()
        # A model may be trained as well, by `model(...)`.
        if watch is not None and all(x.grad is None for x in parameters) and self._has_any(parameters):
            watch.tell(OTHER_GRADIENTS, place_of(frame))

    def _goes_backward(self, frame: FrameType) -> None:
        loss = frame.f_locals["self"]
        if not loss.requires_grad and not loss.ndim:
            fact, remedy = "pm.step has run backward already, and its loss has no graph", "leave it out"
            raise PlanError("loss.backward()", fact, remedy)

    def _has_any(self, parameters: Iterable[torch.Tensor]) -> bool:
        model = self._model()
        own = {id(x) for x in model.parameters()} if model is not None else set()
        return any(id(x) in own for x in parameters)


def outside(frame: FrameType, *inner: str) -> FrameType:
    """Return the nearest frame, from this one on, of a module whose name does not begin so."""
    while home_of(frame).startswith(inner) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def place_of(frame: FrameType) -> Place:
    """Return the line of the user's script that runs."""
    user = outside(frame, "torch.", "autoptd.", "contextlib", "accelerate.", "transformers.")
    return user.f_code.co_filename, user.f_lineno, home_of(user)


def home_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _names_in_loop(frame: FrameType) -> set[str]:
    """Return the attributes that are read in the body of the `for` that a frame is at; `x.data = ...` is a copy."""
    steps = list(dis.get_instructions(frame.f_code))
    end = next((x.argval for x in steps if x.offset == frame.f_lasti and x.opname == "FOR_ITER"), 0)
    body = [x for x in steps if frame.f_lasti < x.offset < end]
    written = {"copy_" for x in body if x.opname == "STORE_ATTR" and x.argval == "data"}
    return written | {x.argval for x in body if x.opname in ("LOAD_ATTR", "LOAD_METHOD")}


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
__all__ = ["AVERAGE", "INITIAL", "LoopLook", "Place", "home_of", "outside", "place_of"]
