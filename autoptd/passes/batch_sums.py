"""Give readers sums over the whole batch, and numbers that depend on its size (CONNECTED -> CONNECTED).

In: a graph whose readers list in their notes the operands that they read as batch sums
(`solve/batch_types.py`). Out: a `markers.batch_sum` after every such value, of type I over the batch.
`number_sums` numbers them once stages are known.

A batch sum may be computed from others (a variance from a mean): those are known one *round* earlier.

    read_batch_sums(graph, ctx)     # mask.sum() -> batch_sum(mask.sum())
    number_sums(graph)              # -> batch_sum(mask.sum(), 0), in round 0
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Graph, Node

from autoptd.ir import markers
from autoptd.ir.facts import Rows
from autoptd.ir.layout import BATCH
from autoptd.ir.notes import note, ops, set_note
from autoptd.ir.types import I
from autoptd.passes.communicate import check_over_batch
from autoptd.passes.context import Context
from autoptd.passes.runner import CALLS, Form, divides_rows, graph_pass


@graph_pass(takes=Form.ANNOTATED, gives=Form.ANNOTATED, when=divides_rows, changes=(CALLS,))
def take_whole_numbers(graph: Graph, ctx: Context) -> None:
    """Replace numbers that depend on the batch size by those of the whole batch."""
    for node in ops(graph):
        if (call := note(node).rows.whole_call) is not None:
            node.args, node.kwargs = call


@graph_pass(
    takes=Form.CONNECTED, gives=Form.CONNECTED, when=divides_rows, changes=(CALLS,), ensures=check_over_batch
)
def read_batch_sums(graph: Graph, ctx: Context) -> None:
    """Insert the markers before the conversions of the sums that readers need."""
    made: dict[Node, Node] = {}
    for reader in list(ops(graph)):
        wanted = note(reader).rows.sums
        for arg in list(reader.all_input_nodes) if wanted else ():
            if markers.unconverted(arg) in wanted:
                reader.replace_input_with(arg, _sum_of(graph, arg, made))
    # Conversions that only the readers of the sums used are dead now.
    for arg in reversed(list(made)):
        if arg.target is markers.convert and not arg.users:
            graph.erase_node(arg)


def _sum_of(graph: Graph, arg: Node, made: dict[Node, Node]) -> Node:
    """Return the batch sum of a value, converted over other axes like the value itself."""
    if arg in made:
        return made[arg]
    if arg.target is markers.convert:
        source = _sum_of(graph, arg.args[0], made)  # type: ignore[arg-type]
        args, target = (source, *arg.args[1:]), arg.target
    else:
        args, target = (arg,), markers.batch_sum
    with graph.inserting_after(arg):
        result = graph.call_function(target, args, arg.kwargs if arg.target is markers.convert else {})
    result.meta["val"] = arg.meta["val"]
    record = set_note(result, note(arg).bare())
    record.kind, record.layout = "op", record.layout.having(BATCH, I)
    is_largest = note(arg).rows.is_largest
    record.forms, record.rows = {}, Rows(is_largest=is_largest)
    if target is markers.batch_sum:
        what = "the largest entries of" if is_largest else "a sum over"
        record.why = f"{what} the whole batch, known before the first forward"
    made[arg] = result
    return result


def number_sums(graph: Graph) -> None:
    """Number the batch sums and note the round in which each is computed."""
    rounds: dict[Node, int] = {}
    number = 0
    for node in graph.nodes:
        # The last round among the sums that it is computed from.
        known = max((rounds[read] for read in node.all_input_nodes), default=0)
        rounds[node] = known
        if node.target is markers.batch_sum:
            node.args = (node.args[0], number)
            note(node).rows = replace(note(node).rows, round=known)
            rounds[node], number = known + 1, number + 1


__all__ = ["number_sums", "read_batch_sums", "take_whole_numbers"]
