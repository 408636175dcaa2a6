"""Parameters whose sharding is pinned by hand: the key `shard` of a plan.

In: entries `{"pattern": "transformer.h.*.mlp.c_fc.weight", "dim": 0, "axis": "tp"}`; a star stands for a number, `"dim": null`
for a parameter that is kept whole; without an axis, an entry is about the axis that splits parameters. Out: for every
parameter that a pattern names, the `Pin` that restricts its strategies over the axis. All others are left to the solver. Pins
that no plan can keep are refused; where two exclude each other, the error names both.

    pins = find_pins(graph, read_shard(plan["shard"], ("tp",), "tp")["tp"])
    # {weight node: Pin("transformer.h.*.mlp.c_fc.weight", dim=0), ...}

`keep_layouts` pins the exact layout of another program instead: an evaluation reads the parameters that training stored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from torch.fx import Graph, Node

from autoptd.errors import PlanError
from autoptd.ir.layout import Layout
from autoptd.ir.mesh import Mesh
from autoptd.ir.notes import note, placeholders, shape
from autoptd.ir.plan import check_known, nearest
from autoptd.ir.types import Dims

SITE = "plan: shard"


@dataclass(frozen=True)
class Pin:
    """One entry of a plan: parameters like `pattern` are sharded along `dim`, or whole where that is None."""

    pattern: str
    dim: int | None
    # Where its elements lie on the ranks (`Layout.element_layout`), where another program's layout is kept.
    layout: tuple[object, ...] | None = None

    def __str__(self) -> str:
        if self.layout is not None:
            return f"{self.pattern} stored as in training {self.layout}"
        return f"{self.pattern} {'whole' if self.dim is None else f'split along dim {self.dim}'}"

    @property
    def where(self) -> str:
        """The pinned layout without the parameter's name: layers stay tied if their pins are equal in this."""
        return repr((self.dim, self.layout))

    def allows(self, layout: Layout, dims: Dims, mesh: Mesh) -> bool:
        """Tell whether a parameter with these dims may be stored in a layout."""
        if layout.sharded_dims != (set() if self.dim is None else {self.dim}):
            return False
        return self.layout is None or layout.element_layout(dims, mesh) == self.layout

    def refused(self, dims: Dims, degree: int) -> PlanError:
        """Make the error of a pin that no layout over `degree` ranks keeps."""
        sizes = " x ".join(map(str, dims[self.dim or 0])) or "1"
        fact = f"{self}: of {sizes}, t={degree} divides no factor"
        return PlanError(SITE, fact, "another dim, or leave it out")


Pins = dict[Node, Pin]


def read_shard(shard: Sequence[Mapping[str, Any]], axes: Sequence[str], default: str) -> dict[str, list[Pin]]:
    """Return the entries of a plan by mesh axis; those without an axis are about the `default`.

    PlanError for an entry that cannot be read, or whose axis is none of `axes`.
    """
    pins: dict[str, list[Pin]] = {axis: [] for axis in axes}
    for entry in shard:
        if not isinstance(entry, Mapping):
            raise PlanError(
                SITE, f"{entry!r} is no entry", f'a JSON object: {{"pattern": ..., "axis": "{default}"}}'
            )
        check_known(SITE, entry, ("pattern", "dim", "axis"))
        pattern, dim, axis = entry.get("pattern"), entry.get("dim"), entry.get("axis") or default
        if not isinstance(pattern, str) or not (dim is None or isinstance(dim, int)) or axis not in axes:
            example = json.dumps({"pattern": "h.*.mlp.c_fc.weight", "dim": 0, "axis": default})
            remedy = f"for example {example}, or dim null to keep it whole"
            raise PlanError(SITE, f"{dict(entry)} is no entry", remedy)
        pins[axis].append(Pin(pattern, dim))
    return pins


def find_pins(graph: Graph, shard: Sequence[Pin]) -> Pins:
    """Find the parameters that the entries of a plan name.

    Raises PlanError for an entry that names no parameter, a dim that the parameter does not have, and two entries that
    contradict each other.
    """
    parameters = {note(node).name: node for node in placeholders(graph, "param")}
    pins: Pins = {}
    for pin in shard:
        # A star is a number, not any text: "h.*.weight" must not take in "h.0.mlp.weight".
        pattern = re.compile(re.escape(pin.pattern).replace(r"\*", r"\d+"))
        matching = [
            node for name, node in parameters.items() if name == pin.pattern or pattern.fullmatch(name)
        ]
        if not matching:
            known = dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in parameters)
            raise PlanError(SITE, f"no parameter is called {pin.pattern}", nearest(pin.pattern, known))
        for node in matching:
            if pins.setdefault(node, pin).dim != pin.dim:
                raise PlanError(SITE, f"{pins[node]}, and {pin}", f"one of them for {note(node).name}")
            if pin.dim is not None and not 0 <= pin.dim < len(shape(node)):
                fact = f"{pin}: {note(node).name} has {len(shape(node))} dims"
                raise PlanError(SITE, fact, f"a dim below {len(shape(node))}")
    return pins


def keep_layouts(graph: Graph, layouts: Mapping[str, tuple[Any, ...]]) -> Pins:
    """Pin every parameter of the graph that `layouts` has, by name, to the layout given there."""
    pins: Pins = {}
    for node in placeholders(graph, "param"):
        name = note(node).name
        if name in layouts:
            layout = layouts[name]
            # An element layout begins with its dim; () is whole.
            pins[node] = Pin(name, layout[0] if layout else None, layout)
    return pins


def refuse_conflict(pins: Pins, is_possible: Callable[[Pins], bool]) -> PlanError:
    """Make the error that names a smallest set of pins which no plan keeps: one, two, or all of them.

    `is_possible` solves with some of the pins, which takes as long as solving the model.
    """
    # Pins, not parameters: one entry of a plan is one pin on all layers.
    each = list(dict.fromkeys(pins.values()))
    remedies = {
        1: "leave it out, or ask program.explain what it could be",
        2: "leave one of the two out",
    }
    for count, remedy in remedies.items():
        for subset in combinations(each, count):
            if not is_possible({node: pin for node, pin in pins.items() if pin in subset}):
                fact = " and ".join(map(str, subset))
                return PlanError(SITE, f"no plan has {fact}", remedy)
    return PlanError(SITE, f"no plan has {', '.join(map(str, each))} together", "leave some of them out")


__all__ = ["Pin", "Pins", "find_pins", "keep_layouts", "read_shard", "refuse_conflict"]
