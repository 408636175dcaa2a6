"""Write `count` of a loss stage: the counts that weighted means divide by, needed before the first forward.

In: the losses of a stage. Out: a method that computes their counts from the labels of one microbatch:

    def count(self, targets):
        return (rt.count_labels(targets, ignore_index=-100),)
"""

from __future__ import annotations

from torch.fx import Node

from autoptd.codegen.expressions import expression
from autoptd.codegen.names import choose_names
from autoptd.codegen.writer import Writer, weight_text
from autoptd.ir import markers
from autoptd.ir.notes import note


def counted_losses(body: list[Node]) -> list[Node]:
    """Return the losses of a stage that divide by a count."""
    losses = (markers.cross_entropy, markers.FUSED["linear_cross_entropy"])
    return [node for node in body if node.target in losses and node.kwargs["total"] != -1]


def labels_of(loss: Node) -> list[Node]:
    """Return the labels of a loss, and the weights of their classes where it has them."""
    # The fused loss has its other operands in the place of class weights.
    read = loss.args[1:] if loss.target is markers.cross_entropy else loss.args[1:2]
    return [arg for arg in read if isinstance(arg, Node)]


def write_count(writer: Writer, counted: list[Node], given: dict[Node, str]) -> None:
    """Write the method, from the labels of one microbatch to the tuple of its counts; `given` are the stage's inputs."""
    needed: list[Node] = []

    def visit(node: Node) -> None:
        if node.op == "call_function" and node not in needed:
            for arg in node.all_input_nodes:
                visit(arg)
            needed.append(node)

    inputs = {node: name for node, name in given.items() if node.op == "placeholder"}
    for node in counted:
        for arg in labels_of(node):
            visit(_whole(arg))
    counted_of = [_whole(arg) for node in counted for arg in labels_of(node)]
    read = [*counted_of, *(arg for node in needed for arg in node.all_input_nodes)]
    names = choose_names(needed, inputs, counted_of)

    def text(node: Node) -> str:
        return names.get(node) or weight_text("w" if note(node).kind == "param" else "b", note(node).name)

    writer.gap()
    writer.add(1, f"def count(self, {', '.join(inputs.values())}):")
    writer.add(2, '"""Number (or class weight) of the valid labels of one microbatch."""')
    if any(note(arg).kind == "buffer" for arg in read):
        writer.add(2, "b = self.buffers")
    for node in needed:
        writer.add(2, f"{names[node]} = {expression(node, text)}")
    calls = []
    for node in counted:
        targets, *weights = labels_of(node)
        keywords = f"ignore_index={node.kwargs['ignore_index']}"
        keywords += f", weight={text(_whole(weights[0]))}" if weights else ""
        calls.append(f"rt.count_labels({text(_whole(targets))}, {keywords})")
    writer.add(2, f"return ({', '.join(calls)},)")


def _whole(node: Node) -> Node:
    """Return a value as it is before its conversion: counts need no communication."""
    return node.args[0] if node.target is markers.convert else node  # type: ignore[return-value]
