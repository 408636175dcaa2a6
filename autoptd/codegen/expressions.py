"""Print one node of a LOCAL graph as the Python expression a person would write.

In: a node and the text of its operands. Out: `F.linear(x, w.attn.c_proj.weight)`. Operators without a row of their own are
printed as the call of their aten overload, which means the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from autoptd.ir import markers
from autoptd.ir.notes import note, op_name, tensor

Text = Callable[[Node], str]
CREATORS = {"aten.arange", "aten.full", "aten.zeros", "aten.ones", "aten.eye", "aten.scalar_tensor"}
INFIX = {"aten.add": "+", "aten.sub": "-", "aten.mul": "*", "aten.div": "/", "aten.bitwise_and": "&", "aten.pow": "**"}
INFIX |= {"aten.eq": "==", "aten.ne": "!=", "aten.lt": "<", "aten.le": "<=", "aten.gt": ">", "aten.ge": ">="}
INFIX |= {"aten.matmul": "@", "aten.logical_and": "&", "aten.bitwise_or": "|"}
FUNCTIONAL = {f"aten.{name}": f"F.{name}" for name in "linear layer_norm gelu silu relu softmax rms_norm".split()}
METHODS = {
    f"aten.{name}": name for name in "transpose permute contiguous clone detach t tanh sigmoid rsqrt neg".split()
}
METHODS |= {f"aten.{name}": name for name in "unsqueeze squeeze sum cos sin exp log expand masked_fill select".split()}
METHODS |= {"aten.view": "reshape", "aten.reshape": "reshape", "aten._unsafe_view": "reshape", "aten.to": "to"}
DROPPED = {"memory_format"}


def expression(node: Node, text: Text) -> str:
    """The expression of `node`; `text` gives the text of each operand."""
    name = op_name(node)
    if node.target in markers.MARKERS:
        return MARKER_TEXTS[name](node, text)
    if name == "getitem":
        return f"{text(node.args[0])}[{node.args[1]}]"  # type: ignore[arg-type]
    args = [literal(arg, text) for arg in node.args]
    keywords = {key: literal(arg, text) for key, arg in node.kwargs.items() if key not in DROPPED}
    if name in CREATORS:
        keywords |= {"dtype": str(tensor(node).dtype), "device": "self.device"}
        return f"torch.{name.removeprefix('aten.')}({_join(args, keywords)})"
    if name in INFIX and len(args) == 2 and not keywords:
        return f"{args[0]} {INFIX[name]} {args[1]}"
    if name == "aten.embedding":
        padding = {"padding_idx": args[2]} if len(args) > 2 and args[2] != "-1" else {}
        return f"F.embedding({_join([args[1], args[0]], padding)})"
    if name == "aten.layer_norm":
        return f"F.layer_norm({_join(args[:5], {})})"
    if name == "aten.scaled_dot_product_attention":
        names = ["attn_mask", "dropout_p", "is_causal"]
        given = {key: arg for key, arg in zip(names, args[3:], strict=False) if arg not in ("None", "0.0", "False")}
        return f"F.scaled_dot_product_attention({_join(args[:3], given | keywords)})"
    if name in FUNCTIONAL:
        return f"{FUNCTIONAL[name]}({_join(args, keywords)})"
    if name in METHODS:
        sizes = [args[1][1:-1]] if METHODS[name] in ("reshape", "expand", "permute") and len(args) == 2 else args[1:]
        return f"{args[0]}.{METHODS[name]}({_join(sizes, keywords)})"
    if name in ("aten.split", "aten.split_with_sizes", "aten.cat", "aten.stack", "aten.chunk", "aten.where"):
        return f"torch.{name.removeprefix('aten.').removesuffix('_with_sizes')}({_join(args, keywords)})"
    return f"torch.ops.{node.target}({_join(args, keywords)})"


def literal(value: Any, text: Text) -> str:
    """Python text of an argument."""
    if isinstance(value, Node):
        return text(value)
    if isinstance(value, (list, tuple)):
        inner = ", ".join(literal(one, text) for one in value)
        return f"[{inner}]"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, (torch.dtype, torch.memory_format)):
        return str(value)
    return repr(value).replace("'", '"')


def _join(args: list[str], keywords: dict[str, str]) -> str:
    return ", ".join([*args, *(f"{key}={value}" for key, value in keywords.items())])


def _convert(node: Node, text: Text) -> str:
    source, name, *places = node.args
    labels = {"s_to_s": ["dim", "outer", "to_dim", "to_outer"]}.get(str(name), ["dim", "outer"])
    keywords = {label: str(number) for label, number in zip(labels, places, strict=False)}
    return f"rt.{name}({_join([text(source), 'tp'], keywords)})"  # type: ignore[arg-type]


def _cross_entropy(node: Node, text: Text) -> str:
    keywords = dict(node.kwargs)
    vocab, total = keywords.pop("vocab"), keywords.pop("total")
    logits, targets, weight = (literal(arg, text) for arg in node.args)
    shown = {key: literal(value, text) for key, value in keywords.items() if (key, value) != ("label_smoothing", 0.0)}
    if weight != "None":
        shown["weight"] = weight
    function = "rt.vocab_parallel_cross_entropy" if vocab else "F.cross_entropy"
    call = f"{function}({_join([logits, targets, *(['tp'] if vocab else [])], shown)})"
    return f"{call} / self.totals[{total}]" if total >= 0 else call  # type: ignore[operator]


def _mean(node: Node, text: Text) -> str:
    x, dims, keepdim, count = node.args
    keywords = {"keepdim": "True"} if keepdim else {}
    return f"{text(x)}.sum({_join([literal(dims, text)], keywords)}) / {count}"  # type: ignore[arg-type]


def _vocab_embedding(node: Node, text: Text) -> str:
    ids, weight, padding = node.args
    keywords = {} if padding == -1 else {"padding_idx": str(padding)}
    return f"rt.vocab_parallel_embedding({_join([text(ids), text(weight), 'tp'], keywords)})"  # type: ignore[arg-type]


MARKER_TEXTS: dict[str, Callable[[Node, Text], str]] = {
    "convert": _convert,
    "first_rows": lambda node, text: (
        f"{text(node.args[0])}.narrow({node.args[1]}, 0, {note(node).extra['local_shapes'][0][node.args[1]]})"
    ),
    "share": lambda node, text: f"{text(node.args[0])} / {node.args[1]}",  # type: ignore[arg-type]
    "cross_entropy": _cross_entropy,
    "mean": _mean,
    "vocab_embedding": _vocab_embedding,
}
