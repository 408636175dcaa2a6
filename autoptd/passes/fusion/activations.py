"""GELU and SiLU in any spelling, gated products, and a bias before GELU.

A pointwise formula of one value is recognised by what it computes: on a few thousand numbers in float64 it must agree with the
known function, and so must its derivative, to the last digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from autoptd.ir.fusion import Found, Refusal
from autoptd.ir.notes import is_tensor, op_name, value
from autoptd.passes.fusion.chain import Chain, is_op, number, orders, same_dtype

KNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
FORMULA = tuple(
    f"aten.{name}" for name in "mul div add sub neg pow tanh erf sigmoid exp reciprocal sqrt".split()
)
# Operators of a formula.
MAX_OPERATORS = 12
# Errors of a formula that is an activation, and of one that should be reported as nearly one.
EXACT, CLOSE = 1e-12, 1e-6


def activation(node: Node) -> Found:
    """Match GELU or SiLU written out."""
    if op_name(node) not in ("aten.mul", "aten.div"):
        return None
    chain = Chain(node)
    found = _formula(chain, node)
    if found is None:
        return None
    name, x, error = found
    if error > EXACT:
        return Refusal(name, node, f"its constants differ from those of {name} by {error:.0e}")
    approximate = {"approximate": "tanh"} if name == "gelu_tanh" else {}
    return chain.group(name.removesuffix("_tanh"), x, **approximate)


def gated(node: Node) -> Found:
    """Match silu(gate) * up and gelu(gate) * up."""
    if op_name(node) != "aten.mul":
        return None
    # In either order: `up * silu(gate)` is the same product.
    for gate, up in orders(node):
        if not (isinstance(gate, Node) and isinstance(up, Node) and value(up).shape == value(gate).shape):
            continue
        chain = Chain(node)
        found = _activation(chain, gate)
        if found is not None and same_dtype(node, found[1], up):
            name, x = found
            keywords = {"approximate": "tanh"} if name == "gelu_tanh" else {}
            return chain.group("swiglu" if name == "silu" else "geglu", x, up, **keywords)
    return None


def biased_gelu(node: Node) -> Found:
    """Match gelu(x W^T + bias): the bias leaves its GEMM, and is added where the activation reads the product."""
    chain = Chain(node)
    found = _activation(chain, node) if op_name(node) in ("aten.gelu", "aten.mul") else None
    # No kernel adds a bias before SiLU: the gated MLPs that use it have none.
    if found is None or found[0] == "silu" or not is_op(found[1], "aten.linear"):
        return None
    name, product = found
    if len(product.args) < 3 or product.args[2] is None:
        return None
    bias = product.args[2]
    if not same_dtype(node, product, bias):
        return Refusal("bias_gelu", node, "the bias has another dtype")
    chain.members.add(product)
    return chain.group("bias_gelu", product, bias, approximate="tanh" if name == "gelu_tanh" else "none")


def _activation(chain: Chain, node: Any) -> tuple[str, Node] | None:
    """Return (name, input) of an activation that ends at `node`."""
    if is_op(node, "aten.silu", "aten.gelu"):
        chain.members.add(node)
        name = op_name(node).removeprefix("aten.")
        if node.kwargs.get("approximate") == "tanh":
            name = "gelu_tanh"
        return name, node.args[0]
    if not is_op(node, "aten.mul", "aten.div"):
        return None
    found = _formula(chain, node)
    if found is None or found[2] > EXACT:
        return None
    return found[:2]


def _formula(chain: Chain, last: Node) -> tuple[str, Node, float] | None:
    """Return (name, input, error) of a pointwise formula that is close to a known activation, and add it to `chain`."""
    # Beyond 12 both GELUs and SiLU are x, or 0, to 1e-4; exp overflows nowhere in between.
    points = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    # Most formulas are none of them, which a few of the numbers show.
    few = points[::500]
    for x, members in _closures(last):
        ours = partial(_run, last, x)
        found = ours(few)
        for name, function in KNOWN.items():
            if not (found - function(few)).abs().max() < CLOSE:
                continue
            pairs = zip(_differentiated(ours, points), _differentiated(function, points), strict=True)
            error = max(float((a - b).abs().max()) for a, b in pairs)
            if error < CLOSE:
                chain.members |= members
                return name, x, error
    return None


def _closures(last: Node) -> Iterator[tuple[Node, set[Node]]]:
    """Yield (x, operators) for every x such that `last` is a formula of x alone, the smallest first."""
    # `last` alone first, then with the operators that it reads, and so on back: of
    # 0.5 * x * (1 + erf(x / 2**0.5)), the values read shrink to {x} when all of the formula is in.
    members: set[Node] = {last}
    while len(members) <= MAX_OPERATORS:
        read = {operand for node in members for operand in node.all_input_nodes} - members
        members |= {operand for operand in read if number(operand) is not None}
        read -= members
        if len(read) == 1:
            yield next(iter(read)), set(members)
        # The one that is made last comes from the others, if this is a formula of one value at all.
        latest = max(read, default=None)
        if latest is None or not is_op(latest, *FORMULA) or not is_tensor(latest):
            return
        members.add(latest)


def _run(last: Node, x: Node, at: Tensor) -> Tensor:
    """Return what `last`, a formula of `x` alone, is there."""
    known = {x: at}

    def compute(node: Node) -> Any:
        if node not in known:
            if number(node) is not None:
                return number(node)
            args, kwargs = map_arg((node.args, node.kwargs), compute)
            known[node] = node.target(*args, **kwargs)
        return known[node]

    return compute(last)


def _differentiated(function: Callable[[Tensor], Tensor], points: Tensor) -> tuple[Tensor, Tensor]:
    x = points.clone().requires_grad_()
    with torch.enable_grad():
        y = function(x)
        (slope,) = torch.autograd.grad(y.sum(), x)
    return y.detach(), slope
