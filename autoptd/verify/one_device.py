"""The side of `verify` that is not partitioned: losses and first steps of the model on one device.

Checks that these prove something are here, too.

In: the user's model or its float64 copy, and the program that divides its batch. Out: losses; the model is restored.

    with Widen():
        loss = loss_of(wide_model, program, setting, call, step=0)      # in float64, with the dropout masks of the ranks
    losses = first_losses(model, program, setting, calls)               # in the model's own dtype

Two things would make a comparison in float64 meaningless. A copy separates parameters that share storage, and buffers
that are views of them, and a wider dtype hides a lost one: so the model itself trains one step, and `check_copy`
compares it with the copy. A model may cast to float32 itself: `check_widening` compares it with the same model whose
casts are widened.

A value marked by `autoptd.per_microbatch` is computed on the rows of every microbatch first; then the model runs on
the whole batch with the means of the marked values in place.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoptd.compat import tree_flatten, tree_unflatten
from autoptd.compiler.request import autocast_here
from autoptd.errors import PlanError, TraceError
from autoptd.ir.machine import machine_record
from autoptd.ir.notes import op_name, ops
from autoptd.kernels.forms import wide
from autoptd.options import PRECISIONS, LossScale, Options
from autoptd.passes.solve.batch_types import MARK
from autoptd.program.program import Program
from autoptd.runtime.ops.dropout import Draw, dropout, exponential, normal, uniform
from autoptd.runtime.step.microbatches import part_of_rows
from autoptd.subject.call import Call
from autoptd.subject.per_microbatch import marking
from autoptd.trace import (
    OFF,
    Autocast,
    Widen,
    WithLoss,
    computing_in,
    given_masks,
    in_float64,
    written_out_attention,
)

# Largest relative difference between a loss in this dtype and one in float64.
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
# Of two runs that round differently, one may be closer to float64 by chance, by up to this factor.
AMPLIFIED = 16
# With this scale, an overflow is the model's own; gradients that round to zero are noise on both sides (see
# `Setting`).
FIXED_SCALE = 1.0
WIDENED_TOLERANCE = 1e-6
DRAWN = {"uniform": uniform, "normal": normal, "exponential": exponential}
Tensor = torch.Tensor
Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class Setting:
    """The training setup of both sides, with AdamW.

    AdamW divides a gradient by its own size plus `eps`. With torch's 1e-8, a gradient that is zero up to
    rounding would move a weight as much as a real one, and the rounding would show.
    """

    options: Options
    lr: float
    eps: float

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.lr, eps=self.eps)


def loss_of(model: nn.Module, program: Program, setting: Setting, call: Call, step: int) -> torch.Tensor:
    """Compute the loss of the unmodified model in float64, with the dropout masks of this step (from 0 on)."""
    with Widen(), masks_of(program, step + 1):
        return loss_by_microbatch(WithLoss(model, setting.options.loss_fn), program, *call)


def evaluated_loss(model: nn.Module, program: Program, setting: Setting, call: Call) -> torch.Tensor:
    """Compute the loss of the unmodified model in evaluation, in float64."""
    with torch.no_grad(), Widen(), put_back(model):
        return loss_by_microbatch(WithLoss(model.eval(), setting.options.loss_fn), program, *call)


def first_losses(
    model: nn.Module, program: Program, setting: Setting, calls: list[Call], autocast: Autocast = OFF
) -> list[torch.Tensor]:
    """Return the losses of the first two calls (one, if there is only one), a step apart, under `autocast`.

    Also only one if the step is skipped: in float16 a gradient may overflow.
    """
    losses = []
    with put_back(model):
        for step, (args, kwargs) in enumerate(calls[:2]):
            with masks_of(program, step + 1), autocast.around():
                loss = loss_by_microbatch(WithLoss(model, setting.options.loss_fn), program, args, kwargs)
            losses.append(loss.detach())
            if len(calls) > 1 and step == 0 and not take_step(model, loss, setting):
                break
    return losses


def take_step(model: nn.Module, loss: torch.Tensor, setting: Setting) -> bool:
    """Take the first training step, of the parameters or, with `precision`, of wide copies of them.

    Return False if it would be skipped: in float16, when a gradient is not finite.
    """
    parameters = list(model.parameters())
    stored = parameters
    if setting.options.precision:
        stored = [nn.Parameter(x.detach().to(wide(x.dtype)), x.requires_grad) for x in parameters]
    scale = setting.options.loss_scale.fixed or 1.0
    (loss * scale).backward()
    for parameter, master in zip(parameters, stored, strict=True):
        if parameter.grad is not None:
            master.grad = parameter.grad.to(master.dtype) / scale
    grads = [master.grad for master in stored if master.grad is not None]
    if setting.options.is_fp16 and not all(bool(grad.isfinite().all()) for grad in grads):
        return False
    setting.optimizer(stored).step()
    with torch.no_grad():
        for parameter, master in zip(parameters, stored, strict=True):
            parameter.grad = None
            parameter.copy_(master)
    return True


def with_fixed_scale(options: Options) -> Options:
    """Return a request with a fixed loss scale, whose first steps are not skipped: a dynamic scale first
    searches for its value.
    """
    if not options.is_fp16 or options.loss_scale.fixed is not None:
        return options
    return replace(options, loss_scale=LossScale(fixed=FIXED_SCALE))


def losses_in_own_dtype(
    model: nn.Module,
    program: Program,
    setting: Setting,
    calls: list[Call],
    losses: list[torch.Tensor],
    exact: list[torch.Tensor],
) -> tuple[list[torch.Tensor], float]:
    """Return the first losses of a model as `precision` computes it, and how far those of the ranks may differ.

    `losses` are those of the model without `precision`, `exact` those in float64.
    """
    options, wanted = setting.options, losses
    if options.precision:
        with computing_in(model, options.precision, program.cast_buffers):
            made = first_losses(model, program, setting, calls, autocast_here(model, options))
        wanted = finite_losses(made, options.precision)
    return wanted, allowance(_rounding(model, options), wanted, exact)


def finite_losses(losses: list[torch.Tensor], precision: str | None) -> list[torch.Tensor]:
    """Return the model's losses up to an overflow in its own dtype; reject a model whose first loss
    overflows.
    """
    count = next((step for step, loss in enumerate(losses) if not torch.isfinite(loss).all()), len(losses))
    if not count:
        fact = f"the model's own first loss is {float(losses[0])}: it overflows"
        raise PlanError(f"precision={precision!r}", fact, "use precision='bf16', or smaller values")
    return losses[:count]


def allowance(rounding: float, losses: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Return how far losses may differ from `losses` of the model in its own dtype, at least `rounding`;
    `exact` are in float64.

    A model may amplify rounding: then its own losses differ from `exact` as well, and those of ranks, which
    round elsewhere, by as much.
    """
    # A skipped step has no second loss.
    pairs = zip(losses, exact[: len(losses)], strict=True)
    own = [relative_difference(loss.double(), wide, 0.0) for loss, wide in pairs]
    return max(rounding, AMPLIFIED * max(own))


def _rounding(model: nn.Module, options: Options) -> float:
    """Return how far a loss of the ranks may differ from float64, given their compute and reduction dtypes."""
    rounding = rounding_of(model)
    if options.precision:
        rounding = ROUNDING[getattr(torch, PRECISIONS[options.precision])]
    if options.zero.reduce_dtype != "fp32":
        # Gradients are rounded in transit, which no single device does: it shows after the first update.
        rounding = max(rounding, ROUNDING[getattr(torch, PRECISIONS[options.zero.reduce_dtype])])
    return rounding


def rounding_of(model: nn.Module) -> float:
    """Return the rounding error of the coarsest parameter dtype."""
    return max((ROUNDING.get(p.dtype, 0.0) for p in model.parameters()), default=1e-6)


def check_copy(model: nn.Module, ours: list[torch.Tensor], copied: list[torch.Tensor]) -> None:
    """Reject a model that trains differently from its float64 copy: the comparison would prove nothing about
    it.
    """
    # Step 0 comes before any update: a lost tie can only show from step 1 on.
    for step, (loss, wanted) in enumerate(zip(map(float, ours), map(float, copied), strict=True)):
        if not abs(loss - wanted) <= rounding_of(model) * max(abs(wanted), abs(float(copied[0]))):
            fact = f"in step {step} its loss is {loss:.9g}, that of a float64 copy {wanted:.9g}: "
            fact += (
                "parameters, buffers or attributes share storage, which a copy separates"
                if step
                else "the copy differs"
            )
            remedy = "tie weights by assigning the Parameter itself, and read it in forward where it is used"
            raise TraceError("model", fact, remedy)


def check_widening(
    model: nn.Module, program: Program, options: Options, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> float:
    """Check that widening float32 casts changes the results by no more than float32's own error; return the
    largest gradient entry.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise PlanError(
            "verify", "the model has no parameter that requires a gradient", "there is nothing to train"
        )
    with put_back(model):
        with masks_of(program, 1), in_float64():
            plain = WithLoss(model, options.loss_fn)(*args, **kwargs)
        narrow = torch.autograd.grad(plain, parameters, allow_unused=True)
    with put_back(model), Widen():
        with masks_of(program, 1):
            loss = WithLoss(model, options.loss_fn)(*args, **kwargs)
        wide = torch.autograd.grad(loss, parameters, allow_unused=True)
    # A parameter without a gradient has None.
    pairs = [(a, b) for a, b in zip(narrow, wide, strict=True) if a is not None and b is not None]
    largest = max(float(b.abs().max()) for _, b in pairs)
    worst = max(
        [
            relative_difference(plain.detach(), loss.detach(), 0.0),
            *(relative_difference(a, b, largest) for a, b in pairs),
        ]
    )
    values = [plain, loss, *itertools.chain.from_iterable(pairs)]
    if not all(value.isfinite().all() for value in values):
        fact = "loss or gradients of the model are not finite on this batch: there is nothing to compare"
        raise PlanError("verify", fact, "use a batch and weights for which they are finite")
    if not worst <= WIDENED_TOLERANCE:
        fact = (
            f"its casts to float32 change loss or gradients by {worst:.1e}: a check in float64 proves "
            "nothing about it"
        )
        remedy = "leave them out for the check, or use a batch and weights that amplify them less"
        raise PlanError("verify", fact, remedy)
    return largest


def widen_options(options: Options, model: nn.Module) -> Options:
    """Return options that give the float64 copy the plan of the model: bytes cost what they cost in the
    model's dtype.
    """
    sizes = Counter[int]()
    for parameter in model.parameters():
        sizes[parameter.element_size()] += parameter.numel()
    # A bf16 model has 4 times the bytes in float64. On a machine with 4 times the bandwidth and memory, it
    # gets the plan of the bf16 model, which is the plan to prove.
    factor = 8 / sizes.most_common(1)[0][0] if sizes else 1.0
    memory = None if options.memory is None else options.rank_machine.memory * factor
    return replace(options, machine=machine_record(options.rank_machine.widened(factor)), memory=memory)


def relative_difference(found: torch.Tensor, wanted: torch.Tensor, floor: float) -> float:
    """Return the largest difference relative to the largest entry, or to `floor` if that is larger."""
    # A parameter may be empty; if all entries are zero, any difference shows.
    if not wanted.numel():
        return 0.0
    scale = max(float(wanted.abs().max()), floor, 1e-300)
    return float((found.to(wanted) - wanted).abs().max()) / scale


@contextmanager
def masks_of(program: Program, step: int) -> Iterator[None]:
    """In this context, the unmodified model, called with the global batch, draws the dropout masks of a step
    of `program`.
    """
    if not program.dropouts:
        yield
        return
    spec_of = {spec.site: spec for spec in program.dropouts}
    rows = program.mask_rows * program.num_microbatches * program.mesh.replicas

    def mask_of(site: int, x: torch.Tensor, keep: float) -> torch.Tensor:
        # Dropout of ones: an entry is 0, or 1 / keep.
        whole = torch.ones(x.shape, device=x.device)
        # A dropout whose result is unused is not in the program.
        if site not in spec_of:
            return whole.bool()
        spec = spec_of[site]
        return dropout(whole, spec.rate, Draw(program.seed, step, site, 0, rows), spec.batch) != 0

    def noise_of(site: int, x: torch.Tensor, kind: str) -> torch.Tensor:
        # Read only by a branch, whose outcome is traced for nonzero numbers.
        if site not in spec_of:
            return torch.full_like(x, 0.5)
        return DRAWN[kind](x, Draw(program.seed, step, site, 0, rows), spec_of[site].batch)

    with given_masks(mask_of, noise_of=noise_of):
        yield


def kernels_of(program: Program) -> AbstractContextManager[None]:
    """Let the ranks use the attention backend that the model used with given masks; models that amplify
    rounding tell backends apart.
    """
    return written_out_attention() if program.dropouts else nullcontext()


def loss_by_microbatch(loss: Loss, program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the loss of a global batch."""
    if not any(op_name(node) == MARK for node in ops(program.graphs["TRACED"])):
        return loss(*args, **kwargs)
    if program.dropouts:
        fact = "values marked by per_microbatch are computed again per row, with other dropout masks"
        raise PlanError("verify", fact, "set dropout to p=0")
    pieces = program.num_microbatches * program.mesh.replicas
    rounds = [_marked(loss, program, args, kwargs, number, pieces) for number in range(pieces)]
    means = [torch.stack(values).mean(0) for values in zip(*rounds, strict=True)]
    left = iter(means)
    with marking(lambda x: next(left)):
        return loss(*args, **kwargs)


def _marked(
    loss: Loss, program: Program, args: tuple[Any, ...], kwargs: dict[str, Any], number: int, pieces: int
) -> list[Tensor]:
    """Return the marked values in the loss of one microbatch, in order."""
    leaves, tree = tree_flatten((args, kwargs))
    for spec in program.inputs:
        if spec.batched:
            leaves[spec.leaf] = part_of_rows(leaves[spec.leaf], number, pieces, spec.blocks)
    part, keywords = tree_unflatten(leaves, tree)
    values: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        values.append(x)
        return x

    with marking(keep):
        loss(*part, **keywords)
    return values


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """Restore every parameter, gradient, buffer and attribute of `model` afterwards."""
    tensors = [*model.parameters(), *model.buffers()]
    values, gradients = [x.detach().clone() for x in tensors], [(p, p.grad) for p in model.parameters()]
    states = [(vars(module), dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        # In place: vars(module) is the module's own dict.
        for state, before, buffers in states:
            state.clear()
            state.update(before)
            state["_buffers"].clear()
            state["_buffers"].update(buffers)
        with torch.no_grad():
            for x, value in zip(tensors, values, strict=True):
                x.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
