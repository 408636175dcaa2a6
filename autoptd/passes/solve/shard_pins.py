"""Pin the sharding of parameters: the key `shard` of a plan.

In: entries `{"pattern": "transformer.h.*.mlp.c_fc.weight", "dim": 0, "axis": "tp"}`; a star stands for a number, `"dim": null`
for a parameter that is kept whole; without an axis, an entry is about the axis that splits parameters. Out: for every
parameter that matches a pattern, the `Pin` that restricts its strategies over the axis. The solver decides all others. Pins
that no plan can keep are refused; if two exclude each other, the error names both.

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
    """One entry of a plan: parameters that match `pattern` are sharded along `dim`, or whole if it is None."""

    pattern: str
    dim: int | None
    # The places of its elements on the ranks (`Layout.element_layout`), if the layout of another program is kept.
    layout: tuple[object, ...] | None = None

    def __str__(self) -> str:
        if self.layout is not None:
            return f"{self.pattern} stored as in training {self.layout}"
        return f"{self.pattern} {'whole' if self.dim is None else f'split along dim {self.dim}'}"

    @property
    def where(self) -> str:
        """The pinned layout without the parameter's name: layers stay tied if these are equal."""
        return repr((self.dim, self.layout))

    def allows(self, layout: Layout, dims: Dims, mesh: Mesh) -> bool:
        """Tell whether a parameter with these dims may be stored in a layout."""
        if layout.sharded_dims != (set() if self.dim is None else {self.dim}):
            return False
        return self.layout is None or layout.element_layout(dims, mesh) == self.layout

    def refused(self, dims: Dims, degree: int) -> PlanError:
        """Make the error for a pin that no layout over `degree` ranks satisfies."""
        sizes = " x ".join(map(str, dims[self.dim or 0])) or "1"
        fact = f"{self}: t={degree} divides no factor of {sizes}"
        return PlanError(SITE, fact, "another dim, or remove the entry")


Pins = dict[Node, Pin]


def read_shard(shard: Sequence[Mapping[str, Any]], axes: Sequence[str], default: str) -> dict[str, list[Pin]]:
    """Return the entries of a plan by mesh axis; those without an axis are about the `default`.

    Raises PlanError for an invalid entry, or one whose axis is not in `axes`.
    """
    pins: dict[str, list[Pin]] = {axis: [] for axis in axes}
    for entry in shard:
        if not isinstance(entry, Mapping):
            remedy = f'a JSON object: {{"pattern": ..., "axis": "{default}"}}'
            raise PlanError(SITE, f"invalid entry {entry!r}", remedy)
        check_known(SITE, entry, ("pattern", "dim", "axis"))
        pattern, dim, axis = entry.get("pattern"), entry.get("dim"), entry.get("axis") or default
        if not isinstance(pattern, str) or not (dim is None or isinstance(dim, int)) or axis not in axes:
            example = json.dumps({"pattern": "h.*.mlp.c_fc.weight", "dim": 0, "axis": default})
            remedy = f"for example {example}, or dim null to keep it whole"
            raise PlanError(SITE, f"invalid entry {dict(entry)}", remedy)
        pins[axis].append(Pin(pattern, dim))
    return pins


def find_pins(graph: Graph, shard: Sequence[Pin]) -> Pins:
    """Find the parameters that match the entries of a plan.

    Raises PlanError for an entry that matches no parameter, a dim that the parameter does not have, and two entries that
    contradict each other.
    """
    parameters = {note(node).name: node for node in placeholders(graph, "param")}
    pins: Pins = {}
    for pin in shard:
        # A star is a number, not any text: "h.*.weight" must not match "h.0.mlp.weight".
        pattern = re.compile(re.escape(pin.pattern).replace(r"\*", r"\d+"))
        matching = [
            node for name, node in parameters.items() if name == pin.pattern or pattern.fullmatch(name)
        ]
        if not matching:
            known = dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in parameters)
            raise PlanError(SITE, f"no parameter matches {pin.pattern}", nearest(pin.pattern, known))
        for node in matching:
            if pins.setdefault(node, pin).dim != pin.dim:
                raise PlanError(SITE, f"{pins[node]}, and {pin}", f"one of them for {note(node).name}")
            if pin.dim is not None and not 0 <= pin.dim < len(shape(node)):
                fact = f"{pin}: {note(node).name} has {len(shape(node))} dims"
                raise PlanError(SITE, fact, f"a dim below {len(shape(node))}")
    return pins


def keep_layouts(graph: Graph, layouts: Mapping[str, tuple[Any, ...]]) -> Pins:
    """Pin every parameter of the graph whose name is in `layouts` to the layout given there."""
    pins: Pins = {}
    for node in placeholders(graph, "param"):
        name = note(node).name
        if name in layouts:
            layout = layouts[name]
            # An element layout begins with its dim; () is whole.
            pins[node] = Pin(name, layout[0] if layout else None, layout)
    return pins


def refuse_conflict(pins: Pins, is_possible: Callable[[Pins], bool]) -> PlanError:
    """Make the error that names a smallest set of pins that no plan satisfies: one, two, or all of them.

    `is_possible` solves with some of the pins, which takes as long as solving the model.
    """
    # Pins, not parameters: one entry of a plan is one pin for all layers.
    each = list(dict.fromkeys(pins.values()))
    remedies = {
        1: "remove it; program.explain shows the alternatives",
        2: "remove one of the two",
    }
    for count, remedy in remedies.items():
        for subset in combinations(each, count):
            if not is_possible({node: pin for node, pin in pins.items() if pin in subset}):
                fact = " and ".join(map(str, subset))
                return PlanError(SITE, f"no plan satisfies {fact}", remedy)
    return PlanError(SITE, f"no plan satisfies {', '.join(map(str, each))} together", "remove some of them")


__all__ = ["Pin", "Pins", "find_pins", "keep_layouts", "read_shard", "refuse_conflict"]
