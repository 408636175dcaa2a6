"""Print one node of a LOCAL graph as the Python expression that a person would write.

In: a node and the text of its operands. Out: `F.linear(x, w.attn.c_proj.weight)`. Operators without a
specific text are printed as an equivalent call of their overload.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.fx import Node

from autoptd.ir import markers
from autoptd.ir.mesh import is_sub_axis, parts_of
from autoptd.ir.names import quoted
from autoptd.ir.notes import note, op_name, tensor
from autoptd.ir.operators.table import operator_of
from autoptd.ir.own_functions import own_function
from autoptd.ir.types import CONVERSIONS, LOCAL_KINDS

Text = Callable[[Node], str]
DROPPED = {"memory_format"}
SILENT = {
    row.name for row in CONVERSIONS.values() if row.forward in LOCAL_KINDS and row.backward in LOCAL_KINDS
}


def expression(node: Node, text: Text, site: str = '""') -> str:
    """Return the expression of `node`; `text` prints operands, `site` is the site of its collectives as text."""
    name = op_name(node)
    if node.target in markers.MARKERS:
        return MARKER_TEXTS[name](node, text, site)
    if name == "getitem":
        return f"{text(node.args[0])}[{node.args[1]}]"  # type: ignore[arg-type]
    if name == "aten.index":
        return _index(node, text)
    args = [literal(arg, text) for arg in node.args]
    keywords = {key: literal(arg, text) for key, arg in node.kwargs.items() if key not in DROPPED}
    if operator_of(node).needs_contiguous:
        args[0] += ".contiguous()"
    if operator_of(node).creates:
        # The traced program has the device of the compilation, which may be meta.
        keywords |= {"dtype": str(tensor(node).dtype), "device": "self.device"}
    if own := own_function(node):
        # Pass all arguments of `apply`, not only those baked into the operator.
        given = [literal(arg, text) for arg in own.arguments(node.args)]
        return f"rt.apply_function({_join([literal(own.name, text), *given], {})})"
    # Operators whose call in torch's Python API is not the one of their overload.
    if name == "aten.slice":
        return _slice(node, args)
    if name == "aten.embedding":
        return _embedding(node, args, keywords)
    if name == "aten.layer_norm":
        # F.layer_norm has no equivalent of the overload's sixth argument, cudnn_enable.
        return f"F.layer_norm({_join(args[:5], {})})"
    if name == "aten.scaled_dot_product_attention":
        return _attention(args, keywords)
    if name == "aten.cross_entropy_loss":
        return _whole_cross_entropy(node, args)
    return _call(node, args, keywords)


def _call(node: Node, args: list[str], keywords: dict[str, str]) -> str:
    """Return the call of an operator in the form of its record (`Operator.text`), else of torch's registry."""
    form = operator_of(node).text
    # A method, `.reshape`, takes sizes one by one: `x.reshape(2, 8)` for the overload's x, [2, 8].
    if form.startswith("."):
        rest = args[1:]
        if len(args) == 2 and form in (".reshape", ".expand", ".permute"):
            rest = [args[1][1:-1] or "()"]
        return f"{args[0]}{form}({_join(rest, keywords)})"
    # A function, `F.linear`.
    if form[:1].isalpha():
        return f"{form}({_join(args, keywords)})"
    # An infix operator, `+`; with `alpha=` it has no such form.
    if form and len(args) == 2 and not keywords:
        return f"{_operand(args[0], form)} {form} {_operand(args[1])}"
    return f"torch.ops.{node.target}({_join(args, keywords)})"


def group_text(node: Node) -> str:
    """Return the group of the call of `node`: the variable of a mesh axis (`bound_axes`), or the group of a
    sub-axis.

    For several axes, a tuple of these.
    """
    groups = [f'self.groups["{axis}"]' if is_sub_axis(axis) else axis for axis in parts_of(note(node).axis)]
    return groups[0] if len(groups) == 1 else f"({', '.join(groups)})"


def bound_axes(nodes: Iterable[Node]) -> dict[str, str]:
    """Return the variables that the expressions of some nodes use, one for each mesh axis, and their values."""
    axes = sorted({axis for node in nodes for axis in parts_of(note(node).axis)})
    return {axis: f'self.groups["{axis}"]' for axis in axes if not is_sub_axis(axis)}


def literal(value: Any, text: Text) -> str:
    """Return the Python text of an argument."""
    if isinstance(value, Node):
        return text(value)
    if isinstance(value, (list, tuple)):
        inner = ", ".join(literal(item, text) for item in value)
        return f"[{inner}]"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, (torch.dtype, torch.memory_format)):
        return str(value)
    return quoted(value) if isinstance(value, str) else repr(value)


def _operand(text: str, left_of: str = "") -> str:
    """Return one side of an infix operator, in parentheses unless it binds more tightly than any operator."""
    if re.fullmatch(r"\w+(\.\w+)*", text):
        return text
    # Parsed, because a number may be written as any expression (`i + 1`, of a loop); `-2 ** x` is `-(2 **
    # x)`.
    tree = ast.parse(text, mode="eval").body
    is_negative = isinstance(tree, ast.UnaryOp) and isinstance(tree.operand, ast.Constant)
    is_tight = isinstance(tree, (ast.Constant, ast.Attribute, ast.Subscript, ast.Call))
    return text if is_tight or (is_negative and left_of != "**") else f"({text})"


def _join(args: list[str], keywords: dict[str, str]) -> str:
    return ", ".join([*args, *(f"{key}={value}" for key, value in keywords.items())])


def _index(node: Node, text: Text) -> str:
    """Return `x[:, rows]`."""
    x, given = node.args
    indices = [":" if index is None else text(index) for index in given]  # type: ignore[union-attr]
    return f"{text(x)}[{', '.join(indices)}]"  # type: ignore[arg-type]


def _slice(node: Node, args: list[str]) -> str:
    """Return `x[..., 8:]`; the last dim is written as such."""
    size = tensor(node.args[0]).shape  # type: ignore[arg-type]
    # The overload's defaults, for the arguments that are left out.
    dim, start, end, step = (*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :])
    dim = dim % len(size)  # type: ignore[operator]
    # torch writes an open end as 2**63 - 1.
    is_open_ended = end is None or end >= size[dim] > 0  # type: ignore[operator]
    bounds = f"{start or ''}:{'' if is_open_ended else end}"
    if step != 1:
        bounds += f":{step}"
    is_last_of_many = 0 < dim == len(size) - 1 > 1
    before = ["..."] if is_last_of_many else [":"] * dim
    return f"{args[0]}[{', '.join([*before, bounds])}]"


def _embedding(node: Node, args: list[str], keywords: dict[str, str]) -> str:
    """Return F.embedding: its operands are in the other order, and scaled or sparse gradients keywords."""
    if "True" in args[3:]:
        return _call(node, args, keywords)
    has_padding = len(args) > 2 and args[2] != "-1"
    padding = {"padding_idx": args[2]} if has_padding else {}
    return f"F.embedding({_join([args[1], args[0]], padding)})"


def _attention(args: list[str], keywords: dict[str, str]) -> str:
    names = ["attn_mask", "dropout_p", "is_causal"]
    given = {}
    for key, arg in zip(names, args[3:], strict=False):
        # Leave out defaults.
        if arg not in ("None", "0.0", "False"):
            given[key] = arg
    return f"F.scaled_dot_product_attention({_join(args[:3], given | keywords)})"


def _whole_cross_entropy(node: Node, args: list[str]) -> str:
    names = ["weight", "reduction", "ignore_index", "label_smoothing"]
    given = dict(zip(names, args[2:], strict=False))
    given |= {key: str(value) for key, value in node.kwargs.items()}
    if "reduction" in given:
        # ATen's enum, at::Reduction.
        given["reduction"] = ('"none"', '"mean"', '"sum"')[int(given["reduction"])]
    usual = {"weight": "None", "reduction": '"mean"', "ignore_index": "-100", "label_smoothing": "0.0"}
    shown = {key: value for key, value in given.items() if usual[key] != value}
    return f"F.cross_entropy({_join(args[:2], shown)})"


def _convert(node: Node, text: Text, site: str) -> str:
    """Return `rt.s_to_r(x, tp, dim=1, blocks=3, site="h.0.mlp")`."""
    source, name, *places = node.args
    operands = [text(source), group_text(node)]  # type: ignore[arg-type]
    labels = ["dim", "blocks"]
    if name == "s_to_s":
        labels += ["to_dim", "to_blocks"]
    keywords = {}
    for label, number in zip(labels, places, strict=False):
        # One block is the default.
        if "blocks" not in label or number != 1:
            keywords[label] = str(number)
    if note(node).gemm.uses is not None:
        return _all_gather_again(node, operands, keywords, site)
    keywords |= {key: str(number) for key, number in node.kwargs.items()}
    if note(node).is_owned:
        keywords["inplace"] = "True"
    # A conversion without communication in either direction needs no site to report when a run hangs.
    if name not in SILENT:
        keywords["site"] = site
    return f"rt.{name}({_join(operands, keywords)})"


def _all_gather_again(node: Node, operands: list[str], keywords: dict[str, str], site: str) -> str:
    """Return the call of a gather whose result is not saved: backward gathers again, for some GEMMs."""
    if note(node).gemm.uses != 1:
        keywords["gemms"] = str(note(node).gemm.uses)
    if note(node).gemm.overlaps:
        keywords["overlap"] = "True"
    return f"rt.all_gather_again({_join(operands, keywords | {'site': site})})"


def _cross_entropy(node: Node, text: Text, site: str) -> str:
    keywords = dict(node.kwargs)
    vocab, size, total = (keywords.pop(key) for key in ("vocab", "size", "total"))
    logits, targets, weight = (literal(arg, text) for arg in node.args)
    # torch's own sum in 16 bits would be rounded before it is divided, and so would its gradient.
    is_ours = vocab or (total >= 0 and tensor(node).element_size() < 4)  # type: ignore[operator]
    shown = _loss_literals(keywords, total if is_ours else -1, text)  # type: ignore[arg-type]
    if weight != "None":
        shown["weight"] = weight
    if size:
        shown["size"] = str(size)
    if vocab:
        operands = [logits, targets, group_text(node)]
        return f"rt.vocab_parallel_cross_entropy({_join(operands, shown | {'site': site})})"
    if is_ours:
        return f"rt.cross_entropy({_join([logits, targets], shown)})"
    # The loss of torch has no `total=`, so divide its sum here.
    divided = f" / self.totals[{total}]" if total >= 0 else ""  # type: ignore[operator]
    return f"F.cross_entropy({_join([logits, targets], shown)}){divided}"


def _loss_literals(keywords: Mapping[str, Any], total: int, text: Text) -> dict[str, str]:
    """Return the non-default options of a cross-entropy; a mean over the whole batch divides by a total."""
    usual = {"label_smoothing": 0.0, "ignore_index": -100, "dtype": None, "wgrad": "", "reduction": "mean"}
    shown = _literals({key: value for key, value in keywords.items() if usual.get(key) != value}, text)
    if keywords.get("wgrad"):
        shown["wgrad"] = f"self.{keywords['wgrad']}"
    if total >= 0:
        # The reduction is "sum" then, and `total=` says so.
        shown.pop("reduction", None)
        shown = {"total": f"self.totals[{total}]"} | shown
    return shown


def _mean(node: Node, text: Text, site: str) -> str:
    x, dims, keepdim, count = node.args
    before, after = tensor(x).dtype, tensor(node).dtype  # type: ignore[arg-type]
    # A mean in 16 bits sums in float32: a sum in 16 bits could overflow, and would be rounded once more.
    wide = torch.float32 if after in (torch.bfloat16, torch.float16) else after
    keywords = {}
    if keepdim:
        keywords["keepdim"] = "True"
    if wide != before:
        keywords["dtype"] = str(wide)
    mean = f"{text(x)}.sum({_join([literal(dims, text)], keywords)}) / {_operand(literal(count, text))}"  # type: ignore[arg-type]
    return mean if wide == after else f"({mean}).to({after})"


def _share(node: Node, text: Text, site: str) -> str:
    """Return `x / 4`, an equal part of a whole value; the value itself if it is one piece."""
    x, pieces = node.args
    # Compare the type too: the number may print as an expression of a loop.
    is_whole = type(pieces) is int and pieces == 1
    return text(x) if is_whole else f"{text(x)} / {_operand(literal(pieces, text))}"  # type: ignore[arg-type]


def _batch_sum(node: Node, text: Text, site: str) -> str:
    """Return `self.batch_sum(0, dtype=torch.int64)`; with the shape unless it is a scalar."""
    shape = f"shape={list(tensor(node).shape)}, " if tensor(node).dim() else ""
    return f"self.batch_sum({node.args[1]}, {shape}dtype={tensor(node).dtype})"


def _over_classes(node: Node, text: Text, site: str) -> str:
    """Return `rt.classes_gather(log_softmax, labels, tp, dim=-1)`; a gather reduces nothing, so has no site."""
    name = op_name(node)
    keywords = _literals(node.kwargs, text)
    if name != "classes_gather":
        keywords["site"] = site
    operands = [*(text(arg) for arg in node.args), group_text(node)]  # type: ignore[arg-type]
    return f"rt.{name}({_join(operands, keywords)})"


def _vocab_embedding(node: Node, text: Text, site: str) -> str:
    ids, weight, padding = node.args
    keywords = {}
    if padding != -1:
        keywords["padding_idx"] = str(padding)
    if node.kwargs["size"]:
        keywords["size"] = str(node.kwargs["size"])
    operands = [text(ids), text(weight), group_text(node)]  # type: ignore[arg-type]
    return f"rt.vocab_parallel_embedding({_join(operands, keywords)})"


def _dropout(node: Node, text: Text, site: str) -> str:
    x, rate, number, batch, shard = node.args
    drawn = [text(x), repr(rate), f"self.draw(site={number})"]
    return f"rt.dropout({_join(drawn, _mask_places(node, batch, shard))})"


def _noise(node: Node, text: Text, site: str) -> str:
    x, kind, number, batch, shard = node.args
    drawn = [text(x), f"self.draw(site={number})"]  # type: ignore[arg-type]
    return f"rt.{kind}({_join(drawn, _mask_places(node, batch, shard))})"  # type: ignore[arg-type]


def _mask_places(node: Node, batch: tuple[int, int] | None, shard: tuple[int, int] | None) -> dict[str, str]:
    """Return the keywords for the position of batch rows and shards in a value."""
    keywords = {}
    if batch is not None:
        # `batch=1`: dim 1 has the rows; `batch=(0, 8)`: dim 0 has them after a factor of 8, as in [8 * b, h].
        dim, entries = batch
        keywords["batch"] = str(dim) if entries == 1 else str((dim, entries))
    if shard is not None:
        keywords |= {"shard": str(tuple(shard)), "group": group_text(node)}
    return keywords


def _linear(node: Node, text: Text, site: str) -> str:
    x, weight, bias = node.args
    keywords = {}
    if node.kwargs["overlap"]:
        keywords["overlap"] = group_text(node)
    if node.kwargs["wgrad"]:
        keywords["wgrad"] = f"self.{node.kwargs['wgrad']}"
    if node.kwargs["transposed"]:
        keywords["transposed"] = "True"
    # Its only collective is the overlapped all-reduce.
    if node.kwargs["overlap"]:
        keywords["site"] = site
    operands = [text(operand) for operand in (x, weight, bias) if operand is not None]  # type: ignore[arg-type]
    return f"rt.linear({_join(operands, keywords)})"


def _fused(node: Node, text: Text, site: str) -> str:
    operands = [literal(arg, text) for arg in node.args]
    # Omitted trailing operands are defaults of the kernels.
    while operands[-1] == "None":
        operands.pop()
    return f"self.fused.{op_name(node)}({_join(operands, _literals(node.kwargs, text))})"


def _bias_dropout_add(node: Node, text: Text, site: str) -> str:
    x, bias, residual = (literal(arg, text) for arg in node.args)
    rate, number, batch, shard = (node.kwargs[key] for key in ("rate", "site", "batch", "shard"))
    drawn = [x, bias, residual, repr(rate), f"self.draw(site={number})"]
    return f"self.fused.bias_dropout_add({_join(drawn, _mask_places(node, batch, shard))})"


def _linear_cross_entropy(node: Node, text: Text, site: str) -> str:
    x, targets, weight, bias = (literal(arg, text) for arg in node.args)
    keywords = dict(node.kwargs)
    vocab, size, total = (keywords.pop(key) for key in ("vocab", "size", "total"))
    shown = {}
    if bias != "None":
        shown["bias"] = bias
    shown |= _loss_literals(keywords, total, text)  # type: ignore[arg-type]
    if vocab:
        if size:
            shown["size"] = str(size)
        shown["site"] = site
        operands = [x, weight, targets, group_text(node)]
        return f"self.fused.vocab_parallel_linear_cross_entropy({_join(operands, shown)})"
    return f"self.fused.linear_cross_entropy({_join([x, weight, targets], shown)})"


def _literals(keywords: Mapping[str, Any], text: Text) -> dict[str, str]:
    return {key: literal(value, text) for key, value in keywords.items()}


def _of_runtime(node: Node, text: Text, site: str) -> str:
    """Return `rt.take_rows(x, order, 2)`; with a group where ranks have different parts."""
    args = [literal(arg, text) for arg in node.args] + [group_text(node)] * bool(note(node).axis)
    return f"rt.{op_name(node)}({_join(args, _literals(node.kwargs, text))})"


OF_RUNTIME = "causal_attention by_expert take_rows put_rows grouped_mm expert_rows"
MARKER_TEXTS: dict[str, Callable[[Node, Text, str], str]] = {
    "convert": _convert,
    "first_rows": lambda node, text, site: (
        f"{text(node.args[0])}.narrow({node.args[1]}, 0, {note(node).local.shapes[0][node.args[1]]})"
    ),
    "batch_sum": _batch_sum,
    "share": _share,
    "cross_entropy": _cross_entropy,
    **dict.fromkeys(markers.OVER_CLASSES, _over_classes),
    "dropout": _dropout,
    "noise": _noise,
    "mean": _mean,
    **dict.fromkeys(markers.FUSED, _fused),
    "bias_dropout_add": _bias_dropout_add,
    "linear_cross_entropy": _linear_cross_entropy,
    "linear": _linear,
    **dict.fromkeys(OF_RUNTIME.split(), _of_runtime),
    "vocab_embedding": _vocab_embedding,
}
