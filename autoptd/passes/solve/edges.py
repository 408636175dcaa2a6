"""What it costs to bring a value to those that read it: the tables between the solver's variables.

In: a value, its readers, and their strategies. Out: `Factor`s (`eliminate.py`) over the variables of the value, of its readers,
and of its hub or entry (`assign.py`); infinite where there is no such conversion. In whole picoseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from torch.fx import Node

from autoptd.ir.layout import Layout
from autoptd.ir.machine import Machine
from autoptd.ir.notes import note, op_name, payload, value
from autoptd.ir.operators.table import operator_of
from autoptd.ir.steps import Step
from autoptd.ir.types import R, ValueType, padded_size
from autoptd.passes.ops.costs import collective_seconds, conversion_price, odd_layer_price
from autoptd.passes.solve.eliminate import Factor
from autoptd.passes.solve.strategies import Splitter, Strategy

PARAMETER_USES = {("I", "P"), ("I", "R"), ("I", "S"), ("R", "S")}
Hub = tuple[int, list[Layout]]  # the variable of a value's types, and its choices
Price = Callable[
    [ValueType, ValueType, float, int, Machine], float
]  # of one conversion, as costs.conversion_seconds


def wanted(node: Node, readers: list[Node], strategies: dict[Node, list[Strategy]]) -> list[Layout]:
    """The types in which the readers of `node` may want it, one after the other."""
    found: list[Layout] = []
    for reader in readers:
        found += [Layout()] if reader.op == "output" else [one.needs[node] for one in strategies[reader]]
    return found


def entry_factors(
    node: Node,
    others: list[Node],
    strategies: dict[Node, list[Strategy]],
    variable: dict[Node, int],
    entry: Hub,
    splitter: Splitter,
) -> list[Factor]:
    """The cost of bringing the value of `node` to the type in which the first layer reads it, and of one that is not plain, or
    not that in which the other layers read `others` in its place.
    """
    i, kinds = entry
    gives = [one.gives for one in strategies[node]]
    made: list[Factor] = [
        ((variable[node], i), price_table([[edge_price(splitter, node, a, b) for b in kinds] for a in gives]))
    ]
    apart = odd_layer_price(payload(node), splitter.degree, splitter.machine)
    for other in others:
        read = [one.gives for one in strategies[other]]
        odd = [[a != b or not splitter.is_plain(node, a) for b in read] for a in kinds]
        made.append(((i, variable[other]), price_table([[apart * one for one in row] for row in odd])))
    return made


def edge_factors(
    node: Node,
    readers: list[Node],
    strategies: dict[Node, list[Strategy]],
    variable: dict[Node, int],
    source: Hub,
    hub: Hub | None,
    splitter: Splitter,
) -> list[Factor]:
    """The cost of bringing the value of `node`, in a type of `source`, to each reader, directly or through its hub, and of
    keeping it for backward.
    """
    cost = partial(edge_price, splitter, node)
    at, gives = source
    savers = [reader for reader in readers if is_saved(node, reader)]
    made: list[Factor] = []
    if hub is not None:
        made.append(((at, hub[0]), price_table([[cost(a, h) for h in hub[1]] for a in gives])))
    for reader in readers:
        needs = [Layout()] if reader.op == "output" else [one.needs[node] for one in strategies[reader]]
        kept = partial(_kept, splitter, node, reader, savers)
        if hub is None:
            table = price_table([[cost(a, b) + kept(a, b) for b in needs] for a in gives])
            made.append(((at, variable[reader]), table) if reader in variable else ((at,), table[:, 0]))
        else:
            cube = price_table(
                [[[min(cost(a, b), cost(h, b)) + kept(a, b) for b in needs] for h in hub[1]] for a in gives]
            )
            where = (at, hub[0], variable[reader]) if reader in variable else (at, hub[0])
            made.append((where, cube if reader in variable else cube[:, :, 0]))
    return made


def is_saved(node: Node, reader: Node) -> bool:
    """Whether `reader` keeps the value of `node`, an activation, for its backward."""
    is_activation = note(node).of_params and note(node).kind != "param"
    return (
        is_activation
        and operator_of(reader).keeps in ("operands", "probabilities")
        and note(reader).needs_grad
    )


def gathers_again(splitter: Splitter, reader: Node, source: Layout, target: Layout) -> bool:
    """Whether backward of `reader` gathers its operand anew, so that the shards alone are kept."""
    is_gather = bool(source.shards) and not source.sub_axes and target == splitter.over(R)
    return is_gather and op_name(reader) in ("aten.linear", "aten.addmm")


def _kept(
    splitter: Splitter, node: Node, reader: Node, savers: list[Node], source: Layout, target: Layout
) -> float:
    """The price of what backward of `reader` needs of the value of `node`; those who save it share one copy."""
    if reader not in savers:
        return 0.0
    machine, t, nbytes = splitter.machine, splitter.degree, payload(node)
    again = gathers_again(splitter, reader, source, target)
    pieces = t if again else target.pieces(splitter.mesh)
    seconds = nbytes / pieces * machine.per_saved_byte + (
        nbytes * splitter.per_whole_byte if pieces == 1 else 0.0
    )
    seconds += collective_seconds("all-gather", nbytes, t, machine) if again else 0.0
    return seconds / len(savers)


def price_table(seconds: list[Any]) -> np.ndarray:
    """In whole picoseconds, so that sums are exact and equal layers tie equally."""
    return np.round(1e12 * np.array(seconds))


def edge_price(
    splitter: Splitter, node: Node, source: Layout, target: Layout, count: Price = conversion_price
) -> float:
    """What the solver pays for converting the value of `node`, or (`count`) how long that takes; inf where it cannot be."""
    if source == target:
        return 0.0
    path = splitter.path(source, target)
    if path is None or not _is_possible(splitter, node, path):
        return math.inf
    mesh, nbytes = splitter.mesh, payload(node)
    return sum(
        count(*step[1:3], nbytes / step.others, mesh.degree(step.axis), splitter.machine) for step in path
    )


def _is_possible(splitter: Splitter, node: Node, path: list[Step]) -> bool:
    """Whether the value of `node` can be converted so."""
    if isinstance(value(node), (tuple, list)):
        return False  # the pieces of a split are converted one by one, behind their getitem
    for step in path:
        kinds, degree = (step.before, step.after), splitter.mesh.degree(step.axis)
        is_exchange = all(kind.kind == "S" for kind in kinds)
        if is_exchange and any(padded_size(note(node).dims, kind, degree) for kind in kinds):
            return False  # an all-to-all of padded shards does not exist
        if note(node).kind == "param" and (step.before.kind, step.after.kind) not in PARAMETER_USES:
            return False
    return True
