"""Report operators that are not split as expected, with the reason and a remedy.

In: the types of an ANNOTATED graph. Out: a `Fallback` in the note of each such operator. A size that t does not divide is not
an error: the operator runs whole on every tensor rank, or is split by another letter, which is correct but slower. The
operators are:

- matrix products and attention that stay whole because t does not divide the letters that would split them;
- attention that is split, but not by its heads;
- operators without a rule that probing refused;
- the first one, if the graph is too dense for the least cost to be found.

    note_fallbacks(graph, assignment, splitter)
    [fallback.fact for fallback in fallbacks(graph)]     # ["6 heads do not divide over t=4", ...]
"""

from __future__ import annotations

import re

from torch.fx import Graph, Node

from autoptd.ir.mesh import AXES
from autoptd.ir.notes import Fallback, divisors, note, op_name, ops, shape
from autoptd.ir.operators.record import QUERIES, operands
from autoptd.ir.types import ValueType
from autoptd.passes.axes.axes import Letter
from autoptd.passes.ops.costs import flops
from autoptd.passes.solve.assignment import Assignment
from autoptd.passes.solve.splits import Splitter, dependents
from autoptd.passes.solve.ties import WHOLE

PLAIN_OPERATORS = (
    'autoptd.register_rule("ns::op", "... -> ..."), or plain operators (sums, products, views, gather)'
)
HEADS, KV_HEADS, REPEAT = "heads", "KV heads", "query heads per KV head"
LETTERS = {HEADS: "a", KV_HEADS: "g", REPEAT: "r"}
COUNTED = (HEADS, KV_HEADS, REPEAT)


def note_fallbacks(graph: Graph, assignment: Assignment, splitter: Splitter) -> None:
    """Fill `fallback` of every operator that has one, add the fact to its `why`, and name the axes of the assignment."""
    nouns = axis_nouns(graph, splitter)
    assignment.letters = name_axes(graph, splitter, nouns)
    for node in ops(graph):
        record = note(node)
        if node not in assignment.strategies:
            continue
        fallback = _unknown(node, splitter) or _blocked(node, assignment, splitter, nouns)
        if fallback is not None:
            record.fallback = fallback
            # "whole on every rank: 6 heads do not divide over t=4"
            record.why += f"{':' if record.why == WHOLE else ', because'} {fallback.fact}"
        elif flops(node) and record.why == WHOLE:
            record.why += ": cheaper than the collectives of a split"
        elif flops(node) and (noun := _split_noun(node, assignment, splitter, nouns)):
            # `8 = 4 x 2` -> `8 heads over 4 ranks`.
            record.why = re.sub(r"(\d+) = \d+ x \d+", rf"\1 {noun} over {splitter.degree} ranks", record.why)
    if assignment.problem is not None and assignment.problem.searched:
        _note_search(graph, assignment)


def axis_nouns(graph: Graph, splitter: Splitter) -> dict[int, str]:
    """Return the names of axes, by their ids: heads, KV heads, query heads per KV head.

    Heads are batch dims of a product of two activations, and not tokens.
    """
    found: dict[int, str] = {}
    activations = {node for node in dependents(graph) if note(node).of_params}
    for node in ops(graph):
        if not flops(node) or any(operand not in activations for operand in operands(node)[:2]):
            continue
        # The axes of each letter. Two axes are those of grouped queries: KV heads, then the query heads of each.
        groups: dict[str, list[int]] = {}
        for letter in splitter.wanted_letters(node):
            is_of_both = len(letter.places) > 1 and letter.form != QUERIES
            if letter.out is not None and (is_of_both or letter.name == "repeat"):
                groups.setdefault(letter.name, []).append(letter.ids[0])
        for name, (first, *others) in groups.items():
            found.setdefault(first, _noun_of_heads(name, is_grouped=bool(others)))
            for axis in others:
                found.setdefault(axis, REPEAT)
    return found


def _noun_of_heads(letter: str, *, is_grouped: bool) -> str:
    if letter == "repeat":
        return REPEAT
    return KV_HEADS if is_grouped or letter == "kv" else HEADS


def name_axes(graph: Graph, splitter: Splitter, nouns: dict[int, str]) -> dict[int, str]:
    """Return the letters of the axes of an ANNOTATED graph, by their ids; `nouns` are those of `axis_nouns`."""
    # Later entries win: an axis that is both heads and tokens, in a model that folds them, is tokens.
    letters = {axis: LETTERS[noun] for axis, noun in nouns.items()}
    for node in ops(graph):
        if op_name(node) == "aten.embedding":
            letters |= {id(axis): "h" for axis in splitter.axes.atoms(node, len(shape(node)) - 1)}
    letters |= dict.fromkeys(splitter.padding.vocabularies, "V")
    letters |= dict.fromkeys(splitter.tokens, "s")
    letters |= dict.fromkeys(splitter.never_split - splitter.tokens, "b")
    return letters


def _split_noun(node: Node, assignment: Assignment, splitter: Splitter, nouns: dict[int, str]) -> str:
    """Return the name of the dim that an operator is split by, if it is heads; else ""."""
    for operand, types in assignment.strategies[node].needs.items():
        names = [nouns.get(_axis_of(operand, kind, splitter), "") for _, kind in types.shards]
        if names and names[0] in COUNTED:
            # Two names: KV heads over one sub-axis, the query heads of each over the other.
            return names[0] if len(names) == 1 else "query heads"
    return ""


def _axis_of(operand: Node, kind: ValueType, splitter: Splitter) -> int:
    """Return the id of the named axis that a type S splits."""
    return id(splitter.axes.atoms(operand, kind.dim)[kind.atom])


def _note_search(graph: Graph, assignment: Assignment) -> None:
    """Note at the first operator without a fallback that the plan may not be the cheapest one."""
    free = (node for node in ops(graph) if node in assignment.strategies and note(node).fallback is None)
    node = next(free, None)
    if node is not None:
        fact = "the model's operators are too densely connected to find the cheapest plan; a search found a near one"
        note(node).fallback = Fallback(
            note(node).module, op_name(node), fact, "a plan= that pins its parameters"
        )


def fallbacks(graph: Graph) -> list[Fallback]:
    """List the fallbacks that `note_fallbacks` filled, in the order of the model."""
    return [fallback for node in ops(graph) if (fallback := note(node).fallback) is not None]


def unlisted_operators(graph: Graph) -> list[str]:
    """List the operators without a record, and how they may be split: `mine.scale in h.*.mlp: probed: may be split by d0, d2`.

    Layers that differ only in their number share a line.
    """
    lines: dict[str, None] = {}
    for node in ops(graph):
        if note(node).rule:
            module = re.sub(r"\b\d+\b", "*", note(node).module) or "the model"
            lines[f"{op_name(node)} in {module}: {note(node).rule}"] = None
    return list(lines)


def _unknown(node: Node, splitter: Splitter) -> Fallback | None:
    if splitter.axes.is_known(node):
        return None
    fact = f"{op_name(node)} has no rule, and probing refused it: {splitter.axes.refused(node)}"
    return Fallback(note(node).module, op_name(node), fact, PLAIN_OPERATORS, flops(node))


def _blocked(
    node: Node, assignment: Assignment, splitter: Splitter, nouns: dict[int, str]
) -> Fallback | None:
    """Return the fallback of a matrix product that stays whole, or of attention that is not split by heads."""
    if not flops(node):
        return None
    taken: list[int] = []
    for operand, types in assignment.strategies[node].needs.items():
        taken += [_axis_of(operand, kind, splitter) for _, kind in types.shards]
    if splitter.is_as_wanted(node, taken):
        return None
    # The names of the axes that are split: None for one without a name.
    split_axes = [nouns.get(axis) for axis in taken]
    is_whole = not split_axes
    blocked = [(letter.size, _noun(node, letter, splitter, nouns)) for letter in splitter.blocked(node)]
    # If heads are blocked, the head size is not mentioned.
    of_heads = [(size, noun) for size, noun in blocked if noun in COUNTED]
    named = list(dict.fromkeys(of_heads or blocked))
    if not named or not (is_whole or of_heads) or any(noun in COUNTED for noun in split_axes):
        return None
    texts = [f"{size} {noun}" if noun in COUNTED else f"{noun} {size}" for size, noun in named]
    degree = AXES[splitter.axis].degree
    verb = "do" if of_heads or len(named) > 1 else "does"
    fact = f"{' and '.join(texts)}{splitter.whose} {verb} not divide over {degree}={splitter.degree}"
    fits = ", ".join(map(str, divisors(size for size, _ in named)))
    # FLOPs that are repeated on every rank; an operator that is split otherwise repeats none.
    repeated = flops(node) if is_whole else 0
    return Fallback(note(node).module, op_name(node), fact, f"{degree} in {{{fits}}}", repeated)


def _noun(node: Node, letter: Letter, splitter: Splitter, nouns: dict[int, str]) -> str:
    for axis in letter.ids:
        if axis in nouns:
            return nouns[axis]
        if axis in splitter.padding.vocabularies:
            return "vocabulary factor"
    is_linear = op_name(node) == "aten.linear"
    return {"o": "output width", "i": "input width"}.get(letter.name, "size") if is_linear else "size"
