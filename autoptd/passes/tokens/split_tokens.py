"""Divide the tokens over cp: types and conversions over a second axis (CONNECTED -> CONNECTED).

In: a graph with types and conversions over tp. Out: the same with types and conversions over cp, and the solution in
`ctx.found.assignments`. Without context-parallel ranks nothing changes.

The plan over tp is given here. Its conversions are operators of this problem, which decides the order in which a value
is converted over both axes: an all-to-all over cp comes before or after an all-gather over tp, whichever is cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from torch.fx import Graph, Node

from autoptd.errors import InternalError, PlanError
from autoptd.ir import markers
from autoptd.ir.layout import shard_places, typed_over
from autoptd.ir.mesh import AXES, Mesh, base
from autoptd.ir.noise import is_draw
from autoptd.ir.notes import Fallback, divisors, note, op_name, ops, payload, placeholders, site
from autoptd.ir.operators.record import QUERIES, argument, operands
from autoptd.ir.types import ZIGZAG
from autoptd.passes.communicate import check_axes, meet_readers
from autoptd.passes.context import Context
from autoptd.passes.ops.costs import flops
from autoptd.passes.runner import CALLS, Form, divides_tokens, graph_pass
from autoptd.passes.solve.assign import assign_tensor, find_plan
from autoptd.passes.solve.assignment import Assignment
from autoptd.passes.solve.fallbacks import fallbacks, note_fallbacks
from autoptd.passes.solve.problem import follows
from autoptd.passes.solve.splits import ATTENTION
from autoptd.passes.solve.tokens import GATHERED_REMEDY, SHIFTED_REMEDY, TokenSplitter, is_repeat
from autoptd.passes.tokens.attention_rewrites import degrees_of_copies


def check_tokens(graph: Graph, ctx: Context) -> None:
    """Verify the graph against the table of types over every axis, with the conversions over the others."""
    check_axes(graph, ctx)
    findings: list[str] = []
    for axis in ctx.mesh.token_axes:
        splitter = ctx.found.assignments[axis].splitter
        for node in ops(graph):
            findings += _changed(node, axis)
            if node.target is markers.convert and isinstance(splitter, TokenSplitter):
                findings += _outer_parts(node, splitter)
    if findings:
        raise InternalError("CONNECTED", "; ".join(findings))


def _changed(node: Node, axis: str) -> Iterator[str]:
    """Yield the errors of conversions over other axes that change the type over `axis`."""
    if node.target in markers.PLACED and note(node).axis != axis:
        before, after = (note(value).layout[axis] for value in (node.args[0], node))  # type: ignore[arg-type]
        if before != after:
            yield f"{site(node)} converts over {note(node).axis}, and changes {before} to {after} over {axis}"


def _outer_parts(node: Node, splitter: TokenSplitter) -> Iterator[str]:
    """Yield the errors of conversions that move the outer part of an atom whose inner part another axis has."""
    own = base(note(node).axis)
    for layout in (note(node.args[0]).layout, note(node).layout):  # type: ignore[arg-type]
        for axis, kind in layout.shards:
            place = kind.dim, kind.atom
            others = [base(other) for other, same in layout.shards if (same.dim, same.atom) == place]
            others = [other for other in others if other != own]
            if base(axis) == own and others and own != splitter.inner_of(node, kind):
                yield f"{site(node)} converts over {own} a dim that is cut over {', '.join(others)} within"


@graph_pass(
    takes=Form.CONNECTED,
    gives=Form.CONNECTED,
    when=divides_tokens,
    changes=(CALLS, "layout", "forms", "why", "fallback", "draw"),
    ensures=check_tokens,
)
def split_tokens(graph: Graph, ctx: Context) -> None:
    """Fill the types over cp of every node, and insert the conversions."""
    for axis in ctx.mesh.token_axes:
        _split(graph, axis, ctx)


def _split(graph: Graph, axis: str, ctx: Context) -> None:
    splitter = TokenSplitter(
        graph,
        ctx.found.axes.connected(graph),
        axis,
        ctx.mesh,
        ctx.machine,
        ctx.batched,
        attention=ctx.options.context.attention,
    )
    _check_sizes(graph, splitter, ctx)
    splitter.order = choose_order(graph, splitter, ctx.options.context.tokens)
    if ctx.options.context.tokens == ZIGZAG:
        _check_pieces(graph, splitter)
    joint = ctx.found.joint if ctx.found.has("joint") else None
    assignment = assign_tensor(graph, splitter, joint and joint.of_tokens)
    if joint is not None and follows(assignment.strategies, joint.of_tokens):
        splitter.joint_text = joint.text
    _check_split(assignment, splitter)
    note_fallbacks(graph, assignment, splitter)
    _note_gathers(assignment, splitter)
    ctx.found.assignments[axis] = assignment
    found = (replace(each, flops=each.flops * ctx.rows // ctx.traced_rows) for each in fallbacks(graph))
    ctx.found.fallbacks = tuple(found)
    for node in ops(graph):
        # Masks are numbered in the whole value: a rank must know which part it has.
        if is_draw(node):
            note(node).draw = replace(note(node).draw, inner_axis=splitter.inner_axis(node))
    meet_readers(graph, assignment, ctx.mesh)
    _place_again(graph, ctx.mesh)


def choose_order(graph: Graph, splitter: TokenSplitter, asked: str) -> str:
    """Return the order in which ranks have tokens; with "auto", zigzag if a rank's queries are causal.

    Then every rank has the same number of keys to multiply; with chunks the last rank would have almost twice the
    mean. All sequences of 2c equal pieces have the same order, so the cheapest plan is the same.
    """
    if asked != "auto":
        return ZIGZAG if asked == ZIGZAG else ""
    causal = [node for node in ops(graph) if op_name(node) == ATTENTION and argument(node, "is_causal")]
    if not causal or splitter.context == "ulysses":
        return ""
    plan = find_plan(graph, splitter)
    ours = [node for node in causal if node in plan and plan[node].form == QUERIES]
    return ZIGZAG if any(splitter.has_pieces(node, plan[node].gives) for node in ours) else ""


def _check_pieces(graph: Graph, splitter: TokenSplitter) -> None:
    """Raise PlanError if no sequence has two equal pieces for every rank."""
    sizes, count = sorted(_token_sizes(graph, splitter)), 2 * splitter.degree
    if all(size % count for size in sizes):
        letter = AXES[splitter.axis].degree
        fact = f"{' and '.join(map(str, sizes))} tokens do not divide over 2*{letter}={count}"
        raise PlanError(
            f"token_order={ZIGZAG!r}", fact, f"a multiple of {count} tokens, or token_order='auto'"
        )


def _note_gathers(assignment: Assignment, splitter: TokenSplitter) -> None:
    """Note operators that run whole on gathered tokens: an uneven slice of large values, a sort."""
    for node, strategy in assignment.strategies.items():
        is_known = note(node).fallback is not None or note(node).tokens.is_moved_cut
        if strategy.is_split or is_known or is_repeat(node):
            continue
        nbytes = sum(payload(read) for read in operands(node) if splitter.gathered(node, read))
        if nbytes:
            fact = f"needs all tokens: {nbytes:,} B of the trace are gathered over {splitter.axis}"
            remedy = SHIFTED_REMEDY if op_name(node) == "aten.slice" else GATHERED_REMEDY
            note(node).fallback = Fallback(note(node).module, op_name(node), fact, remedy, flops(node))


def _place_again(graph: Graph, mesh: Mesh) -> None:
    """Correct the positions of every conversion's shards, which depend on both axes."""
    for node in ops(graph):
        if node.target is markers.convert:
            source, name = node.args[:2]
            layouts = (note(source).layout, note(node).layout)  # type: ignore[arg-type]
            axis = typed_over(note(node).axis)
            node.args = (source, name, *shard_places(note(node).dims, axis, layouts, mesh))


def _check_sizes(graph: Graph, splitter: TokenSplitter, ctx: Context) -> None:
    """Raise PlanError for a model without tokens, and for numbers of tokens that do not divide."""
    sizes = sorted(_token_sizes(graph, splitter))
    degree, letter = splitter.mesh.product_text([splitter.axis]), AXES[splitter.axis].degree
    if not sizes:
        fact = (
            "the model has no tokens: no dim of an input, other than the batch, that weights do not contract"
        )
        raise PlanError(degree, fact, f"{letter}=1")
    # Under sequence parallelism tp divides what cp leaves of them.
    cut_by = splitter.axes_of_tokens(graph)
    # If sequence parallelism is requested, the cheapest plan must not evade it.
    if ctx.options.sequence_parallel is True:
        cut_by = [axis for axis in ctx.found.assignments if axis != splitter.axis]
    others = math.prod(map(splitter.mesh.degree, cut_by))
    ranks = splitter.degree * others
    if all(size % ranks for size in sizes):
        over = splitter.mesh.product_text([*cut_by, splitter.axis])
        fact = f"{' and '.join(map(str, sizes))} tokens do not divide over {over}"
        fits = ", ".join(map(str, divisors([size // others for size in sizes if size % others == 0])))
        raise PlanError(
            degree, fact, f"a multiple of {ranks} tokens" + f", or {letter} in {{{fits}}}" * bool(fits)
        )


def _token_sizes(graph: Graph, splitter: TokenSplitter) -> set[int]:
    """Return the numbers of tokens of inputs, and of attention over values that do not come from an input."""
    sizes: set[int] = set()
    for node in (*placeholders(graph, "input"), *ops(graph)):
        if splitter.axes.has(node) and (node.op == "placeholder" or splitter.multiplies_activations(node)):
            for dim in range(len(note(node).dims)):
                atoms = splitter.axes.atoms(node, dim)
                sizes.update(axis.size for axis in atoms if id(axis) in splitter.tokens)
    return sizes


def _check_split(assignment: Assignment, splitter: TokenSplitter) -> None:
    """Raise PlanError if nothing is split, or if attention is not split as requested."""
    degree, letter = splitter.mesh.product_text([splitter.axis]), AXES[splitter.axis].degree
    if not any(strategy.is_split for strategy in assignment.strategies.values()):
        raise PlanError(degree, "no operator can be split by tokens", f"{letter}=1")
    by = {"ulysses": ("heads", "all_gather"), "all_gather": ("queries", "auto")}
    if splitter.context not in by:
        return
    (noun, other), context = by[splitter.context], splitter.context
    for node, strategy in assignment.strategies.items():
        is_attention = splitter.multiplies_activations(node) and splitter.reads_tokens(node)
        if is_attention and not strategy.is_split:
            start = f"{context=} splits attention by {noun}, and"
            sizes = sorted({way.size for way in splitter.blocked(node)})
            # For example heads with a learned bias, or queries that tp has split already.
            if not sizes:
                raise PlanError(site(node), f"{start} cannot split this one by them", f"context={other!r}")
            counted = f"{' and '.join(map(str, sizes))} {noun}{splitter.whose}"
            fact = f"{start} {counted} do not divide over {degree}"
            copied = degrees_of_copies(node, splitter.mesh) if context == "ulysses" else ()
            fits = ", ".join(map(str, sorted({*divisors(sizes), *copied})))
            remedy = f"{letter} in {{{fits}}}, or context={other!r}"
            raise PlanError(site(node), fact, remedy)
