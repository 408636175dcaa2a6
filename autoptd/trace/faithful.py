"""Guard the promise that the traced graph computes what the model computes, gradients included.

torch.export drops tensor hooks, backward hooks and the backward of custom autograd functions without a word. They are
refused: on the model before tracing (`check_model`), in the forward while tracing (`watch_tracing`; functions by what
`functions.py` finds), and whatever is left is caught by running both once (`compare`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autoptd.compat import tree_leaves
from autoptd.errors import TraceError
from autoptd.ir.notes import note, output
from autoptd.trace.dropouts import dropouts
from autoptd.trace.functions import Call, run_forward
from autoptd.trace.loss import WithLoss
from autoptd.trace.masks import any_mask, given_masks

HOOK_REMEDY = "remove the hook: change the gradient after pm.step, or the model's forward"


def check_model(model: nn.Module) -> None:
    """Refuse what tracing would lose: backward hooks on modules, gradient hooks on parameters, an ambient autocast."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise TraceError(
            "autocast", "it is on around parallelize, and is not traced", "leave autocast off; cast the model"
        )
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise TraceError(name or "model", "has a backward hook, which is not traced", HOOK_REMEDY)
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise TraceError(name, "has a gradient hook, which is not traced", HOOK_REMEDY)


@contextmanager
def watch_tracing() -> Iterator[list[Call]]:
    """While the model is traced, refuse tensor hooks, and trace custom autograd functions as their forward.

    Yields the functions that were met, for `check_functions`. What torch makes for `torch.library.register_autograd` is no such
    function: the operator is one node, its backward with it.
    """
    met: list[Call] = []

    def trace_function(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__ == "torch._library.autograd":
            return apply.__func__(cls, *args, **kwargs)
        met.append(Call.of(cls, args))
        return run_forward(cls, args)

    def refuse_hook(self: torch.Tensor, hook: Callable[..., Any]) -> Any:
        raise TraceError("Tensor.register_hook", "a hook in the forward is not traced", HOOK_REMEDY)

    apply, hook = torch.autograd.Function.__dict__["apply"], torch.Tensor.register_hook
    torch.autograd.Function.apply = classmethod(trace_function)  # type: ignore[assignment, method-assign]
    torch.Tensor.register_hook = refuse_hook  # type: ignore[method-assign]
    try:
        yield met
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        torch.Tensor.register_hook = hook  # type: ignore[method-assign]


def compare(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    graph: Graph,
    buffers: dict[str, torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Run model and graph once on the same call: TraceError when the loss or a gradient differs.

    The tolerance is 1e-3 of each tensor's largest entry (the two run the same operators in the same order; a lost backward
    or region shows at the order of the gradient itself).
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name: one.detach().clone() for name, one in model.named_buffers()}
    sites = [note(node).extra["site"] for node in dropouts(graph)]
    with given_masks(any_mask) if sites else nullcontext():
        wanted_loss = WithLoss(model, loss_fn)(*args, **kwargs)
    _check_buffers(model, before)
    wanted = dict(
        zip(parameters, torch.autograd.grad(wanted_loss, list(parameters.values()), allow_unused=True), strict=True)
    )
    with torch.enable_grad(), given_masks(any_mask, sites) if sites else nullcontext():
        found_loss, leaves = run_graph(graph, dict(model.named_parameters()), buffers, tree_leaves((args, kwargs)))
    used = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    found = dict(zip(used, torch.autograd.grad(found_loss, list(used.values()), allow_unused=True), strict=True))
    _same("loss", found_loss.detach(), wanted_loss.detach())
    largest = max((float(g.abs().max()) for g in wanted.values() if g is not None), default=0.0)
    for name, gradient in wanted.items():
        other = found.get(name)
        if gradient is None and other is None:
            continue
        zero = torch.zeros_like(parameters[name])
        _same(
            f"gradient of {name}",
            other if other is not None else zero,
            gradient if gradient is not None else zero,
            largest,
        )


def _check_buffers(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    """Restore and refuse buffers that the forward has changed."""
    after = dict(model.named_buffers())
    changed = [name for name, one in before.items() if name in after and not _equal(one, after[name])]
    for name in changed:
        after[name].detach().copy_(before[name])
    if changed:
        fact = "changed by the forward, which the traced graph would not do"
        raise TraceError(f"buffer {', '.join(changed)}", fact, "keep buffers constant in forward, or model.eval()")


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num()) if one.is_floating_point() else torch.equal(one, other)


def run_graph(
    graph: Graph, parameters: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], leaves: list[Any]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Interpret a TRACED graph; returns the loss and the parameter leaves that it was computed from."""
    tensors = iter([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
    device = next((one.device for one in parameters.values()), None)
    env: dict[Node, Any] = {}
    used: dict[str, torch.Tensor] = {}
    for node in graph.nodes:
        record = note(node)
        if record.kind == "param":
            parameter = parameters[record.name]
            env[node] = used[record.name] = parameter.detach().requires_grad_(parameter.requires_grad)
        elif record.kind == "buffer":
            env[node] = buffers[record.name]
        elif record.kind == "input":
            env[node] = next(tensors)
        elif node.op == "call_function":
            made_here = {} if node.all_input_nodes or device is None else _device_keyword(node, device)
            kwargs = map_arg(node.kwargs, env.__getitem__) | made_here
            env[node] = node.target(*map_arg(node.args, env.__getitem__), **kwargs)
    return env[output(graph).args[0]], used


def _device_keyword(node: Node, device: torch.device) -> dict[str, Any]:
    """Operators that make a tensor from nothing (arange) make it where the parameters are."""
    schema = getattr(node.target, "_schema", None)
    return {"device": device} if schema and any(one.name == "device" for one in schema.arguments) else {}


def _same(what: str, found: torch.Tensor, wanted: torch.Tensor, largest: float = 0.0) -> None:
    scale = max(float(wanted.abs().max()), 1e-3 * largest, 1e-30)
    difference = float((found.double() - wanted.double()).abs().max())
    is_finite = bool(wanted.isfinite().all()) or bool(found.isfinite().all())
    if is_finite and not difference <= 1e-3 * scale:
        raise TraceError(
            what,
            f"the traced graph gives another value than the model (largest difference {difference:.2e})",
            "look for Python state, custom backward code or hooks in the forward",
        )
