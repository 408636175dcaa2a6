"""Count floating-point operations and bytes of a node, and the seconds of operators and conversions, from the graph.

FLOPs are two per multiply-add, of matrix products only. Backward of a GEMM costs its forward once for every factor that needs a
gradient. Attention counts both of its products in full (no discount for a causal mask); backward of its fused kernels has five
products, as it recomputes the scores: 2.5 times the forward if queries and values are equally wide.
"""

from __future__ import annotations

import math
from collections import Counter

from torch.fx import Graph, Node

from autoptd.ir import markers
from autoptd.ir.machine import Machine
from autoptd.ir.mesh import Mesh
from autoptd.ir.names import star
from autoptd.ir.notes import (
    converted_types,
    is_pair,
    is_tensor,
    is_whole,
    note,
    op_name,
    ops,
    payload,
    shape,
    tensor,
)
from autoptd.ir.operators.flops import products
from autoptd.ir.operators.record import Product, Size, operands
from autoptd.ir.operators.table import is_view, operator_of
from autoptd.ir.types import CONVERSIONS, LOCAL_KINDS, LOCAL_WORK, ValueType, wire_bytes
from autoptd.program.costs import Costs, GemmCosts, ProductCosts

# The price of a plan in addition to its seconds, so that the simpler of two plans of similar speed is chosen: for every
# collective, in latencies; for odd layers (`odd_layer_price`), in all-reduces of the value that the first one reads.
PER_COLLECTIVE = 1.0
PER_ODD_LAYER = 1.0


def flops(node: Node, shape: Size = shape) -> int:
    """Count the forward FLOPs of one node, by default on whole tensors; 0 except for matrix products."""
    record = operator_of(node)
    if record.factors:
        rows = operands(node)[record.factors[0]]
        return 2 * math.prod(shape(node)) * shape(rows)[-1]
    return record.flops(node, shape) if record.flops else 0


def backward_flops(node: Node, shape: Size = shape) -> int:
    """Count the backward FLOPs of one node, by default on whole tensors."""
    record, read = operator_of(node), operands(node)
    if record.backward_flops:
        return record.backward_flops(node, shape)
    # dX = dY W^T and dW = X^T dY each take as many FLOPs as Y = X W.
    factors = [read[i] for i in record.factors] or read[:2]
    return flops(node, shape) * sum(note(factor).needs_grad for factor in factors)


def passes_of(node: Node) -> int:
    """Return the time of forward and backward in units of the forward: 3, less 1 for each frozen factor of a product.

    If no gradient reaches the operator, because everything before it is frozen, it is 1.
    """
    if _is_frozen(node):
        return 1
    record, read = operator_of(node), operands(node)
    if not flops(node) or record.backward_flops:
        return 3
    factors = [read[i] for i in record.factors] or read[:2]
    return 3 - sum(map(_is_frozen, factors))


def _is_frozen(node: Node) -> bool:
    """Tell whether a value depends on parameters, and none of them is trained."""
    return note(node).of_params and not note(node).needs_grad


def count_work(graph: Graph, mesh: Mesh, whole: Size, local: Size) -> Costs:
    """Count the work of one microbatch by stage, by module and operator, and by the sizes of products.

    `whole` and `local` return shapes for one microbatch, of the model and of a rank.
    """
    gemms: dict[tuple[int, str, str], Counter[str]] = {}
    by_size: dict[tuple[int, tuple[int, ...], str], Counter[str]] = {}
    sums: dict[int, Counter[str]] = {}
    for node in ops(graph):
        once, forward = flops(node, whole), flops(node, local)
        total = once // products(node)
        # A fused head computes its gradients in forward. Recomputing scores in backward is not work of the model.
        total_backward = min(once - total + backward_flops(node, whole), 2 * total) if total else 0
        # Work that all replicas repeat counts once for all of them.
        if note(node).rows.of_all:
            total, total_backward = (-(-count // mesh.replicas) for count in (total, total_backward))
        backward = backward_flops(node, local) if total else 0
        redundant = forward if mesh.value_ranks > 1 and is_whole(node) else 0
        for stage in note(node).stages:
            stage_sums = sums.setdefault(stage, Counter())
            work = Counter(moved=moved_bytes(node, local), kernels=int(has_kernel(node)))
            stage_sums.update(work)
            if note(node).keep.again is not None:
                stage_sums.update(again_moved=work["moved"], again_kernels=work["kernels"], again=forward)
            # "gemms" are by module, for reports; "products" by size, which determines their speed.
            if total:
                row = gemms.setdefault((stage, star(note(node).module), op_name(node)), Counter())
                sized = by_size.setdefault((stage, *product_sizes(node, local)), Counter())
                row.update(times=1, total=total, forward=forward, backward=backward, redundant=redundant)
                sized.update(times=1, forward=forward, backward=backward)
                stage_sums.update(total=total, forward=forward, backward=backward, redundant=redundant)
                stage_sums["total_backward"] += total_backward
    by_stage = [sums[stage] for stage in sorted(sums)]
    return Costs(
        flops_per_stage=tuple(count["forward"] for count in by_stage),
        backward_flops_per_stage=tuple(count["backward"] for count in by_stage),
        total_flops=sum(count["total"] for count in by_stage),
        total_backward_flops=sum(count["total_backward"] for count in by_stage),
        redundant_gemm_flops=sum(count["redundant"] for count in by_stage),
        moved_bytes_per_stage=tuple(count["moved"] for count in by_stage),
        kernels_per_stage=tuple(count["kernels"] for count in by_stage),
        again_flops_per_stage=tuple(count["again"] for count in by_stage),
        again_moved_bytes_per_stage=tuple(count["again_moved"] for count in by_stage),
        again_kernels_per_stage=tuple(count["again_kernels"] for count in by_stage),
        gemms=tuple(GemmCosts(*key, **row) for key, row in gemms.items()),
        products=tuple(ProductCosts(*key, **row) for key, row in by_size.items()),
    )


def product_sizes(node: Node, shape: Size) -> Product:
    """Return (batch, m, n, k) of the products of a node, and the kernel that they are a part of.

    A product with a weight, which has two dims, is one product, however many dims its rows have.
    """
    record, read, made = operator_of(node), operands(node), shape(node)
    if record.product:
        return record.product(node, shape)
    is_batched = bool(record.factors) and all(len(shape(read[i])) > 2 for i in record.factors)
    batch = math.prod(made[:-2]) if is_batched else 1
    # The contracted size k follows from the FLOPs, so records need not name its position.
    rows, columns = math.prod(made[:-1]) // batch, made[-1] if made else 1
    return (batch, rows, columns, flops(node, shape) // max(2 * batch * rows * columns, 1)), "product"


def has_kernel(node: Node) -> bool:
    """Tell whether an operator launches a kernel: views and conversions do not."""
    return node.target is not markers.convert and not is_view(node) and (is_tensor(node) or is_pair(node))


def moved_bytes(node: Node, shape: Size) -> int:
    """Count the bytes that an operator reads and writes in forward; 0 for a matrix product, a view and a conversion."""
    if flops(node) or not has_kernel(node):
        return 0
    read = [operand for operand in node.all_input_nodes if is_tensor(operand)]
    # A lookup reads only the rows of the table that it returns.
    if operator_of(node).is_lookup:
        read = [node]
    results = list(node.users) if is_pair(node) else [node]
    return sum(math.prod(shape(value)) * tensor(value).element_size() for value in [*results, *read])


def compute_seconds(node: Node, machine: Machine) -> float:
    """Return the roofline time of a node, forward and backward, on whole tensors."""
    moved = payload(node) + sum(payload(operand) for operand in node.all_input_nodes)
    # Backward takes twice as long as forward.
    return max(3 * flops(node) / machine.flops, 3 * moved / machine.memory_bandwidth)


def rank_seconds(node: Node, mesh: Mesh, machine: Machine) -> float:
    """Return the roofline time of a node of a CONNECTED graph on one rank, forward and backward, with its collectives."""
    record = operator_of(node)
    if node.target is markers.convert:
        source, target = converted_types(node)
        degree = mesh.degree(note(node).axis)
        return conversion_seconds(source, target, converted_bytes(node, mesh), degree, machine)
    if is_view(node):
        return 0.0
    read = []
    for operand in node.all_input_nodes:
        # A lookup reads only the rows of the table that it returns.
        if not (record.is_lookup and note(operand).kind == "param"):
            read.append(operand)
    moved = sum(local_payload(value, mesh) for value in [node, *read])
    if record.sorts:
        moved *= max(1.0, math.log2(shape(read[0])[-1] if shape(read[0]) else 1))
    # If a contracted letter is split, only the operands show it: the result is P, of full size.
    pieces = max(note(value).layout.pieces(mesh) for value in [node, *node.all_input_nodes])
    once = max(flops(node) / pieces / machine.flops, moved / machine.memory_bandwidth)
    return passes_of(node) * once


def forward_seconds(node: Node, mesh: Mesh, machine: Machine) -> float:
    """Return the roofline time of a node of a LOCAL graph on one rank, for forward alone, with its collective."""
    if node.target is markers.convert:
        source, target = converted_types(node)
        # Ranks communicate the larger one: the whole value, not the shard.
        nbytes = max(map(_local_bytes, (node, *node.all_input_nodes)))
        kind = CONVERSIONS[source.kind, target.kind].forward
        return collective_seconds(kind, nbytes, mesh.degree(note(node).axis), machine)
    work = flops(node, _local_size) / machine.flops
    return max(work, moved_bytes(node, _local_size) / machine.memory_bandwidth)


def _local_size(node: Node) -> tuple[int, ...]:
    return note(node).local.shapes[0]  # type: ignore[no-any-return]


def _local_bytes(node: Node) -> int:
    return math.prod(_local_size(node)) * tensor(node).element_size()


def local_payload(node: Node, mesh: Mesh) -> float:
    """Return the bytes of a node's value on one rank of a mesh."""
    return payload(node) / note(node).layout.pieces(mesh)


def converted_bytes(node: Node, mesh: Mesh) -> float:
    """Return the bytes that all ranks along the axis of a conversion convert together; other axes may cut the value."""
    others = [axis for axis, _ in note(node).layout.shards if axis != note(node).axis]
    return payload(node) / math.prod(map(mesh.degree, others))


def conversion_seconds(
    source: ValueType, target: ValueType, nbytes: float, degree: int, machine: Machine
) -> float:
    """Return the seconds of a conversion, forward and backward; infinite if there is none.

    It takes ring collectives over `degree` ranks, for a whole value of `nbytes`.
    """
    if source == target:
        return 0.0
    row = CONVERSIONS.get((source.kind, target.kind))
    if row is None:
        return math.inf
    return sum(collective_seconds(kind, nbytes, degree, machine) for kind in (row.forward, row.backward))


def conversion_price(
    source: ValueType, target: ValueType, nbytes: float, degree: int, machine: Machine
) -> float:
    """Return the price of a conversion in a plan: its seconds, and one more latency for each collective."""
    seconds = conversion_seconds(source, target, nbytes, degree, machine)
    if source == target or math.isinf(seconds):
        return seconds
    row = CONVERSIONS[source.kind, target.kind]
    collectives = sum(kind not in LOCAL_KINDS for kind in (row.forward, row.backward))
    return seconds + PER_COLLECTIVE * machine.latency * collectives


def odd_layer_price(nbytes: int, degree: int, machine: Machine) -> float:
    """Return the price, in seconds, of a first layer that reads its value (`nbytes`) in another type than the other layers.

    Layers also pay it if they pass on anything but a whole value, a partial sum, or shards of tokens.
    """
    return PER_ODD_LAYER * collective_seconds("all-reduce", nbytes, degree, machine)


def collective_seconds(kind: str, nbytes: float, degree: int, machine: Machine) -> float:
    """Return the seconds of one direction of a conversion of a value of `nbytes`: a ring collective, local work, or nothing."""
    if kind in LOCAL_WORK:
        return nbytes / machine.memory_bandwidth
    if kind in LOCAL_KINDS:
        return 0
    return wire_bytes(kind, nbytes, degree) / machine.link_bandwidth + machine.latency
