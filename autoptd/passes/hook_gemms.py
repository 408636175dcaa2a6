"""Attach communication hooks to the GEMMs of a LOCAL graph, as the last rewrite before emission (LOCAL ->
LOCAL).

In: a LOCAL graph, and the options that choose hooks. Out: `markers.linear`, an autograd function of the
runtime, instead of each `linear` or `addmm` with a hook. All other GEMMs are unchanged.

- *overlap*: if a GEMM is the only reader of an f (I -> R), with nothing but views between, f becomes part of
  the GEMM, so that the all-reduce of the input gradient overlaps the wgrad GEMM. An f that several GEMMs read
  (separate q, k, v) stays a separate line: their input gradients are added first and all-reduced once.
- A gather (S -> R) that only GEMMs read is repeated in backward; with *overlap*, while the input gradient is
  computed. If a single GEMM reads the value, the reduce-scatter of its gradient overlaps the wgrad GEMM.
- *wgrad*: if the weight is itself a parameter, its gradient bypasses autograd and goes to "main_grads" or
  "deferred", an attribute of the stage (see runtime/ops/linear.py). This also holds for a head fused with its
  loss.

    hook_gemms(graph, ctx)"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch.fx import Graph, Node

from autoptd.ir import markers
from autoptd.ir.layout import BATCH, typed_over
from autoptd.ir.notes import Absorbed, note, op_name, ops, tensor
from autoptd.ir.operators.table import operator_of
from autoptd.passes.context import Context
from autoptd.passes.runner import CALLS, Form, graph_pass

HEAD = markers.FUSED["linear_cross_entropy"]
# The position of the weight among the operands.
WEIGHTS = {markers.linear: 1, HEAD: 2}
PLAIN_KWARGS: dict[str, object] = {"alpha": 1, "beta": 1}


@graph_pass(takes=Form.LOCAL, gives=Form.LOCAL, changes=(CALLS, "axis", "gemm"))
def hook_gemms(graph: Graph, ctx: Context) -> None:
    """Replace every GEMM that a hook applies to."""
    overlap, wgrad = ctx.options.hooks.async_allreduce, ctx.wgrad_sink
    # Do this before GEMMs become markers, which `gather_again` does not recognize.
    gathered = {gemm for node in ops(graph) for gemm in _mark_readers(node, overlap)}
    for node in list(ops(graph)):
        # The fused loss computes the gradient of its weight itself, in forward.
        if node.target is HEAD and _is_parameter(node.args[2]):
            node.kwargs = {**node.kwargs, "wgrad": wgrad}
        operands = gemm_operands(node)
        if operands is None or not (note(operands[1]).needs_grad or node in gathered):
            continue
        x, weight, bias = operands
        f = _f_in_front(x, node) if overlap else None
        where = wgrad if _is_parameter(weight) else ""
        if f is None and not where and node not in gathered:
            continue
        is_transposed = op_name(node) == "aten.addmm"
        node.target, node.args = markers.linear, (x, weight, bias)
        node.kwargs = {"overlap": f is not None, "wgrad": where, "transposed": is_transposed}
        if f is not None:
            record = note(f)
            absorbed = Absorbed(record.conversion, _payload(f), record.why)
            note(node).gemm = replace(note(node).gemm, absorbed=absorbed)
            note(node).axis = record.axis
            # An f does nothing in forward, so the GEMM can read its operand.
            f.replace_all_uses_with(f.args[0])  # type: ignore[arg-type]
            graph.erase_node(f)


def _mark_readers(node: Node, overlap: bool) -> list[Node]:
    """Return the GEMMs that gather `node` again in backward.

    Note in `node` how many of them have a weight gradient, which needs the gathered value, and whether the
    gather and the reduce-scatter are overlapped.
    """
    gemms = gather_again(node)
    if gemms:
        count = sum(note(gemm_operands(gemm)[1]).needs_grad for gemm in gemms)  # type: ignore[index]
        # With several readers, the one with a weight gradient could not reduce-scatter for the others.
        overlaps = overlap and (len(gemms) == 1 or count > 1)
        note(node).gemm = replace(note(node).gemm, uses=count, overlaps=overlaps)
    return gemms


def gather_again(node: Node) -> list[Node]:
    """Return the GEMMs that read `node` if it gathers shards (S -> R) only for them, so that backward needs
    only the shards.
    """
    if node.target is not markers.convert or note(node).conversion != "s_to_r" or node.kwargs.get("size"):
        return []
    # Rows of other replicas are gathered once, in forward only.
    if typed_over(note(node).axis) == BATCH:
        return []
    # The list grows while it is walked: the readers of a reshape follow those of the value.
    gemms, reads = [], [(node, user) for user in node.users]
    for source, user in reads:
        operands = gemm_operands(user)
        if operands is not None and operands[0] is source and source not in operands[1:]:
            gemms.append(user)
        # The result of `rt.all_gather_again` can be reshaped, and nothing else.
        elif operator_of(user).text == ".reshape" and tensor(user).shape[-1] == tensor(source).shape[-1]:
            reads += [(user, reader) for reader in user.users]
        else:
            return []
    count = sum(note(gemm_operands(gemm)[1]).needs_grad for gemm in gemms)  # type: ignore[index]
    # A recomputed value is computed once for all uses in backward; a plan may pin that it is kept whole.
    if note(node).keep.again is not None or note(node).keep.whole or not count:
        return []
    if any(note(gemm).stages != note(node).stages for gemm in gemms):
        return []
    return gemms


def adds_to_gradient(weight: Node, stage: int) -> int:
    """Count how often the backward of one microbatch adds to the gradient of a parameter in `stage`.

    Autograd adds once, whatever the number of readers; every GEMM that accumulates its weight gradient itself
    adds once more.
    """
    readers = [user for user in weight.users if stage in note(user).stages]
    # A bucket is reduced after the last addition to it.
    bypassing = []
    for user in readers:
        is_hooked = user.target in WEIGHTS and bool(user.kwargs["wgrad"])
        if is_hooked and user.args[WEIGHTS[user.target]] is weight:
            bypassing.append(user)
    # A GEMM may also read the parameter as its input: autograd adds that gradient.
    is_input_too = any(user.args.count(weight) > 1 for user in bypassing)
    needs_autograd = is_input_too or len(bypassing) < len(readers)
    return len(bypassing) + needs_autograd


def _is_parameter(weight: Any) -> bool:
    return weight.op == "placeholder" and note(weight).kind == "param" and note(weight).needs_grad  # type: ignore[no-any-return]


def gemm_operands(node: Node) -> tuple[Node, Node, Node | None] | None:
    """Return (input, weight, bias) of a linear, or of an addmm that is one; None for anything else."""
    if op_name(node) == "aten.linear":
        x, weight, *rest = node.args
        # A matrix-vector product, as in value heads, is left to autograd.
        if tensor(weight).dim() == 1:
            return None
        return x, weight, (rest[0] if rest else None)  # type: ignore[return-value]
    is_plain = all(PLAIN_KWARGS.get(key) == given for key, given in node.kwargs.items())
    if op_name(node) == "aten.addmm" and is_plain:
        bias, x, weight = node.args
        return (x, weight, bias) if tensor(bias).dim() == 1 else None  # type: ignore[return-value, arg-type]
    return None


def _f_in_front(x: Node, reader: Node) -> Node | None:
    """Return the f that `x` is, or is a view of, if `reader` is its only reader."""
    while len(x.users) == 1 and note(x).stages == note(reader).stages and x.op == "call_function":
        if x.target is markers.convert:
            return x if note(x).conversion == "i_to_r" and note(x).needs_grad else None
        record = operator_of(x)
        if record.moves not in ("fold", "turn", "same") or record.cuts_gradient:
            return None
        x = x.args[0]  # type: ignore[assignment]
    return None


def _payload(f: Node) -> int:
    return math.prod(note(f).local.shapes[0]) * tensor(f).element_size()


@graph_pass(takes=Form.LOCAL, gives=Form.LOCAL, changes=("is_owned",))
def mark_owned(graph: Graph, ctx: Context) -> None:
    """Mark the conversions that may reduce in place."""
    for node in ops(graph):
        if node.target is not markers.convert:
            continue
        name = note(node).conversion
        if (name == "p_to_i" and _is_fresh(node)) or (name == "i_to_r" and _is_read_by_gemms(node)):
            note(node).is_owned = True


def _is_fresh(node: Node) -> bool:
    """Tell whether the operand of `node` is newly allocated and has no other reader."""
    x = node.args[0]
    while isinstance(x, Node) and len(x.users) == 1 and note(x).stages == note(node).stages:
        record = operator_of(x)
        # Nothing else refers to the memory of its result, and its backward does not read it.
        if record.is_fresh:
            return True
        if record.moves != "fold":
            return False
        x = x.args[0]
    return False


def _is_read_by_gemms(node: Node) -> bool:
    """Tell whether only GEMMs compute the gradient of `node`."""
    # The list grows during iteration: the readers of a view are appended.
    reads = [(node, user) for user in node.users]
    for source, user in reads:
        operands = user.args if user.target is markers.linear else gemm_operands(user)
        if operands is not None and operands[0] is source and source not in operands[1:]:
            continue
        if operator_of(user).moves != "fold":
            return False
        # The gradient of a view is a view of the gradient from its readers.
        reads += [(user, reader) for reader in user.users]
    return bool(reads) and all(note(user).stages == note(node).stages for _, user in reads)
