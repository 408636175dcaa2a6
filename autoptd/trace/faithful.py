"""Check that the traced graph computes the same as the model, gradients included.

A graph of operators drops tensor hooks, backward hooks and the backward of custom autograd functions. These are
refused: on the model before tracing, and in the forward while tracing (`watch.py`; for functions, according to
`functions.py`). Anything left is caught by running model and graph once (`compare`).

If they differ by more than the tolerance of their dtype, both run in float64, where rounding is negligible
(`fault_of`). A trace that differs there is a fault. One that agrees may still round more than the model, so the
errors of both in their own dtype are measured against float64. They need not round alike: torch's batch norm computes
x * a + b, ours (x - mean) * scale, and where x equals its mean, one gives 1e-9 and the other 0, and a ReLU then has
different gradients in 16 bits. Such a tie depends on the weights: a larger error only counts as a fault if it also
occurs with other weights.

    pair = Pair(model, None, graph, buffers, args, kwargs)      # runs either on one call; the model is restored
    wanted, buffers = pair.of_model(lambda loss, parameters: Reference(loss, parameters, share=1e-3))
    found, updated = pair.of_graph(wanted.differences)
    pair.in_float64().of_graph(wanted.differences)
"""

from __future__ import annotations

import copy
import math
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
from autoptd.errors import TraceError
from autoptd.ir.expert_mm import NAME as EXPERTS
from autoptd.ir.noise import is_draw
from autoptd.ir.notes import is_tensor, note, op_name, ops, output, shape, value
from autoptd.trace.autocast import OFF, Autocast
from autoptd.trace.changed_buffers import KeptBuffers, distance, updated_buffers
from autoptd.trace.differences import Reference
from autoptd.trace.draws import ATTENTION, any_mask, draws, given_masks
from autoptd.trace.precision import Widen, widen_inputs, widen_model
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
        fact = f"two runs on the same batch differ by a relative {noise:.0e}: the model is not a function of its inputs"
        raise TraceError("model", fact, "draw random numbers outside of the model and pass them as an input")
    tolerance = max(tolerance, NOISE_FACTOR * noise)
    for what, size in excess.items():
        if not size <= tolerance:
            fact = f"the traced graph and the model give different values (largest relative difference {size:.2e})"
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
            fact = (
                f"{found.fact}; it cannot be run in float64, which would show whether that is rounding: {why}"
            )
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


# In float64; constants of the graph may have been rounded to float32.
EXACT_TOLERANCE = 1e-5
# The error of the trace may be this many times that of the model.
FACTOR = 2
# Runs with the model's weights, and with others in case these are a tie.
TRIES = 6
# Most parameters: float64 copies of more would exhaust host memory.
MOST_ENTRIES = 1 << 29
STATE = "look for Python state, torch.compiler.is_compiling(), custom backward code or hooks in the forward"
WIDER = "compute this part in float32 (x.float()), or precision=None"


@dataclass(frozen=True)
class Fault:
    """Name where a trace and its model differ, the fact and the remedy."""

    what: str
    fact: str
    remedy: str


def fault_of(pair: Pair, found: Fault, tolerance: float, share: float) -> Fault | None:
    """Return the fault of a trace that was `found` to differ; None if the difference is rounding.

    Raises the model's error if it fails in float64.
    """
    exact = _Exact.of(pair, share)
    if exact.has_other_value():
        return replace(found, fact=f"{found.fact}, in float64 as well")
    faults = exact.other_rounding(pair, tolerance)
    for number in range(1, TRIES):
        if not faults:
            return None
        moved = pair.moved(number)
        again = _Exact.of(moved, share).other_rounding(moved, tolerance)
        faults = {what: fault for what, fault in faults.items() if what in again}
    return next(iter(faults.values()), None)


@dataclass(frozen=True)
class _Exact:
    """Hold the results of a model in float64."""

    wide: Pair
    reference: Reference
    buffers: dict[str, Tensor]

    @classmethod
    def of(cls, pair: Pair, share: float) -> _Exact:
        if sum(p.numel() for p in pair.model.parameters()) > MOST_ENTRIES:
            raise MemoryError(f"its copy would have more than {MOST_ENTRIES:,} entries")
        wide = pair.in_float64()
        return cls(wide, *wide.of_model(lambda loss, parameters: Reference(loss, parameters, share)))

    def has_other_value(self) -> bool:
        """Tell whether the trace computes another value in float64."""
        return (
            not max(self._errors(*self.wide.of_graph(self.reference.differences)).values()) <= EXACT_TOLERANCE
        )

    def other_rounding(self, pair: Pair, tolerance: float) -> dict[str, Fault]:
        """Return where the trace is further from float64 than the model, in their own dtype."""
        ours = self._errors(*pair.of_graph(self.reference.differences))
        theirs = self._errors(*pair.of_model(self.reference.differences))
        found: dict[str, Fault] = {}
        for what, error in ours.items():
            if not error <= max(tolerance, FACTOR * theirs.get(what, 0.0)):
                fact = (
                    f"the traced graph rounds more than the model: it is off by {error:.1e} of the largest entry, the "
                    f"model by {theirs.get(what, 0.0):.1e}; in float64 both are equal"
                )
                found[what] = Fault(what, fact, WIDER)
        return found

    def _errors(self, differences: Mapping[str, float], updated: Mapping[str, Tensor]) -> dict[str, float]:
        errors = dict(differences)
        for name, new in updated.items():
            exact = self.buffers.get(name, self.wide.buffers[name])
            errors[f"buffer {name}"] = distance(exact, new.to(exact.dtype))
        return errors


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
