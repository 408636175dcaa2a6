"""The judge of hostile cases: torch's own loop on the whole batch, and the same script by AutoPTD, every number compared.

In: a source and a `Script`. The source defines `make(variant)`, a model, and `batch(step, rows)`, the arguments of its call or
(args, kwargs); `B` rows are a step's. It may define, for both sides alike,

    build(opt, model)       opt(cls, params=None, **keywords) -> the optimizer; `model` is the user's
    rates(optimizer)        a scheduler
    hooks(optimizer)        what is registered once
    before(step, model)     what the loop changes from outside, before a step
    grads(step, model)      between backward and optimizer.step(); `model` has .parameters()
    edit(step, optimizer)   after optimizer.step()

Out: an `Outcome`, one of

    equal      every loss, gradient, parameter, buffer, moment and evaluation is the plain loop's at 1e-9
    refused    a TraceError or PlanError before anything ran (where ranks were made to differ, a RuntimeFault too; where a
               script tells that nobody can follow it, a warning)
    void       the plain loop itself fails, its numbers are not finite, or last bits of its weights move them as far:
               nothing can be said
    wrong      another number
    raw        anything else: an error of torch's or Python's, an InternalError, a refusal in the middle of training

Float32 is held to 1e-4, as both sides round, and has to be equal in float64 where the plain loop's rounding moves numbers as
far. Nothing of `autoptd.verify` is used.
"""

from __future__ import annotations

import math
import random
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import autoptd
from autoptd.errors import AutoptdError, InternalError, PlanError, RuntimeFault, TraceError
from autoptd.options import grouped

TOLERANCES = {"float64": 1e-9, "float32": 1e-4}
NOISE = 1e-3
ROUNDING = {"float64": 1e-4, "float32": 1e-2}  # a larger difference is never one of rounding
FORBIDDEN = "1 / 0"  # what nobody can do to one model
LIMIT = 150  # seconds of a case of a few steps
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Script:
    """What a training script does; `mesh` are keywords of parallelize."""

    mesh: dict[str, Any]
    steps: int = 3
    dtype: str = "float64"
    optimizer: str = "AdamW"
    groups: bool = False  # no weight decay for vectors, another rate for the rest
    schedule: bool = False  # of the learning rate
    accumulate: int = 1  # calls of step for one of the optimizer
    clip: float = 0.0
    zeros: bool = False  # zero_grad(set_to_none=False)
    halve: bool = False  # gradients in place, on all ranks
    meddles: tuple[str, str] = (
        "",
        "",
    )  # lines between backward and optimizer.step(), on the ranks' `pm` and on `model`
    evaluate: tuple[int, ...] = ()  # eval_step of so many rows (of PIECES, where the source has it)
    often: bool = False  # after every step, not only after the first and the last
    load: str = ""  # "variant": before the first step; after it "all" (another state), "some" (strict=False), "buffers"
    reload: dict[str, Any] = field(default_factory=dict)  # after the second step: the mesh to go on with
    by_folder: bool = False  # by pm.save and pm.load
    lazy: bool = False  # no example_inputs
    loss_fn: bool = False  # the model returns logits; the loss is outside
    losses_only: bool = False
    told: bool = False  # a warning stands for a refusal, and a fault while it runs
    floor: float = 1e-2  # numbers of a state that are smaller are compared absolutely
    data_by_rank: bool = False  # processes only

    def __str__(self) -> str:
        fields = type(self).__dataclass_fields__.items()
        return str(
            {name: value for name, f in fields if (value := getattr(self, name)) not in (f.default, {})}
        )

    @property
    def is_meddled(self) -> bool:
        return bool(self.meddles[0]) or self.data_by_rank

    def evaluates(self, step: int) -> tuple[int, ...]:
        return self.evaluate if self.often or step in (0, self.steps - 1) else ()


@dataclass(frozen=True)
class Outcome:
    kind: str
    detail: str = ""
    seconds: float = 0.0


class Different(Exception):
    """A number is not the plain loop's: by how much, relatively."""

    def __init__(self, fact: str, size: float = float("inf")) -> None:
        super().__init__(fact)
        self.size = size


class Late(Exception):
    """The time is over."""


@contextmanager
def limited(seconds: int = LIMIT) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise Late(f"no end within {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Seen:
    """The numbers of one run, by name, in the order in which they were made."""

    numbers: list[tuple[str, Tensor, float]] = field(default_factory=list)  # what, value, floor of its size

    def add(self, what: str, value: Tensor, floor: float = 1e-12) -> None:
        self.numbers.append((what, value.detach().clone(), floor))

    def add_all(self, what: str, values: Tensors, floor: float) -> None:
        for name in sorted(values):
            self.add(f"{what} {name}", values[name], floor)

    def add_gradients(self, step: int, gradients: Tensors) -> None:
        largest = max((float(x.abs().max()) for x in gradients.values() if x.numel()), default=1.0)
        self.add_all(f"gradient {step}", gradients, NOISE * largest)

    def add_moments(self, step: int, state: dict[str, dict[str, Any]]) -> None:
        for name in sorted(state):
            for key, value in sorted(state[name].items()):
                if isinstance(value, (int, float)) and math.isfinite(value):
                    value = torch.tensor(float(value))
                if isinstance(value, Tensor):
                    self.add(f"moment {step} {name} {key}", value.double(), 1e-6)

    def is_finite(self) -> bool:
        return all(bool(value.isfinite().all()) for _, value, _ in self.numbers)


def judge(source: str, script: Script, *, backend: str | None = "local", rank: int = 0) -> Outcome:
    """Run a case both ways."""
    start = time.monotonic()
    found = _judged(source, script, backend, rank)
    return replace(found, seconds=time.monotonic() - start)


def _judged(source: str, script: Script, backend: str | None, rank: int) -> Outcome:
    wanted = None
    if script.meddles[1] != FORBIDDEN:
        try:
            wanted = plain_loop(source, script)
        except Exception as error:
            return Outcome("void", f"{type(error).__name__}: {error}")
        if not wanted.is_finite():
            return Outcome("void", "not finite")
    run = Run(script, backend, rank)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with limited(LIMIT + 5 * script.steps):
                found = run.train(source)
            if wanted is not None and found is not None:
                compare(found, wanted, TOLERANCES[script.dtype])
        except Different as error:
            told = [str(one.message) for one in said if is_ours(one)]
            if script.told and told:
                return Outcome("refused", f"warned: {told[0]}")
            assert wanted is not None
            if is_rounding(source, script, wanted, error.size) and is_exact(source, script, backend):
                return Outcome("void", f"the plain loop amplifies its own rounding: {error}")
            return Outcome("wrong", f"{error}{' | said: ' + told[0] if told else ''}")
        except Exception as error:
            kind = "InternalError" if isinstance(error, InternalError) else type(error).__name__
            return Outcome(
                "refused" if is_refusal(error, script, run.phase) else "raw",
                f"in {run.phase}: {kind}: {error}",
            )
    return (
        Outcome("equal")
        if wanted is not None
        else Outcome("wrong", "nothing was said about ranks that differ")
    )


def is_refusal(error: Exception, script: Script, phase: str) -> bool:
    """Whether it is the one clear error that a script may get: before it trains, or while what is done to its ranks shows."""
    if isinstance(error, InternalError):
        return False
    is_free = script.is_meddled or script.told
    if isinstance(error, RuntimeFault):
        return is_free and "Error: " not in error.fact  # what a rank raised is passed on
    if isinstance(error, (TraceError, PlanError)):
        return is_free or script.lazy or phase not in ("step", "between steps")
    return isinstance(error, AutoptdError) and script.is_meddled


def is_ours(warning: warnings.WarningMessage) -> bool:
    """Whether AutoPTD said it: torch's own have a line of torch's."""
    return "Remedy:" in str(warning.message) or "site-packages" not in str(warning.filename)


def namespace(source: str, dtype: str = "float64") -> dict[str, Any]:
    """The source run from the beginning, every random number and every counter as at the start."""
    torch.set_default_dtype(torch.float64)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    made: dict[str, Any] = {"__name__": "case"}
    exec(source, made)
    torch.set_default_dtype(getattr(torch, dtype))
    made["DTYPE"] = getattr(torch, dtype)
    return made


def batch_of(case: dict[str, Any], step: int, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    found = case["batch"](step, rows)
    return found if len(found) == 2 and isinstance(found[1], dict) else (found, {})


def loss_of(case: dict[str, Any], script: Script, model: nn.Module, args: Any, kwargs: Any) -> Tensor:
    if script.loss_fn:
        targets = kwargs.pop("targets")
        return case["loss_fn"](model(*args, **kwargs), targets)
    output = model(*args, **kwargs)
    if isinstance(output, Tensor):
        return output
    if isinstance(output, dict):
        return output["loss"]
    return output.loss if hasattr(output, "loss") else output[1]


def plain_loop(source: str, script: Script, shaken: float = 0.0) -> Seen:
    """What a script without AutoPTD does; with weights that are off by `shaken` of themselves."""
    case = namespace(source, script.dtype)
    model = case["make"](int(script.load == "variant"))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for x in model.parameters() if shaken else ():
            noise = torch.randn(x.shape, generator=draw, dtype=torch.float64)
            x.mul_((1 + shaken * noise).to(x.dtype))
    named = dict(model.named_parameters())

    def opt(cls: Any, params: Any = None, **keywords: Any) -> torch.optim.Optimizer:
        def tensors(some: Any) -> Any:
            if isinstance(some, dict):
                return {**some, "params": tensors(some["params"])}
            if isinstance(some, Tensor):
                return some
            return [
                named[x] if isinstance(x, str) else tensors(x) if isinstance(x, dict) else x for x in some
            ]

        args = [] if params is None and hasattr(cls, "args") and cls.args else [named.values()]
        return cls(*([tensors(params)] if params is not None else args), **keywords)

    optimizer = build_optimizer(case, script, opt, model)
    call(case, "hooks", optimizer)
    rates = make_rates(case, script, optimizer)
    seen, unsaved = Seen(), unsaved_buffers(model)
    for step in range(script.steps):
        call(case, "before", step, model)
        for part in range(script.accumulate):
            loss = loss_of(case, script, model, *batch_of(case, step * 7 + part, case["B"]))
            loss.backward()
            seen.add(f"loss {step}.{part}", loss)
        if script.meddles[1]:
            exec(script.meddles[1], {"model": model, "torch": torch})
        call(case, "grads", step, model)
        if script.clip:
            seen.add(f"norm {step}", torch.nn.utils.clip_grad_norm_(model.parameters(), script.clip))
        every = dict(model.named_parameters(remove_duplicate=False))
        if script.halve:
            halve(named.values())
        if not script.losses_only:
            seen.add_gradients(step, {name: x.grad for name, x in every.items() if x.grad is not None})
        optimizer.step()
        after(case, script, step, optimizer, rates, loss)
        if not script.losses_only:
            seen.add_all(f"state {step}", dict(model.state_dict()), script.floor)
            seen.add_moments(step, {name: optimizer.state.get(x, {}) for name, x in named.items()})
        modes = {module: module.training for module in model.modules()}
        for number, rows in enumerate(script.evaluates(step)):
            model.eval()
            with torch.no_grad():
                evaluated = batch_of(case, 900 + step + number, rows * case.get("PIECES", 1))
                seen.add(f"evaluation {step}.{number}", loss_of(case, script, model, *evaluated))
        for module, mode in modes.items():
            module.training = mode
        if script.load not in ("", "variant") and step == 0:
            model.load_state_dict(another(model.state_dict(), script.load, set(every)), strict=False)
        if script.reload and step == 1:
            model.zero_grad()  # gradients of what the optimizer does not have are left behind
            # State dicts and checkpoints leave these out, as torch's do: a resumed run begins with those of a new model.
            for module, name, x in unsaved:
                module._buffers[name] = x.clone()
    return seen


class Run:
    """The same script by AutoPTD; `phase` is where it is."""

    def __init__(self, script: Script, backend: str | None, rank: int) -> None:
        self.script, self.backend, self.rank = script, backend, rank
        self.phase = "make"
        self.running: list[autoptd.ParallelModel] = []

    def train(self, source: str) -> Seen | None:
        """Return its numbers; None on a rank of processes that has no state."""
        try:
            return self._train(source)
        finally:
            for pm in self.running:
                pm.close()

    def _build(self, mesh: dict[str, Any]) -> tuple[autoptd.ParallelModel, Any]:
        self.phase = "reload" if self.running else "parallelize"
        args, kwargs = batch_of(self.case, 0, self.case["B"])
        is_lazy = self.script.lazy or bool(args and kwargs)  # example_inputs takes one of both
        asked: dict[str, Any] = {"backend": self.backend, "timeout": 60, **mesh}
        if not is_lazy:
            asked["example_inputs"] = args or kwargs
        if self.script.loss_fn:
            asked["loss_fn"] = self.case["loss_fn"]
        pm = autoptd.parallelize(self.model, **grouped(asked))
        self.running.append(pm)
        if is_lazy:
            pm.compile_now(args, kwargs)
        self.phase = "optimizer" if len(self.running) == 1 else "reload"
        return pm, build_optimizer(self.case, self.script, pm.optimizer, self.model)

    def _local(self, pm: autoptd.ParallelModel, step: int, rows: int) -> tuple[Any, Any]:
        args, kwargs = batch_of(self.case, step + 1000 * self.rank * self.script.data_by_rank, rows)
        found = pm.local_batch(*args, **kwargs)
        return found if args and kwargs else (found, {}) if args else ((), found)

    def _train(self, source: str) -> Seen | None:
        script, seen = self.script, Seen()
        self.case = case = namespace(source, script.dtype)
        self.model = case["make"](0)
        names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        pm, optimizer = self._build(script.mesh)
        call(case, "hooks", optimizer)
        rates = make_rates(case, script, optimizer)
        if script.load == "variant":
            self.phase = "load"
            pm.load_state_dict({name: x.detach().clone() for name, x in case["make"](1).state_dict().items()})
        for step in range(script.steps):
            self.phase = "step"
            call(case, "before", step, self.model)
            for part in range(script.accumulate):
                args, kwargs = self._local(pm, step * 7 + part, case["B"])
                loss = pm.step(*args, **kwargs)
                seen.add(f"loss {step}.{part}", loss)
            self.phase = "the loop's own gradients"  # which it reads where ranks may not have them
            if script.meddles[0]:
                exec(script.meddles[0], {"pm": pm, "torch": torch})
            call(case, "grads", step, pm)
            self.phase = "between steps"
            if script.clip:
                norm = pm.clip_grad_norm_(script.clip)
                seen.add(f"norm {step}", norm.to(getattr(torch, script.dtype)))
            if script.halve:
                halve(self._parameters(pm))
            if not script.losses_only:
                seen.add_gradients(step, pm.gradients())
            optimizer.step()
            after(case, script, step, optimizer, rates, loss)
            state = pm.state_dict()
            if not script.losses_only:
                seen.add_all(f"state {step}", state, script.floor)
                seen.add_moments(step, optimizer.state_dict().get("state", {}))
            self.phase = "evaluation"
            for number, rows in enumerate(script.evaluates(step)):
                args, kwargs = self._local(pm, 900 + step + number, rows * case.get("PIECES", 1))
                seen.add(f"evaluation {step}.{number}", pm.eval_step(*args, **kwargs))
            if script.load not in ("", "variant") and step == 0:
                self.phase = "load"
                pm.load_state_dict(another(state, script.load, names), strict=False)
            if script.reload and step == 1:
                self.phase = "reload"
                pm, optimizer = self._moved(pm, optimizer)
                call(case, "hooks", optimizer)
                if rates is not None:  # a new schedule sets its first rate
                    old, moments = rates.state_dict(), optimizer.state_dict()
                    rates = make_rates(case, script, optimizer)
                    rates.load_state_dict(old)
                    optimizer.load_state_dict(moments)
        return seen if state else None

    def _moved(self, pm: autoptd.ParallelModel, optimizer: Any) -> tuple[autoptd.ParallelModel, Any]:
        """Go on with another mesh."""
        with tempfile.TemporaryDirectory() as folder:
            weights, moments = pm.state_dict(), optimizer.state_dict()
            if self.script.by_folder:
                pm.save(folder, optimizer)
            pm.close()
            pm, optimizer = self._build(self.script.reload)
            if self.script.by_folder:
                pm.load(folder, optimizer)
            else:
                pm.load_state_dict(weights)
                optimizer.load_state_dict(moments)
        return pm, optimizer

    def _parameters(self, pm: autoptd.ParallelModel) -> list[nn.Parameter]:
        ranks = range(pm.options.mesh.size) if self.backend else ()
        here = [x for rank in ranks for x in pm.rank_parameters(rank).values()]
        return list({id(x): x for x in (here if self.backend else pm.parameters())}.values())


def unsaved_buffers(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """The module, name and a copy of every buffer that no state dict has."""
    found = []
    for module in model.modules():
        for name in sorted(module._non_persistent_buffers_set):
            found.append((module, name, module.get_buffer(name).detach().clone()))
    return found


def build_optimizer(case: dict[str, Any], script: Script, opt: Callable[..., Any], model: nn.Module) -> Any:
    if "build" in case:
        return case["build"](opt, model)
    if script.optimizer == "SGD":
        return opt(torch.optim.SGD, lr=0.1, momentum=0.9)
    keywords: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
    if not script.groups:
        return opt(torch.optim.AdamW, **keywords)
    trained = {name: x for name, x in model.named_parameters() if x.requires_grad}
    small = [name for name, x in trained.items() if x.dim() < 2]
    large = [name for name in trained if name not in small]
    groups: list[Any] = [{"params": large}, {"params": small, "weight_decay": 0.0, "lr": 3e-2}]
    return opt(torch.optim.AdamW, [one for one in groups if one["params"]], **keywords)


def make_rates(case: dict[str, Any], script: Script, optimizer: Any) -> Any:
    if script.schedule:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return call(case, "rates", optimizer)


def after(case: dict[str, Any], script: Script, step: int, optimizer: Any, rates: Any, loss: Any) -> None:
    if rates is not None:
        is_plateau = isinstance(rates, torch.optim.lr_scheduler.ReduceLROnPlateau)
        rates.step(float(loss.detach())) if is_plateau else rates.step()
    call(case, "edit", step, optimizer)
    optimizer.zero_grad(set_to_none=not script.zeros)


def call(case: dict[str, Any], name: str, *args: Any) -> Any:
    return case[name](*args) if name in case else None


def halve(parameters: Any) -> None:
    for x in parameters:
        if x.grad is not None:
            x.grad.mul_(0.5)


def another(state: Tensors, what: str, parameters: set[str]) -> Tensors:
    """Other values for a state: all of them, every second name, or buffers alone."""
    names = sorted(state)
    if what == "some":
        names = [name for name in names if len(name) % 2]
    if what == "buffers":
        names = [name for name in names if name not in parameters]
    return {
        name: state[name] * 1.125 if state[name].is_floating_point() else state[name].clone()
        for name in names
    }


def compare(found: Seen, wanted: Seen, tolerance: float) -> None:
    """Raise Different at the first number that is another one."""
    ours, theirs = ([what for what, _, _ in one.numbers] for one in (found, wanted))
    if ours != theirs:
        raise Different(f"there or not are {sorted(set(ours) ^ set(theirs))[:6]}")
    for (what, x, _), (_, expected, floor) in zip(found.numbers, wanted.numbers, strict=True):
        if x.dtype != expected.dtype or x.shape != expected.shape:
            raise Different(
                f"{what} is {x.dtype} {list(x.shape)} for {expected.dtype} {list(expected.shape)}"
            )
        size = gap(x, expected, floor)
        if size > tolerance:
            raise Different(f"{what} differs by {size:.1e}", size)


def gap(x: Tensor, wanted: Tensor, floor: float) -> float:
    """How far a number is off, relatively."""
    if not wanted.numel():
        return 0.0
    if wanted.is_complex():
        x, wanted = torch.view_as_real(x), torch.view_as_real(wanted)
    size = float((x.double() - wanted.double()).abs().nan_to_num(float("inf")).max())
    return size / max(float(wanted.double().abs().max()), floor)


def is_rounding(source: str, script: Script, wanted: Seen, size: float) -> bool:
    """Whether a few last bits of the weights move the plain loop's own numbers nearly as far."""
    if size > ROUNDING[script.dtype]:
        return False
    shaken = plain_loop(source, script, 1e-15 if script.dtype == "float64" else 1e-7)
    pairs = zip(shaken.numbers, wanted.numbers, strict=True)
    return 30 * max(gap(x, expected, floor) for (_, x, _), (_, expected, floor) in pairs) > size


def is_exact(source: str, script: Script, backend: str | None) -> bool:
    """Whether the numbers of a float32 case are equal in float64; there is nothing finer to ask for one in float64."""
    if script.dtype == "float64":
        return True
    return judge(source, replace(script, dtype="float64"), backend=backend).kind == "equal"
