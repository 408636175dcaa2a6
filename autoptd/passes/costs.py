"""Counting from the graph: floating-point operations and bytes of a node, seconds of a conversion.

FLOPs are forward only, two per multiply-add; backward of a GEMM costs twice that. Attention counts both of its products in
full (no discount for a causal mask).
"""

from __future__ import annotations

import math

from torch.fx import Node

from autoptd.ir.machine import Machine
from autoptd.ir.notes import op_name, payload, shape
from autoptd.ir.types import CONVERSIONS, ValueType
from autoptd.passes.links import operands
from autoptd.passes.rules import GEMMS

LOCAL_WORK = ("one rank keeps it", "slice", "zero-pad")
RING_PASSES = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 1.0}


def flops(node: Node) -> int:
    """Forward floating-point operations of one node on whole tensors; 0 for what is no matrix product."""
    name = op_name(node)
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


def compute_seconds(node: Node, machine: Machine) -> float:
    """Roofline time of a node, forward and backward, on whole tensors."""
    moved = payload(node) + sum(payload(one) for one in node.all_input_nodes)
    return max(3 * flops(node) / machine.flops, 3 * moved / machine.memory_bandwidth)


def conversion_seconds(source: ValueType, target: ValueType, nbytes: int, degree: int, machine: Machine) -> float:
    """Time of a conversion, forward and backward, of a value of `nbytes` in all, by ring collectives over `degree` ranks."""
    if source == target:
        return 0.0
    row = CONVERSIONS.get((source.kind, target.kind))
    if row is None:
        return math.inf
    share = nbytes * (degree - 1) / degree / machine.link_bandwidth
    total = 0.0
    for collective in (row.forward, row.backward):
        passes = RING_PASSES.get(collective, 0.0)
        if collective in LOCAL_WORK:
            total += nbytes / machine.memory_bandwidth
        elif collective == "all-to-all":
            total += share / degree + machine.latency
        elif passes:
            total += passes * share + machine.latency
    return total
