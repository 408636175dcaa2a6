"""Parameters whose sharding is pinned by hand: the key `shard` of a plan.

In: entries `{"pattern": "transformer.h.*.mlp.c_fc.weight", "dim": 0, "axis": "tp"}`; a star stands for a number, `"dim": null`
for a parameter that is kept whole. Out: for every parameter that a pattern names, the `Pin` that its strategies are held
against. Parameters that no pattern names stay the solver's. What cannot be is refused, naming both of two wishes that
exclude each other.

    pins = find_pins(graph, plan["shard"])       # {weight node: Pin("transformer.h.*.mlp.c_fc.weight", dim=0), ...}

Another program's layout is kept to the letter instead (`keep_layouts`): an evaluation reads the parameters that training
stored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from torch.fx import Graph, Node

from autoptd.errors import PlanError
from autoptd.ir.notes import note, placeholders, shape
from autoptd.ir.plan import check_known, nearest

SITE = "plan: shard"


@dataclass(frozen=True)
class Pin:
    """One entry of a plan: parameters like `pattern` are sharded along `dim`, or whole where that is None."""

    pattern: str
    dim: int | None
    layout: tuple[object, ...] | None = (
        None  # where its elements lie on the ranks (`Layout.element_layout`), if all that is given
    )

    def __str__(self) -> str:
        if self.layout is not None:
            return f"{self.pattern} stored as in training {self.layout}"
        return f"{self.pattern} {'whole' if self.dim is None else f'split along dim {self.dim}'}"

    @property
    def where(self) -> str:
        """What is pinned, of whichever parameter: layers whose pins are equal in this stay alike."""
        return repr((self.dim, self.layout))


Pins = dict[Node, Pin]


def find_pins(graph: Graph, shard: Sequence[Mapping[str, Any]]) -> Pins:
    """The parameters that the entries of a plan name; PlanError for entries that name none, or one twice."""
    parameters = {note(node).name: node for node in placeholders(graph, "param")}
    pins: Pins = {}
    for entry in shard:
        pin = _read(entry)
        wanted = re.compile(re.escape(pin.pattern).replace(r"\*", r"\d+"))
        found = [node for name, node in parameters.items() if wanted.fullmatch(name)]
        if not found:
            known = dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in parameters)
            raise PlanError(SITE, f"no parameter is called {pin.pattern}", nearest(pin.pattern, known))
        for node in found:
            if pins.setdefault(node, pin).dim != pin.dim:
                raise PlanError(SITE, f"{pins[node]}, and {pin}", f"one of them for {note(node).name}")
            if pin.dim is not None and not 0 <= pin.dim < len(shape(node)):
                fact = f"{pin}: {note(node).name} has {len(shape(node))} dims"
                raise PlanError(SITE, fact, f"a dim below {len(shape(node))}")
    return pins


def keep_layouts(graph: Graph, layouts: Mapping[str, tuple[Any, ...]]) -> Pins:
    """Pins for all parameters of the graph that `layouts` has, by name."""
    parameters = {note(node).name: node for node in placeholders(graph, "param")}
    return {
        node: Pin(name, layouts[name][0] if layouts[name] else None, layouts[name])
        for name, node in parameters.items()
        if name in layouts
    }


def _read(entry: Mapping[str, Any]) -> Pin:
    check_known(SITE, entry, ("pattern", "dim", "axis"))
    pattern, dim, axis = entry.get("pattern"), entry.get("dim"), entry.get("axis", "tp")
    if not isinstance(pattern, str) or not (dim is None or isinstance(dim, int)) or axis not in ("tp", None):
        example = '{"pattern": "h.*.mlp.c_fc.weight", "dim": 0, "axis": "tp"}'
        raise PlanError(
            SITE, f"{dict(entry)} is no entry", f"for example {example}, or dim null to keep it whole"
        )
    return Pin(pattern, dim)


def refuse_conflict(pins: Pins, is_possible: Callable[[Pins], bool]) -> PlanError:
    """Why no plan keeps all `pins`: one that no plan keeps, or two that exclude each other."""
    each = list(dict.fromkeys(pins.values()))
    remedy = "leave it out, or ask program.explain what it could be"
    for count in (1, 2):
        for some in combinations(each, count):
            if not is_possible({node: pin for node, pin in pins.items() if pin in some}):
                fact = " and ".join(map(str, some))
                return PlanError(
                    SITE, f"no plan has {fact}", remedy if count == 1 else "leave one of the two out"
                )
    return PlanError(SITE, f"no plan has {', '.join(map(str, each))} together", "leave some of them out")


__all__ = ["Pin", "Pins", "find_pins", "keep_layouts", "refuse_conflict"]
