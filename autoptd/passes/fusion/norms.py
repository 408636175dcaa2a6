"""Match RMSNorm and LayerNorm written out: `weight * x * rsqrt(mean(x^2) + eps)` and variants, as models spell them."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from autoptd.ir.fusion import Found, Refusal
from autoptd.ir.notes import note, op_name, shape, value
from autoptd.passes.fusion.chain import Chain, is_op, last_dim, number, orders, same_dtype

SQUARES = ("aten.pow", "aten.mul", "aten.square")


def norm(node: Node) -> Found:
    """Match a norm over the last dim, with its weight and bias if it has them."""
    if op_name(node) == "aten.rms_norm":
        return _of_torch(node)
    if op_name(node) not in ("aten.mul", "aten.div", "aten.add", "aten.to", "aten._to_copy"):
        return None
    chain = Chain(node)
    inner = chain.uncast(node)
    # norm + bias
    if is_op(inner, "aten.add"):
        for bias, rest in orders(inner):
            branch = chain.copy()
            if _is_vector(bias, node) and branch.enter(inner, "aten.add"):
                found = _weighted(branch, branch.uncast(rest), bias)
                if isinstance(found, Refusal) or (found is not None and found.op == "layer_norm"):
                    return found
        return None
    return _weighted(chain, inner, None)


def _weighted(chain: Chain, node: Any, bias: Node | None) -> Found:
    """Match the norm that ends at `node`: a product with a weight, or the normalized value itself."""
    if is_op(node, "aten.mul"):
        for weight, rest in orders(node):
            branch = chain.copy()
            branch.enter(node, "aten.mul")
            offset, vector = _offset(branch, branch.uncast(weight))
            if _is_vector(vector, node):
                found = _normal(branch, branch.uncast(rest))
                if found is not None:
                    return _group(branch, found, vector, bias, offset)
    # Without a weight, x * rsqrt(...) is such a product itself. With a bias but no weight it is not a norm.
    if bias is not None:
        return None
    found = _normal(chain, node)
    return None if found is None else _group(chain, found, None, None, 0.0)


def _group(
    chain: Chain, found: tuple[str, Node, float] | str, weight: Node | None, bias: Node | None, offset: float
) -> Found:
    if isinstance(found, str):
        return Refusal("norm", chain.last, found)
    op, x, eps = found
    # The kernel of rms_norm has no bias, and that of layer_norm no offset.
    if op == "rms_norm" and bias is not None:
        return Refusal(op, chain.last, "a bias follows it")
    if op == "layer_norm" and offset:
        return Refusal(op, chain.last, f"its weight is {offset} + a parameter")
    if value(chain.last).dtype != value(x).dtype or shape(chain.last) != shape(x):
        return Refusal(op, chain.last, f"gives {value(chain.last).dtype} for {value(x).dtype}")
    if op == "layer_norm":
        # torch's operator accepts these, but only on some devices.
        if not same_dtype(x, weight, bias):
            return Refusal(op, chain.last, "its parts have several dtypes")
        return chain.group(op, x, weight, bias, eps=eps)
    if not _gives_widest(chain.last, x, weight):
        return Refusal(op, chain.last, f"gives {value(chain.last).dtype}, narrower than its weight")
    keywords = {"offset": offset} if offset else {}
    return chain.group(op, x, weight, eps=eps, **keywords)


def _of_torch(node: Node) -> Found:
    """Match torch's own rms_norm, which launches several kernels on most devices."""
    x, size, *rest = node.args
    given = dict(zip(("weight", "eps"), rest, strict=False)) | node.kwargs
    if len(size) != 1 or given.get("eps") is None:
        return Refusal("rms_norm", node, "over more than the last dim, or with the default eps of the dtype")
    # torch returns the dtype of x, our operator the wider one.
    if not _gives_widest(node, x, given.get("weight")):
        return Refusal("rms_norm", node, f"gives {value(node).dtype}, narrower than its weight")
    return Chain(node).group("rms_norm", x, given.get("weight"), eps=given["eps"])


def _gives_widest(node: Node, x: Any, weight: Any) -> bool:
    """Tell whether a norm returns the dtype of our rms_norm: the wider one of x and the weight."""
    dtype = value(x).dtype
    return value(node).dtype == (dtype if weight is None else torch.promote_types(dtype, value(weight).dtype))


def norm_of_sum(node: Node) -> Found:
    """Match torch's own layer_norm of a sum: one operator already, except for the sum."""
    if op_name(node) != "aten.layer_norm" or sum_of(node.args[0]) is None or len(node.args[1]) != 1:
        return None
    x, _, *rest = node.args
    given = dict(zip(("weight", "bias", "eps"), rest, strict=False)) | node.kwargs
    return Chain(node).group(
        "layer_norm", x, given.get("weight"), given.get("bias"), eps=given.get("eps", 1e-5)
    )


def sum_of(node: Any) -> tuple[Node, Node] | None:
    """Return (a, b) if `node` is the sum of two values of the same shape and dtype."""
    if not is_op(node, "aten.add") or len(node.args) != 2 or node.kwargs:
        return None
    a, b = node.args
    is_like = all(isinstance(part, Node) and value(part).shape == value(node).shape for part in (a, b))
    return (a, b) if is_like and same_dtype(a, b, node) else None


def _offset(chain: Chain, weight: Any) -> tuple[float, Any]:
    """Return (1.0, w) for 1 + w, as in Gemma; (0.0, weight) for any other weight."""
    if is_op(weight, "aten.add"):
        for literal, rest in orders(weight):
            if number(literal) is not None and isinstance(rest, Node):
                chain.enter(weight, "aten.add")
                return float(number(literal) or 0.0), chain.uncast(rest)
    return 0.0, weight


def _is_vector(node: Any, result: Node) -> bool:
    """Tell whether `node` is a parameter along the last dim of `result`."""
    # Or computed from parameters, such as a cast.
    is_own = isinstance(node, Node) and (node.op == "placeholder" or note(node).of_params)
    return is_own and shape(node) == shape(result)[-1:]


def _normal(chain: Chain, node: Any) -> tuple[str, Node, float] | str | None:
    """Return (operator, x, eps) of a value divided by its root mean square; or the reason, if a conversion interferes."""
    # (value, factor): x * rsqrt(...) in either order, or x / sqrt(...).
    if is_op(node, "aten.mul"):
        ways = [(x, r) for x, r in orders(node) if isinstance(x, Node) and isinstance(r, Node)]
    elif is_op(node, "aten.div"):
        ways = [(node.args[0], node.args[1])]
    else:
        return None
    for x, factor in ways:
        branch = chain.copy()
        branch.members.add(node)
        inside = _under_root(branch, factor, is_op(node, "aten.div"))
        if inside is None:
            # A norm over a split dim has a collective between mean and root: report it.
            conversion = branch.conversion
            if conversion is not None and is_op(conversion.args[0], "aten.rsqrt", "aten.sqrt"):
                return f"communicates inside: {note(conversion).why}"
            continue
        found = _mean_square(branch, branch.uncast(x), inside)
        if found is not None:
            chain.members |= branch.members
            return found
    return None


def _under_root(chain: Chain, factor: Any, divides: bool) -> Any:
    """Return the argument of the root in 1 / sqrt(...); with `divides`, `factor` is the root itself."""
    if divides:
        is_root = chain.enter(factor, "aten.sqrt") or _is_power(chain, factor, 0.5)
        return factor.args[0] if is_root else None
    if chain.enter(factor, "aten.rsqrt") or _is_power(chain, factor, -0.5):
        return factor.args[0]
    # 1.0 / x is a reciprocal times 1.
    factor, times = chain.scaled(factor)
    if times == 1.0 and chain.enter(factor, "aten.reciprocal") and chain.enter(factor.args[0], "aten.sqrt"):
        return factor.args[0].args[0]
    return None


def _is_power(chain: Chain, node: Any, exponent: float) -> bool:
    return is_op(node, "aten.pow") and number(node.args[1]) == exponent and chain.enter(node, "aten.pow")


def _mean_square(chain: Chain, x: Node, inside: Any) -> tuple[str, Node, float] | str | None:
    """Match mean(x^2) + eps; if x is y - mean(y), or `inside` has the variance, it is a layer norm of y."""
    if not chain.enter(inside, "aten.add"):
        return None
    for mean, eps in orders(inside):
        if number(eps) is None:
            continue
        mean = chain.uncast(mean)
        # If the root divides x = y - mean(y), it is a layer norm; otherwise an rms norm.
        centred = _centred(chain, x)
        if is_op(mean, "aten.var") and centred is not None and _is_plain_variance(chain, mean, centred):
            return "layer_norm", centred, float(number(eps) or 0.0)
        if not chain.enter(mean, "aten.mean"):
            if chain.conversion is not None:
                return f"communicates inside: {note(chain.conversion).why}"
            continue
        square = mean.args[0]
        if not _keeps_last_dim(mean):
            continue
        base = _squared(chain, square)
        if base is not None and chain.uncast(base) is x:
            if centred is None:
                return "rms_norm", x, float(number(eps) or 0.0)
            return "layer_norm", centred, float(number(eps) or 0.0)
    return None


def _keeps_last_dim(mean: Node) -> bool:
    """Tell whether a mean is x.mean(-1, keepdim=True)."""
    has_keepdim = len(mean.args) > 2 and bool(mean.args[2])
    return has_keepdim and last_dim(mean.args[0], mean.args[1])  # type: ignore[arg-type]


def _squared(chain: Chain, node: Any) -> Any:
    """Return x of x^2, x * x or square(x)."""
    if not is_op(node, *SQUARES):
        return None
    if is_op(node, "aten.pow"):
        is_square = number(node.args[1]) == 2
    else:
        is_square = is_op(node, "aten.square") or node.args[0] is node.args[1]
    return node.args[0] if is_square and chain.enter(node, *SQUARES) else None


def _centred(chain: Chain, node: Any) -> Any:
    """Return y if `node` is y - mean(y) over the last dim."""
    if not is_op(node, "aten.sub") or len(node.args) != 2:
        return None
    y, mean = chain.uncast(node.args[0]), node.args[1]
    is_mean = is_op(mean, "aten.mean") and _keeps_last_dim(mean)
    if not is_mean or chain.uncast(mean.args[0]) is not y:
        return None
    chain.members |= {node, mean}
    return y


def _is_plain_variance(chain: Chain, node: Node, x: Node) -> bool:
    """Tell whether a variance is var(x, -1, unbiased=False, keepdim=True), or with correction=0."""
    given = dict(zip(("dim", "unbiased", "keepdim"), node.args[1:], strict=False)) | node.kwargs
    # LayerNorm divides by n; torch's own default, by n - 1.
    is_biased = given.get("unbiased") is False or given.get("correction") == 0
    if not (is_biased and given.get("keepdim") and last_dim(node.args[0], given.get("dim"))):
        return False
    return chain.uncast(node.args[0]) is x and chain.enter(node, "aten.var")
