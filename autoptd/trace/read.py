"""Read an exported program: one placeholder per parameter, buffer and input, a Note on every node, and
no_grad regions inlined.

In: an exported program, and names. Out: a graph that is not normalised yet.

    graph, inputs, buffers = read_graph(exported, wrapper, first_name, leaves, names)
"""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import InputKind
from torch.fx import Graph, Node

from autoptd.errors import TraceError
from autoptd.ir.notes import Note, Origin, note, op_name, set_note
from autoptd.subject.storage import is_same_memory
from autoptd.trace.sizes import size_error
from autoptd.trace.watched import Watched

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


__all__ = ["VALUE_REMEDY", "check_kept", "module_path", "read_graph", "source_line"]
