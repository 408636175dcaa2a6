"""Prove that a partitioned model computes the same loss, gradients and updated parameters as the model.

    report = autoptd.verify(model, t=2, p=2, d=2, example_inputs=(ids, targets))
    print(report)           # largest difference of losses, gradients and parameters, by name

Both run in float64 for some optimizer steps, the partitioned one with ranks as threads, and with the plan
that the model has in its own dtype. Every step has new data (fresh.py). Halfway, the partitioned model is
saved and loaded into a new one, optimizer included; at the end it is evaluated. Faults that a float64 copy
would hide are looked for on the model itself, which trains one step and is restored (one_device.py): its first
two losses must equal those of the copy, and of the partitioned model in the model's dtype, up to that dtype's
rounding.

Differences are measured as max|x - ref| / max(max|ref|, 1e-3 * largest gradient, or the learning rate for
parameters): a gradient that is mathematically zero (a key bias) is noise and must not be divided by itself.
Casts to float32 inside the model (Hugging Face's norms and losses) would hide errors under 1e-7, so they are
widened to float64 in both programs, and the widened reference is compared with the untouched model at 1e-6.
If the model uses dropout, the reference draws the same masks, for the whole batch.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoptd.compiler.compiler import Compiler
from autoptd.compiler.driver import compile_program
from autoptd.errors import InternalError, PlanError, RuntimeFault, TraceError
from autoptd.ir.scopes import activity
from autoptd.model.parallel_model import ParallelModel
from autoptd.options import Options
from autoptd.program.program import Program
from autoptd.subject.call import Call
from autoptd.subject.initial.deferred import materialize
from autoptd.subject.subject import Subject
from autoptd.trace import Outputs, Widen, check_module, check_precision, widen_inputs, widen_model
from autoptd.verify.fresh import check_calls, fresh_calls, given_calls
from autoptd.verify.one_device import (
    Setting,
    check_copy,
    check_widening,
    evaluated_loss,
    first_losses,
    kernels_of,
    loss_of,
    losses_in_own_dtype,
    relative_difference,
    widen_options,
    with_fixed_scale,
)

TOLERANCE = 1e-9
# Smaller gradients, relative to the largest one, are compared with it instead of themselves.
NOISE = 1e-3
# The learning rate of the model's own step: large enough to exceed the rounding of its dtype.
FIRST_LR = 1e-2
# Checks besides training in float64; most tests skip them.
CHECKS = ("own dtype", "reload", "evaluation")


@dataclass(frozen=True)
class Difference:
    """The relative difference of one tensor after one step, and its tolerance.

    `what` is "loss", "gradient", "parameter" or "evaluation", or "own dtype": a loss of the unconverted
    model.
    """

    what: str
    name: str
    step: int
    size: float
    allowed: float = TOLERANCE

    @property
    def passed(self) -> bool:
        # Written so that NaN fails.
        return self.size <= self.allowed


@dataclass(frozen=True)
class Report:
    """All differences, the largest one that passes, and notes on further checks."""

    differences: tuple[Difference, ...]
    tolerance: float
    mesh: str
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return all(difference.passed for difference in self.differences)

    def worst(self, what: str) -> Difference:
        """Return the largest difference of one kind; NaN counts as the largest."""
        mine = [difference for difference in self.differences if difference.what == what]
        return max(mine, key=lambda difference: math.inf if math.isnan(difference.size) else difference.size)

    def __str__(self) -> str:
        kinds = list(dict.fromkeys(difference.what for difference in self.differences))
        steps = max(difference.step for difference in self.differences) + 1
        verdict = f"{'equal' if self.passed else 'DIFFERENT'} to {self.tolerance:g}"
        lines = [f"{self.mesh}: {verdict} over {steps} step{'s'[: steps > 1]}"]
        for kind in kinds:
            worst = self.worst(kind)
            allowed = f" (tolerance {worst.allowed:.1g})" if worst.allowed != self.tolerance else ""
            where = f"at {worst.name}, step {worst.step}{allowed}"
            lines.append(f"  {kind:10}  largest difference {worst.size:.1e}  {where}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def compare(
    model: nn.Module,
    options: Options,
    call: Call,
    batches: Iterable[Any] | None = None,
    steps: int = 5,
    lr: float = 1e-3,
) -> Report:
    """Run a model and its partitioned form side by side: `autoptd.verify` for a request that was read."""
    check_module(model)
    check_precision(model, options.precision)
    if any(p.is_meta for p in model.parameters()):
        remedy = "build it on a real device, or inside `with autoptd.deferred():`"
        raise PlanError("verify", "the model is on meta: there are no weights to compare", remedy)
    model = materialize(model)
    own = None
    if checks_own_dtype(model):
        own = compile_program(model, options, *call, replicas=options.mesh.replicas)
    wide_model, wide_options = widen_model(model), widen_options(options, model)
    with Widen():
        program = compile_program(
            wide_model, wide_options, *widen_inputs(call), replicas=options.mesh.replicas
        )
    calls = fresh_calls(program, call, steps) if batches is None else given_calls(batches, steps)
    wide_calls = [widen_inputs(wide_call) for wide_call in calls]
    check_calls(program, wide_calls)
    eps = max(1e-8, NOISE * check_widening(wide_model, program, options, *wide_calls[0]))
    setting = Setting(wide_options, lr, eps)
    large = replace(setting, lr=max(lr, FIRST_LR))
    with activity("first steps of the model and its float64 copy"):
        losses = first_losses(model, program, large, calls)
        with Widen():
            exact = first_losses(wide_model, program, large, wide_calls)
            check_copy(model, losses, exact)
    report = compare_program(wide_model, program, setting, wide_calls)
    if own is not None:
        with kernels_of(own), activity(f"first steps of {program.mesh.size} ranks in the model's own dtype"):
            narrow = replace(large, options=with_fixed_scale(options))
            wanted, allowed = losses_in_own_dtype(model, own, narrow, calls, losses, exact)
            found = compare_first_losses(model, own, narrow, calls, wanted, allowed)
        report = replace(report, differences=report.differences + tuple(found))
    if not report.passed:
        raise InternalError("verify", f"the partitioned model differs from the model\n{report}\n")
    return report


def checks_own_dtype(model: nn.Module) -> bool:
    """Tell whether the model is also compiled in its own dtype, besides float64."""
    return "own dtype" in CHECKS and any(p.dtype != torch.float64 for p in model.parameters())


def compare_program(model: nn.Module, program: Program, setting: Setting, calls: list[Call]) -> Report:
    """Train `model` and `program` from the same float64 weights on the same batches, and measure their
    differences.
    """
    reference = copy.deepcopy(model)
    optimizer = setting.optimizer(reference.parameters())
    ours = Trained(model, program, setting)
    found: list[Difference] = []
    notes: list[str] = []
    try:
        for step, (args, kwargs) in enumerate(calls):
            # Halfway, so that both the loading and the training after it are compared.
            if step and step == len(calls) // 2 and "reload" in CHECKS:
                ours = ours.saved_and_loaded(model)
                notes.append(f"saved, and loaded into a new model, before step {step}")
            with activity(f"step {step + 1} of {len(calls)} of the model"):
                loss = loss_of(reference, program, setting, calls[step], step)
                loss.backward()
            with activity(f"step {step + 1} of {len(calls)} of {program.mesh.size} ranks"):
                our_loss = ours.pm.step(*args, **kwargs)
            found.append(Difference("loss", "loss", step, relative_difference(our_loss, loss.detach(), 0.0)))
            # Before the optimizers step, as `zero_grad` removes the gradients.
            found += _gradient_differences(ours.pm, reference, step)
            for each in (optimizer, ours.optimizer):
                each.step()
                each.zero_grad()
            found += _parameter_differences(ours.pm, reference, setting, step)
        if "evaluation" in CHECKS:
            found += compare_evaluation(ours.pm, reference, setting, calls, notes)
    except RuntimeFault as error:
        if all(difference.passed for difference in found):
            raise
        # An earlier difference, noticed by a guard of the runtime.
        notes.append(f"ended: {error}")
    finally:
        ours.pm.close()
    mesh = f"{setting.options.mesh} v={setting.options.v} m={program.num_microbatches}"
    return Report(tuple(found), TOLERANCE, mesh, tuple(notes))


class WideCompiler(Compiler):
    """Compiles evaluations of a model whose casts to float32 are widened."""

    def for_evaluation(
        self, call: Call, first: Program, counts: tuple[int, ...] = (), outputs: Outputs | None = None
    ) -> Program:
        with Widen():
            return super().for_evaluation(call, first, counts, outputs)


class Trained:
    """The partitioned model and its optimizer."""

    def __init__(self, model: nn.Module, program: Program, setting: Setting) -> None:
        compiler = WideCompiler(Subject.of(model), setting.options)
        self.program, self.setting = program, setting
        self.pm = ParallelModel(program, setting.options, model.state_dict(), compiler=compiler)
        self.optimizer = self.pm.optimizer(torch.optim.AdamW, lr=setting.lr, eps=setting.eps)

    def saved_and_loaded(self, model: nn.Module) -> Trained:
        """Save this model to a file, close it, and return a new one loaded from that file, as a user would."""
        file = io.BytesIO()
        torch.save({"model": self.pm.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
        file.seek(0)
        state, steps = torch.load(file), self.pm.steps
        self.pm.close()
        other = Trained(model, self.program, self.setting)
        other.pm.load_state_dict(state["model"])
        other.optimizer.load_state_dict(state["optimizer"])
        other.pm.steps = steps
        return other


def compare_evaluation(
    pm: ParallelModel, reference: nn.Module, setting: Setting, calls: list[Call], notes: list[str]
) -> list[Difference]:
    """Evaluate both on the last batch; if that is refused, add the reason to `notes`."""
    args, kwargs = calls[-1]
    try:
        ours = pm.eval_step(*args, **kwargs)
    except (PlanError, TraceError) as error:
        notes.append(f"not evaluated: {error}")
        return []
    wanted = evaluated_loss(reference, pm.program, setting, calls[-1])
    return [Difference("evaluation", "loss", len(calls) - 1, relative_difference(ours, wanted, 0.0))]


def compare_first_losses(
    model: nn.Module,
    program: Program,
    setting: Setting,
    calls: list[Call],
    wanted: list[torch.Tensor],
    allowed: float,
) -> list[Difference]:
    """Compare the first two losses of the partitioned model in its requested compute dtype."""
    pm = ParallelModel(program, setting.options, model.state_dict())
    found = []
    try:
        optimizer = pm.optimizer(torch.optim.AdamW, lr=setting.lr, eps=setting.eps)
        for step, loss in enumerate(wanted):
            ours = pm.step(*calls[step][0], **calls[step][1])
            is_same = ours.dtype == loss.dtype
            name = "loss" if is_same else f"loss, of {ours.dtype} for {loss.dtype},"
            # A wrong dtype fails however close the number is.
            size = relative_difference(ours, loss, 0.0) if is_same else float("inf")
            found.append(Difference("own dtype", name, step, size, allowed=allowed))
            optimizer.step()
            optimizer.zero_grad()
    finally:
        pm.close()
    return found


def _gradient_differences(pm: ParallelModel, reference: nn.Module, step: int) -> list[Difference]:
    wanted = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    largest = max((float(gradient.abs().max()) for gradient in wanted.values()), default=0.0)
    # Names without a gradient are absent; compared with zeros, they must be absent on both sides.
    ours = pm.gradients()
    made = []
    for name, parameter in reference.named_parameters():
        zero = torch.zeros_like(parameter)
        size = relative_difference(ours.get(name, zero), wanted.get(name, zero), NOISE * largest)
        made.append(Difference("gradient", name, step, size))
    return made


def _parameter_differences(
    pm: ParallelModel, reference: nn.Module, setting: Setting, step: int
) -> list[Difference]:
    state = pm.state_dict()
    made = []
    for name, parameter in reference.named_parameters():
        size = relative_difference(state[name], parameter.detach(), setting.lr)
        made.append(Difference("parameter", name, step, size))
    return made
