"""Write `count` of a loss stage: the counts that weighted means divide by, needed before the first forward.

In: the losses of a stage. Out: a method that computes their counts from the labels of one microbatch:

    def count(self, targets):
        return (rt.count_labels(targets, ignore_index=-100),)
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Node

from autoptd.codegen.expressions import expression
from autoptd.codegen.names import choose_names, operand_text
from autoptd.codegen.writer import Writer
from autoptd.ir import markers
from autoptd.ir.notes import note


def counted_losses(body: list[Node]) -> list[Node]:
    """Return the losses of a stage that divide by a count."""
    losses = (markers.cross_entropy, markers.FUSED["linear_cross_entropy"])
    # -1: a sum, or a loss per token, which divides by nothing.
    return [node for node in body if node.target in losses and node.kwargs["total"] != -1]


def labels_of(loss: Node) -> list[Node]:
    """Return the labels of a loss, and the weights of their classes where it has them."""
    # The fused loss has its other operands in the place of class weights.
    read = loss.args[1:] if loss.target is markers.cross_entropy else loss.args[1:2]
    return [arg for arg in read if isinstance(arg, Node)]


def write_count(writer: Writer, counted: list[Node], given: dict[Node, str]) -> None:
    """Write the method, from the labels of one microbatch to the tuple of its counts; `given` are the stage's inputs."""
    # Labels depend on inputs and buffers alone, so they can be counted before any stage has run.
    counted_of = [_whole(arg) for node in counted for arg in labels_of(node)]
    needed = _computation_of(counted_of)
    inputs = {node: name for node, name in given.items() if node.op == "placeholder"}
    names = choose_names(needed, inputs, counted_of)

    def text(node: Node) -> str:
        return operand_text(node, names)

    read = set(counted_of)
    for node in needed:
        read.update(node.all_input_nodes)
    writer.gap()
    writer.add(1, f"def count(self, {', '.join(inputs.values())}):")
    writer.add(2, '"""Number (or class weight) of the valid labels of one microbatch."""')
    if any(note(arg).kind == "buffer" for arg in read):
        writer.add(2, "b = self.buffers")
    for node in needed:
        writer.add(2, f"{names[node]} = {expression(node, text)}")
    calls = [_count_call(node, text) for node in counted]
    writer.add(2, f"return ({', '.join(calls)},)")


def _computation_of(values: list[Node]) -> list[Node]:
    """Return the operators that compute some values from placeholders, in an order in which they can run."""
    needed: list[Node] = []

    def visit(node: Node) -> None:
        if node.op == "call_function" and node not in needed:
            for arg in node.all_input_nodes:
                visit(arg)
            needed.append(node)

    for node in values:
        visit(node)
    return needed


def _count_call(loss: Node, text: Callable[[Node], str]) -> str:
    """Return `rt.count_labels(targets, ignore_index=-100)`."""
    targets, *weights = labels_of(loss)
    keywords = f"ignore_index={loss.kwargs['ignore_index']}"
    if weights:
        keywords += f", weight={text(_whole(weights[0]))}"
    return f"rt.count_labels({text(_whole(targets))}, {keywords})"


def _whole(node: Node) -> Node:
    """Return a value as it is before its conversions: of all labels, which are counted without communication."""
    while node.target is markers.convert:
        node = node.args[0]  # type: ignore[assignment]
    return node
