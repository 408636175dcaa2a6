"""Write the sums of a stage before the first forward: the counts that weighted means divide by, and batch
sums.

In: the losses and batch sums of a stage. Out: methods that compute them from the inputs of one microbatch:

    def count(self, targets):
        return (rt.count_labels(targets, ignore_index=-100),)

    def batch_sums_0(self, mask):
        return {0: mask.sum()}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch.fx import Node

from autoptd.codegen.expressions import bound_axes, expression
from autoptd.codegen.names import choose_names, operand_text
from autoptd.codegen.writer import Writer
from autoptd.errors import InternalError
from autoptd.ir import markers
from autoptd.ir.notes import note, site

# The names of the sum of counts, and of the values gathered for it.
COUNT_SITE = "count of labels"


def counted_losses(body: list[Node]) -> list[Node]:
    """Return the losses of a stage that divide by a count."""
    losses = (markers.cross_entropy, markers.FUSED["linear_cross_entropy"])
    # -1: a sum, or a loss per token, which divides by nothing.
    return [node for node in body if node.target in losses and node.kwargs["total"] != -1]


def labels_of(loss: Node) -> list[Node]:
    """Return the labels of a loss, and the weights of their classes where it has them."""
    # The fused loss has other operands instead of class weights.
    read = loss.args[1:] if loss.target is markers.cross_entropy else loss.args[1:2]
    return [arg for arg in read if isinstance(arg, Node)]


def write_count(writer: Writer, counted: list[Node], given: dict[Node, str]) -> None:
    """Write the method that maps the labels of one microbatch to its counts; `given` are the stage's inputs."""
    about = "Number (or class weight) of the valid labels of one microbatch."
    text = _begin(writer, "count", about, _counted_of(counted), given)
    calls = [_count_call(node, text) for node in counted]
    if any(note(node).rows.counted_by > 1 for node in counted):
        writer.comment(2, "Every replica counts the labels of all rows: each takes an equal part.")
    writer.add(2, f"return ({', '.join(calls)},)")


def _counted_of(counted: list[Node]) -> list[Node]:
    """Return the operands of the counts of some losses: labels, which depend only on inputs and buffers."""
    return [markers.unconverted(arg) for node in counted for arg in labels_of(node)]


def count_conversions(counted: list[Node]) -> list[Node]:
    """Return the conversions that `count` makes: labels of all rows are gathered over the replicas."""
    return [node for node in _computation_of(_counted_of(counted)) if node.target is markers.convert]


def batch_sums(nodes: Sequence[Node]) -> list[list[Node]]:
    """Return the batch sums among some operators, by the rounds in which they are known."""
    sums = [node for node in nodes if node.target is markers.batch_sum]
    last = max((note(node).rows.round for node in sums), default=-1)
    rounds: list[list[Node]] = [[] for _ in range(last + 1)]
    for node in sums:
        rounds[note(node).rows.round].append(node)
    return rounds


def write_sums(writer: Writer, number: int, sums: list[Node], given: dict[Node, str]) -> None:
    """Write the method of a round, from the inputs of one microbatch to its part of every sum, by number."""
    summed: list[Node] = [node.args[0] for node in sums]  # type: ignore[misc]
    about = "This microbatch's part of the sums over the batch, computed before the first forward."
    text = _begin(writer, f"batch_sums_{number}", about, summed, given)
    parts = []
    for node, part in zip(sums, summed, strict=True):
        shown = f"rt.Largest({text(part)})" if note(node).rows.is_largest else text(part)
        parts.append(f"{node.args[1]}: {shown}")
    writer.add(2, f"return {{{', '.join(parts)}}}")


def _begin(
    writer: Writer, name: str, about: str, values: list[Node], given: dict[Node, str]
) -> Callable[[Node], str]:
    """Write a method up to the computation of some values; return the function that prints its values."""
    needed = _computation_of(values)
    for value in values:
        # Every rank along an axis that splits values must count all entries.
        for axis, _ in note(value).layout.shards:
            raise InternalError(
                site(value), f"{name} would count only a part of the values: {axis} divides them"
            )
    inputs = {node: name for node, name in given.items() if node.op == "placeholder"}
    names = choose_names(needed, inputs, values)

    text = partial(operand_text, names=names)
    read = set(values)
    for node in needed:
        read.update(node.all_input_nodes)
    writer.gap()
    writer.add(1, f"def {name}({', '.join(['self', *inputs.values()])}):")
    writer.docstring(about)
    writer.bind(bound_axes(needed))
    if any(note(arg).kind == "buffer" for arg in read):
        writer.add(2, "b = self.buffers")
    where = f'"{COUNT_SITE}"'
    for node in needed:
        writer.add(2, f"{names[node]} = {expression(node, text, where)}")
    return text


def _computation_of(values: list[Node]) -> list[Node]:
    """Return the operators that compute some values from placeholders, in an executable order.

    The operands of batch sums are not among them, as these sums are already known.
    """
    needed: list[Node] = []

    def visit(node: Node) -> None:
        if node.op == "call_function" and node not in needed:
            for arg in node.all_input_nodes if node.target is not markers.batch_sum else ():
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
        keywords += f", weight={text(markers.unconverted(weights[0]))}"
    count = f"rt.count_labels({text(markers.unconverted(targets))}, {keywords})"
    counted_by = note(loss).rows.counted_by
    return f"{count} / {counted_by}" if counted_by > 1 else count
