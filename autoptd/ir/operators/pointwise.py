"""Pointwise operators, and operators that make tensors from literals.

torch tags pointwise operators. This file lists those without the tag, and those with more to record.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from autoptd.ir.notes import shape
from autoptd.ir.operators.links import free_links, no_links, pointwise_links, same_dim
from autoptd.ir.operators.record import FIRST, Link, Member, Operator, argument


def glu_links(node: Node) -> list[Link]:
    """Link glu: both halves of a dim give one."""
    ndim = len(shape(node))
    halved = argument(node, "dim") % ndim
    links = [same_dim(d) for d in range(ndim) if d != halved]
    return [*links, Link("half", {0: Member((halved,), lead=2)}, Member((halved,)))]


# Jointly linear in both operands: partial sums add up only where both are partial.
SUM = Operator("", links=pointwise_links, linear=((0, 1),), is_sum=True)
FILLED = Operator("", fills=True, cuts_gradient=True)

OPERATORS = [
    replace(
        SUM,
        name="aten.add",
        is_finite=True,
        keeps="nothing",
        is_fresh=True,
        monotone=(1, 1),
        text="+",
        variable="x",
    ),
    replace(SUM, name="aten.sub", is_finite=True, keeps="nothing", monotone=(1, -1), text="-", variable="x"),
    replace(SUM, name="aten.rsub"),
    Operator(
        "aten.mul", links=pointwise_links, linear=((0,), (1,)), is_finite=True, keeps="operands", text="*"
    ),
    Operator("aten.div", links=pointwise_links, linear=FIRST, is_finite=True, keeps="operands", text="/"),
    Operator(
        "aten.neg",
        links=pointwise_links,
        linear=FIRST,
        is_finite=True,
        keeps="nothing",
        monotone=(-1,),
        text=".neg",
    ),
    Operator("aten.pow", keeps="operands", text="**", variable="power"),
    # Values that each microbatch computes separately (`autoptd/per_microbatch.py`).
    Operator("autoptd.per_microbatch", links=no_links, linear=FIRST),
    # Updates of buffers in forward (`ir/updates.py`).
    Operator("autoptd.update_buffer", links=no_links, linear=FIRST, variable="loss"),
    Operator("autoptd.keep_part", links=no_links, linear=FIRST, text="self.keep_part", variable="loss"),
    # Linear: all addends share one mask.
    Operator("aten.dropout", links=pointwise_links, linear=FIRST, is_random=True),
    # These read only the shape of the operand.
    *(
        Operator(name, links=pointwise_links, is_random=True, cuts_gradient=True, variable="noise")
        for name in ("autoptd.uniform", "autoptd.normal", "autoptd.exponential")
    ),
    Operator("aten.gelu", keeps="operands", text="F.gelu"),
    Operator("aten.relu", keeps="operands", text="F.relu"),
    Operator("aten.silu", keeps="operands", text="F.silu"),
    Operator("aten.tanh", keeps="operands", is_finite=True, text=".tanh"),
    Operator("aten.sigmoid", keeps="operands", text=".sigmoid"),
    *(
        Operator(f"aten.{name}", text=f".{name}")
        for name in "rsqrt cos sin exp log abs square sqrt clamp".split()
    ),
    Operator("aten.glu", links=glu_links),
    *(
        Operator(f"aten.{name}", links=pointwise_links)
        for name in ("hardswish", "log_sigmoid", "floor_divide")
    ),
    # Choices and comparisons.
    Operator("aten.where", links=pointwise_links, text="torch.where"),
    Operator("aten.masked_fill", links=pointwise_links, is_finite=True, text=".masked_fill"),
    Operator("aten.minimum", monotone=(1, 1), text="torch.minimum"),
    Operator("aten.maximum", monotone=(1, 1), text="torch.maximum"),
    Operator("aten.eq", text="=="),
    Operator("aten.ne", text="!="),
    Operator("aten.lt", monotone=(-1, 1), text="<"),
    Operator("aten.le", monotone=(-1, 1), text="<="),
    Operator("aten.gt", monotone=(1, -1), text=">"),
    Operator("aten.ge", monotone=(1, -1), text=">="),
    Operator("aten.logical_and", monotone=(1, 1), text="torch.logical_and"),
    Operator("aten.logical_or", monotone=(1, 1), text="torch.logical_or"),
    Operator("aten.logical_not", monotone=(-1,), text="torch.logical_not"),
    Operator("aten.bitwise_and", monotone=(1, 1), text="&"),
    Operator("aten.bitwise_or", monotone=(1, 1), text="|"),
    Operator("aten.bitwise_not", monotone=(-1,)),
    Operator("aten.__and__", links=pointwise_links, monotone=(1, 1), text="&", variable="mask"),
    Operator("aten.__or__", links=pointwise_links, monotone=(1, 1), text="|", variable="mask"),
    Operator("aten.__xor__", links=pointwise_links, text="^"),
    *(Operator(f"aten.{name}", links=pointwise_links) for name in ("isfinite", "isnan", "isinf")),
    # Complex numbers.
    *(Operator(f"aten.{name}", links=pointwise_links) for name in "real imag complex polar _conj".split()),
    Operator("aten.resolve_conj", links=pointwise_links, is_view=False),
    # Made of literals.
    *(
        Operator(
            f"aten.{name}", links=free_links, sizes=("size",), fills=True, creates=True, text=f"torch.{name}"
        )
        for name in ("full", "zeros", "ones")
    ),
    *(
        Operator(f"aten.{name}", links=no_links, creates=True, text=f"torch.{name}")
        for name in ("arange", "eye", "scalar_tensor")
    ),
    # These take only the shape, or the dtype, of another tensor.
    *(replace(FILLED, name=f"aten.{name}_like", links=pointwise_links) for name in ("full", "zeros", "ones")),
    *(replace(FILLED, name=f"aten.new_{name}", cuts_gradient=False) for name in ("full", "zeros", "ones")),
    *(Operator(f"aten.{name}_like", cuts_gradient=True) for name in ("empty", "rand", "randn", "randint")),
]
