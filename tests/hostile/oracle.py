"""The judge of a hostile case: the plain torch loop, written out, on new data in every step, and AutoPTD on the same.

In: the source of a case (it defines `make(variant)`, a model in float64, and `batch(step)`, its call) and how to run it.
Out: an `Outcome`, one of

    equal      every loss, gradient, parameter, buffer and evaluation is the plain loop's at 1e-9
    refused    a TraceError or PlanError before anything ran (where ranks were made to differ, a RuntimeFault too)
    void       the plain loop itself fails, its numbers are not finite, or a change of 1e-15 of the weights moves them as far:
               nothing can be said
    wrong      another number
    raw        anything else: an error of torch's or Python's, an InternalError, a refusal in the middle of training

Nothing of `autoptd.verify` is used.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import autoptd
from autoptd.errors import PlanError, RuntimeFault, TraceError

TOLERANCE, NOISE = 1e-9, 1e-3
FORBIDDEN = "1 / 0"  # what nobody can do to one model
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Setting:
    """How a source is run."""

    mesh: dict[str, Any]  # keywords of parallelize
    steps: int = 4
    optimizer: str = "SGD"
    evaluate: bool = False
    reload: dict[str, Any] | None = None  # the mesh to go on with after the second step
    loads: bool = False  # the state of variant 1 is loaded into variant 0
    meddles: tuple[str, str] = ("", "")
    data_by_rank: bool = False  # processes only


@dataclass(frozen=True)
class Outcome:
    kind: str
    detail: str = ""
    seconds: float = 0.0


@dataclass
class Step:
    """What one step of the plain loop gave."""

    loss: Tensor
    gradients: Tensors
    state: Tensors
    evaluation: Tensor | None = None


class Different(Exception):
    """A number is not the plain loop's: by how much, relatively."""

    def __init__(self, fact: str, size: float = float("inf")) -> None:
        super().__init__(fact)
        self.size = size


def judge(source: str, setting: Setting, *, backend: str | None = "local", rank: int = 0) -> Outcome:
    """Run a case both ways."""
    start = time.monotonic()
    wanted: list[Step] | None = None
    if setting.meddles[1] != FORBIDDEN:
        try:
            wanted = plain_loop(source, setting)
        except Exception as error:
            return Outcome("void", f"{type(error).__name__}: {error}", time.monotonic() - start)
        if not all(x.isfinite().all() for one in wanted for x in (one.loss, *one.state.values())):
            return Outcome("void", "not finite", time.monotonic() - start)
    kind, detail = _judged(source, setting, wanted, backend, rank)
    return Outcome(kind, detail, time.monotonic() - start)


def namespace(source: str) -> dict[str, Any]:
    """The source run from the beginning, every random number and every counter as at the start."""
    torch.set_default_dtype(torch.float64)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    made: dict[str, Any] = {"__name__": "case"}
    exec(source, made)
    return made


def make_optimizer(name: str) -> tuple[type[torch.optim.Optimizer], dict[str, float]]:
    if name == "SGD":
        return torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}
    return torch.optim.AdamW, {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}


def plain_loop(source: str, setting: Setting, shaken: float = 0.0) -> list[Step]:
    """What a user's script without AutoPTD does; with weights that are off by `shaken` of themselves."""
    case = namespace(source)
    model = case["make"](int(setting.loads))
    if shaken:
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + shaken * torch.randn(parameter.shape, generator=draw))
    cls, keywords = make_optimizer(setting.optimizer)
    optimizer = cls(model.parameters(), **keywords)
    found = []
    for step in range(setting.steps):
        args, kwargs = case["batch"](step)
        loss = model(*args, **kwargs)
        loss.backward()
        if setting.meddles[1]:
            exec(setting.meddles[1], {"model": model, "torch": torch})
        named = dict(model.named_parameters(remove_duplicate=False))
        gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        state = {name: x.detach().clone() for name, x in model.state_dict().items()}
        found.append(Step(loss.detach(), gradients, state))
        if setting.evaluate and step in (0, setting.steps - 1):
            model.eval()
            with torch.no_grad():
                found[-1].evaluation = model(*args, **kwargs)
            model.train()
    return found


def _judged(
    source: str, setting: Setting, wanted: list[Step] | None, backend: str | None, rank: int
) -> tuple[str, str]:
    phase = Phase()
    refusals = (
        (TraceError, PlanError) if not (setting.meddles[0] or setting.data_by_rank) else autoptd.AutoptdError
    )
    try:
        autoptd_loop(source, setting, wanted, backend, rank, phase)
    except Different as error:
        if wanted is not None and error.size < 1e-4 and is_rounding(source, setting, wanted, error.size):
            return "void", f"the plain loop amplifies its own rounding: {error}"
        return "wrong", str(error)
    except refusals as error:
        is_late = phase.at == "step" and refusals == (TraceError, PlanError)
        is_bare = isinstance(error, RuntimeFault) and "Error: " in error.fact  # what a rank raised, passed on
        if isinstance(error, autoptd.InternalError) or is_late or is_bare:
            return "raw", f"in {phase.at}: {type(error).__name__}: {error}"
        return "refused", f"in {phase.at}: {type(error).__name__}: {error.fact}"
    except Exception as error:
        return "raw", f"in {phase.at}: {type(error).__name__}: {error}"
    finally:
        if phase.pm is not None:
            phase.pm.close()
    return ("equal", "") if wanted is not None else ("wrong", "nothing was said about ranks that differ")


def is_rounding(source: str, setting: Setting, wanted: list[Step], size: float) -> bool:
    """Whether a few last bits of the weights move the plain loop's own numbers nearly as far."""
    moved = 0.0
    for one, other in zip(wanted, plain_loop(source, setting, shaken=1e-15), strict=True):
        largest = max((float(x.abs().max()) for x in one.gradients.values()), default=0.0)
        for name, x in one.gradients.items():
            moved = max(moved, relative(other.gradients[name], x, NOISE * largest))
        moved = max([moved, *(relative(other.state[name], x, 1e-2) for name, x in one.state.items())])
        moved = max(moved, relative(other.loss, one.loss, 1e-12))
    return moved * 30 > size


@dataclass
class Phase:
    """Where a run is, and what is to be closed."""

    at: str = "make"
    pm: autoptd.ParallelModel | None = None


def autoptd_loop(
    source: str, setting: Setting, wanted: list[Step] | None, backend: str | None, rank: int, phase: Phase
) -> None:
    """The same script by AutoPTD, every number compared where it is made."""
    case = namespace(source)
    model, share = case["make"](0), setting.mesh["d"] if backend is None else 1
    phase.at = "parallelize"
    cls, keywords = make_optimizer(setting.optimizer)

    def build(mesh: dict[str, Any]) -> tuple[autoptd.ParallelModel, torch.optim.Optimizer]:
        args, kwargs = case["batch"](0)
        pm = autoptd.parallelize(
            model,
            **mesh,
            backend=backend,
            timeout=40,
            example_inputs=(kwargs if kwargs and not args else args),
        )
        phase.pm = pm
        return pm, pm.optimizer(cls, **keywords)

    if share > 1 and len(case["batch"](0)[1]):
        raise PlanError("the oracle", "keywords in processes", "positional arguments")
    pm, optimizer = build(setting.mesh)
    if setting.loads:
        phase.at = "load"
        pm.load_state_dict({name: x.detach().clone() for name, x in case["make"](1).state_dict().items()})
    for step in range(setting.steps):
        args, kwargs = case["batch"](step + 1000 * rank * setting.data_by_rank)
        local = pm.local_batch(*args) if share > 1 else args
        phase.at = "step"
        loss = pm.step(*local, **kwargs)
        if setting.meddles[0]:
            phase.at = "meddling"
            exec(setting.meddles[0], {"pm": pm, "torch": torch})
        gradients = pm.gradients()
        optimizer.step()
        optimizer.zero_grad()
        state = pm.state_dict()
        if wanted is not None and state:
            compare(wanted[step], step, loss, gradients, state)
        if setting.evaluate and step in (0, setting.steps - 1):
            phase.at = "evaluation"
            evaluation = pm.eval_step(*local, **kwargs)
            if wanted is not None:
                compare_one("evaluation", step, evaluation, wanted[step].evaluation)
        if setting.reload is not None and step == 1:
            phase.at = "reload"
            moments = optimizer.state_dict()
            pm.close()
            pm, optimizer = build(setting.reload)
            pm.load_state_dict(state)
            optimizer.load_state_dict(moments)


def compare(wanted: Step, step: int, loss: Tensor, gradients: Tensors, state: Tensors) -> None:
    compare_one("loss", step, loss, wanted.loss)
    if set(gradients) != set(wanted.gradients):
        raise Different(
            f"gradients of step {step}: there or not are {sorted(set(gradients) ^ set(wanted.gradients))}"
        )
    largest = max((float(x.abs().max()) for x in wanted.gradients.values()), default=0.0)
    for name, x in wanted.gradients.items():
        compare_one(f"gradient {name}", step, gradients[name], x, NOISE * largest)
    for name, x in wanted.state.items():
        compare_one(f"state {name}", step, state[name], x, 1e-2)


def compare_one(what: str, step: int, x: Tensor, wanted: Tensor | None, floor: float = 1e-12) -> None:
    if wanted is None:
        return
    if x.dtype != wanted.dtype or x.shape != wanted.shape:
        raise Different(
            f"{what} of step {step} is {x.dtype} {list(x.shape)} for {wanted.dtype} {list(wanted.shape)}"
        )
    size = relative(x, wanted, floor)
    if size > TOLERANCE:
        raise Different(f"{what} of step {step} differs by {size:.1e}", size)


def relative(x: Tensor, wanted: Tensor, floor: float) -> float:
    if not wanted.numel():
        return 0.0
    gap = float((x.double() - wanted.double()).abs().nan_to_num(float("inf")).max())
    return gap / max(float(wanted.double().abs().max()), floor)
