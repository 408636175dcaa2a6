"""Check that a comparison in float64 is meaningful for a model that casts to float32 itself; choose its
options there.

In: a widened model, its program and a call. Out: the largest gradient entry, or a PlanError if widening the
casts changes the results by more than float32's own error.

    largest = check_widening(model, program, options, args, kwargs)
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoptd.errors import PlanError
from autoptd.ir.machine import machine_record
from autoptd.options import Options
from autoptd.program.program import Program
from autoptd.runtime.ops.dropout import Draw, dropout, exponential, normal, uniform
from autoptd.trace import given_masks
from autoptd.trace.draws import written_out_attention
from autoptd.trace.loss import WithLoss
from autoptd.trace.precision import Widen, in_float64
from autoptd.verify.put_back import put_back

WIDENED_TOLERANCE = 1e-6
NOISE = {"uniform": uniform, "normal": normal, "exponential": exponential}


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
        return NOISE[kind](x, Draw(program.seed, step, site, 0, rows), spec_of[site].batch)

    with given_masks(mask_of, noise_of=noise_of):
        yield


def kernels_of(program: Program) -> AbstractContextManager[None]:
    """Let the ranks use the attention backend that the model used with given masks; models that amplify
    rounding tell backends apart.
    """
    return written_out_attention() if program.dropouts else nullcontext()


def relative_difference(found: torch.Tensor, wanted: torch.Tensor, floor: float) -> float:
    """Return the largest difference relative to the largest entry, or to `floor` if that is larger."""
    # A parameter may be empty; if all entries are zero, any difference shows.
    if not wanted.numel():
        return 0.0
    scale = max(float(wanted.abs().max()), floor, 1e-300)
    return float((found.to(wanted) - wanted).abs().max()) / scale


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
