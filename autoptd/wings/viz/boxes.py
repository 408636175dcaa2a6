"""What a picture of operators is made of: boxes of operators, and what flows from one to another.

In: nodes of a LOCAL graph, in order, and what each communicates. Out: `Box`es with their operators,
parameters and collectives; small operators of one module that follow each other share a box.

    adder = BoxAdder(0, "s0", boxes=[], made={})
    adder.add(linear, stage=0, likes={})
    adder.boxes[0].params[0][0]         # "weight"
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Node

from autoptd.ir import markers
from autoptd.ir.notes import note
from autoptd.ir.operators.table import operator_of
from autoptd.program.specs import Collective
from autoptd.wings.viz.alike import Like, layer_of
from autoptd.wings.viz.node_calls import Calls
from autoptd.wings.viz.views import hidden_inputs, origin

# Name in the operator's module, placeholder, conversion or None.
Param = tuple[str, Node, Node | None]
# The box of every node that is drawn, by (stage or number of the layer drawn apart, node).
Home = dict[tuple[int, Node], str]


@dataclass
class Box:
    """One thing to draw, in column `column`.

    `layer` and `part` (attn, mlp, ...) are the frames around it, "" for none.

    `nodes` are the operators it stands for; `folded` are the layers drawn as this one box, in order, and what
    each equals.
    """

    id: str
    column: int
    layer: str
    part: str
    nodes: list[Node]
    params: tuple[Param, ...] = ()
    folded: dict[str, Like] = field(default_factory=dict)
    calls: list[Collective] = field(default_factory=list)

    @property
    def is_input(self) -> bool:
        return self.nodes[0].op == "placeholder"

    @property
    def is_received(self) -> bool:
        """Whether it is a value of another stage, or of what comes before a layer that is drawn apart."""
        return self.id.startswith("from_")

    @property
    def sent_to(self) -> int:
        """The stage that a value goes to, in the picture of one stage alone; else -1."""
        return int(self.id.split("_")[1][1:]) if self.id.startswith("to_") else -1


@dataclass(frozen=True)
class Edge:
    """`value` flows from box `source` to box `target`.

    `crosses`: it is sent to another column, where a box receives it.
    """

    source: str
    target: str
    value: Node
    crosses: bool = False
    calls: tuple[Collective, ...] = ()


@dataclass
class BoxAdder:
    """Puts the shown operators of a column into boxes, in order; `made` are collectives not yet in one."""

    column: int
    prefix: str
    boxes: list[Box]
    made: Calls

    def add(self, node: Node, stage: int, likes: dict[str, Like]) -> None:
        """Put `node` into the box of its folded layer, into the last box if both are small and of one module,
        or its own.
        """
        layer = layer_of(node)
        before = self.boxes[-1] if self.boxes else None
        if layer in likes:
            if before is None or not before.folded:
                before = self._new(node)
            # One box stands for all folded layers in a row.
            before.folded.setdefault(layer, likes[layer])
            before.nodes.append(node)
            before.params += _params(node)
        elif before and not before.folded and _can_join(before.nodes[-1], node):
            before.nodes.append(node)
            known = before.params
            before.params += tuple(param for param in _params(node) if param not in known)
        else:
            before = self._new(node)
            inner = note(node).module.removeprefix(layer).removeprefix(".") if layer else ""
            before.layer, before.part = layer, inner.partition(".")[0]
            before.nodes.append(node)
            before.params = _params(node)
        # A conversion of a parameter has no box: its reader shows what it communicates.
        for maker in (*hidden_inputs(node), node):
            before.calls += self.made.pop((maker, stage), ())

    def _new(self, node: Node) -> Box:
        self.boxes.append(Box(f"{self.prefix}_{node.name}", self.column, "", "", []))
        return self.boxes[-1]


def _can_join(before: Node, node: Node) -> bool:
    """Tell whether two operators that follow each other share a box: small ones of one module, so that no
    cycle arises.
    """
    is_small = before.op == node.op == "call_function" and not (_is_alone(before) or _is_alone(node))
    same = note(before).module == note(node).module and note(before).of_params == note(node).of_params
    return is_small and same and bool(note(node).module) and _kinds(before) == _kinds(node)


def _is_alone(node: Node) -> bool:
    """Tell whether an operator is never merged with its neighbours into one box: products, look-ups,
    losses, conversions.
    """
    record = operator_of(node)
    is_large = bool(record.factors or record.flops) or record.is_lookup or record.keeps == "probabilities"
    return is_large or node.target is markers.convert


def _kinds(node: Node) -> list[str]:
    return [kind.kind for _, kind in note(node).layout.over_mesh]


def _params(node: Node) -> tuple[Param, ...]:
    found: dict[Node, Param] = {}
    for arg in node.all_input_nodes:
        # Through views and conversions: the reader of a transposed weight still reads that weight.
        source = origin(arg)
        if note(source).kind in ("param", "buffer"):
            name = note(source).name
            own = name.removeprefix(note(node).module + ".")
            conversion = arg if note(arg).conversion else None
            found.setdefault(source, (own if "." not in own else name, source, conversion))
    return tuple(found.values())


def given_by(arg: Node, place: int, home: Home) -> str | None:
    """Return the box that gives an operand in a stage or a layer, through its views; None for parameters."""
    while (place, arg) not in home and arg.op == "call_function" and arg.all_input_nodes:
        arg = arg.all_input_nodes[0]
    return home.get((place, arg))


def inner_edges(boxes: list[Box], place: int, home: Home) -> list[Edge]:
    """Return what flows between boxes of operators of one stage or layer; one edge for each two boxes."""
    edges: dict[tuple[str, str], Edge] = {}
    for box in boxes:
        operands: list[Node] = []
        for node in box.nodes:
            operands += node.all_input_nodes
        for arg in operands:
            source = given_by(arg, place, home)
            if source is not None and source != box.id:
                # Several values between two boxes are one arrow, or a fused q, k, v would be three.
                edges.setdefault((source, box.id), Edge(source, box.id, arg))
    return list(edges.values())


__all__ = ["Box", "BoxAdder", "Edge", "Home", "Param", "given_by", "inner_edges"]
