"""Capture an unmodified model and its loss as one FX graph of aten operators (form TRACED).

In: a module, the call `(args, kwargs)` of one microbatch (at least two rows), where the loss is. Out:
`Captured`, whose graph has placeholders for parameters (each tied group once), buffers and batch inputs,
operators with module path and source line, and the loss as its only output.

    captured = capture(model, (ids, targets), {}, loss_fn=None)

torch.export does the tracing; what it would lose silently is refused here or repaired in `normalize.py`.
"""

from __future__ import annotations

import inspect
import operator
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import InputKind
from torch.fx import Graph, Node

from autoptd.compat import light_export, tree_flatten, tree_unflatten
from autoptd.errors import AutoptdError, TraceError
from autoptd.ir.elsewhere import EXPERTS
from autoptd.ir.names import USED
from autoptd.ir.notes import Note, note, op_name, output, set_note
from autoptd.ir.operators.table import operator_of
from autoptd.trace.faithful import check_loss_fn, check_model
from autoptd.trace.functions import check_functions
from autoptd.trace.normalize import normalize
from autoptd.trace.storage import is_same_memory, tied_names
from autoptd.trace.watch import Operands, checkpoint_sites, watch_tracing
from autoptd.trace.watched import Watched, check_changes

VALUE_REMEDY = (
    "compute with the tensor itself (x * scale, torch.where, gather), or keep the number as an attribute"
)


@dataclass
class Captured:
    """The TRACED graph of a model, and what its placeholders stand for.

    `aliases` maps the first name of every parameter to all its names; `inputs` are (placeholder name, leaf
    index) pairs of the flattened call; `constants` are the leaves that are not tensors; `buffers` hold values
    of buffers and constants. `checkpointed` are modules whose activation checkpoints are not in the graph.
    """

    graph: Graph
    aliases: dict[str, tuple[str, ...]]
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    persistent: frozenset[str]
    inputs: tuple[tuple[str, int], ...]
    constants: tuple[tuple[int, Any], ...]
    tree: str
    checkpointed: tuple[str, ...] = ()


def capture(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss_fn: Callable[..., Any] | None
) -> Captured:
    """Trace `model(*args, **kwargs)` down to its scalar loss; TraceError names the user's own source line."""
    check_model(model)
    check_loss_fn(loss_fn)
    leaves, tree = tree_flatten((args, kwargs))
    fresh = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    call_args, call_kwargs = tree_unflatten(fresh, tree)
    # The parameters themselves: while the forward is traced, the model has fake ones in their place.
    registered = {id(parameter): name for name, parameter in model.named_parameters()}
    wrapper = Watched(model, loss_fn, around=partial(Operands, model, registered))
    exported, checkpointed = _export(wrapper, call_args, call_kwargs)
    check_changes(wrapper, args, kwargs)
    aliases = tied_names(model)
    first_name = {name: names[0] for names in aliases.values() for name in names}
    graph, inputs, buffers = _read(exported, wrapper, first_name, leaves, input_names(model, args, kwargs))
    normalize(graph)
    _mark_dependence(graph, dict(model.named_parameters()))
    _drop_idle_detaches(graph)
    _forget_lost_gradients(graph)
    persistent = frozenset(model.state_dict(keep_vars=True)) - set(first_name)
    constants = tuple((i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor))
    every = dict(model.named_parameters(remove_duplicate=False))
    parameters = {name: every[name] for name in aliases}
    return Captured(
        graph, aliases, parameters, buffers, persistent, inputs, constants, str(tree), checkpointed
    )


def input_names(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Name every leaf of the call by the parameter of the model's forward that it is passed as."""
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
    """Return names that an emitted function can take as arguments: Python's, different, and not those
    that it uses itself.
    """
    made: list[str] = []
    for name in names:
        free = re.sub(r"\W", "_", name)
        while free in made or free in USED or not free.isidentifier():
            free = f"{free}_" if free.isidentifier() else f"input_{free}"
        made.append(free)
    return made


def _leaf_names(name: str, arg: Any) -> list[str]:
    leaves = tree_flatten(arg)[0]
    return [name] if len(leaves) == 1 else [f"{name}_{i}" for i in range(len(leaves))]


def _export(
    wrapper: Watched, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.export.ExportedProgram, tuple[str, ...]]:
    """The exported program, and the modules whose activation checkpoints it does without."""
    device = next((p.device.type for p in wrapper.parameters()), "cpu")
    try:
        autocast = torch.autocast(device if device != "meta" else "cpu", enabled=False)
        with watch_tracing(wrapper.model) as met, autocast, torch.enable_grad(), light_export():
            exported = torch.export.export(wrapper, args, kwargs, strict=False)
        check_functions(met.functions)
        return exported, tuple(checkpoint_sites(wrapper.model, met.checkpointed))
    except AutoptdError:
        raise
    except Exception as error:
        line = _user_line(error)
        fact = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if "data-dependent" in fact:
            fact = "the value of a tensor becomes a Python number, and a branch or a size may follow it"
            remedy = f"{VALUE_REMEDY}; {EXPERTS}" if "for expert" in line else VALUE_REMEDY
            raise TraceError(line, fact, remedy) from error
        remedy = "the model must run on these example inputs; torch.export must be able to trace it"
        raise TraceError(line, f"cannot be traced: {type(error).__name__}: {fact}", remedy) from error


def _user_line(error: BaseException) -> str:
    """`file:line  code` of the innermost frame that is neither torch's nor AutoPTD's."""
    own = ("/torch/", "/autoptd/trace/", "/contextlib.py", "<string>", "<eval_with_key>")
    frames = traceback.extract_tb(error.__traceback__)
    mine = []
    for frame in frames:
        if not any(part in frame.filename for part in own):
            mine.append(frame)
    mine = [frame for frame in mine if "/autoptd/" not in frame.filename] or mine
    return f"{mine[-1].filename}:{mine[-1].lineno}  {mine[-1].line}" if mine else "model"


def _read(
    exported: torch.export.ExportedProgram,
    wrapper: Watched,
    first_name: dict[str, str],
    leaves: list[Any],
    names: list[str],
) -> tuple[Graph, tuple[tuple[str, int], ...], dict[str, torch.Tensor]]:
    """Copy the exported graph with one placeholder per parameter, buffer and input, and a Note on every node."""
    signature = exported.graph_signature
    # Properties of the signature build their mapping at each access: read them once.
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
        if node.op == "placeholder" and node.name in parameters:
            name = first_name[parameters[node.name].removeprefix("model.")]
            mapping[node] = seen[name] = seen.get(name) or _placeholder(graph, node, "param", name)
        elif node.op == "placeholder" and node.name in constants:
            name = constants[node.name].removeprefix("model.")
            mapping[node] = seen[name] = seen.get(name) or _placeholder(graph, node, "buffer", name)
            buffers[name] = stored[constants[node.name]].detach()
            _check_kept(buffers[name], wrapper)
            if node.name in lifted:
                # A constant that the forward makes may follow the size of the batch.
                note(mapping[node]).extra["constant"] = buffers[name]
        elif node.op == "placeholder" and node.name in leaf_of:
            leaf = leaf_of[node.name]
            if isinstance(leaves[leaf], torch.Tensor):
                mapping[node] = _placeholder(graph, node, "input", names[leaf])
                inputs.append((names[leaf], leaf))
        elif node.op == "output":
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
        _, _, enabled, _, region, *read = node.args
        body = getattr(root, region.target)
        if enabled:
            line = next((line for line, _ in map(source_line, body.graph.nodes) if line), "model")
            raise TraceError(
                line, "autocast inside the model is not traced", "cast explicitly with .to(dtype)"
            )
        _inline(graph, node, body, read, mapping, detached)
        return
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        raise TraceError(
            source_line(node)[0], f"{name} cannot be partitioned", "write this part with plain operators"
        )
    _check_sizes(node)
    made = graph.node_copy(node, lambda old: mapping[old])
    made.meta = {"val": node.meta.get("val")}
    source, code = source_line(node)
    set_note(made, Note(module=module_path(node), source=source, code=code))
    mapping[node] = made


def _inline(
    graph: Graph, node: Node, region: Any, read: list[Any], mapping: dict[Node, Node], detached: bool
) -> None:
    inner = dict(zip(region.graph.find_nodes(op="placeholder"), (mapping[arg] for arg in read), strict=True))
    for step in region.graph.nodes:
        if step.op == "call_function":
            _copy(graph, step, inner, region, detached)
    results = next(iter(reversed(region.graph.nodes))).args[0]
    results = results if isinstance(results, (tuple, list)) else (results,)
    # The region's value is a tuple: its readers are getitem nodes, which are answered from here.
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
            set_note(piece, Note(module=note(inside).module, source=note(inside).source))
        pieces.append(piece)
    for reader in list(node.users):
        if reader.target is operator.getitem:
            mapping[reader] = pieces[reader.args[1]]


def _check_kept(constant: torch.Tensor, wrapper: Watched) -> None:
    """A tensor attribute that the forward reads and replaces is state.

    One that it only writes concerns nobody.
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
            fact = f"the size of {node.target}'s result depends on the values of a tensor"
            raise TraceError("  ".join(source_line(node)), fact, "use torch.where or a mask of fixed size")


def module_path(node: Node) -> str:
    """Return the dotted path of the user's module that ran the node, "" for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return path.removeprefix("model").removeprefix(".")


def source_line(node: Node) -> tuple[str, str]:
    """Return (`file.py:41`, code) of the user's innermost line that made the node."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    frames = [i for i, line in enumerate(lines) if line.startswith("File ") and not _is_library(line)]
    if not frames:
        return "", ""
    _, file, rest = lines[frames[-1]].split('"')
    code = lines[frames[-1] + 1] if frames[-1] + 1 < len(lines) else ""
    return f"{file.rsplit('/', 1)[-1]}:{rest.split('line ')[1].split(',')[0]}", code


def _is_library(frame: str) -> bool:
    return "/torch/" in frame or "/autoptd/trace/" in frame


def _drop_idle_detaches(graph: Graph) -> None:
    """A value that carries no gradient (a table of sines under no_grad) needs no detach."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        source = node.args[0]
        if isinstance(source, Node) and not note(source).needs_grad:
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _forget_lost_gradients(graph: Graph) -> None:
    """No gradient reaches a value that the loss reads only through detach or zeros_like.

    Its parameters are not trained.
    """
    live = set(output(graph).all_input_nodes)
    for node in reversed(graph.nodes):
        if node not in live:
            # The output itself as well: it has no value of its own.
            note(node).needs_grad = False
        elif note(node).needs_grad:
            live.update(node.all_input_nodes)


def _mark_dependence(graph: Graph, parameters: dict[str, nn.Parameter]) -> None:
    """Fill `of_params` and `needs_grad`: which values depend on parameters, and which of them carry a
    gradient.
    """
    for node in graph.nodes:
        record = note(node)
        if record.kind == "param":
            record.of_params, record.needs_grad = True, parameters[record.name].requires_grad
        elif node.op in ("call_function", "output"):
            operands = [note(arg) for arg in node.all_input_nodes]
            record.of_params = any(operand.of_params for operand in operands)
            result = node.meta.get("val")
            pieces = result if isinstance(result, (tuple, list)) else [result]
            needs_grad = any(operand.needs_grad for operand in operands)
            cuts = operator_of(node).cuts_gradient
            record.needs_grad = needs_grad and not cuts and any(map(_is_differentiable, pieces))


def _is_differentiable(piece: Any) -> bool:
    return isinstance(piece, torch.Tensor) and (piece.dtype.is_floating_point or piece.is_complex())
