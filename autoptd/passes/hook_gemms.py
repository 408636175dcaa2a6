"""Attach communication hooks to GEMMs, and find the all-reduces that may run in place: the last rewrites before
emission (LOCAL -> LOCAL).

`hook_gemms`: instead of each `linear` or `addmm` with a hook, `markers.linear`, an autograd function of the
runtime. All other GEMMs are unchanged.

- *overlap*: if a GEMM is the only reader of an f (I -> R), with nothing but views between, f becomes part of
  the GEMM, so that the all-reduce of the input gradient overlaps the wgrad GEMM. An f that several GEMMs read
  (separate q, k, v) stays a separate line: their input gradients are added first and all-reduced once.
- A gather (S -> R) that only GEMMs read is repeated in backward; with *overlap*, while the input gradient is
  computed. If a single GEMM reads the value, the reduce-scatter of its gradient overlaps the wgrad GEMM.
- *wgrad*: if the weight is itself a parameter, its gradient bypasses autograd and goes to "main_grads" or
  "deferred", an attribute of the stage (see runtime/ops/linear.py). This also holds for a head fused with its
  loss.

`mark_owned`: a g (P -> I) whose operand has no other reader, or an f (I -> R) whose gradient has none, is marked
`is_owned` and emitted as `rt.p_to_i(x, tp, owned=True)`. Such a value was just computed by an operator whose backward
does not need it:

- g: the operand is the result of a GEMM or an addition, or rows of an embedding, and g is its only reader;
- f: all readers are GEMMs, so the gradient is computed by a GEMM, or is autograd's sum of several GEMM
  results.

Views in between do not matter as long as they have no other readers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch.fx import Graph, Node

from autoptd.ir import markers
from autoptd.ir.notes import Absorbed, note, op_name, ops, tensor
from autoptd.ir.operators.table import operator_of
from autoptd.passes.context import Context
from autoptd.passes.kept.requested import gather_again, gemm_operands, weight_gradients
from autoptd.passes.runner import CALLS, Form, graph_pass

HEAD = markers.FUSED["linear_cross_entropy"]
# The position of the weight among the operands.
WEIGHTS = {markers.linear: 1, HEAD: 2}


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
        count = weight_gradients(gemms)
        # With several readers, the one with a weight gradient could not reduce-scatter for the others.
        overlaps = overlap and (len(gemms) == 1 or count > 1)
        note(node).gemm = replace(note(node).gemm, uses=count, overlaps=overlaps)
    return gemms


def _is_parameter(weight: Any) -> bool:
    return weight.op == "placeholder" and note(weight).kind == "param" and note(weight).needs_grad  # type: ignore[no-any-return]


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
