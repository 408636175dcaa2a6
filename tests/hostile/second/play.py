"""The judge of the second round: a script's loop in plain torch on the whole batch, and the same script by AutoPTD.

In: a source (source.py) and a `Play`. The source may define, for both sides alike,

    build(opt, model)       opt(cls, params=None, **keywords) -> the optimizer; `model` is the user's
    rates(optimizer)        a scheduler
    hooks(optimizer)        what is registered once
    before(step, model)     what the loop changes from outside, before a step
    grads(step, model)      between backward and optimizer.step(); `model` has .parameters()
    edit(step, optimizer)   after optimizer.step()

Out: an `Outcome` of tests/hostile/oracle.py. Every loss, gradient, parameter, buffer and entry of the optimizer's state is
compared. `told` lets a warning stand for a refusal, and a fault while it runs: what nobody can follow has to be said.
"""

from __future__ import annotations

import math
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import autoptd
from autoptd.errors import InternalError, PlanError, RuntimeFault, TraceError
from autoptd.options import grouped
from tests.hostile.attack.judge import Seen, compare, moves_as_far
from tests.hostile.oracle import Different, Outcome, namespace

LIMIT = 150  # seconds of a case


@dataclass(frozen=True)
class Play:
    mesh: dict[str, Any]
    steps: int = 3
    accumulate: int = 1
    evaluate: tuple[int, ...] = ()  # rows of eval_step after every step, in this order
    reload: dict[str, Any] = field(default_factory=dict)  # after the second step: the mesh to go on with
    by_folder: bool = False  # by pm.save and pm.load
    clip: float = 0.0
    losses_only: bool = False
    told: bool = False
    floor: float = 1e-2  # numbers of a state that are smaller are compared absolutely


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


# Where a refusal is one of what the case asks for, not of what it was promised.
EARLY = ("parallelize", "optimizer", "the loop's own gradients", "evaluation", "reload")


def judge(source: str, play: Play) -> Outcome:
    start = time.monotonic()

    def outcome(kind: str, detail: str = "") -> Outcome:
        return Outcome(kind, detail, time.monotonic() - start)

    try:
        wanted = plain(source, play)
    except Exception as error:
        return outcome("void", f"{type(error).__name__}: {error}")
    if not all(value.isfinite().all() for _, value, _ in wanted.numbers):
        return outcome("void", "not finite")
    phase = ["parallelize"]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with limited():
                found = ours(source, play, phase)
            compare(found, wanted, 1e-9)
        except Different as error:
            told = [str(one.message) for one in said if is_ours(one)]
            if play.told and told:
                return outcome("refused", f"warned: {told[0]}")
            if error.size < 1e-4 and moves_as_far(plain(source, play, 1e-15), wanted, error.size):
                return outcome("void", f"the plain loop amplifies its own rounding: {error}")
            return outcome("wrong", f"{error}{' | said: ' + told[0] if told else ''}")
        except (TraceError, PlanError) as error:
            early = phase[0] in EARLY or play.told
            return outcome("refused" if early else "raw", f"in {phase[0]}: {error}")
        except RuntimeFault as error:
            is_meant = play.told and "Error: " not in error.fact
            return outcome("refused" if is_meant else "raw", f"in {phase[0]}: RuntimeFault: {error}")
        except Exception as error:
            kind = "InternalError" if isinstance(error, InternalError) else type(error).__name__
            return outcome("raw", f"in {phase[0]}: {kind}: {error}")
    return outcome("equal")


def is_ours(warning: warnings.WarningMessage) -> bool:
    """Whether AutoPTD said it: torch's own have a line of torch's."""
    return "Remedy:" in str(warning.message) or "site-packages" not in str(warning.filename)


def plain(source: str, play: Play, shaken: float = 0.0) -> Seen:
    case = namespace(source)
    model = case["make"]()
    with torch.no_grad():
        for x in model.parameters() if shaken else ():
            draw = torch.Generator().manual_seed(0)
            x.mul_(1 + shaken * torch.randn(x.shape, generator=draw))
    named = dict(model.named_parameters())

    def opt(cls: Any, params: Any = None, **keywords: Any) -> torch.optim.Optimizer:
        def tensors(some: Any) -> Any:
            if isinstance(some, dict):
                return {**some, "params": tensors(some["params"])}
            if isinstance(some, torch.Tensor):
                return some
            return [
                named[x] if isinstance(x, str) else tensors(x) if isinstance(x, dict) else x for x in some
            ]

        args = [] if params is None and hasattr(cls, "args") and cls.args else [named.values()]
        return cls(*([tensors(params)] if params is not None else args), **keywords)

    optimizer = case.get("build", default_build)(opt, model)
    rates = prepare(case, optimizer)
    seen = Seen()
    for step in range(play.steps):
        call(case, "before", step, model)
        for part in range(play.accumulate):
            loss = model(*case["batch"](step * 7 + part, case["B"]))
            loss.backward()
            seen.add(f"loss {step}.{part}", loss)
        call(case, "grads", step, model)
        if play.clip:
            seen.add(f"norm {step}", torch.nn.utils.clip_grad_norm_(model.parameters(), play.clip))
        every = dict(model.named_parameters(remove_duplicate=False))
        keep(seen, play, step, {name: x.grad for name, x in every.items() if x.grad is not None})
        optimizer.step()
        after(case, step, optimizer, rates, loss)
        if not play.losses_only:
            seen.add_all(f"state {step}", dict(model.state_dict()), play.floor)
            add_moments(seen, play, step, {n: optimizer.state.get(x, {}) for n, x in named.items()})
        modes = {module: module.training for module in model.modules()}
        for number, rows in enumerate(play.evaluate):
            model.eval()
            with torch.no_grad():
                seen.add(f"evaluation {step}.{number}", model(*case["batch"](900 + step + number, rows)))
        for module, mode in modes.items():
            module.training = mode
        if play.reload and step == 1:
            model.zero_grad()  # gradients of what the optimizer does not have are left behind
    return seen


def ours(source: str, play: Play, phase: list[str]) -> Seen:
    case = namespace(source)
    model = case["make"]()
    running = []

    def build(mesh: dict[str, Any]) -> tuple[autoptd.ParallelModel, torch.optim.Optimizer]:
        phase[0] = "parallelize" if not running else "reload"
        example = case["batch"](0, case["B"])
        keywords = grouped({"backend": "local", "timeout": 60, "example_inputs": example, **mesh})
        pm = autoptd.parallelize(model, **keywords)
        running.append(pm)
        phase[0] = "optimizer" if len(running) == 1 else "reload"
        return pm, case.get("build", default_build)(pm.optimizer, model)

    try:
        pm, optimizer = build(play.mesh)
        rates = prepare(case, optimizer)
        seen = Seen()
        for step in range(play.steps):
            phase[0] = "step"
            call(case, "before", step, model)
            for part in range(play.accumulate):
                loss = pm.step(*pm.local_batch(*case["batch"](step * 7 + part, case["B"])))
                seen.add(f"loss {step}.{part}", loss)
            phase[0] = "the loop's own gradients"  # which it reads where ranks may not have them
            call(case, "grads", step, pm)
            phase[0] = "between steps"
            if play.clip:
                seen.add(f"norm {step}", pm.clip_grad_norm_(play.clip))
            keep(seen, play, step, pm.gradients() if not play.losses_only else {})
            optimizer.step()
            after(case, step, optimizer, rates, loss)
            if not play.losses_only:
                seen.add_all(f"state {step}", pm.state_dict(), play.floor)
                add_moments(seen, play, step, optimizer.state_dict()["state"])
            for number, rows in enumerate(play.evaluate):
                phase[0] = "evaluation"
                seen.add(
                    f"evaluation {step}.{number}", pm.eval_step(*case["batch"](900 + step + number, rows))
                )
            if play.reload and step == 1:
                phase[0] = "reload"
                pm, optimizer = moved(pm, optimizer, play, build)
                call(case, "hooks", optimizer)
                if rates is not None:
                    old, first = rates.state_dict(), optimizer.state_dict()
                    rates = case["rates"](optimizer)
                    rates.load_state_dict(old)
                    optimizer.load_state_dict(first)
        return seen
    finally:
        for pm in running:
            pm.close()


def moved(
    pm: autoptd.ParallelModel, optimizer: torch.optim.Optimizer, play: Play, build: Callable[..., Any]
) -> tuple[autoptd.ParallelModel, torch.optim.Optimizer]:
    """Go on with another mesh."""
    with tempfile.TemporaryDirectory() as folder:
        weights, moments = pm.state_dict(), optimizer.state_dict()
        if play.by_folder:
            pm.save(folder, optimizer)
        pm.close()
        pm, optimizer = build(play.reload)
        if play.by_folder:
            pm.load(folder, optimizer)
        else:
            pm.load_state_dict(weights)
            optimizer.load_state_dict(moments)
    return pm, optimizer


def default_build(opt: Any, model: Any) -> torch.optim.Optimizer:
    return opt(torch.optim.AdamW, lr=1e-2, eps=1e-3, weight_decay=0.1)  # type: ignore[no-any-return]


def prepare(case: dict[str, Any], optimizer: Any) -> Any:
    call(case, "hooks", optimizer)
    return call(case, "rates", optimizer)


def after(case: dict[str, Any], step: int, optimizer: Any, rates: Any, loss: Any) -> None:
    if rates is not None:
        is_plateau = isinstance(rates, torch.optim.lr_scheduler.ReduceLROnPlateau)
        rates.step(float(loss.detach())) if is_plateau else rates.step()
    call(case, "edit", step, optimizer)
    optimizer.zero_grad()


def call(case: dict[str, Any], name: str, *args: Any) -> Any:
    return case[name](*args) if name in case else None


def keep(seen: Seen, play: Play, step: int, gradients: dict[str, torch.Tensor]) -> None:
    if not play.losses_only:
        largest = max((float(x.abs().max()) for x in gradients.values() if x.numel()), default=1.0)
        seen.add_all(f"gradient {step}", gradients, 1e-3 * largest)


def add_moments(seen: Seen, play: Play, step: int, state: dict[str, dict[str, Any]]) -> None:
    for name in sorted(state):
        for key, value in sorted(state[name].items()):
            if isinstance(value, (int, float)) and math.isfinite(value):
                value = torch.tensor(float(value))
            if isinstance(value, torch.Tensor):
                seen.add(f"moment {step} {name} {key}", value.double(), 1e-6)
