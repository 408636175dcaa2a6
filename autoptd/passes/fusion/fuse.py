"""Find groups of operators that a fused one can replace (CONNECTED), and replace them (LOCAL): the table of patterns.

`find_fusions` only marks: types, cut and local shapes are proven on the plain operators, so fusion does not affect these
proofs. `substitute` replaces every group that ended up on one stage. Both record the groups that were not fused, with
the reason.

    find_fusions(graph, ctx)
    ...                                 # cut, localize
    graph = substitute(graph, ctx)
    ctx.found.fusions                   # (Fusion("rms_norm", "model.layers.*.input_layernorm", times=12), ...)
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from autoptd.ir import markers
from autoptd.ir.fusion import CHUNK_BYTES, WIDEST, Found, Fusion, Group, Groups, Refusal, Swapped
from autoptd.ir.names import star
from autoptd.ir.notes import Fused, Local, copy_nodes, note, op_name, ops, set_note, shape, value
from autoptd.ir.operators.table import is_over_classes
from autoptd.passes.axes.constants import Constants
from autoptd.passes.context import Context
from autoptd.passes.fusion import attention, losses, norms, pointwise
from autoptd.passes.fusion.chain import erase_unread, local_size
from autoptd.passes.runner import CALLS, Form, graph_pass

aten = torch.ops.aten
# Backends on which a fused norm of a sum is faster than sum and norm.
SUMS = ("triton",)


@dataclass(frozen=True)
class Pattern:
    """A row of the table: a fused operator, how to find it, and the backends on which it is faster than its group."""

    name: str
    find: Callable[[Node, Constants], Found]
    backends: tuple[str, ...]


def _plain(find: Callable[[Node], Found]) -> Callable[[Node, Constants], Found]:
    return lambda node, constants: find(node)


PATTERNS = (
    Pattern("attention", attention.attention, ("eager", "inductor", "triton")),
    Pattern("masked_softmax", attention.masked_softmax, ("eager", "triton")),
    Pattern("bias_gelu", _plain(pointwise.biased_gelu), ("triton",)),
    Pattern("gated", _plain(pointwise.gated), ("eager", "triton")),
    Pattern("activation", _plain(pointwise.activation), ("eager", "inductor", "triton")),
    Pattern("norm", _plain(norms.norm), ("eager", "triton")),
    Pattern("norm_of_sum", _plain(norms.norm_of_sum), ("triton",)),
    Pattern("rotary", _plain(pointwise.rotary), ("eager", "triton")),
    Pattern("bias_dropout_add", _plain(pointwise.bias_dropout_add), ("eager", "triton")),
    Pattern("linear_cross_entropy", _plain(losses.linear_cross_entropy), ("eager", "inductor", "triton")),
)


@graph_pass(takes=Form.CONNECTED, gives=Form.CONNECTED, changes=("fused",), finds=("groups",))
def find_fusions(graph: Graph, ctx: Context) -> None:
    """Choose groups that share no operator, the last and largest first; mark their members for the dump.

    The values of buffers show which masks are causal.
    """
    backend, only = ctx.options.fuse.backend or False, ctx.options.fuse.only
    if not backend:
        ctx.found.groups = Groups()
        return
    constants = Constants(ctx.buffers)
    chosen: list[Group] = []
    refused: list[Refusal] = []
    taken: set[Node] = set()
    # From the end: a pattern is found at its last operator, so attention takes its softmax before
    # `masked_softmax` sees it, and `norm + bias` its norm.
    for node in reversed(list(ops(graph))):
        for pattern in PATTERNS:
            if node in taken or backend not in pattern.backends:
                continue
            found = _checked(pattern.find(node, constants))
            # `only` lists fused operators, not patterns: "gated" gives swiglu or geglu.
            if found is not None and only is not None and found.op not in only:
                continue
            if isinstance(found, Group) and taken.isdisjoint(found.members):
                chosen.append(found)
                taken |= found.members
                for member in found.members:
                    note(member).fused = Fused(f"part of {found.op}", member is not found.result)
            elif isinstance(found, Refusal):
                refused.append(found)
    # Another pattern may have taken a refused operator.
    refused = [refusal for refusal in refused if refusal.result not in taken]
    ctx.found.groups = Groups(tuple(reversed(chosen)), tuple(reversed(refused)), backend)


def _checked(found: Found) -> Found:
    """Return a group if only its operators read its inner values; otherwise why it is not fused."""
    if not isinstance(found, Group):
        return found
    if any(map(is_over_classes, found.members)):
        return Refusal(
            found.op, found.result, "its classes are split over ranks, which compute them together"
        )
    for member in sorted(found.members - {found.result}):
        outside = next((user for user in member.users if user not in found.members), None)
        # An operator without operands is a literal tensor, such as `aten.full`: it simply stays for its other readers.
        if outside is not None and member.all_input_nodes:
            inner, reader = op_name(member).removeprefix("aten."), op_name(outside).removeprefix("aten.")
            where = f" of {note(outside).module}" if note(outside).module else ""
            return Refusal(found.op, found.result, f"{inner} is also read by {reader}{where}")
    return found


@graph_pass(takes=Form.LOCAL, gives=Form.LOCAL, changes=(CALLS,), finds=("fusions",))
def substitute(plain: Graph, ctx: Context) -> Graph:
    """Return a copy of a LOCAL graph in which every group that is on one stage is replaced.

    `plain` stays unchanged: plans are explained by its operators. Equal layers are recorded together.
    """
    groups = ctx.found.groups
    graph, copies = copy_nodes(plain)
    fusions: Counter[Fusion] = Counter()
    # The replacements of results. Later groups still have the old nodes as operands.
    made: dict[Node, Node] = {}
    for refusal in groups.refused:
        fusions[_fusion(refusal.op, refusal.result, refusal.why)] += 1
    chosen = [group.on(copies) for group in groups.chosen]
    for group in chosen:
        # Groups were found before the cut.
        if len({note(member).stages for member in group.members}) > 1:
            fusions[_fusion(group.op, group.result, "a stage boundary cuts it")] += 1
            continue
        form = _form(group, groups.backend)
        total = norm_total(group, made) if groups.backend in SUMS and not form else None
        if total is not None:
            fusions[_fusion(group.op, group.result)] += 1
            made |= _norm_of_sum(graph, group, total)
        # torch's layer_norm without a sum is one operator already.
        elif op_name(group.result) != "aten.layer_norm":
            fusions[replace(_fusion(group.op, group.result), form=form)] += 1
            made[group.result] = _substitute(graph, group, made, groups.backend)
    # The sums that norms absorbed are not members, but are no longer read either.
    unread = dict.fromkeys(made)
    for group in chosen:
        if group.result in made:
            unread |= dict.fromkeys(group.members)
    erase_unread(graph, list(unread))
    ctx.found.fusions = tuple(replace(fusion, times=times) for fusion, times in fusions.items())
    return graph


def _fusion(op: str, result: Node, why: str = "") -> Fusion:
    return Fusion(op, star(note(result).module) or "model", 1, why)


def _form(group: Group, backend: str | bool) -> str:
    """Return why a group does not run as a Triton kernel with this backend; "" if it does."""
    width, widest = local_size(group.result)[-1:], WIDEST.get(group.op)
    if backend != "triton" or widest is None or not width or width[0] <= widest:
        return ""
    return f"by torch's operators: a program holds rows of {widest:,} elements at most, not {width[0]:,}"


def _substitute(graph: Graph, group: Group, made: dict[Node, Node], backend: str | bool) -> Node:
    """Insert the fused operator and let it replace the group's result; the members stay, unread."""
    operands = tuple(_operand(graph, group, operand, made) for operand in group.operands)
    if group.op == "linear_cross_entropy":
        # The program does not know its device, but Triton implies a GPU.
        most = CHUNK_BYTES["cuda" if backend == "triton" else "cpu"]
        operands, keywords = losses.in_chunks(graph, group, operands, most)
        found = _call(graph, group, markers.FUSED[group.op], operands, keywords)
    elif group.op == "bias_dropout_add":
        found = _dropout_add(graph, group, operands)
    else:
        if group.op == "bias_gelu":
            # The bias leaves its GEMM.
            operands[0].args = operands[0].args[:2]
        found = _call(graph, group, *_spelled(group, operands))
    group.result.replace_all_uses_with(found)
    return found


def norm_total(group: Group, made: dict[Node, Node]) -> Node | None:
    """Return the sum that a norm can compute itself: a separate operator that has no earlier reader."""
    x = group.operands[0]
    if group.op not in ("rms_norm", "layer_norm") or x in made or norms.sum_of(x) is None:
        return None
    if note(x).stages != note(group.result).stages:
        return None
    # The sum becomes a result of the norm, which only later operators may read, such as the residual after the layer.
    is_late = all(user in group.members or group.result < user for user in x.users)
    return x if is_late else None


def _norm_of_sum(graph: Graph, group: Group, total: Node) -> dict[Node, Node]:
    """Insert one operator with two results, the norm and the sum; return the nodes that replace either."""
    added, residual = total.args
    call = _call(
        graph,
        group,
        markers.FUSED[group.op],
        (added, *group.operands[1:]),
        group.keywords | {"residual": residual},
    )
    note(call).reason += ", with the sum before it"
    call.meta["val"] = (value(group.result), value(total))
    note(call).local = replace(note(call).local, shapes=[local_size(group.result), local_size(total)])
    pieces = {}
    for k, old in enumerate((group.result, total)):
        with graph.inserting_before(group.result):
            piece = graph.call_function(operator.getitem, (call, k))
        piece.meta["val"] = value(old)
        set_note(piece, replace(note(old), why="", forms={}, conversion="", axis=""))
        old.replace_all_uses_with(piece)
        pieces[old] = piece
    return pieces


def _spelled(group: Group, operands: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the operator of torch that a group is, or the runtime's, with its arguments."""
    x, *rest = operands
    if group.op == "attention":
        keywords = dict(group.keywords)
        return aten.scaled_dot_product_attention.default, (*operands, 0.0, keywords.pop("causal")), keywords
    if group.op == "layer_norm":
        return aten.layer_norm.default, (x, [local_size(x)[-1]], *rest, group.keywords["eps"]), {}
    if group.op == "gelu":
        return aten.gelu.default, (x,), group.keywords
    if group.op == "silu":
        return aten.silu.default, (x,), {}
    return markers.FUSED[group.op], operands, group.keywords


def _operand(graph: Graph, group: Group, operand: Any, made: dict[Node, Node]) -> Node | None:
    if not isinstance(operand, Swapped):
        return made.get(operand, operand)
    # Keys that were permuted from [b, s, h, d] directly to [b, h, d, s]: the operator needs [b, h, s, d].
    source = made.get(operand.node, operand.node)
    with graph.inserting_before(group.result):
        swapped = graph.call_function(aten.transpose.int, (source, -2, -1))
    swapped.meta["val"] = value(source).transpose(-2, -1)
    local = [(*size[:-2], size[-1], size[-2]) for size in note(source).local.shapes]
    record = set_note(swapped, replace(note(source).bare(), why="", forms={}, axis=""))
    record.local = Local(local, shape(swapped))
    return swapped


def _dropout_add(graph: Graph, group: Group, operands: tuple[Any, ...]) -> Node:
    """Insert the fused dropout; localize has found the position of its mask."""
    x, bias, _ = operands
    # The bias leaves its GEMM, and is added whole on every rank.
    if bias is not None:
        x.args[0].args = x.args[0].args[:2]
    # The arguments of markers.dropout after x.
    keywords = dict(zip(("rate", "site", "batch", "shard"), group.literals.args[1:], strict=True))
    made = _call(graph, group, markers.FUSED["bias_dropout_add"], operands, keywords)
    note(made).axis = note(group.literals).axis
    return made


def _call(graph: Graph, group: Group, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
    """Insert the fused operator before the result, with its note."""
    result, record = group.result, note(group.result)
    with graph.inserting_before(result):
        made = graph.call_function(target, args, kwargs)
    made.meta["val"] = value(result)
    # Each operator once, in program order, as in the model.
    names = dict.fromkeys(op_name(member).removeprefix("aten.") for member in sorted(group.members))
    reason = f"fused: {', '.join(names)}"
    if op_name(result) == "aten.scaled_dot_product_attention":
        reason = "its mask is causal, and not read"
    set_note(made, replace(record, why="", forms={}, conversion="", fused=Fused(), reason=reason))
    return made
