"""Whether a check in float64 says something about a model that casts to float32 itself, and its options there.

In: a widened model, its program and a call. Out: the largest entry of a gradient, or a PlanError where widening the casts
changes what the model computes by more than float32's own error.

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
from autoptd.options import Options
from autoptd.program.program import Program
from autoptd.runtime.ops import noise
from autoptd.runtime.ops.dropout import Draw, dropout
from autoptd.trace import given_masks
from autoptd.trace.loss import WithLoss
from autoptd.trace.masks import written_out_attention
from autoptd.trace.widen import Widen, in_float64
from autoptd.verify.put_back import put_back

WIDENED_TOLERANCE = 1e-6
NOISE = {"uniform": noise.uniform, "normal": noise.normal, "exponential": noise.exponential}


@contextmanager
def masks_of(program: Program, step: int) -> Iterator[None]:
    """Let the unmodified model, called with the global batch, draw the masks of a step of `program` meanwhile."""
    if not program.dropouts:
        yield
        return
    spec_of = {spec.site: spec for spec in program.dropouts}
    rows = program.mask_rows * program.num_microbatches * program.mesh.replicas

    def mask_of(site: int, x: torch.Tensor, keep: float) -> torch.Tensor:
        # Dropout of ones: an entry is 0, or 1 / keep.
        whole = torch.ones(x.shape, device=x.device)
        # A dropout whose result is not read has no place in the program.
        if site not in spec_of:
            return whole.bool()
        spec = spec_of[site]
        return dropout(whole, spec.rate, Draw(program.seed, step, site, 0, rows), spec.batch) != 0

    def noise_of(site: int, x: torch.Tensor, kind: str) -> torch.Tensor:
        # Read by nothing but a branch, whose outcome the tracer knows of numbers that are not 0.
        if site not in spec_of:
            return torch.full_like(x, 0.5)
        return NOISE[kind](x, Draw(program.seed, step, site, 0, rows), spec_of[site].batch)

    with given_masks(mask_of, noise_of=noise_of):
        yield


def kernels_of(program: Program) -> AbstractContextManager[None]:
    """Let ranks run the attention that the model ran with given masks; a model that amplifies rounding tells kernels apart."""
    return written_out_attention() if program.dropouts else nullcontext()


def relative_difference(found: torch.Tensor, wanted: torch.Tensor, floor: float) -> float:
    """Return the largest difference over the largest entry, or over `floor` where that is more."""
    # A parameter may have no entries; of all zeros, any difference shows.
    if not wanted.numel():
        return 0.0
    scale = max(float(wanted.abs().max()), floor, 1e-300)
    return float((found.to(wanted) - wanted).abs().max()) / scale


def widen_options(options: Options, model: nn.Module) -> Options:
    """Return options by which the float64 copy gets the plan of the model: bytes are priced as those of
    its dtype.
    """
    sizes = Counter[int]()
    for parameter in model.parameters():
        sizes[parameter.element_size()] += parameter.numel()
    # A bf16 model in float64 has 4 times the bytes. On a machine with 4 times the bandwidth and memory it
    # gets the plan of the bf16 model, which is the one to be proven.
    factor = 8 / sizes.most_common(1)[0][0] if sizes else 1.0
    memory = None if options.memory is None else options.rank_machine.memory * factor
    return replace(options, machine=options.rank_machine.widened(factor), memory=memory)


def check_widening(
    model: nn.Module, program: Program, options: Options, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> float:
    """Check that widening float32 casts changes what the model computes by no more than float32's own error.

    Returns the largest entry of a gradient.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise PlanError(
            "verify", "the model has no parameter that requires a gradient", "nothing is trained here"
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
        fact = "the model's own loss or gradients are not finite on this batch: there is nothing to compare"
        raise PlanError("verify", fact, "a batch and weights for which they are")
    if not worst <= WIDENED_TOLERANCE:
        fact = f"its casts to float32 change loss or gradients by {worst:.1e}: a check in float64 says nothing about it"
        remedy = "leave them out for the check, or take a batch and weights that amplify them less"
        raise PlanError("verify", fact, remedy)
    return largest
