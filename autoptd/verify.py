"""Prove that a partitioned model computes what the model computes: loss, every gradient, every updated parameter.

    report = autoptd.verify(model, t=2, p=2, d=2, example_inputs=(ids, targets))
    print(report)           # largest difference of losses, gradients and parameters, by name

Both programs run in float64 for some optimizer steps, the partitioned one with its ranks as threads, and with the plan that
the model has in its own dtype. Differences are measured
as max|x - ref| / max(max|ref|, 1e-3 * largest gradient, or the learning rate for parameters): a gradient that is
mathematically zero (a key bias) is noise and must not be divided by itself. Casts to float32 inside the model (Hugging Face's
norms and losses) would hide errors under 1e-7, so they are widened to float64 in both programs, and the widened reference
is held against the untouched model at 1e-6. Where the model drops out, the reference draws the same masks, of the whole batch.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autoptd.auto import planned
from autoptd.compat import tree_map
from autoptd.compile import check_module, compile_program, split_call
from autoptd.errors import InternalError, PlanError
from autoptd.ir.program import Program
from autoptd.options import Options, make_options
from autoptd.parallel_model import ParallelModel
from autoptd.runtime.dropout import Draw, dropout
from autoptd.trace import given_masks
from autoptd.trace.loss import WithLoss
from autoptd.trace.state import map_attribute_tensors

TOLERANCE = 1e-9
NOISE = 1e-3  # of the largest gradient: smaller ones are not held against themselves
WIDENED_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Difference:
    """The relative difference of one tensor after one step; `what` is "loss", "gradient" or "parameter"."""

    what: str
    name: str
    step: int
    size: float


@dataclass(frozen=True)
class Report:
    """All differences, and the largest one that passes."""

    differences: tuple[Difference, ...]
    tolerance: float
    mesh: str

    @property
    def passed(self) -> bool:
        return all(one.size <= self.tolerance for one in self.differences)

    def worst(self, what: str) -> Difference:
        """The largest difference of one kind; NaN counts as the largest."""
        mine = [one for one in self.differences if one.what == what]
        return max(mine, key=lambda one: float("inf") if one.size != one.size else one.size)

    def __str__(self) -> str:
        kinds = list(dict.fromkeys(one.what for one in self.differences))
        steps = max(one.step for one in self.differences) + 1
        verdict = f"{'equal' if self.passed else 'DIFFERENT'} to {self.tolerance:g}"
        lines = [f"{self.mesh}: {verdict} over {steps} step{'s'[: steps > 1]}"]
        for kind in kinds:
            worst = self.worst(kind)
            lines.append(f"  {kind:9}  largest difference {worst.size:.1e}  at {worst.name}, step {worst.step}")
        return "\n".join(lines)


class Widen(TorchFunctionMode):
    """Requests for float32 become float64: a model's own upcasts must not truncate a float64 check."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty_strided:  # the tracer's own: it rebuilds a constant of the model in its very dtype
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.float:
            return args[0].double() if args[0].is_floating_point() else func(*args, **(kwargs or {}))
        wide = [torch.float64 if arg is torch.float32 else arg for arg in args]
        named = {key: torch.float64 if arg is torch.float32 else arg for key, arg in (kwargs or {}).items()}
        return func(*wide, **named)


def verify(model: nn.Module, *, example_inputs: Any, steps: int = 5, lr: float = 1e-3, **keywords: Any) -> Report:
    """Run `model` and its partitioned form side by side; raise InternalError with the report if they differ.

    `example_inputs` is the global batch; every step rolls its rows by one. Keywords are those of `parallelize`. The model
    itself is not changed. Raises PlanError when the model has no weights (meta) or trains no parameter.
    """
    options = make_options(**{**planned(model, example_inputs, keywords), "backend": "local"})
    args, kwargs = split_call(example_inputs)
    check_module(model)
    if any(p.is_meta for p in model.parameters()):
        raise PlanError("verify", "the model is on meta: there are no weights to compare", "build it on a real device")
    wide_model, (args, kwargs) = widen_model(model), widen_inputs((args, kwargs))
    with Widen():
        program = compile_program(wide_model, widen_options(options, model), args, kwargs, replicas=options.d)
    eps = max(1e-8, NOISE * check_widening(wide_model, program, options, args, kwargs))
    report = compare_program(wide_model, program, options, args, kwargs, steps=steps, lr=lr, eps=eps)
    if not report.passed:
        raise InternalError("verify", f"the partitioned model differs from the model\n{report}\n")
    return report


def widen_model(model: nn.Module) -> nn.Module:
    """A float64 copy, plain tensor attributes included; tied weights stay tied."""
    try:
        wide = copy.deepcopy(model).double()
        map_attribute_tensors(wide, lambda x: x.double() if x.is_floating_point() else x)
        return wide
    except RuntimeError as error:  # a module that keeps a tensor with a history, as the old weight_norm does
        fact = f"it cannot be copied: {str(error).splitlines()[0]}"
        raise PlanError("verify", fact, "keep only parameters and buffers on modules") from error


def widen_options(options: Options, model: nn.Module) -> Options:
    """Options by which the float64 copy of `model` gets the plan of the model: bytes are priced as those of its dtype."""
    sizes = Counter[int]()
    for parameter in model.parameters():
        sizes[parameter.element_size()] += parameter.numel()
    factor = 8 / sizes.most_common(1)[0][0] if sizes else 1.0
    memory = None if options.memory is None else options.memory * factor
    return replace(options, machine=options.rank_machine.widened(factor), memory=memory)


def widen_inputs(call: Any) -> Any:
    def wide(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return tree_map(wide, call)


def compare_program(
    model: nn.Module,
    program: Program,
    options: Options,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    steps: int = 5,
    lr: float = 1e-3,
    eps: float = 1e-8,
) -> Report:
    """Train `model` and `program` from the same float64 weights on the same batches, and measure their differences.

    AdamW divides a gradient by its own size plus `eps`: with torch's 1e-8, one that is zero but for rounding moves a weight by
    as much as a true one, and the rounding shows.
    """
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=lr, eps=eps)
    pm = ParallelModel(program, options, model.state_dict())
    found: list[Difference] = []
    try:
        ours = pm.optimizer(torch.optim.AdamW, lr=lr, eps=eps)
        for step in range(steps):
            call = _roll(program, args, kwargs, step)
            with Widen():
                with masks_of(program, pm.steps + 1):
                    loss = WithLoss(reference, options.loss_fn)(*call[0], **call[1])
                loss.backward()
            our_loss = pm.step(*call[0], **call[1])
            found.append(Difference("loss", "loss", step, _relative(our_loss, loss.detach(), 0.0)))
            found += _gradient_differences(pm, reference, step)
            optimizer.step()
            optimizer.zero_grad()
            ours.step()
            ours.zero_grad()
            state = pm.state_dict()
            for name, parameter in reference.named_parameters():
                found.append(Difference("parameter", name, step, _relative(state[name], parameter.detach(), lr)))
    finally:
        pm.close()
    return Report(tuple(found), TOLERANCE, f"{options.mesh} v={options.v} m={program.num_microbatches}")


@contextmanager
def masks_of(program: Program, step: int) -> Iterator[None]:
    """While it lasts, the unmodified model, called with the global batch, draws the dropout masks of a step of `program`."""
    if not program.dropouts:
        yield
        return
    spec_of = {one.site: one for one in program.dropouts}
    rows = program.rows * program.num_microbatches * program.mesh.d

    def mask_of(site: int, x: torch.Tensor, keep: float) -> torch.Tensor:
        whole = torch.ones(x.shape, device=x.device)
        if site not in spec_of:  # its result is not read
            return whole.bool()
        spec = spec_of[site]
        return dropout(whole, spec.rate, Draw(program.seed, step, site, 0, rows), spec.batch) != 0

    with given_masks(mask_of):
        yield


def _gradient_differences(pm: ParallelModel, reference: nn.Module, step: int) -> list[Difference]:
    wanted = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    largest = max((float(gradient.abs().max()) for gradient in wanted.values()), default=0.0)
    ours = pm.gradients()
    made = []
    for name, parameter in reference.named_parameters():
        zero = torch.zeros_like(parameter)
        size = _relative(ours.get(name, zero), wanted.get(name, zero), NOISE * largest)
        made.append(Difference("gradient", name, step, size))
    return made


def _relative(found: torch.Tensor, wanted: torch.Tensor, floor: float) -> float:
    scale = max(float(wanted.abs().max()) if wanted.numel() else 0.0, floor, 1e-300)
    return float((found.to(wanted) - wanted).abs().max()) / scale if wanted.numel() else 0.0


def _roll(
    program: Program, args: tuple[Any, ...], kwargs: dict[str, Any], step: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The batch with its rows rolled: other rows meet in a microbatch in every step."""
    rows = {spec.leaf for spec in program.inputs if spec.batched}
    count = iter(range(10**6))

    def roll(leaf: Any) -> Any:
        return leaf.roll(step, 0) if next(count) in rows else leaf

    return tree_map(roll, (args, kwargs))


def check_widening(
    model: nn.Module, program: Program, options: Options, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> float:
    """Widening float32 casts must not change what the model computes by more than float32's own error.

    Returns the largest entry of a gradient.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise PlanError("verify", "the model has no parameter that requires a gradient", "nothing is trained here")
    with masks_of(program, 1):
        plain = WithLoss(model, options.loss_fn)(*args, **kwargs)
    narrow = torch.autograd.grad(plain, parameters, allow_unused=True)
    with Widen():
        with masks_of(program, 1):
            loss = WithLoss(model, options.loss_fn)(*args, **kwargs)
        wide = torch.autograd.grad(loss, parameters, allow_unused=True)
    largest = max(float(one.abs().max()) for one in wide if one is not None)
    pairs = [(a, b) for a, b in zip(narrow, wide, strict=True) if a is not None and b is not None]
    worst = max([_relative(plain.detach(), loss.detach(), 0.0), *(_relative(a, b, largest) for a, b in pairs)])
    if not all(one.isfinite().all() for one in (plain, loss, *narrow, *wide) if one is not None):
        fact = "the model's own loss or gradients are not finite on this batch: there is nothing to compare"
        raise PlanError("verify", fact, "a batch and weights for which they are")
    if not worst <= WIDENED_TOLERANCE:
        fact = f"its casts to float32 change loss or gradients by {worst:.1e}: a check in float64 says nothing about it"
        remedy = "leave them out for the check, or take a batch and weights that amplify them less"
        raise PlanError("verify", fact, remedy)
    return largest
