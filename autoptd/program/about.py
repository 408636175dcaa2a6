"""Describe a program for its checkpoints: the atoms and ties of its parameters, and hashes of what its
modules compute.

In: a program that was compiled here. Out: plain data, by which a checkpoint is recognized as one of this
model. It detects changes that shapes do not show: 4 heads of 8 instead of 8 heads of 4, `gelu` instead of
`relu`, another epsilon, or another base of rotary angles.

    module_hashes(program)["transformer.h.0.mlp.gelu"]          # "5d4a09fb"
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from autoptd.ir.mesh import DEGREES
from autoptd.ir.notes import note, op_name, ops, output, shape
from autoptd.ir.operators.record import argument, operands
from autoptd.ir.outputs import OUTPUT
from autoptd.ir.own_functions import own_function
from autoptd.ir.types import Segmented
from autoptd.ir.updates import KEEP
from autoptd.program.program import Program

# Parts of the names of operators that precision, evaluation and memory options add or remove.
LEFT_OUT = ("_to_copy", ".to.", "dropout", "detach", "alias", "clone", "contiguous", "getitem")


def about_program(program: Program) -> dict[str, Any]:
    """Return the description of a program in `checkpoint.json`."""
    return {
        "torch": torch.__version__,
        "seed": program.seed,
        "mesh": {**{name: getattr(program.mesh, name) for name in DEGREES}, "order": program.mesh.order},
        "names": tied_names(program),
        "model": about_model(program),
        "prints": module_hashes(program),
    }


def tied_names(program: Program) -> dict[str, list[str]]:
    """Return all names of tied parameters, by the first one."""
    return {spec.name: list(spec.aliases) for spec in program.params if len(spec.aliases) > 1}


def about_model(program: Program) -> dict[str, Any]:
    """Return the atoms and dtypes of the parameters.

    A dim that is read in slices, such as learned positions, counts as one atom: its atoms depend on the
    tokens of a batch.
    """
    entries, sliced = {}, _sliced_dims(program)
    for spec in program.params:
        dims = [_atom_sizes(atoms) for atoms in spec.model_dims or spec.dims]
        for dim in sliced.get(spec.name, ()):
            dims[dim] = [spec.shape[dim]]
        entries[spec.name] = {"dims": dims, "use": spec.use.dtype, "dtype": spec.dtype}
    return entries


def _sliced_dims(program: Program) -> dict[str, set[int]]:
    """Return the dims along which operators read slices of parameters, by name."""
    graph = program.graphs.get("TRACED")
    found: dict[str, set[int]] = {}
    for node in ops(graph) if graph is not None else ():
        if op_name(node) == "aten.slice" and note(source := operands(node)[0]).kind == "param":
            found.setdefault(note(source).name, set()).add(int(argument(node, "dim")) % len(shape(source)))
    return found


def _atom_sizes(atoms: Sequence[int]) -> list[Any]:
    """Return the atoms of a dim; for a segmented one, the sizes of its segments."""
    return [atom.blocks if isinstance(atom, Segmented) else atom for atom in atoms]


def module_hashes(program: Program) -> dict[str, str]:
    """Return a hash of the operators of every module that computes something, and of their literals, in model
    order.

    Sizes are left out, and so are casts and dropout: another precision or rate is still the same model. So
    are values that only buffer updates read, since one microbatch computes them whole, and several compute
    parts. A program read from a folder has no graph, and no hashes.
    """
    graph, annotated = program.graphs.get("TRACED"), program.graphs.get("ANNOTATED")
    # Numbers that depend on the rows of the batch are those of a whole step, not those of a microbatch.
    whole = {node.name: note(node).rows.whole_call for node in annotated.nodes} if annotated else {}
    lines: dict[str, list[str]] = {}
    for node in _of_loss(graph) if graph is not None else ():
        if node.op != "call_function" or any(part in str(node.target) for part in LEFT_OUT):
            continue
        args, kwargs = whole.get(node.name) or (node.args, node.kwargs)
        numbers = [repr(value) for value in (*args, *kwargs.values()) if _is_literal(value)]
        own = own_function(node)
        called = own.name if own is not None else str(node.target)
        lines.setdefault(note(node).module, []).append(" ".join([called, *numbers]))
    return {module: _hash("\n".join(some)) for module, some in lines.items()}


def _of_loss(graph: Graph) -> list[Node]:
    """Return the nodes that the loss depends on, in order, without those that are only kept."""
    (loss,) = output(graph).args
    while isinstance(loss, Node) and loss.op == "call_function" and op_name(loss) in (KEEP, OUTPUT):
        loss = loss.args[0]
    found, stack = set[Node](), [loss] if isinstance(loss, Node) else []
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return [node for node in graph.nodes if node in found]


def _is_literal(value: Any) -> bool:
    """Tell whether an argument is a number other than a size, or a choice such as `approximate="tanh"`."""
    return isinstance(value, (float, str))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
