"""Split experts over the ranks of an axis by their number: each rank multiplies the rows that chose one of its experts.

In: a graph whose rows are multiplied by the matrices of experts (`expert_mm`). Out: strategies that run such a product, and
operators that treat its rows one by one, on rows of type `E`: only those that chose an expert of the rank.

    experts = expert_mm(x, gate_up, ids)        # x: R, gate_up: S(0, 0)    -> E
    up = experts + bias[ids]                    # the bias: S(0, 0)         -> E
    experts = expert_mm(silu(up), down, ids)    # silu(up): E               -> E; as P it is zero in others' rows

All other operators read such a value as P: a rank's rows among zeros (`e_to_p`), which are summed once. In backward, too, E is
a shard: operands that are read whole are R, and their gradients are summed over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Protocol

from torch.fx import Graph, Node

from autoptd.ir import markers
from autoptd.ir.expert_mm import NAME
from autoptd.ir.layout import Layout
from autoptd.ir.machine import Machine
from autoptd.ir.mesh import Mesh
from autoptd.ir.notes import note, op_name, ops, payload, shape
from autoptd.ir.operators.record import operands
from autoptd.ir.operators.table import experts_of, is_pointwise, looked_up, operator_of, rows_read
from autoptd.ir.types import E, I, R, S, ValueType, division_text
from autoptd.passes.ops.costs import flops
from autoptd.passes.solve.ties import Strategy

# The standard deviation of the number of an expert's rows, relative to its mean: an assumption for routers that a loss keeps
# balanced. Untrained ones have 0.6 to 1.5 (`benchmarks/experts.py`).
DEVIATION = 0.5
# Columns of a matrix that a GPU multiplies at once: for 96 columns, a kernel computes 128.
TILE = 128


class Along(Protocol):
    """The facts about an axis that experts need: see `Splitter`."""

    mesh: Mesh
    machine: Machine
    degree: int

    def over(self, kind: ValueType) -> Layout: ...

    def seconds(self, node: Node) -> float: ...

    def divides_evenly(self, value: Node, dim: int) -> bool: ...


def rows_by_expert(graph: Graph) -> dict[Node, Node]:
    """Map the values with one row for each choice of an expert to these choices: products of experts, and what follows."""
    products = [node for node in ops(graph) if op_name(node) == NAME]
    counts = {experts_of(node.args[2]): shape(operands(node)[1])[0] for node in products}
    found: dict[Node, Node] = {}
    for node in ops(graph) if products else ():
        if op_name(node) == NAME:
            found[node] = experts_of(node.args[2])
        elif (ids := looked_up(node)) is not None:
            if counts.get(experts_of(ids)) == shape(operands(node)[0])[0]:
                found[node] = experts_of(ids)
        else:
            read = {found[operand] for operand in operands(node) if operand in found}
            rows = [operand for operand in operands(node) if operand in found]
            if len(read) == 1 and _stays_apart(node) and rows_read(node, rows) is not None:
                found[node] = read.pop()
    return found


def _stays_apart(node: Node) -> bool:
    """Tell whether an operator can run on any number of rows."""
    record = operator_of(node)
    if node.target in markers.FUSED.values():
        return True
    is_moved = record.moves in ("fold", "turn", "pieces", "part", "same", "cast")
    return op_name(node) == "getitem" or is_moved or (is_pointwise(node) and not record.sizes)


def expert_strategies(node: Node, along: Along, rows: Mapping[Node, Node]) -> list[Strategy]:
    """Return the strategy that runs an operator on the rows of a rank's experts, if there is one."""
    if node not in rows:
        return []
    own = along.over(E)
    needs = {operand: along.over(R if note(operand).of_params else I) for operand in operands(node)}
    needs |= {operand: own for operand in needs if rows.get(operand) is rows[node]}
    table = expert_table(node)
    if table is None:
        return [Strategy(needs, own, along.seconds(node), "of a rank's own rows")]
    if not along.divides_evenly(table, 0):
        return []
    needs[table] = along.over(S(0, 0))
    why = f"split by expert: {division_text(shape(table)[0], along.degree)}"
    if op_name(node) != NAME:
        return [Strategy(needs, own, along.seconds(node), why)]
    why += f", the busiest rank has {_busiest(node, along.degree):.0%} of the mean"
    return [Strategy(needs, own, product_seconds(node, along, needs, own), why)]


def expert_table(node: Node) -> Node | None:
    """Return the operand with the experts in dim 0: matrices, or rows that are looked up."""
    if op_name(node) == NAME:
        return operands(node)[1]
    return operands(node)[0] if looked_up(node) is not None else None


def busiest(experts: int, ranks: int) -> float:
    """Return the expected rows of the busiest rank, relative to the mean, if experts are chosen independently.

    The sum over a rank's experts deviates less than one expert; the busiest rank is the largest of `ranks` draws (Blom 1958,
    "Statistical estimates and transformed beta-variables").
    """
    if ranks == 1:
        return 1.0
    deviation = DEVIATION * math.sqrt(ranks / experts) * math.sqrt(1 - 1 / ranks)
    largest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return min(1 + deviation * largest, float(ranks))


def _busiest(node: Node, ranks: int) -> float:
    return busiest(shape(operands(node)[1])[0], ranks)


def product_seconds(node: Node, along: Along, needs: Mapping[Node, Layout], gives: Layout) -> float:
    """Return the seconds of a product of experts, forward and backward, on one rank, with operands and result of these types.

    Split within each expert, a rank has all rows of fewer columns; split by expert, whole columns of fewer rows. Kernels
    compute whole tiles. Reading and writing rows takes time, too, on every rank if they are not split.
    """
    mesh, machine, x, weight = along.mesh, along.machine, *operands(node)[:2]
    is_by_expert = gives == along.over(E)
    # The number of parts of rows, columns and channels. A rank has one of them; split by expert, the rows of the busiest rank.
    channels, columns = _cuts(needs[x], 1, mesh), _cuts(gives, 1, mesh)
    rows = along.degree / _busiest(node, along.degree) if is_by_expert else _cuts(gives, 0, mesh)
    whole_waste = max(_tiled(size) for size in shape(weight)[1:])
    waste = max(_tiled(shape(weight)[1] // channels), _tiled(shape(weight)[2] // columns)) / whole_waste
    moved = payload(weight) / needs[weight].pieces(mesh)
    moved += payload(x) / channels / rows + payload(node) / columns / rows
    work = 3 * flops(node) / (rows * channels * columns) * waste / machine.flops
    return max(work, 3 * moved / machine.memory_bandwidth)


def _cuts(layout: Layout, dim: int, mesh: Mesh) -> int:
    """Return the number of parts that a dim is cut into."""
    return math.prod(mesh.degree(axis) for axis, kind in layout.shards if kind.dim == dim)


def _tiled(size: int) -> float:
    """Return the work that a kernel does for a size, relative to that size: 128/96 for 96 columns."""
    return math.ceil(size / TILE) * TILE / size


__all__ = ["Along", "busiest", "expert_strategies", "expert_table", "product_seconds", "rows_by_expert"]
