"""Divide the tokens over cp: types and conversions over a second axis (CONNECTED -> CONNECTED).

In: a graph with types and conversions over tp. Out: the same with types and conversions over cp, and the solution in
`ctx.found.assignments`. Without context-parallel ranks nothing changes.

The plan over tp is given here. Its conversions are operators of this problem, which decides the order in which a value
is converted over both axes: an all-to-all over cp comes before or after an all-gather over tp, whichever is cheaper.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Graph

from autoptd.ir.noise import is_draw
from autoptd.ir.notes import note, op_name, ops
from autoptd.ir.operators.record import QUERIES, argument
from autoptd.ir.types import ZIGZAG
from autoptd.passes.communicate import check_tokens, meet_readers, place_again
from autoptd.passes.context import Context
from autoptd.passes.runner import CALLS, Form, divides_tokens, graph_pass
from autoptd.passes.solve.assign import assign_tensor, find_plan
from autoptd.passes.solve.fallbacks import fallbacks, note_fallbacks
from autoptd.passes.solve.problem import follows
from autoptd.passes.solve.splits import ATTENTION
from autoptd.passes.solve.tokens import TokenSplitter
from autoptd.passes.tokens.attention_rewrites import degrees_of_copies
from autoptd.passes.tokens.checks import check_pieces, check_sizes, check_split, note_gathers


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
    # Under sequence parallelism tp divides what cp leaves of the tokens. If it is requested, the cheapest plan must not
    # evade it.
    cut_by = splitter.axes_of_tokens(graph)
    if ctx.options.sequence_parallel is True:
        cut_by = [other for other in ctx.found.assignments if other != axis]
    check_sizes(graph, splitter, cut_by)
    splitter.order = choose_order(graph, splitter, ctx.options.context.tokens)
    if ctx.options.context.tokens == ZIGZAG:
        check_pieces(graph, splitter)
    joint = ctx.found.joint if ctx.found.has("joint") else None
    assignment = assign_tensor(graph, splitter, joint and joint.of_tokens)
    if joint is not None and follows(assignment.strategies, joint.of_tokens):
        splitter.joint_text = joint.text
    check_split(assignment, splitter, degrees_of_copies)
    note_fallbacks(graph, assignment, splitter)
    note_gathers(assignment, splitter)
    ctx.found.assignments[axis] = assignment
    found = (replace(each, flops=each.flops * ctx.rows // ctx.traced_rows) for each in fallbacks(graph))
    ctx.found.fallbacks = tuple(found)
    for node in ops(graph):
        # Masks are numbered in the whole value: a rank must know which part it has.
        if is_draw(node):
            note(node).draw = replace(note(node).draw, inner_axis=splitter.inner_axis(node))
    meet_readers(graph, assignment, ctx.mesh)
    place_again(graph, ctx.mesh)


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
