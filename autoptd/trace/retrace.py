"""Trace a model a second time with another number of rows, by following its first trace.

All of the model's Python code runs again in the same environment (torch.export's), but no graph is built: every
operator that the forward calls must be the next one of the first graph, on the same operands, in the same gradient
mode. The second trace is then the first graph with the numbers and sizes of the second run. If the forward does
anything else, it is traced in full.

In: the first trace, before it was normalised (`Raw`), and the forward with other rows. Out: the graph that `capture`
would return.

    graph = capture_again(captured, model, args, kwargs, loss_fn)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils.weak import WeakTensorKeyDictionary

from autoptd.compat import FakeTensor, FakeTensorMode, PreDispatchMode
from autoptd.errors import AutoptdError
from autoptd.ir.notes import copy_nodes, note, output, placeholders, value
from autoptd.trace.autocast import OFF, Autocast, Casting
from autoptd.trace.capture import (
    IGNORED,
    Captured,
    Followed,
    Raw,
    capture,
    check_kept,
    export,
    fresh_call,
    watched_model,
)
from autoptd.trace.normalize import bring_to_traced
from autoptd.trace.watched import check_changes

aten = torch.ops.aten


class Differs(BaseException):
    """Signal that the forward differs from the first trace; a BaseException, as models catch Exception."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """Hold the metadata of a fake tensor instead of the tensor: torch copies results that are referenced."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> Metadata:
        return cls(x.shape, x.stride(), x.dtype, x.device)

    def make(self, mode: FakeTensorMode) -> FakeTensor:
        meta = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")
        return FakeTensor(mode, meta, self.device)


def capture_again(
    first: Captured,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: Callable[..., Any] | None,
    autocast: Autocast = OFF,
) -> Graph:
    """Trace the call of `first` with other rows, following `first` while the forward does the same.

    Returns the same graph as `capture`.
    """
    wrapper, follower = watched_model(model, loss_fn, first.checks), Follower(first.raw, Casting(autocast))
    known: dict[str, Any] = {"whole": set(first.whole), "checks": first.checks}
    try:
        fresh = fresh_call(args, kwargs)
        export(wrapper, *fresh, casting=Casting(autocast), **known, run=follower.run)
    # A full trace reports whatever the forward does differently, or where it fails.
    except (Differs, AutoptdError):
        return capture(model, args, kwargs, loss_fn, autocast).graph
    with autocast.ambient():
        check_changes(wrapper, args, kwargs)
    graph = follower.graph()
    # `read_graph` refuses these in a trace; the first trace did not have them.
    for node in placeholders(graph, "buffer"):
        if note(node).origin.constant is not None:
            check_kept(note(node).origin.constant, wrapper)
    bring_to_traced(graph, model, autocast.dtype, wrapper.seen.assigned.keys())
    return graph


class Follower(PreDispatchMode):
    """Compare the operators of a running forward with those of a graph, and record the values of the run."""

    def __init__(self, raw: Raw, casting: Casting) -> None:
        super().__init__()
        self._raw, self._casting = raw, casting
        self._steps = [node for node in raw.graph.nodes if _is_step(node)]
        self._at = 0
        self._has_differed = False
        # Weak, as torch copies results of operators that are referenced elsewhere.
        self._node_of = WeakTensorKeyDictionary()
        self._values: dict[Node, Metadata | tuple[Metadata, ...]] = {}
        self._calls: dict[Node, tuple[Any, Any]] = {}
        self._constants: dict[Node, Tensor] = {}

    def run(self, forward: Any, args: Sequence[Any]) -> None:
        """Call the forward instead of torch.export's tracer."""
        if len(args) != len(self._raw.given):
            self._differ()
        for node, arg in zip(self._raw.given, args, strict=True):
            if isinstance(arg, Tensor) != (node is not None):
                self._differ()
            if node is not None:
                self._enter(node, arg)
        with self:
            (loss,) = forward(*args)
        # The model's code may have swallowed a `Differs` in a bare except.
        if self._has_differed or self._at != len(self._steps):
            self._differ()
        self._operand(loss, output(self._raw.graph).args[0])
        raise Followed

    def graph(self) -> Graph:
        """Return the first graph with the values of the second run, not normalised either."""
        graph, copies = copy_nodes(self._raw.graph)
        for node, copy in copies.items():
            if node in self._calls:
                args, kwargs = self._calls[node]
                copy.args, copy.kwargs = map_arg((args, kwargs), copies.__getitem__)
            if node in self._constants:
                note(copy).origin = replace(note(copy).origin, constant=self._constants[node].detach())
            made_by = _made_by(node)
            if made_by in self._values:
                copy.meta["val"] = _with(value(node), self._values[made_by])
        return graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # In a first trace, `traced_through` does this.
        return self._casting.call(self._follow, func, args, kwargs or {})

    def _follow(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator and match it with the next step of the first trace."""
        if func in IGNORED:
            return func(*args, **kwargs)
        node = self._steps[self._at] if self._at < len(self._steps) else None
        # The graph copies a tensor made by `torch.tensor`, so as not to write to the constant.
        target = aten.lift_fresh_copy.default if func is aten.lift_fresh.default else func
        # torch.export drops an unused detach, so it has no node here.
        if func is aten.detach.default and not self._is_detach(node, args[0]):
            return func(*args, **kwargs)
        if node is None or node.target is not target:
            self._differ()
        # In-place changes of sizes would invalidate the recorded metadata; detach_ does not change any.
        if torch.Tag.inplace_view in func.tags and func is not aten.detach_.default:
            self._differ()
        if torch.is_grad_enabled() == note(node).origin.without_grad:
            self._differ()
        self._calls[node] = self._literals(args, node.args), self._literals(kwargs, node.kwargs)
        result = func(*args, **kwargs)
        self._at += 1
        self._enter(node, result)
        return result

    def _is_detach(self, node: Node | None, source: Tensor) -> bool:
        if node is None or node.target is not aten.detach.default:
            return False
        return self._node_of.get(source) is _made_by(node.args[0])

    def _enter(self, node: Node, met: Any) -> None:
        """Record the value of a node in this run; for several tensors, the values of its getitem readers."""
        if isinstance(met, FakeTensor):
            # Data-dependent results have symbolic sizes.
            if met.layout is not torch.strided or any(type(size) is not int for size in met.shape):
                self._differ()
            self._node_of[met] = node
            self._values[node] = Metadata.of(met)
        elif isinstance(met, (list, tuple)) and all(isinstance(piece, FakeTensor) for piece in met):
            self._values[node] = tuple(map(Metadata.of, met))
            for user in node.users:
                if user.target is operator.getitem:
                    self._enter(user, met[user.args[1]])  # type: ignore[index]
        else:
            self._differ()

    def _literals(self, met: Any, expected: Any) -> Any:
        """Return the arguments of a call with tensors replaced by the nodes of the first graph."""
        if isinstance(met, Tensor):
            return self._operand(met, expected)
        if isinstance(expected, Node):
            self._differ()
        if isinstance(met, dict) and isinstance(expected, dict) and met.keys() == expected.keys():
            return {key: self._literals(met[key], expected[key]) for key in met}
        if isinstance(met, (list, tuple)):
            if not isinstance(expected, (list, tuple)) or len(met) != len(expected):
                self._differ()
            return type(met)(map(self._literals, met, expected))
        # Compare types: True equals 1, and a symbolic number compares equal to anything.
        if type(met) is not type(expected):
            self._differ()
        return met

    def _operand(self, met: Any, expected: Any) -> Node:
        """Return the first graph's node of an operand, if it is the same value in both runs."""
        if not isinstance(expected, Node):
            self._differ()
        made_by = _made_by(expected)
        known = self._node_of.get(met) if isinstance(met, Tensor) else None
        if known is None:
            # An unknown tensor is a constant that the forward makes, or finds, in both runs.
            is_new = note(made_by).origin.constant is not None and made_by not in self._constants
            if not is_new or type(met) is not Tensor:
                self._differ()
            self._constants[made_by] = met
            self._node_of[met] = known = made_by
        if known is not made_by:
            self._differ()
        return expected

    def _differ(self) -> NoReturn:
        self._has_differed = True
        raise Differs


def _is_step(node: Node) -> bool:
    """Tell whether a node is a call of the forward, not a getitem and not a detach that we inserted."""
    is_call = node.op == "call_function" and node.target not in (*IGNORED, operator.getitem)
    return is_call and not note(node).origin.ends_region


def _made_by(node: Any) -> Any:
    """Return the node, or the source of a detach after a region: the same tensor for the forward."""
    while isinstance(node, Node) and note(node).origin.ends_region:
        node = node.args[0]
    return node


def _with(known: Any, met: Metadata | tuple[Metadata, ...]) -> Any:
    """Return a node's value in the second run, given its value in the first, `known`."""
    if isinstance(met, tuple):
        return type(known)([_with(*pair) for pair in zip(known, met, strict=True)])
    return known if Metadata.of(known) == met else met.make(known.fake_mode)
