"""Counting from the graph: floating-point operations and bytes of a node, seconds of a conversion.

FLOPs are two per multiply-add, of matrix products only. Backward of a GEMM costs its forward once for every factor that needs a
gradient. Attention counts both of its products in full (no discount for a causal mask); backward of its fused kernels makes
five, since it computes the scores again: 2.5 times the forward where queries and values are equally wide.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node

from autoptd.ir import markers
from autoptd.ir.calls import star
from autoptd.ir.machine import Machine
from autoptd.ir.notes import is_whole, note, op_name, ops, payload, shape
from autoptd.ir.types import CONVERSIONS, ValueType
from autoptd.passes.links import operands
from autoptd.passes.rules import GEMMS

LOCAL_WORK = ("one rank keeps it", "slice", "zero-pad")
VIEWS = {
    f"aten.{name}" for name in "view reshape _unsafe_view transpose permute t expand select slice split chunk".split()
}
VIEWS |= {f"aten.{name}" for name in "split_with_sizes unbind unsqueeze squeeze unflatten flatten detach".split()} | {
    "getitem"
}
SORTS = ("aten.sort", "aten.argsort", "aten.topk", "aten.msort", "aten.searchsorted")
RING_PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}


Size = Callable[[Node], tuple[int, ...]]  # the shape of a node's value: whole, or a rank's


def flops(node: Node, shape: Size = shape) -> int:
    """Forward floating-point operations of one node, by default on whole tensors; 0 for what is no matrix product."""
    name = op_name(node)
    if node.target is markers.linear:  # an `aten.linear` or `aten.addmm` with hooks
        return 2 * math.prod(shape(node)) * shape(node.args[0])[-1]  # type: ignore[arg-type]
    if node.target is markers.FUSED["linear_cross_entropy"]:  # its gradients are made with the loss
        x, _, weight, *_ = node.args
        products = 1 + note(x).needs_grad + note(weight).needs_grad
        return products * 2 * math.prod(shape(x)) * shape(weight)[0]  # type: ignore[arg-type]
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


def count_work(graph: Graph, t: int, whole: Size, local: Size) -> dict[str, Any]:
    """Matrix products of one microbatch, in all (`total`: on one device) and on one rank, by stage, module and operator.

    `whole` and `local` give shapes of one microbatch, `redundant` is what all of the `t` ranks compute in full. A repeated
    layer's number is a star.
    """
    rows: dict[tuple[int, str, str], dict[str, Any]] = {}
    stages = sorted({stage for node in ops(graph) for stage in note(node).stages})
    for node in ops(graph):
        total, forward = flops(node, whole), flops(node, local)
        for stage in note(node).stages if total else ():
            key = (stage, star(note(node).module), op_name(node))
            row = rows.setdefault(key, {"times": 0, "total": 0, "forward": 0, "backward": 0, "redundant": 0})
            row["times"] += 1
            row["total"] += total
            row["forward"] += forward
            row["backward"] += backward_flops(node, local)
            row["redundant"] += forward if t > 1 and is_whole(node) else 0

    def sums(what: str) -> list[int]:
        return [sum(row[what] for (at, _, _), row in rows.items() if at == stage) for stage in stages]

    return {
        "flops_per_stage": sums("forward"),
        "backward_flops_per_stage": sums("backward"),
        "total_flops": sum(sums("total")),
        "redundant_gemm_flops": sum(sums("redundant")),
        "gemms": [
            {"stage": stage, "module": module, "operator": operator, **row}
            for (stage, module, operator), row in rows.items()
        ],
    }


def compute_seconds(node: Node, machine: Machine) -> float:
    """Roofline time of a node, forward and backward, on whole tensors."""
    moved = payload(node) + sum(payload(one) for one in node.all_input_nodes)
    return max(3 * flops(node) / machine.flops, 3 * moved / machine.memory_bandwidth)


def rank_seconds(node: Node, t: int, machine: Machine) -> float:
    """Roofline time of a node of a CONNECTED graph on one of t tensor ranks, forward and backward, its collectives included."""
    name = op_name(node)
    if node.target is markers.convert:
        source = node.args[0]
        return conversion_seconds(note(source).tp, note(node).tp, payload(node), t, machine)  # type: ignore[arg-type]
    if name in VIEWS:
        return 0.0
    read = [one for one in node.all_input_nodes if not (name == "aten.embedding" and note(one).kind == "param")]
    moved = sum(local_payload(one, t) for one in [node, *read])
    if name in SORTS:
        moved *= max(1.0, math.log2(shape(read[0])[-1] if shape(read[0]) else 1))
    work = flops(node) / max(note(one).tp.pieces(t) for one in [node, *node.all_input_nodes])
    return 3 * max(work / machine.flops, moved / machine.memory_bandwidth)


def local_payload(node: Node, t: int) -> float:
    """Bytes of a node's value on one of t tensor ranks."""
    return payload(node) / note(node).tp.pieces(t)


def conversion_seconds(source: ValueType, target: ValueType, nbytes: int, degree: int, machine: Machine) -> float:
    """Time of a conversion, forward and backward, of a value of `nbytes` in all, by ring collectives over `degree` ranks."""
    if source == target:
        return 0.0
    row = CONVERSIONS.get((source.kind, target.kind))
    if row is None:
        return math.inf
    return sum(collective_seconds(one, nbytes, degree, machine) for one in (row.forward, row.backward))


def collective_seconds(kind: str, nbytes: int, degree: int, machine: Machine) -> float:
    """Time of one direction of a conversion of a value of `nbytes` in all: a ring collective, local work, or nothing."""
    share = nbytes * (degree - 1) / degree / machine.link_bandwidth
    if kind in LOCAL_WORK:
        return nbytes / machine.memory_bandwidth
    if kind == "all-to-all":
        return share / degree + machine.latency
    return RING_PASSES[kind] * share + machine.latency if kind in RING_PASSES else 0
