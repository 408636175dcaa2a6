"""Match pointwise patterns: GELU and SiLU in any spelling, gated products, a bias before GELU; rotary position
embedding; dropout with a residual sum and the bias of the GEMM before them (SC'21, section 4.2).

A pointwise formula of one value is recognized by its values: on a few thousand numbers in float64 it must agree with the
known function, and so must its derivative, to the last digits.

A rotary embedding is `x * cos + rotate_half(x) * sin`, with halves (Llama, NeoX) or neighbors (GPT-J) rotated.

The bias of a row-split GEMM counts once; as part of the GEMM it is zero on all ranks but one. Here it moves after the sum
over the ranks, where it is added on all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from autoptd.ir import markers
from autoptd.ir.fusion import Found, Refusal
from autoptd.ir.notes import is_tensor, note, op_name, shape, value
from autoptd.passes.fusion.chain import (
    Chain,
    is_op,
    last_dim,
    number,
    orders,
    same_dtype,
    splits,
)

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
    """Match gelu(x W^T + bias): the bias leaves its GEMM, and is added when the activation reads the product."""
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
    """Return (name, input, error) of a pointwise formula close to a known activation, and add it to `chain`."""
    # Beyond +-12, both GELUs and SiLU are x or 0 to 1e-4; within, exp does not overflow.
    points = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    # Most formulas are none of these, as a few points show.
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
    # `last` alone first, then with its operands, and so on: for 0.5 * x * (1 + erf(x / 2**0.5)), the values
    # that are read shrink to {x} once the whole formula is included.
    members: set[Node] = {last}
    while len(members) <= MAX_OPERATORS:
        read = {operand for node in members for operand in node.all_input_nodes} - members
        members |= {operand for operand in read if number(operand) is not None}
        read -= members
        if len(read) == 1:
            yield next(iter(read)), set(members)
        # In a formula of one value, the operand that is computed last depends on the others.
        latest = max(read, default=None)
        if latest is None or not is_op(latest, *FORMULA) or not is_tensor(latest):
            return
        members.add(latest)


def _run(last: Node, x: Node, at: Tensor) -> Tensor:
    """Evaluate `last`, a formula of `x` alone, at these points."""
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


# (start, end, step) along the last dim.
Piece = tuple[int, int, int]


def rotary(node: Node) -> Found:
    """Match the sum of a value times its cosines and the rotated value times its sines."""
    if op_name(node) != "aten.add" or not all(is_op(term, "aten.mul") for term in node.args):
        return None
    # There are eight ways to read (a * b) + (c * d); in one of them a factor is the rotated half of another.
    for straight, turned in orders(node):
        for (x, cos), (half, sin) in itertools.product(orders(straight), orders(turned)):
            chain = Chain(node)
            chain.members |= {straight, turned}
            is_interleaved = _rotation(chain, half, x)
            if is_interleaved is None or not (isinstance(cos, Node) and isinstance(sin, Node)):
                continue
            refused = _why_not(node, x, cos, sin)
            if refused:
                return Refusal("rotary", node, refused)
            keywords = {"interleaved": True} if is_interleaved else {}
            return chain.group("rotary", x, cos, sin, **keywords)
    return None


def _why_not(node: Node, x: Node, cos: Node, sin: Node) -> str:
    """Return the reason why a rotation cannot be fused; "" if it can."""
    if shape(cos) != shape(sin) or shape(cos)[-1:] != shape(x)[-1:]:
        return "its cosines and sines differ in shape, or are not as wide as the rotated value"
    if note(cos).needs_grad or note(sin).needs_grad:
        return "the angles need a gradient"
    # Element i is paired with i + d/2 of the same head: both must be on one rank.
    if splits(x, -1):
        return "the rotated dim is split"
    if not same_dtype(node, x, cos, sin):
        return "its parts have several dtypes"
    return ""


def _rotation(chain: Chain, node: Any, x: Any) -> bool | None:
    """Return False if `node` is cat(-x2, x1) of the halves of x, True if it is (-x1, x0, -x3, x2, ...), else None."""
    if not isinstance(x, Node) or not shape(x):
        return None
    size, half = shape(x)[-1], shape(x)[-1] // 2
    # torch.cat((-x[..., half:], x[..., :half]), -1)
    if is_op(node, "aten.cat"):
        pieces = _negated_and_plain(chain, node, x)
        if pieces == ((half, 2 * half, 1), (0, half, 1)):
            chain.members |= {node, node.args[0][0]}
            return False
    # torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    is_fold = is_op(node, "aten.view", "aten.reshape", "aten.flatten", "aten._unsafe_view")
    if is_fold and is_op(node.args[0], "aten.stack"):
        stack = node.args[0]
        pieces = _negated_and_plain(chain, stack, x)
        if pieces == ((1, size, 2), (0, size, 2)) and shape(node) == shape(x):
            chain.members |= {node, stack, stack.args[0][0]}
            return True
    return None


def _negated_and_plain(chain: Chain, node: Node, x: Node) -> tuple[Piece | None, Piece | None] | None:
    """Return the pieces (a, b) of x if `node` is the cat or stack of (-a, b) on the last dim; else None."""
    parts: Any = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else 0
    if len(parts) != 2 or not last_dim(node, dim) or not is_op(parts[0], "aten.neg"):
        return None
    plain = _piece(chain, parts[1], x)
    return _piece(chain, parts[0].args[0], x), plain


def _piece(chain: Chain, node: Any, x: Node) -> Piece | None:
    """Return (start, end, step) if `node` is a part of `x` along its last dim; else None."""
    size = shape(x)[-1]
    if is_op(node, "aten.slice") and node.args[0] is x:
        dim, start, end, step = (*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :])
        if not last_dim(x, dim):
            return None
        chain.members.add(node)
        # Python's own rules, including -1 and ends beyond the size.
        return slice(start, end, step).indices(size)
    # Two halves of torch.chunk, or of split.
    if is_op(node, "getitem") and is_op(node.args[0], "aten.split", "aten.chunk", "aten.split_with_sizes"):
        split = node.args[0]
        if split.args[0] is x and len(split.users) == 2 and shape(node)[-1] * 2 == size:
            chain.members |= {node, split}
            return node.args[1] * size // 2, (node.args[1] + 1) * size // 2, 1
    return None


def bias_dropout_add(node: Node) -> Found:
    """Match residual + dropout(x), where x may be the sum over tp of partial products with a bias."""
    if op_name(node) != "aten.add":
        return None
    for drop, residual in orders(node):
        if not is_op(drop, "aten.dropout") or not isinstance(residual, Node) or len(drop.users) > 1:
            continue
        chain = Chain(node)
        chain.members.add(drop)
        x = drop.args[0]
        if value(residual).shape != value(x).shape:
            return Refusal("bias_dropout_add", node, "the residual has another shape")
        if not same_dtype(node, x, residual):
            return Refusal("bias_dropout_add", node, "its parts have several dtypes")
        moved = _row_bias(x)
        bias = None
        if moved is not None:
            chain.members |= {x, moved}
            # The operand of the conversion is the bias itself.
            bias = moved.args[2].args[0]
        return replace(chain.group("bias_dropout_add", x, bias, residual), literals=drop)
    return None


def _row_bias(x: Node) -> Node | None:
    """Return the row-split GEMM whose sum over tp is `x`, if it has a bias that one rank adds."""
    if x.target is not markers.convert or note(x).conversion != "p_to_i" or len(x.users) > 1:
        return None
    product = x.args[0]
    if not is_op(product, "aten.linear") or len(product.args) < 3 or len(product.users) > 1:
        return None
    bias = product.args[2]
    if not isinstance(bias, Node) or len(bias.users) > 1:
        return None
    # A whole value that becomes a partial sum: one rank adds it.
    is_moved = bias.target is markers.convert and note(bias).conversion == "i_to_p"
    return product if is_moved else None
