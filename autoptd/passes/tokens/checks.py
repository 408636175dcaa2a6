"""Refuse context parallelism that a model does not allow, with a remedy, and note what it gathers.

In: a graph, and the splitter of its tokens. Out: PlanError for a model without tokens, for numbers of tokens or heads
that do not divide, and for attention that cannot be split as requested; a `Fallback` for every operator on gathered
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch.fx import Graph, Node

from autoptd.errors import PlanError
from autoptd.ir.mesh import AXES, Mesh
from autoptd.ir.notes import Fallback, divisors, note, op_name, ops, payload, placeholders, site
from autoptd.ir.operators.record import operands
from autoptd.ir.types import ZIGZAG
from autoptd.passes.ops.costs import flops
from autoptd.passes.solve.assignment import Assignment
from autoptd.passes.solve.tokens import GATHERED_REMEDY, SHIFTED_REMEDY, TokenSplitter, is_repeat


def check_sizes(graph: Graph, splitter: TokenSplitter, cut_by: Sequence[str]) -> None:
    """Raise PlanError for a model without tokens, and for numbers of tokens that do not divide.

    `cut_by` are the other axes that divide tokens.
    """
    sizes = sorted(_token_sizes(graph, splitter))
    degree, letter = splitter.mesh.product_text([splitter.axis]), AXES[splitter.axis].degree
    if not sizes:
        fact = "the model has no tokens: weights contract every dim of the inputs other than the batch"
        raise PlanError(degree, fact, f"{letter}=1")
    others = math.prod(map(splitter.mesh.degree, cut_by))
    ranks = splitter.degree * others
    if all(size % ranks for size in sizes):
        over = splitter.mesh.product_text([*cut_by, splitter.axis])
        fact = f"{' and '.join(map(str, sizes))} tokens do not divide over {over}"
        fits = ", ".join(map(str, divisors([size // others for size in sizes if size % others == 0])))
        raise PlanError(
            degree, fact, f"a multiple of {ranks} tokens" + f", or {letter} in {{{fits}}}" * bool(fits)
        )


def check_pieces(graph: Graph, splitter: TokenSplitter) -> None:
    """Raise PlanError if no sequence has two equal pieces for every rank."""
    sizes, count = sorted(_token_sizes(graph, splitter)), 2 * splitter.degree
    if all(size % count for size in sizes):
        letter = AXES[splitter.axis].degree
        fact = f"{' and '.join(map(str, sizes))} tokens do not divide over 2*{letter}={count}"
        raise PlanError(
            f"token_order={ZIGZAG!r}", fact, f"a multiple of {count} tokens, or token_order='auto'"
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


def check_split(
    assignment: Assignment, splitter: TokenSplitter, copies: Callable[[Node, Mesh], list[int]]
) -> None:
    """Raise PlanError if nothing is split, or if attention is not split as requested.

    `copies` returns the degrees for which the KV heads of an attention would be copied.
    """
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
            copied = copies(node, splitter.mesh) if context == "ulysses" else ()
            fits = ", ".join(map(str, sorted({*divisors(sizes), *copied})))
            remedy = f"{letter} in {{{fits}}}, or context={other!r}"
            raise PlanError(site(node), fact, remedy)


def note_gathers(assignment: Assignment, splitter: TokenSplitter) -> None:
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
