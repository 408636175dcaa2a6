"""Find the tensors that every operator saves for backward, by running its emitted expression once on tensors
without data.

In: LOCAL graphs. Out: `SavedForBackward` of each: the memory of every value on a rank, and the storages that
each operator saves: operands, results, and internal values (the log-sum-exp of attention, the factors of a
norm).

    find_saved = FindSaved(mesh, rows=4)
    found = find_saved(graph)
    found.of[gelu]                              # {Storage(c_fc, 524288)}

It runs the same code as a rank, the runtime's functions included, with autograd and its saved-tensor hooks,
so this file has no list of operators. Equal expressions on equal operands run once across graphs and layers,
on the meta device, with attention by the kernel of a CPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Graph, Node

from autoptd import runtime
from autoptd.codegen.expressions import expression
from autoptd.compiler.on_meta import AsOnCpu
from autoptd.errors import InternalError
from autoptd.ir.kept import SavedForBackward, Storage, Value
from autoptd.ir.mesh import Mesh, is_sub_axis
from autoptd.ir.notes import note, op_name, placeholders, row_blocks, site, tensor, value
from autoptd.runtime.ops.dropout import Draw
from autoptd.runtime.ops.fused import Fused
from autoptd.runtime.world.shape_world import ShapeGroup

# The argument of an expression that names its site in the model.
SITE = re.compile(r"""\bsite=(?:\d+|'[^']*'|"[^"]*")""")


class _Outcome(NamedTuple):
    """The result of an expression: a `Value` per result and the saved storages, with storages as numbers.

    Numbers below `operands` are the storages of operands, in order; the others are new, with their bytes in
    `fresh`.
    """

    results: tuple[tuple[int, Any], ...]
    saved: tuple[int, ...]
    operands: int
    fresh: tuple[int, ...]


class FindSaved:
    """Run every distinct operator of the LOCAL graphs of a compilation; a microbatch has `rows` rows."""

    def __init__(self, mesh: Mesh, rows: int) -> None:
        self._mesh, self._rows = mesh, rows
        self._known: dict[int, _Known] = {}

    def __call__(self, graph: Graph) -> SavedForBackward:
        """Return the tensors that the operators of a graph save; InternalError if one does not run."""
        blocks = map(row_blocks, placeholders(graph, "input"))
        # Masks number rows within a block of the batch.
        rows = self._rows // max(blocks, default=1)
        if rows not in self._known:
            self._known[rows] = _Known(self._mesh, rows)
        known = self._known[rows]
        found = SavedForBackward()
        for node in graph.nodes:
            if node.op == "placeholder" and value(node) is not None:
                found.values[node] = tuple(_given(node))
            elif node.op == "call_function" and value(node) is not None:
                found.values[node], found.of[node] = _run(node, found, known)
        return found


def _given(node: Node) -> Iterator[Value]:
    dtype = tensor(node).dtype
    for piece, shape in enumerate(note(node).local.shapes):
        count = torch.Size(shape).numel()
        stride = torch.empty(shape, device="meta").stride()
        yield Value(
            Storage(node, piece, count * dtype.itemsize), shape, stride, 0, dtype, note(node).needs_grad
        )


def _run(node: Node, found: SavedForBackward, known: _Known) -> tuple[tuple[Value, ...], frozenset[Storage]]:
    if op_name(node) == "getitem":
        return (found.values[node.args[0]][node.args[1]],), frozenset()  # type: ignore[index]
    operands = [found.values[arg] for arg in node.all_input_nodes]
    storages = list(dict.fromkeys(each.storage for pieces in operands for each in pieces))
    outcome = known.outcome(node, operands, storages)
    # Map storage numbers to storages; those of no result are internal to the operator.
    piece_of = {number: piece for piece, (number, _) in reversed(list(enumerate(outcome.results)))}
    for i, nbytes in enumerate(outcome.fresh):
        number = outcome.operands + i
        storages.append(Storage(node, piece_of.get(number, -1 - i), nbytes))
    values = tuple(Value(storages[number], *rest) for number, rest in outcome.results)
    return values, frozenset(storages[number] for number in outcome.saved)


class _Known:
    """The outcomes of expressions, and the names for evaluating them."""

    def __init__(self, mesh: Mesh, rows: int) -> None:
        self._mesh, self._outcomes = mesh, dict[Any, _Outcome]()
        self._self = _Stage(mesh, rows)
        self._names: dict[str, Any] = {"torch": torch, "F": F, "rt": runtime, "self": self._self}
        self._names |= {axis: self._self.groups[axis] for axis in (*mesh.value_axes, *mesh.batch_axes)}

    def outcome(self, node: Node, operands: Sequence[tuple[Value, ...]], storages: list[Storage]) -> _Outcome:
        numbers = {arg: f"x{i}" for i, arg in enumerate(node.all_input_nodes)}
        text = expression(node, numbers.__getitem__)
        seen = [(storages.index(each.storage), each.storage.nbytes, *each[1:]) for each in chain(*operands)]
        # Layers draw different masks, and pass different sites, but save the same tensors.
        key = repr((SITE.sub("site", text), list(map(len, operands)), seen))
        if key not in self._outcomes:
            try:
                self._outcomes[key] = self._evaluate(text, operands, storages)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise InternalError(site(node), f"fails without numbers: {error}") from error
        return self._outcomes[key]

    def _evaluate(
        self, text: str, operands: Sequence[tuple[Value, ...]], storages: list[Storage]
    ) -> _Outcome:
        memory = {
            storage: torch.empty(storage.nbytes, dtype=torch.uint8, device="meta") for storage in storages
        }
        names = dict(self._names)
        for i, pieces in enumerate(operands):
            made = [_tensor(memory[each.storage], each) for each in pieces]
            names[f"x{i}"] = made[0] if len(made) == 1 else made
        packed: list[torch.Tensor] = []

        def pack(x: torch.Tensor) -> torch.Tensor:
            packed.append(x)
            return x

        with torch.enable_grad(), saved_tensors_hooks(pack, lambda x: x), AsOnCpu():
            # The text is emitted by us, so it is safe to evaluate.
            result = eval(text, names)
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        return _outcome(results, packed, [memory[storage] for storage in storages])


def _tensor(memory: torch.Tensor, like: Value) -> torch.Tensor:
    # Hide this cast from modes that reinterpret the model's casts (`verify`).
    with torch._C.DisableTorchFunction():
        whole = memory.view(like.dtype) if like.dtype != torch.uint8 else memory
    return whole.as_strided(like.shape, like.stride, like.offset).requires_grad_(like.requires_grad)


def _outcome(
    results: Sequence[torch.Tensor], packed: Sequence[torch.Tensor], memory: Sequence[torch.Tensor]
) -> _Outcome:
    number_of: dict[int, int] = {}
    fresh: list[int] = []
    for i, each in enumerate(memory):
        number_of[each.untyped_storage()._cdata] = i

    def number(x: torch.Tensor) -> int:
        storage = x.untyped_storage()
        if storage._cdata not in number_of:
            number_of[storage._cdata] = len(number_of)
            fresh.append(storage.nbytes())
        return number_of[storage._cdata]

    made = []
    for x in results:
        about = tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, x.requires_grad
        made.append((number(x), about))
    saved = tuple(sorted({number(x) for x in packed}))
    return _Outcome(tuple(made), saved, len(memory), tuple(fresh))


class _Groups(dict[str, ShapeGroup]):
    def __init__(self, mesh: Mesh) -> None:
        axes = (*mesh.value_axes, *mesh.batch_axes)
        super().__init__({axis: ShapeGroup(mesh.degree(axis)) for axis in axes})
        self._mesh = mesh

    def __missing__(self, axis: str) -> ShapeGroup:
        if not is_sub_axis(axis):
            raise KeyError(axis)
        self[axis] = ShapeGroup(self._mesh.degree(axis))
        return self[axis]


class _Totals:
    def __getitem__(self, number: int) -> float:
        return 1.0


class _Stage:
    """The attributes of a stage that expressions read."""

    totals = _Totals()
    device = torch.device("meta")

    def __init__(self, mesh: Mesh, rows: int) -> None:
        self.groups, self.rows, self.fused = _Groups(mesh), rows, Fused()

    def draw(self, site: int) -> Draw:
        return Draw(0, 0, site, 0, self.rows)

    def batch_sum(self, number: int, *, dtype: torch.dtype, shape: Sequence[int] = ()) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def keep_part(self, loss: torch.Tensor, *_: Any) -> torch.Tensor:
        return loss

    keep_output = keep_part

    def main_grads(self, gemm: Any) -> None:
        pass

    deferred = main_grads


__all__ = ["FindSaved"]
