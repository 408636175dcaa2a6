"""Check that the traced graph computes the same as the model, gradients included.

torch.export silently drops tensor hooks, backward hooks and the backward of custom autograd functions. These
are refused: on the model before tracing (`check_model`), and in the forward while tracing (`watch.py`; for
functions, according to `functions.py`). Anything left is caught by running model and graph once (`compare`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import Graph

from autoptd.errors import TraceError
from autoptd.ir.expert_mm import NAME as EXPERTS
from autoptd.ir.noise import is_draw
from autoptd.ir.notes import is_tensor, note, op_name, ops, shape, value
from autoptd.subject.storage import check_storage
from autoptd.trace.autocast import OFF, Autocast
from autoptd.trace.differences import Reference
from autoptd.trace.dropouts import ATTENTION
from autoptd.trace.kept_buffers import distance
from autoptd.trace.noise import draws
from autoptd.trace.pair import Pair
from autoptd.trace.rounding import STATE, Fault, fault_of
from autoptd.trace.updates import updated_buffers
from autoptd.trace.watch import HOOK_REMEDY
from autoptd.trace.watched import Watched, check_changes

# By the narrowest dtype that a gradient flows through: the tolerance relative to a tensor's largest entry,
# and the share of the largest gradient that is added to that entry. A gradient that is zero except for
# rounding must not be compared with its own size.
TOLERANCES = {torch.float64: (1e-9, 1e-3), torch.float32: (1e-5, 1e-1)}
TOLERANCE_OF_HALF = (2.0**-7, 1.0)
# Attention with dropout is decomposed, and rounds at other points than the model's.
TOLERANCE_OF_HALF_DROPOUT = (2.0**-6, 1.0)
# Batch norm is decomposed: it adds in another order than torch's kernel, and subtracts almost equal numbers.
TOLERANCES_OF_NORMS = {torch.float64: (1e-7, 1e-1), torch.float32: (1e-3, 1e-1)}
# Rows of experts are added in another order than in the model, and every sum is rounded.
TOLERANCE_OF_HALF_EXPERTS = (2.0**-5, 1.0)
# Both cast at the same points and mostly agree bitwise: allow for rounding, but check small gradients.
TOLERANCE_OF_AUTOCAST = (2.0**-5, 1e-2)
# With nondeterministic kernels, a difference may be this many times the one between two runs of the model.
NOISE_FACTOR = 4
# Attention scores with at most this many entries fit in memory.
MAX_SCORES = 1 << 28
# A model that differs more from itself is not a function of its inputs.
MAX_NOISE = 2.0**-4


def check_model(model: nn.Module) -> None:
    """Refuse what tracing would drop: backward hooks of modules and parameters, an ambient autocast."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        fact = "it is on around parallelize, and is not traced"
        raise TraceError("autocast", fact, "leave autocast off; cast the model")
    check_storage(model)
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise TraceError(name or "model", "has a backward hook, which is not traced", HOOK_REMEDY)
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise TraceError(name, "has a gradient hook, which is not traced", HOOK_REMEDY)


def check_loss_fn(loss_fn: object) -> None:
    """Refuse a loss function with parameters: the optimizer would not train them."""
    names = [name for name, _ in loss_fn.named_parameters()] if isinstance(loss_fn, nn.Module) else []
    if names:
        fact = f"it is a module with parameters ({', '.join(names)}), and only the model's are trained"
        raise TraceError("loss_fn", fact, "make it a part of the model, whose forward then returns the loss")


def compare(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    graph: Graph,
    buffers: dict[str, torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    autocast: Autocast = OFF,
) -> None:
    """Run model and graph once on the same call: TraceError when the loss or a gradient differs.

    They run the same operators in the same order, on CUDA with deterministic attention. If they differ by more
    than the dtype's tolerance, the model runs again, and the difference between its two runs widens the
    tolerance. If that is not enough, float64 tells rounding from a fault.
    """
    watched = Watched(model, loss_fn)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sites = tuple(note(node).draw.site for node in draws(graph))
    is_exact = bool(sites) or _has_small_attention_on_cuda(graph, trained)
    pair = Pair(model, loss_fn, graph, buffers, args, kwargs, autocast, sites if is_exact else None)
    tolerance, share = _tolerance(graph) if autocast.dtype is None else TOLERANCE_OF_AUTOCAST

    wanted, changed = pair.of_model(lambda loss, mine: Reference(loss, mine, share), watched)
    if others := [name for name in changed if name not in dict(updated_buffers(graph))]:
        fact = "changed by the forward, which the traced graph would not do"
        raise TraceError(
            f"buffer {', '.join(others)}", fact, "keep buffers constant in forward, or model.eval()"
        )
    with autocast.ambient():
        check_changes(watched, args, kwargs)
    excess, results = pair.of_graph(wanted.differences)
    for name, result in results.items():
        excess[f"buffer {name}"] = distance(changed.get(name, buffers[name]), result)
    if max(excess.values()) <= tolerance:
        return
    # Compare the model with itself: the graph cannot be held to values that the model does not reproduce.
    differences, again = pair.of_model(wanted.differences, watched)
    noise = max(
        [*differences.values(), *(distance(changed.get(name, new), new) for name, new in again.items())]
    )
    if noise > MAX_NOISE:
        fact = f"two runs on the same batch differ by {noise:.0e} of their values: it is not a function of its inputs"
        raise TraceError("model", fact, "draw random numbers outside of the model and pass them as an input")
    tolerance = max(tolerance, NOISE_FACTOR * noise)
    for what, size in excess.items():
        if not size <= tolerance:
            fact = f"the traced graph gives another value than the model (largest difference {size:.2e} of its entries)"
            _judge(pair, Fault(what, fact, STATE), tolerance, share)
            return


def _judge(pair: Pair, found: Fault, tolerance: float, share: float) -> None:
    """Raise TraceError for a difference that is more than rounding, or that cannot be judged."""
    fault: Fault | None = found
    if any(p.dtype != torch.float64 for p in pair.model.parameters()):
        try:
            fault = fault_of(pair, found, tolerance, share)
        # The model's code may fail in any way when it sees float64.
        except Exception as error:
            why = f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]
            fact = f"{found.fact}; in float64, which would tell whether that is rounding, it cannot be run: {why}"
            raise TraceError(found.what, fact, f"{STATE}; or let the model run in float64") from error
    if fault is not None:
        raise TraceError(fault.what, fault.fact, fault.remedy)


def _has_small_attention_on_cuda(graph: Graph, parameters: dict[str, nn.Parameter]) -> bool:
    """Tell whether the attention scores fit in memory, so that deterministic math attention can run.

    torch's fused kernels never hold the scores, but sum gradients in any order.
    """
    found = [node for node in ops(graph) if op_name(node) == ATTENTION]
    sizes = [math.prod(shape(node.args[0])[:-1]) * shape(node.args[1])[-2] for node in found]  # type: ignore[arg-type]
    return (
        any(parameter.is_cuda for parameter in parameters.values())
        and max(sizes, default=MAX_SCORES) < MAX_SCORES
    )


def _tolerance(graph: Graph) -> tuple[float, float]:
    """Return the tolerance of the narrowest dtype that a gradient flows through."""
    values = [value(node) for node in graph.nodes if note(node).needs_grad and is_tensor(node)]
    widths = {tensor.dtype: torch.finfo(tensor.dtype).eps for tensor in values if tensor.is_floating_point()}
    narrowest = max(widths, key=widths.__getitem__, default=torch.float32)
    of_half = TOLERANCE_OF_HALF_DROPOUT if any(map(is_draw, ops(graph))) else TOLERANCE_OF_HALF
    if any(op_name(node) in (EXPERTS, "autoptd.grouped_mm") for node in ops(graph)):
        of_half = TOLERANCE_OF_HALF_EXPERTS
    has_norm = any(note(node).origin.batch_norm for node in ops(graph))
    return (TOLERANCES_OF_NORMS if has_norm else TOLERANCES).get(narrowest, of_half)
