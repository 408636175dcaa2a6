"""Capture an unmodified model and its loss as one FX graph of aten operators (form TRACED).

In: a module, the call `(args, kwargs)` of one microbatch (at least two rows), and the position of the loss.
Out: `Captured`, whose graph has placeholders for parameters (each tied group once), buffers and batch inputs,
operators with module path and source line, and the loss as its only output.

    captured = capture(model, (ids, targets), {}, loss_fn=None)

torch.export does the tracing (`export`), while `watch.py` and `watched.py` refuse what it would drop silently. The exported
program is read into a graph with one placeholder per parameter, buffer and input, a Note on every node, and no_grad
regions inlined (`read_graph`). `normalize.py` then brings the graph into the form TRACED.
"""

from __future__ import annotations

import inspect
import operator
import re
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import InputKind
from torch.fx import Graph, Node

from autoptd.compat import OpOverload, light_export, traced_through, tree_flatten, tree_unflatten
from autoptd.errors import AutoptdError, TraceError
from autoptd.ir.names import USED, identifier
from autoptd.ir.notes import Note, Origin, copy_graph, note, op_name, ops, set_note, site
from autoptd.options.elsewhere import EXPERTS
from autoptd.subject.storage import first_names, is_same_memory, tied_names
from autoptd.trace.autocast import OFF, Autocast, Casting
from autoptd.trace.functions import other_functions
from autoptd.trace.normalize import bring_to_traced
from autoptd.trace.reads import Reads
from autoptd.trace.tensor_values import Checks, size_error
from autoptd.trace.users import UserFrames
from autoptd.trace.watch import (
    Operands,
    called_at,
    check_loss_fn,
    check_model,
    checkpoint_sites,
    watch_tracing,
)
from autoptd.trace.watched import Watched, check_changes

aten = torch.ops.aten
# Messages of torch where tracing would need the values of a tensor.
OF_VALUES = re.compile(r"data-dependent|unbacked symbols|infer dtype of Sym|\.numpy\(\) is not supported")
# Calls without a value. During torch.export, a cast asserts its source dtype.
IGNORED = (torch.ops.prim.device.default, aten._assert_tensor_metadata.default)


@dataclass(frozen=True)
class Raw:
    """Hold a first trace: its graph before `normalize`, and the placeholder of each argument with which
    torch.export calls the forward: parameters, buffers, leaves of the call (None: no tensor).
    """

    graph: Graph
    given: tuple[Node | None, ...]


class Followed(BaseException):
    """Signal that the whole forward followed the first trace, so torch.export has nothing left to do."""


@dataclass
class Captured:
    """Hold the TRACED graph of a model, and the meaning of its placeholders.

    `aliases` maps the first name of every parameter to all its names; `inputs` are (placeholder name, leaf
    index) pairs of the flattened call; `constants` are the leaves that are not tensors; `buffers` hold values
    of buffers and constants. `raw` is the graph before it was normalised, for a second trace (`retrace.py`).
    `checkpointed` are modules whose activation checkpoints are not in the graph, `whole` custom autograd functions
    that are one operator each; `reads` is the Python state that the forward may depend on.
    """

    graph: Graph
    aliases: dict[str, tuple[str, ...]]
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    persistent: frozenset[str]
    inputs: tuple[tuple[str, int], ...]
    constants: tuple[tuple[int, Any], ...]
    tree: str
    raw: Raw
    checkpointed: tuple[str, ...] = ()
    whole: frozenset[Any] = frozenset()
    checks: Checks = field(default_factory=Checks)
    reads: Reads | None = None


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: Callable[..., Any] | None,
    autocast: Autocast = OFF,
    *,
    is_known: bool = False,
) -> Captured:
    """Trace `model(*args, **kwargs)` down to its scalar loss, under `autocast`.

    TraceError names the user's source line. A model that `is_known`, because it was traced before, is not run.
    """
    check_model(model)
    check_loss_fn(loss_fn)
    leaves, tree = tree_flatten((args, kwargs))
    checks = Checks()
    wrapper = watched_model(model, loss_fn, checks)
    casting = Casting(autocast)
    whole: set[Any] = set()
    exported, checkpointed = export(
        wrapper, *fresh_call(args, kwargs), casting=casting, whole=whole, checks=checks
    )
    assert exported is not None
    checks.warn()
    # After the trace, as `Watched` has restored the model by then; runs it again where something changed.
    if not is_known:
        with autocast.ambient():
            check_changes(wrapper, args, kwargs)
    aliases = tied_names(model)
    tied = {name: names[0] for names in aliases.values() for name in names}
    first_name = tied | first_names(wrapper)
    graph, inputs, buffers = read_graph(
        exported, wrapper, first_name, leaves, input_names(model, args, kwargs)
    )
    check_grad_modes(graph, casting)
    # Copy first: `normalize` drops and rewrites operators that a second run of the forward will call.
    read = copy_graph(graph)
    raw = Raw(read, _given(read, wrapper, first_name, inputs, len(leaves)))
    bring_to_traced(graph, model, autocast.dtype, wrapper.seen.assigned.keys())
    persistent = frozenset(model.state_dict(keep_vars=True)) - set(tied)
    constants = tuple((i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor))
    every = dict(model.named_parameters(remove_duplicate=False))
    parameters = {name: every[name] for name in aliases}
    return Captured(
        graph,
        aliases,
        parameters,
        buffers,
        persistent,
        inputs,
        constants,
        str(tree),
        raw,
        checkpointed,
        frozenset(whole),
        checks,
        wrapper.seen.reads(),
    )


def watched_model(model: nn.Module, loss_fn: Callable[..., Any] | None, checks: Checks) -> Watched:
    # Take the real parameters now: during tracing the model has fake ones.
    registered = {id(parameter): name for name, parameter in model.named_parameters()}
    return Watched(model, loss_fn, around=partial(Operands, model, registered, checks))


def fresh_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy the tensors of a call: torch.export leaves marks on the tensors that it has seen."""
    leaves, tree = tree_flatten((args, kwargs))
    fresh = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return tree_unflatten(fresh, tree)


def _given(
    graph: Graph,
    wrapper: Watched,
    first_name: dict[str, str],
    inputs: tuple[tuple[str, int], ...],
    leaves: int,
) -> tuple[Node | None, ...]:
    """Return the placeholders of the values with which torch.export calls the forward, in its order."""
    named = {(note(node).kind, note(node).name): node for node in graph.find_nodes(op="placeholder")}
    given: list[Node | None] = []
    for name, _ in wrapper.named_parameters(remove_duplicate=False):
        given.append(named.get(("param", first_name[name.removeprefix("model.")])))
    for name, _ in wrapper.named_buffers(remove_duplicate=False):
        name = name.removeprefix("model.")
        given.append(named.get(("buffer", first_name.get(name, name))))
    name_of = {leaf: name for name, leaf in inputs}
    given += [named.get(("input", name_of.get(leaf, ""))) for leaf in range(leaves)]
    return tuple(given)


def check_grad_modes(graph: Graph, casting: Casting) -> None:
    """Refuse a trace whose operators have gradients that the forward disabled: torch.export drops inference
    mode, and no_grad inside an autocast region.
    """
    # Constants are made and copied in any mode; a detached value has no gradient.
    without = (*IGNORED, aten.lift_fresh_copy.default, aten.detach.default)
    met: Counter[Any] = Counter()
    for node in ops(graph):
        if not isinstance(node.target, OpOverload) or node.target in without:
            continue
        if note(node).origin.without_grad or note(node).origin.ends_region:
            continue
        met[node.target] += 1
        if met[node.target] > casting.with_grad[node.target]:
            fact = f"{op_name(node)} is called under no_grad or inference mode, which torch.export loses here"
            raise TraceError(
                site(node), fact, ".detach() its results; no_grad around torch.autocast, not in it"
            )


def input_names(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Name every leaf of the call after the parameter of forward that receives it."""
    try:
        bound = list(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        bound = []
    names: list[str] = []
    for i, arg in enumerate(args):
        names += _leaf_names(bound[i] if i < len(bound) else f"input_{i}", arg)
    for key, arg in kwargs.items():
        names += _leaf_names(key, arg)
    return distinct_names(names)


def distinct_names(names: list[str]) -> list[str]:
    """Return names valid as arguments of an emitted function: identifiers, distinct, not used in its body."""
    made: list[str] = []
    for name in names:
        # Inside a class, Python mangles names that begin with two underscores.
        free = identifier(name.lstrip("_") if name.startswith("__") else name, "input_")
        while free in made or free in USED:
            free = f"{free}_"
        made.append(free)
    return made


def _leaf_names(name: str, arg: Any) -> list[str]:
    leaves = tree_flatten(arg)[0]
    return [name] if len(leaves) == 1 else [f"{name}_{i}" for i in range(len(leaves))]


def export(
    wrapper: Watched,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    casting: Casting,
    whole: set[Any],
    checks: Checks,
    run: Callable[[Any, tuple[Any, ...]], None] | None = None,
) -> tuple[torch.export.ExportedProgram | None, tuple[str, ...]]:
    """Export the forward; return the program (None where `run` followed the forward instead), and the modules
    whose activation checkpoints it omits.

    Exports again if the backward of some custom autograd functions is not the derivative of their forward
    (these join `whole`), or if a check of values has raised (it joins `checks`).
    """
    exported, checks.tried = None, None
    try:
        with ExitStack() as around:
            met = around.enter_context(watch_tracing(wrapper, whole))
            around.enter_context(casting.autocast.ambient())
            around.enter_context(torch.enable_grad())
            around.enter_context(light_export(UserFrames(Watched.forward.__code__), run))
            around.enter_context(traced_through(casting.call))
            around.enter_context(suppress(Followed))
            exported = torch.export.export(wrapper, args, kwargs, strict=False)
        others = other_functions(met.functions)
        if others:
            whole |= others
            casting.with_grad.clear()
            return export(wrapper, args, kwargs, casting, whole, checks, run)
        if checks.tried is not None:
            fact = "raises on the value of a tensor, and the forward catches the exception and continues"
            raise TraceError(checks.site(), fact, VALUE_REMEDY)
        return exported, tuple(checkpoint_sites(wrapper.model, met.checkpointed))
    except AutoptdError:
        raise
    except Exception as error:
        if not checks.has_left(error):
            raise _refusal(error, checks) from error
    casting.with_grad.clear()
    return export(wrapper, args, kwargs, casting, whole, checks, run)


def _refusal(error: Exception, checks: Checks) -> TraceError:
    """Make a TraceError from an exception of torch.export or of the model."""
    line = user_line(error)
    fact = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if OF_VALUES.search(fact):
        if (refusal := checks.sizes.refusal(error, called_at(error), line)) is not None:
            return refusal
        fact = "the value of a tensor becomes a Python number, and a branch or a size may depend on it"
        remedy = f"{VALUE_REMEDY}; {EXPERTS}" if "for expert" in line else VALUE_REMEDY
        return TraceError(line, fact, remedy)
    remedy = "the model must run on these example inputs; torch.export must be able to trace it"
    return TraceError(line, f"cannot be traced: {type(error).__name__}: {fact}", remedy)


def user_line(error: BaseException) -> str:
    """Return `file:line  code` of the innermost frame that is neither torch's nor AutoPTD's."""
    own = ("/torch/", "/autoptd/trace/", "/contextlib.py", "<string>", "<eval_with_key>")
    frames = traceback.extract_tb(error.__traceback__)
    mine = []
    for frame in frames:
        if not any(part in frame.filename for part in own):
            mine.append(frame)
    mine = [frame for frame in mine if "/autoptd/" not in frame.filename] or mine
    return f"{mine[-1].filename}:{mine[-1].lineno}  {mine[-1].line}" if mine else "model"


# A frame of a stack trace: file, line number, source line. A file name may contain quotes and line breaks.
FRAME = re.compile(
    r'^ *File "(.*?)", line (\d+), in [^\n]*(?:\n(?! *File ")([^\n]*))?', re.MULTILINE | re.DOTALL
)
VALUE_REMEDY = (
    "compute with the tensor itself (x * scale, torch.where, gather; torch.arange(n) < length for a slice), "
)
VALUE_REMEDY += "or keep the number as an attribute"


def read_graph(
    exported: torch.export.ExportedProgram,
    wrapper: Watched,
    first_name: dict[str, str],
    leaves: list[Any],
    names: list[str],
) -> tuple[Graph, tuple[tuple[str, int], ...], dict[str, torch.Tensor]]:
    """Copy the exported graph, with one placeholder per parameter, buffer and input, and Notes on nodes."""
    signature = exported.graph_signature
    # The signature's properties rebuild their mapping at each access: read them once.
    parameters = dict(signature.inputs_to_parameters)
    lifted = dict(signature.inputs_to_lifted_tensor_constants)
    constants = {**signature.inputs_to_buffers, **lifted}
    stored = {**dict(wrapper.named_buffers(remove_duplicate=False)), **exported.constants}
    graph, mapping = Graph(), dict[Node, Node]()
    given = [spec.arg.name for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
    # All leaves of the call are numbered, constants as well.
    leaf_of = {name: leaf for leaf, name in enumerate(given)}
    inputs: list[tuple[str, int]] = []
    buffers: dict[str, torch.Tensor] = {}
    seen: dict[str, Node] = {}
    for node in exported.graph.nodes:
        # A reader of a region that was inlined is mapped already.
        if node in mapping:
            continue
        # torch.export has a placeholder per name of a tensor; our graph has one per tensor.
        if node.op == "placeholder" and node.name in parameters:
            name = first_name[parameters[node.name].removeprefix("model.")]
            mapping[node] = seen[name] = seen.get(name) or _placeholder(graph, node, "param", name)
        elif node.op == "placeholder" and node.name in constants:
            name = constants[node.name].removeprefix("model.")
            name = first_name.get(name, name)
            mapping[node] = seen[name] = seen.get(name) or _placeholder(graph, node, "buffer", name)
            buffers[name] = stored[constants[node.name]].detach()
            check_kept(buffers[name], wrapper)
            if node.name in lifted:
                # A constant that the forward makes may follow the size of the batch.
                note(mapping[node]).origin = Origin(constant=buffers[name])
        elif node.op == "placeholder" and node.name in leaf_of:
            leaf = leaf_of[node.name]
            if isinstance(leaves[leaf], torch.Tensor):
                mapping[node] = _placeholder(graph, node, "input", names[leaf])
                inputs.append((names[leaf], leaf))
        elif node.op == "output":
            # The wrapper returns only the loss; changed state has been refused.
            mapping[node] = graph.output(mapping[node.args[0][0]])
            set_note(mapping[node], Note(kind="output"))
        elif node.op == "get_attr":
            continue
        else:
            _copy(graph, node, mapping, exported.graph_module)
    return graph, tuple(inputs), buffers


def _placeholder(graph: Graph, node: Node, kind: str, name: str) -> Node:
    made = graph.placeholder(node.name)
    made.meta["val"] = node.meta.get("val")
    set_note(made, Note(kind=kind, name=name))
    return made


def _copy(
    graph: Graph, node: Node, mapping: dict[Node, Node], root: nn.Module, detached: bool = False
) -> None:
    """Copy one operator; a no_grad region is inlined with its results detached."""
    name = str(node.target)
    if name == "wrap_with_set_grad_enabled":
        enabled, region, *read = node.args
        _inline(graph, node, getattr(root, region.target), read, mapping, detached or not enabled)
        return
    if name == "wrap_with_autocast":
        # Inline the autocast region: its casts are already in the trace.
        _, _, _, _, region, *read = node.args
        body = getattr(root, region.target)
        _inline(graph, node, body, read, mapping, detached)
        return
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        raise TraceError(
            source_line(node)[0], f"{name} cannot be partitioned", "write this part with plain operators"
        )
    # torch.export allows data-dependent sizes; a rank could not know its local ones.
    _check_sizes(node)
    made = graph.node_copy(node, lambda old: mapping[old])
    made.meta = {"val": node.meta.get("val")}
    source, code = source_line(node)
    origin = Origin(without_grad=detached)
    set_note(made, Note(module=module_path(node), source=source, code=code, origin=origin))
    mapping[node] = made


def _inline(
    graph: Graph, node: Node, region: Any, read: list[Any], mapping: dict[Node, Node], detached: bool
) -> None:
    inner = dict(zip(region.graph.find_nodes(op="placeholder"), (mapping[arg] for arg in read), strict=True))
    for step in region.graph.nodes:
        # A reader of a region within this one is mapped already.
        if step.op == "call_function" and step not in inner:
            _copy(graph, step, inner, region, detached)
    results = next(iter(reversed(region.graph.nodes))).args[0]
    results = results if isinstance(results, (tuple, list)) else (results,)
    # The region returns a tuple: map its getitem readers directly to the results.
    pieces = []
    for result in results:
        piece = inner[result]
        if (
            detached
            and isinstance(piece.meta.get("val"), torch.Tensor)
            and piece.meta["val"].is_floating_point()
        ):
            inside = piece
            piece = graph.call_function(torch.ops.aten.detach.default, (inside,))
            piece.meta["val"] = inside.meta["val"].detach()
            record, origin = note(inside), Origin(ends_region=True)
            set_note(piece, Note(module=record.module, source=record.source, origin=origin))
        pieces.append(piece)
    for reader in list(node.users):
        if reader.target is operator.getitem:
            mapping[reader] = pieces[reader.args[1]]


def check_kept(constant: torch.Tensor, wrapper: Watched) -> None:
    """Raise TraceError for a tensor attribute that the forward reads and replaces: it is state.

    An attribute that is only written is harmless.
    """
    for path, replaced in wrapper.seen.replaced.items():
        if is_same_memory(replaced, constant):
            fact = "a tensor attribute that the forward reads and then replaces, which the traced graph would not do"
            raise TraceError(path, fact, "keep state out of the forward, and pass it as an input")


def _check_sizes(node: Node) -> None:
    pieces = node.meta.get("val")
    if isinstance(pieces, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        fact = f"the value of a tensor becomes a Python number ({op_name(node)})"
        raise TraceError("  ".join(source_line(node)) or "model", fact, VALUE_REMEDY)
    for piece in pieces if isinstance(pieces, (tuple, list)) else [pieces]:
        if isinstance(piece, torch.Tensor) and not all(isinstance(size, int) for size in piece.shape):
            raise size_error(op_name(node), "  ".join(source_line(node)))


def module_path(node: Node) -> str:
    """Return the dotted path of the user's module that ran the node, "" for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return path.removeprefix("model").removeprefix(".")


def source_line(node: Node) -> tuple[str, str]:
    """Return (`file.py:41`, code) of the user's innermost line that made the node."""
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    for file, number, code in reversed(frames):
        if "/torch/" not in file and "/autoptd/trace/" not in file:
            return f"{file.rsplit('/', 1)[-1]}:{number}", code.strip()
    return "", ""
