"""Counting from the graph: floating-point operations and bytes of a node, seconds of a conversion.

FLOPs are two per multiply-add, of matrix products only. Backward of a GEMM costs its forward once for every factor that needs a
gradient. Attention counts both of its products in full (no discount for a causal mask); backward of its fused kernels makes
five, since it computes the scores again: 2.5 times the forward where queries and values are equally wide.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from torch.fx import Graph, Node

from autoptd.ir import markers
from autoptd.ir.machine import Machine
from autoptd.ir.mesh import Mesh
from autoptd.ir.notes import converted_types, is_pair, is_tensor, is_whole, note, op_name, ops, payload, shape, tensor
from autoptd.ir.types import CONVERSIONS, ValueType
from autoptd.passes.ops.dim_links import operands
from autoptd.passes.ops.table import GEMMS
from autoptd.program.calls import LOCAL_KINDS, LOCAL_WORK, star, wire_bytes
from autoptd.program.costs import Costs, GemmCosts, ProductCosts

VIEWS = {
    f"aten.{name}" for name in "view reshape _unsafe_view transpose permute t expand select slice split chunk".split()
}
VIEWS |= {f"aten.{name}" for name in "split_with_sizes unbind unsqueeze squeeze unflatten flatten detach".split()}
VIEWS |= {"getitem"}
SORTS = ("aten.sort", "aten.argsort", "aten.topk", "aten.msort", "aten.searchsorted")
# What a plan pays beside its seconds, so that of two that are nearly as fast the simpler one is taken:
PER_COLLECTIVE = 1.0  # for every collective, in latencies
PER_ODD_LAYER = 1.0  # for layers that are odd (`odd_layer_price`), in all-reduces of what the first one reads


Size = Callable[[Node], tuple[int, ...]]  # the shape of a node's value: whole, or a rank's


def flops(node: Node, shape: Size = shape) -> int:
    """Forward floating-point operations of one node, by default on whole tensors; 0 for what is no matrix product."""
    name = op_name(node)
    if node.target is markers.linear:  # an `aten.linear` or `aten.addmm` with hooks
        return 2 * math.prod(shape(node)) * shape(node.args[0])[-1]  # type: ignore[arg-type]
    if node.target is markers.FUSED["linear_cross_entropy"]:
        x, _, weight, *_ = node.args
        return products(node) * 2 * math.prod(shape(x)) * shape(weight)[0]  # type: ignore[arg-type]
    if name in GEMMS:
        x = operands(node)[1 if name in ("aten.addmm", "aten.baddbmm") else 0]
        return 2 * math.prod(shape(node)) * shape(x)[-1]
    if name == "aten.einsum":
        terms = str(node.args[0]).replace(" ", "").split("->")[0].split(",")
        sizes = {
            letter: n
            for term, one in zip(terms, operands(node), strict=True)
            for letter, n in zip(term, shape(one), strict=False)
        }
        return 2 * math.prod(sizes.values()) if len(terms) > 1 and "." not in "".join(terms) else 0
    if name == "aten.scaled_dot_product_attention":
        query, key, value = (shape(one) for one in operands(node)[:3])
        return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    return 0


def products(node: Node) -> int:
    """Matrix products in a node's forward that the model has one of: a head fused with its loss makes its gradients too."""
    if node.target is not markers.FUSED["linear_cross_entropy"]:
        return 1
    return 1 + sum(note(one).needs_grad for one in (node.args[0], node.args[2]))  # type: ignore[arg-type]


def backward_flops(node: Node, shape: Size = shape) -> int:
    """Floating-point operations of the backward of one node, by default on whole tensors."""
    read = operands(node)
    if op_name(node) == "aten.scaled_dot_product_attention":
        query, key, value = (shape(one) for one in read[:3])
        is_needed = any(note(one).needs_grad for one in read[:3])
        return is_needed * 2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])
    if node.target is markers.FUSED["linear_cross_entropy"]:
        return 0
    factors = read[1:3] if op_name(node) in ("aten.addmm", "aten.baddbmm") else read[:2]
    return flops(node, shape) * sum(note(one).needs_grad for one in factors)


def count_work(graph: Graph, t: int, whole: Size, local: Size) -> Costs:
    """Count the work of one microbatch by stage, by module and operator, and by the sizes of products.

    `whole` and `local` give shapes of one microbatch, those of the model and those of a rank.
    """
    gemms: dict[tuple[int, str, str], Counter[str]] = {}
    by_size: dict[tuple[int, tuple[int, ...], str], Counter[str]] = {}
    sums: dict[int, Counter[str]] = {}
    for node in ops(graph):
        total, forward = flops(node, whole) // products(node), flops(node, local)
        backward = backward_flops(node, local) if total else 0
        redundant = forward if t > 1 and is_whole(node) else 0
        for stage in note(node).stages:
            stage_sums = sums.setdefault(stage, Counter())
            stage_sums.update(moved=moved_bytes(node, local), kernels=int(has_kernel(node)))
            if total:
                row = gemms.setdefault((stage, star(note(node).module), op_name(node)), Counter())
                sized = by_size.setdefault((stage, *product_sizes(node, local)), Counter())
                row.update(times=1, total=total, forward=forward, backward=backward, redundant=redundant)
                sized.update(times=1, forward=forward, backward=backward)
                stage_sums.update(total=total, forward=forward, backward=backward, redundant=redundant)
    by_stage = [sums[stage] for stage in sorted(sums)]
    return Costs(
        flops_per_stage=tuple(count["forward"] for count in by_stage),
        backward_flops_per_stage=tuple(count["backward"] for count in by_stage),
        total_flops=sum(count["total"] for count in by_stage),
        redundant_gemm_flops=sum(count["redundant"] for count in by_stage),
        moved_bytes_per_stage=tuple(count["moved"] for count in by_stage),
        kernels_per_stage=tuple(count["kernels"] for count in by_stage),
        gemms=tuple(GemmCosts(*key, **row) for key, row in gemms.items()),
        products=tuple(ProductCosts(*key, **row) for key, row in by_size.items()),
    )


def product_sizes(node: Node, shape: Size) -> tuple[tuple[int, ...], str]:
    """(batch, m, n, k) of the products of a node, and what kernel they are a part of.

    Products with a weight are one, however many dims their rows have: a weight has two.
    """
    name, read, made = op_name(node), operands(node), shape(node)
    if name == "aten.scaled_dot_product_attention":
        query, key = shape(read[0]), shape(read[1])
        is_causal = node.kwargs.get("is_causal", node.args[5] if len(node.args) > 5 else False)
        kind = "causal attention" if is_causal else "attention"
        return (math.prod(query[:-2]), query[-2], key[-2], query[-1]), kind
    if node.target is markers.FUSED["linear_cross_entropy"]:
        x, weight = shape(node.args[0]), shape(node.args[2])  # type: ignore[arg-type]
        return (1, math.prod(x[:-1]), weight[0], x[-1]), "head with its loss"
    first = 1 if name in ("aten.addmm", "aten.baddbmm") else 0
    is_batched = name in GEMMS and all(len(shape(one)) > 2 for one in read[first : first + 2])
    batch = math.prod(made[:-2]) if is_batched else 1
    rows, columns = math.prod(made[:-1]) // batch, made[-1] if made else 1
    return (batch, rows, columns, flops(node, shape) // max(2 * batch * rows * columns, 1)), "product"


def has_kernel(node: Node) -> bool:
    """Whether an operator computes, and is no view or conversion."""
    return node.target is not markers.convert and op_name(node) not in VIEWS and (is_tensor(node) or is_pair(node))


def moved_bytes(node: Node, shape: Size) -> int:
    """Bytes that an operator reads and writes in forward; 0 for a matrix product, a view and a conversion.

    Of a table that rows are taken from, it reads as much as it gives.
    """
    if flops(node) or not has_kernel(node):
        return 0
    is_lookup = op_name(node) == "aten.embedding" or node.target is markers.vocab_embedding
    read = [node] if is_lookup else [one for one in node.all_input_nodes if is_tensor(one)]
    made = list(node.users) if is_pair(node) else [node]
    return sum(math.prod(shape(one)) * tensor(one).element_size() for one in [*made, *read])


def compute_seconds(node: Node, machine: Machine) -> float:
    """Roofline time of a node, forward and backward, on whole tensors."""
    moved = payload(node) + sum(payload(one) for one in node.all_input_nodes)
    return max(3 * flops(node) / machine.flops, 3 * moved / machine.memory_bandwidth)


def rank_seconds(node: Node, mesh: Mesh, machine: Machine) -> float:
    """Roofline time of a node of a CONNECTED graph on one rank of a mesh, forward and backward, its collectives included."""
    name = op_name(node)
    if node.target is markers.convert:
        source, target = converted_types(node)
        return conversion_seconds(source, target, converted_bytes(node, mesh), mesh.degree(note(node).axis), machine)
    if name in VIEWS:
        return 0.0
    read = [one for one in node.all_input_nodes if not (name == "aten.embedding" and note(one).kind == "param")]
    moved = sum(local_payload(one, mesh) for one in [node, *read])
    if name in SORTS:
        moved *= max(1.0, math.log2(shape(read[0])[-1] if shape(read[0]) else 1))
    work = flops(node) / max(note(one).layout.pieces(mesh) for one in [node, *node.all_input_nodes])
    return 3 * max(work / machine.flops, moved / machine.memory_bandwidth)


def local_payload(node: Node, mesh: Mesh) -> float:
    """Bytes of a node's value on one rank of a mesh."""
    return payload(node) / note(node).layout.pieces(mesh)


def converted_bytes(node: Node, mesh: Mesh) -> float:
    """Bytes of what the ranks along the axis of a conversion convert together: other axes may cut the value."""
    others = [axis for axis, _ in note(node).layout.shards if axis != note(node).axis]
    return payload(node) / math.prod(map(mesh.degree, others))


def conversion_seconds(source: ValueType, target: ValueType, nbytes: float, degree: int, machine: Machine) -> float:
    """Time of a conversion, forward and backward, of a value of `nbytes` in all, by ring collectives over `degree` ranks."""
    if source == target:
        return 0.0
    row = CONVERSIONS.get((source.kind, target.kind))
    if row is None:
        return math.inf
    return sum(collective_seconds(one, nbytes, degree, machine) for one in (row.forward, row.backward))


def conversion_price(source: ValueType, target: ValueType, nbytes: float, degree: int, machine: Machine) -> float:
    """What a plan pays for a conversion: its seconds, and the price of its collectives."""
    seconds = conversion_seconds(source, target, nbytes, degree, machine)
    if source == target or math.isinf(seconds):
        return seconds
    row = CONVERSIONS[source.kind, target.kind]
    collectives = sum(kind not in LOCAL_KINDS for kind in (row.forward, row.backward))
    return seconds + PER_COLLECTIVE * machine.latency * collectives


def odd_layer_price(nbytes: int, degree: int, machine: Machine) -> float:
    """What a plan pays once for a first layer that reads its value, of `nbytes`, in another type than the other layers theirs,
    and for layers that hand on anything but a whole value, a pending sum, or shards of tokens.
    """
    return PER_ODD_LAYER * collective_seconds("all-reduce", nbytes, degree, machine)


def collective_seconds(kind: str, nbytes: float, degree: int, machine: Machine) -> float:
    """Time of one direction of a conversion of a value of `nbytes` in all: a ring collective, local work, or nothing."""
    if kind in LOCAL_WORK:
        return nbytes / machine.memory_bandwidth
    if kind in LOCAL_KINDS:
        return 0
    return wire_bytes(kind, nbytes, degree) / machine.link_bandwidth + machine.latency
