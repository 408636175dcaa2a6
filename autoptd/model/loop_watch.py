"""Warn once of training loops that were only partly ported, which would silently train nothing, or something
else.

In: a `ParallelModel`, its optimizers, and the user's own model. Out: a warning if an optimizer steps without
gradients, because the loop calls the model instead of `pm.step`; if gradients of two `pm.step` add up, or no
`pm.optimizer` steps; and if the user's model, which is not trained, is written to, called or asked for a
state dict, or a loop clips, measures or averages its parameters. An error if the loop runs backward from the
loss of `pm.step`.

    watch = LoopWatch(model, speaks=True)           # by parallelize
    watch.started()                                 # after the ranks have copied its weights
    watch.begin(parameters)                         # by pm.step, before it runs
    watch.end()                                     # and after it has added gradients
    watch.follow(optimizer)                         # by pm.optimizer

From the end of a `pm.step` to the next, up to the first update, Python calls `LoopLook` for each function
that starts on this thread (`sys.setprofile`), in libraries as well; later steps cost nothing.
"""

from __future__ import annotations

import dis
import inspect
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.compat import FakeTensor
from autoptd.errors import PlanError
from autoptd.ir.buffers import same_entries
from autoptd.runtime.params.guard import AVERAGES, CLIPPING, unguarded

INITIAL = "the model that was handed to parallelize has the weights from before training; ranks train copies. Remedy: "
OTHER_GRADIENTS = (
    "gradients of model.parameters(): the model that was handed to parallelize has none, and nothing is clipped or measured. "
    "Remedy: pm.clip_grad_norm_(max_norm), which returns the norm, or pm.clip_grad_value_(clip_value); pm.gradients() has all"
)
AVERAGE = (
    f"average of weights: {INITIAL}weights = pm.state_dict() on every rank, and on rank 0 model.load_state_dict(weights) "
    "before the average is updated"
)
NO_GRADIENTS = (
    "optimizer.step(): there are no gradients, and nothing is trained: the loop calls the model, not pm.step. "
    "Remedy: loss = pm.step(*pm.local_batch(x, y)) instead of the forward and loss.backward()"
)
ADDS_UP = (
    "pm.step: the gradients of two steps add up, as neither optimizer.step() nor zero_grad() came between. Remedy: one pm.step "
    "of the whole batch, which parallelize(..., num_microbatches=) divides, instead of accumulation in the loop; or nothing, "
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
# How many entries of a parameter are compared.
MOST_LOOKED_AT = 64
# The dtypes that models are cast to.
CASTS = (torch.float32, torch.bfloat16, torch.float16)
# How many names it lists.
MOST_NAMED = 8
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
    """Follows the calls of one loop since the last update, and changes of the model; one rank `speaks`
    for all.
    """

    def __init__(self, model: nn.Module | None = None, *, speaks: bool = False) -> None:
        self._speaks = speaks
        self.names = OwnParameters(model)
        # Steps, and updates of all optimizers; steps since gradients were last used or forgotten.
        self.steps = self.updates = self._unused = 0
        self._told = set[str]()
        self._has_optimizer = False
        # Gradients: whether an update has used them, and another step has added to them; whether their values
        # were read.
        self._are_kept = self._are_mixed = self._has_read = False
        self._look: LoopLook | None = None
        # The weights that the ranks have copied, and the exchanges of weights with the user up to the last
        # check.
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
        """Check before `pm.step` runs; `tensors`, which hold the gradients of this process, are rarely read."""
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
        """Check the steps of an optimizer, after other hooks have run."""
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
        """Tell whether the ranks have trained while the model kept its weights, and the user has not loaded
        others.
        """
        return self.updates > 0 and self._has_weights() and not self._are_the_users

    def _has_weights(self) -> bool:
        """Tell whether the model is alive and has values; note writes to them."""
        if (model := self._model()) is None or self._weights is None:
            return False
        self._written |= dict.fromkeys(self._weights.written(model))
        self._are_the_users |= bool(self._written)
        return True

    def check_weights(self, site: str, exchanges: int) -> None:
        """Warn once where the loop has written to the model since the last check, unless weights of the
        ranks.
        """
        if not self._speaks or WRITTEN in self._told or not self._has_weights():
            return
        written, self._written = list(self._written), {}
        if written and exchanges == self._exchanges:
            self._told.add(WRITTEN)
            self.tell(f"{site}: {', '.join(written[:MOST_NAMED])} {WRITTEN}")
        self._exchanges = exchanges

    def tell(self, text: str, place: Place | None = None) -> None:
        """Warn once, at `place` or at the line of the user's script that is running."""
        is_new = text not in self._told
        self._told.add(text)
        if self._speaks and is_new:
            warnings.warn_explicit(text, UserWarning, *(place or place_of(sys._getframe())))


class AtForward:
    """The hook on the user's model; it keeps nothing alive, and is not copied or pickled with the model."""

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
    """The hook for state dicts, on copies as well: a copy from before training that was written to is an
    average.
    """

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
        # A function that takes the arguments of a hook and does nothing, and exists without AutoPTD.
        return partial, (slice,)


def _are_same(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(model.parameters(), other.parameters(), strict=False)
    return all(x.device == y.device and not x.is_meta and same_entries(x, y) for x, y in pairs)


@unguarded()
def _has_gradients(tensors: Iterable[torch.Tensor], by_value: bool = False) -> bool:
    return any(x.grad is not None and (not by_value or bool(x.grad.any())) for x in tensors)


def _is_own_call() -> bool:
    """Tell whether AutoPTD, or torch on its behalf, made this call."""
    return home_of(outside(sys._getframe(), __name__, "torch.nn.", "torch.utils.")).startswith(OWN)


class LoopLook:
    """Watches what a loop does with the model between two steps; keeps nothing alive."""

    def __init__(self, watch: LoopWatch, model: nn.Module) -> None:
        self._watch, self._model = weakref.ref(watch), weakref.ref(model)
        self._left, self._is_on = MOST_EVENTS, False
        # Where an average is made, unless the loop writes to the model instead, which shows later.
        self._average: Place | None = None
        self._itself: LoopLook | None = None

    def start(self) -> None:
        """Watch this thread, unless a profiler does."""
        if sys.getprofile() is None:
            self._is_on = True
            sys.setprofile(self)

    def stop(self) -> bool:
        """Stop watching; tell whether it was on."""
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
            # Python 3.11 may call a freed profiler, if code that the collector runs just before the call ends
            # the look. So this lives until the next collection.
            self._itself = self
            sys.setprofile(None)
        elif event == "call" and (known := SEEN.get(id(frame.f_code))) is not None:
            known[1](self, frame)

    def _reads_parameters(self, frame: FrameType) -> None:
        watch, reader, names = self._watch(), frame, set[str]()
        # A generator, which is resumed for each of them.
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
        # A generator has not read them yet.
        self._reads_gradients(given if isinstance(given, (list, tuple)) else [], frame)

    def _reads_gradients(self, parameters: Iterable[torch.Tensor], frame: FrameType) -> None:
        watch = self._watch()
        # The model itself may be trained as well, by `model(...)`.
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
    """Return the nearest frame, from this one outwards, in a module whose name begins with none of these."""
    while home_of(frame).startswith(inner) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def place_of(frame: FrameType) -> Place:
    """Return the running line of the user's script."""
    user = outside(frame, "torch.", "autoptd.", "contextlib", "accelerate.", "transformers.")
    return user.f_code.co_filename, user.f_lineno, home_of(user)


def home_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _names_in_loop(frame: FrameType) -> set[str]:
    """Return the attributes that are read in the body of the `for` that a frame is at; `x.data = ...` is a
    copy.
    """
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


class OwnParameters:
    """The names of a model's parameters, by tensor; keeps none of them alive."""

    def __init__(self, model: nn.Module | None = None) -> None:
        named = [] if model is None else model.named_parameters()
        self._names = {id(x): (weakref.ref(x), name) for name, x in named}

    def name_of(self, x: torch.Tensor) -> str | None:
        """Return the name of one of them; None for any other tensor."""
        found = self._names.get(id(x))
        # Another tensor may have got the id of a freed one.
        return found[1] if found is not None and found[0]() is x else None

    def in_names(self, params: Iterable[Any], trained: Collection[str]) -> list[Any]:
        """Return parameters, pairs or groups with names instead of the model's tensors, and only those in
        `trained`.
        """
        if isinstance(params, (str, torch.Tensor)):
            params = [params]
        found: list[Any] = []
        for item in params:
            if isinstance(item, Mapping):
                found.append({**item, "params": self.in_names(item["params"], trained)})
                continue
            x = item[1] if isinstance(item, tuple) and len(item) == 2 else item
            name = self.name_of(x) if isinstance(x, torch.Tensor) else None
            if name is None:
                found.append(item)
            elif name in trained:
                found.append(name)
        return found


class Weights:
    """The parameters of a model: their addresses, how often they were written to, and some of their entries."""

    def __init__(self, model: nn.Module) -> None:
        self._known = {name: _seen(x) for name, x in _with_values(model)}

    def written(self, model: nn.Module) -> list[str]:
        """Return the names of parameters with other values than at the last call; moving or casting does not
        count.
        """
        found = []
        for name, x in _with_values(model):
            if name not in self._known or self._known[name][0] != x.shape:
                continue
            (_, place, writes, entries), now = self._known[name], _seen(x)
            self._known[name] = now
            # Torch does not count writes through `.data`.
            is_counted = place == now[1] and writes != now[2]
            if is_counted or not is_rounded(entries, now[3]):
                found.append(name)
        return found


def is_rounded(before: Tensor, after: Tensor) -> bool:
    """Tell whether entries are the same, or rounded to a narrower dtype when the model was cast."""
    if before.shape != after.shape:
        return False
    between = CASTS if before.is_floating_point() else (after.dtype,)
    return any(same_entries(before.to(dtype).to(after.dtype), after) for dtype in (after.dtype, *between))


def _seen(x: Tensor) -> tuple[torch.Size, tuple[int, int], int, Tensor]:
    """Return the shape of a parameter, its address, how often it was written to, and copies of some entries."""
    flat, writes = x.detach().reshape(-1), -1 if x.is_inference() else x._version
    some = flat[:: max(1, len(flat) // MOST_LOOKED_AT)].to("cpu", copy=True)
    return x.shape, (id(x), x.data_ptr()), writes, some


def _with_values(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, x in model.named_parameters(remove_duplicate=False):
        if not (x.is_meta or isinstance(x, FakeTensor)) and x.layout is torch.strided:
            yield name, x
