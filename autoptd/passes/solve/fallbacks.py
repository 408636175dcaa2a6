"""Say why an operator is not split as one would expect (in: ANNOTATED types; out: reasons in the notes).

A size that t does not divide is no error: the operator runs whole on every tensor rank, or split by another letter, which is
right and slower. What cannot be seen is what hurts, so each such operator gets a `Fallback` with the fact and a remedy:

- matrix products and attention that stay whole because t does not divide the letters that would split them;
- attention that is split, but not by its heads;
- operators that no rule knows, and that probing refused;
- a graph that is too dense for the least cost to be found.

    note_fallbacks(graph, assignment, splitter)
    [one.fact for one in fallbacks(graph)]     # ["6 heads do not divide over t=4", ...]
"""

from __future__ import annotations

import re

from torch.fx import Graph, Node

from autoptd.ir.fallback import Fallback, divisors
from autoptd.ir.notes import note, op_name, ops
from autoptd.ir.operators.record import operands
from autoptd.passes.axes.axes import Letter
from autoptd.passes.ops.costs import flops
from autoptd.passes.solve.assign import Assignment
from autoptd.passes.solve.strategies import WHOLE, Splitter

HEADS, KV_HEADS, REPEAT = "heads", "KV heads", "query heads per KV head"
COUNTED = (HEADS, KV_HEADS, REPEAT)
PLAIN_OPERATORS = (
    'autoptd.register_rule("ns::op", "... -> ..."), or plain operators (sums, products, views, gather)'
)


def note_fallbacks(graph: Graph, assignment: Assignment, splitter: Splitter) -> None:
    """Fill `fallback` of every operator that has one, and tell it in its `why`."""
    nouns = axis_nouns(graph, splitter)
    for node in ops(graph):
        record = note(node)
        if node not in assignment.strategies:
            continue
        found = _unknown(node, splitter) or _blocked(node, assignment, splitter, nouns)
        if found is not None:
            record.fallback = found
            record.why += f"{':' if record.why == WHOLE else ', because'} {found.fact}"
        elif flops(node) and record.why == WHOLE:
            record.why += ": cheaper than the collectives of a split"
        elif flops(node) and (noun := _split_noun(node, assignment, splitter, nouns)):
            record.why = re.sub(r"(\d+) = \d+ x \d+", rf"\1 {noun} over {splitter.degree} ranks", record.why)
    if assignment.problem is not None and assignment.problem.searched:
        _say_searched(graph, assignment)


def _split_noun(node: Node, assignment: Assignment, splitter: Splitter, nouns: dict[int, str]) -> str:
    """What a split operator is split by, where people have a word for it: heads."""
    for one, types in assignment.strategies[node].needs.items():
        if types.shards:
            found = [
                nouns.get(id(splitter.axes.atoms(one, kind.dim)[kind.atom]), "") for _, kind in types.shards
            ]
            if found[0] in COUNTED:
                return found[0] if len(found) == 1 else "query heads"
    return ""


def _say_searched(graph: Graph, assignment: Assignment) -> None:
    """The first operator that is free to carry it says that the plan need not be the cheapest one."""
    free = (node for node in ops(graph) if node in assignment.strategies and note(node).fallback is None)
    node = next(free, None)
    if node is not None:
        fact = "the model's operators hang together too closely for the cheapest plan to be found: a near one was searched"
        note(node).fallback = Fallback(
            note(node).module, op_name(node), fact, "a plan= that pins its parameters"
        )


def fallbacks(graph: Graph) -> list[Fallback]:
    """What `note_fallbacks` found, in the order of the model."""
    return [found for node in ops(graph) if (found := note(node).fallback) is not None]


def unlisted_operators(graph: Graph) -> list[str]:
    """What was found out about operators without a row: `mine.scale in h.*.mlp: probed: may be split by d0, d2`."""
    found = [(re.sub(r"\b\d+\b", "*", note(node).module), node) for node in ops(graph) if note(node).rule]
    return list(
        dict.fromkeys(
            f"{op_name(node)} in {module or 'the model'}: {note(node).rule}" for module, node in found
        )
    )


def _unknown(node: Node, splitter: Splitter) -> Fallback | None:
    if splitter.axes.is_known(node):
        return None
    fact = f"no rule knows {op_name(node)}, and probing refused it: {splitter.axes.refused(node)}"
    return Fallback(note(node).module, op_name(node), fact, PLAIN_OPERATORS, flops(node))


def _blocked(
    node: Node, assignment: Assignment, splitter: Splitter, nouns: dict[int, str]
) -> Fallback | None:
    """A matrix product that stays whole, or attention that is not split by heads, because t does not divide."""
    if not flops(node):
        return None
    places = [
        (one, kind) for one, types in assignment.strategies[node].needs.items() for _, kind in types.shards
    ]
    split_by = {nouns.get(id(splitter.axes.atoms(one, kind.dim)[kind.atom])) for one, kind in places}
    is_whole = not places
    blocked = [(one.size, _noun(node, one, splitter, nouns)) for one in splitter.blocked(node)]
    of_heads = [(size, noun) for size, noun in blocked if noun in COUNTED]
    named = list(dict.fromkeys(of_heads or blocked))
    if not named or not (is_whole or of_heads) or split_by.intersection(COUNTED):
        return None
    texts = [f"{size} {noun}" if noun in COUNTED else f"{noun} {size}" for size, noun in named]
    fact = f"{' and '.join(texts)} {'do' if of_heads or len(named) > 1 else 'does'} not divide over t={splitter.degree}"
    fits = ", ".join(map(str, divisors(size for size, _ in named)))
    return Fallback(
        note(node).module, op_name(node), fact, f"t in {{{fits}}}", flops(node) if is_whole else 0
    )


def _noun(node: Node, letter: Letter, splitter: Splitter, nouns: dict[int, str]) -> str:
    for axis in splitter.axes.ids_of(node, letter):
        if axis in nouns:
            return nouns[axis]
        if axis in splitter.padding.vocabularies:
            return "vocabulary factor"
    is_linear = op_name(node) == "aten.linear"
    return {"o": "output width", "i": "input width"}.get(letter.name, "size") if is_linear else "size"


def axis_nouns(graph: Graph, splitter: Splitter) -> dict[int, str]:
    """What people call an axis: heads are what two activations are multiplied along, one by one, and is no token axis."""
    found: dict[int, str] = {}
    activations = _of_inputs(graph)
    for node in ops(graph):
        if not flops(node) or any(one not in activations for one in operands(node)[:2]):
            continue
        groups: dict[str, list[int]] = {}  # of grouped queries: KV heads, then the query heads of each
        for letter in splitter.free_letters(node):
            if letter.out is not None and (len(letter.places) > 1 or letter.name == "repeat"):
                groups.setdefault(letter.name, []).append(splitter.axes.ids_of(node, letter)[0])
        for name, (first, *others) in groups.items():
            found.setdefault(
                first, REPEAT if name == "repeat" else KV_HEADS if others or name == "kv" else HEADS
            )
            for axis in others:
                found.setdefault(axis, REPEAT)
    return found


def _of_inputs(graph: Graph) -> set[Node]:
    """Values that depend on inputs and parameters."""
    found: set[Node] = set()
    for node in graph.nodes:
        if note(node).kind == "input" or any(arg in found for arg in node.all_input_nodes):
            found.add(node)
    return {node for node in found if note(node).of_params}
