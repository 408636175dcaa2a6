"""Hash the computation of a model's modules, without sizes, to check that a checkpoint belongs to the model.

In: a program that was compiled here. Out: per module a hash of its operators and their literals, in order. It
detects changes that shapes do not show: `gelu` instead of `relu`, another epsilon, or another base of rotary
angles.

    prints_of(program)["transformer.h.0.mlp.gelu"]          # "5d4a09fb"

Casts and dropout are left out, as another precision or rate is still the same model. So are values that only
buffer updates read: one microbatch computes them whole, several compute parts. A program read from a folder
has no graph, and no hashes.
"""

from __future__ import annotations

import hashlib
from typing import Any

from torch.fx import Graph, Node

from autoptd.ir.notes import note, op_name, output
from autoptd.ir.own_functions import own_function
from autoptd.ir.updates import KEEP
from autoptd.program.program import Program

# Parts of the names of operators that precision, evaluation and memory options add or remove.
LEFT_OUT = ("_to_copy", ".to.", "dropout", "detach", "alias", "clone", "contiguous", "getitem")


def prints_of(program: Program) -> dict[str, str]:
    """Return the hash of every module that computes something, in model order."""
    graph, annotated = program.graphs.get("TRACED"), program.graphs.get("ANNOTATED")
    # Numbers that depend on the rows of the batch are those of a whole step, not those of a microbatch.
    whole = {node.name: note(node).rows.whole_call for node in annotated.nodes} if annotated else {}
    lines: dict[str, list[str]] = {}
    for node in _of_loss(graph) if graph is not None else ():
        if node.op != "call_function" or any(part in str(node.target) for part in LEFT_OUT):
            continue
        args, kwargs = whole.get(node.name) or (node.args, node.kwargs)
        numbers = [repr(value) for value in (*args, *kwargs.values()) if is_literal(value)]
        own = own_function(node)
        called = own.name if own is not None else str(node.target)
        lines.setdefault(note(node).module, []).append(" ".join([called, *numbers]))
    return {module: _hash("\n".join(some)) for module, some in lines.items()}


def _of_loss(graph: Graph) -> list[Node]:
    """Return the nodes that the loss depends on, in order, without those that buffer updates keep."""
    (loss,) = output(graph).args
    while isinstance(loss, Node) and loss.op == "call_function" and op_name(loss) == KEEP:
        loss = loss.args[0]
    found, stack = set[Node](), [loss] if isinstance(loss, Node) else []
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return [node for node in graph.nodes if node in found]


def is_literal(value: Any) -> bool:
    """Tell whether an argument is a number other than a size, or a choice such as `approximate="tanh"`."""
    return isinstance(value, (float, str))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


__all__ = ["prints_of"]
