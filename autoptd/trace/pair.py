"""Run a model and its trace on one call: in their own dtype, in float64, or with other weights.

In: a model, its traced graph, a call, and a function of the loss and the parameters. Out: the result of that
function, and the buffers that the run has updated. The model is restored.

    pair = Pair(model, None, graph, buffers, args, kwargs)
    wanted, buffers = pair.of_model(lambda loss, parameters: Reference(loss, parameters, share=1e-3))
    found, updated = pair.of_graph(wanted.differences)
    pair.in_float64().of_graph(wanted.differences)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate, map_arg

from autoptd.compat import plain_checkpoints, tree_leaves
from autoptd.ir.notes import note, output, value
from autoptd.trace.autocast import OFF, Autocast
from autoptd.trace.kept_buffers import KeptBuffers
from autoptd.trace.masks import any_mask, given_masks
from autoptd.trace.updates import updated_buffers
from autoptd.trace.watched import Watched
from autoptd.trace.widen import Widen, widen_inputs, widen_model

# Replacements of dtypes in a graph that runs in float64.
WIDE = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64)
# Relative change of perturbed weights.
MOVE = 2.0**-5

Result = TypeVar("Result")
Look = Callable[[Tensor, dict[str, Tensor]], Result]


@dataclass(frozen=True)
class Pair:
    """Pair a model with its trace; with `sites`, both use given masks and random numbers of these sites."""

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    graph: Graph
    buffers: dict[str, Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: Autocast = OFF
    sites: tuple[int, ...] | None = None
    dtypes: Mapping[torch.dtype, torch.dtype] = field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters of the model."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def of_model(
        self, look: Look[Result], watched: Watched | None = None
    ) -> tuple[Result, dict[str, Tensor]]:
        """Run the model; return the result of `look`, and the buffers that have changed."""
        # Without `Operands`: parameters are real here, and the model may use them freely.
        watched, kept = watched or Watched(self.model, self.loss_fn), KeptBuffers(self.model)
        given = plain_checkpoints() if self.sites is None else given_masks(any_mask)
        changed: dict[str, Tensor] = {}
        try:
            with given, self.autocast.around(), self._widening():
                loss = watched(*self.args, **self.kwargs)
            result = look(loss, dict(self.parameters))
        finally:
            changed = kept.put_back()
        return result, {**changed, **watched.seen.assigned}

    def of_graph(self, look: Look[Result]) -> tuple[Result, dict[str, Tensor]]:
        """Run the graph; return the result of `look`, and the buffers that it updates."""
        given = nullcontext() if self.sites is None else given_masks(any_mask, self.sites)
        updates = dict(updated_buffers(self.graph))
        parameters, leaves = dict(self.model.named_parameters()), tree_leaves((self.args, self.kwargs))
        with torch.enable_grad(), given:
            loss, used, results = run_graph(
                self.graph, parameters, self.buffers, leaves, updates.values(), self.dtypes
            )
        result = look(loss, {name: leaf for name, leaf in used.items() if leaf.requires_grad})
        return result, dict(zip(updates, results, strict=True))

    def in_float64(self) -> Pair:
        """Return a copy that computes in float64."""
        buffers, args, kwargs = widen_inputs((self.buffers, self.args, self.kwargs))
        model = widen_model(self.model)
        return replace(self, model=model, buffers=buffers, args=args, kwargs=kwargs, dtypes=WIDE)

    def moved(self, seed: int) -> Pair:
        """Return a copy with slightly perturbed weights."""
        model = copy.deepcopy(self.model)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    factor = torch.rand(parameter.shape, generator=generator, device="cpu")
                    parameter.mul_((1 + MOVE * (factor - 0.5)).to(parameter))
        return replace(self, model=model)

    def _widening(self) -> AbstractContextManager[Any]:
        return Widen(self.dtypes) if self.dtypes else nullcontext()


def run_graph(
    graph: Graph,
    parameters: dict[str, torch.Tensor],
    buffers: dict[str, torch.Tensor],
    leaves: list[Any],
    asked: Iterable[Node] = (),
    dtypes: Mapping[torch.dtype, torch.dtype] = MappingProxyType({}),
) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[torch.Tensor]]:
    """Interpret a TRACED graph; return the loss, the parameter leaves it depends on, and values of `asked`.

    `dtypes` maps dtypes in the graph to those to use instead.
    """
    asked = list(asked)
    tensors = iter([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
    device = next((parameter.device for parameter in parameters.values()), None)
    env: dict[Node, Any] = {}
    used: dict[str, torch.Tensor] = {}
    # Free each value after its last use, as the model does: all of them may not fit in memory.
    last_read = {read: node for node in graph.nodes for read in node.all_input_nodes}
    ends: dict[Node, list[Node]] = {}
    for read, node in last_read.items():
        if read in asked:
            continue
        ends.setdefault(node, []).append(read)
    for node in graph.nodes:
        record = note(node)
        if record.kind == "param":
            parameter = parameters[record.name]
            leaf = used[record.name] = parameter.detach().requires_grad_(parameter.requires_grad)
            # The placeholder has another dtype if the parameter is cast once per step.
            dtype = value(node).dtype
            env[node] = leaf.to(dtypes.get(dtype, dtype))
        elif record.kind == "buffer":
            env[node] = buffers[record.name]
        elif record.kind == "input":
            env[node] = next(tensors)
        elif node.op == "call_function":
            made_here = {} if node.all_input_nodes or device is None else _device_keyword(node, device)
            args, kwargs = _read((node.args, node.kwargs), env, dtypes)
            # A view may not fit this layout: it was traced with the layouts of other kernels.
            target = (
                torch.ops.aten.reshape.default if node.target is torch.ops.aten.view.default else node.target
            )
            env[node] = target(*args, **kwargs, **made_here)
        else:
            # The output reads the loss, which is returned.
            continue
        for read in ends.get(node, ()):
            del env[read]
    return env[output(graph).args[0]], used, [env[node].detach() for node in asked]


def _read(given: Any, env: dict[Node, Any], dtypes: Mapping[torch.dtype, torch.dtype]) -> Any:
    """Substitute the values of nodes, and replace dtypes, in arguments."""
    if not dtypes:
        return map_arg(given, env.__getitem__)

    def of(leaf: Any) -> Any:
        if isinstance(leaf, Node):
            return env[leaf]
        return dtypes.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf

    return map_aggregate(given, of)


def _device_keyword(node: Node, device: torch.device) -> dict[str, Any]:
    """Return the `device` keyword of operators that create tensors (arange): the device of the parameters."""
    schema = getattr(node.target, "_schema", None)
    return (
        {"device": device}
        if schema and any(argument.name == "device" for argument in schema.arguments)
        else {}
    )
