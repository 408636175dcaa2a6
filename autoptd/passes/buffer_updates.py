"""Split buffer updates into parts that each microbatch computes and a rest that runs once, after the last
microbatch.

In: a TRACED graph with `update_buffer` before its output, and its second trace. Out: both traces without
updates, and `Updates`. All microbatches of a step read a buffer's value from before the step, as the single
call on one device does. A new value is computed from

- parts of sums over the batch: each microbatch keeps its part (`keep_part`), and the runtime adds the parts
  over all microbatches and replicas. Everything downstream of such a sum is computed once, from the whole
  sum, so it need not be linear in it;
- values that are the same for all microbatches (computed from parameters, or known before the first forward):
  the first microbatch keeps them;
- buffers and numbers alone: computed in the update itself.

An update that keeps rows of the batch is refused with the buffer's name, as it depends on how the batch is
divided, unless each replica has one microbatch.

    ours, whole, updates = split_updates(graph, whole, ctx)
    updates.buffers         # ("bn.running_mean", "bn.num_batches_tracked")
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autoptd.errors import PlanError
from autoptd.ir.layout import BATCH
from autoptd.ir.noise import is_draw
from autoptd.ir.notes import (
    Note,
    copy_nodes,
    note,
    op_name,
    ops,
    output,
    set_note,
    shape,
    site,
    tensor,
)
from autoptd.ir.updates import KEEP, UPDATE, Updates, keep_call, part_name
from autoptd.passes.axes.axes import Axes
from autoptd.passes.axes.constants import Constants
from autoptd.passes.context import Context
from autoptd.passes.samples import place_batch
from autoptd.passes.solve.batch_types import ALONE, ONE, MixedSamples, assign_batch, type_of

Split = tuple[Graph, Graph | None, Updates | None]


@dataclass
class _Plan:
    """Hold the positions of nodes computed in the update, and of parts with whether they are summed."""

    tail: set[int] = field(default_factory=set)
    parts: dict[int, bool] = field(default_factory=dict)


def split_updates(graph: Graph, whole: Graph | None, ctx: Context) -> Split:
    """Return both traces without updates, and the updates.

    Raises MixedSamples if an update needs all rows in one microbatch.
    """
    if not _chain(graph):
        return graph, whole, None
    if whole is not None and len(whole.nodes) != len(graph.nodes):
        fact = "its operators depend on the number of rows in the batch"
        raise PlanError("model", fact, f"the same operators for any number of rows, {ALONE}")
    plan = _find(graph, whole, ctx)
    ours, tail = _divide(graph, plan)
    if whole is None:
        return ours, None, tail
    theirs, of_all = _divide(whole, plan)
    for mine, other in zip(tail.parts, of_all.parts, strict=True):
        if shape(mine) != shape(other):
            fact = f"an update of a buffer keeps a value of shape {shape(mine)}, which depends on the number of rows"
            raise PlanError(site(mine), fact, f"a sum or mean over the batch, {ALONE}")
    # Numbers in the update are those for all rows of a step.
    return ours, theirs, tail if ctx.traces_all else of_all


def _chain(graph: Graph) -> list[Node]:
    return [node for node in ops(graph) if op_name(node) == UPDATE]


def _find(graph: Graph, whole: Graph | None, ctx: Context) -> _Plan:
    """Decide where every node that only updates read is computed."""
    trial, _ = copy_nodes(graph)
    chain = _chain(trial)
    of_loss = _ancestors([chain[0].args[0]])  # type: ignore[list-item]
    own = [node for node in ops(trial) if node not in of_loss and node not in chain]
    types = None
    if ctx.pieces > 1:
        types = _Types(trial, chain, [*own, *chain], ctx, _atom(graph, whole, ctx))
    plan, places = _Plan(), {node: i for i, node in enumerate(trial.nodes)}
    free, waiting, for_buffer = _free(trial), set[Node](), _readers(chain)

    def keep(part: Node, reader: Node) -> None:
        kind = "" if types is None else note(part).layout.batch.kind
        name = for_buffer[reader]
        if kind == "S" and not ctx.mixes:
            fact = f"the update of buffer {name} reads rows of the batch, and each microbatch has only some of them"
            raise MixedSamples(site(reader), fact, f"a sum or mean over the batch, {ONE}")
        if note(part).rows.is_largest:
            fact = f"the update of buffer {name} keeps the largest entries over the batch"
            raise MixedSamples(site(reader), fact, f"a sum or mean over the batch, {ONE}")
        if tensor(part).is_complex():
            fact = f"the update of buffer {name} keeps a complex number"
            raise PlanError(site(part), fact, "torch.view_as_real, and sums of that")
        plan.parts[places[part]] = kind == "P"

    # Include those that the loss reads, which every microbatch computes as well.
    plan.tail.update(places[node] for node in free if node.op == "call_function")
    for node in own:
        if is_draw(node):
            fact = f"the update of buffer {for_buffer[node]} draws random numbers"
            raise PlanError(site(node), fact, "pass them to the model as an input")
        read = node.all_input_nodes
        if node in free:
            continue
        if types is not None and _is_late(read, waiting):
            waiting.add(node)
            plan.tail.add(places[node])
            for arg in read:
                if arg not in waiting and arg not in free:
                    keep(arg, node)
        elif types is not None:
            types.fill(node, for_buffer[node])
    for update in chain:
        new = update.args[1]
        assert isinstance(new, Node)
        if new not in waiting and new not in free:
            keep(new, update)
    return plan


def _is_late(read: Sequence[Node], waiting: set[Node]) -> bool:
    """Tell whether an operator reads a sum over the batch that is known only after the last microbatch."""
    kinds = {note(arg).layout.batch.kind for arg in read if arg not in waiting}
    return not waiting.isdisjoint(read) or ("P" in kinds and "S" not in kinds)


class _Types:
    """The types over the batch of the nodes of a graph, those of its loss first."""

    def __init__(self, graph: Graph, chain: list[Node], own: list[Node], ctx: Context, atom: int) -> None:
        self._axes, self._constants, self._mixes = Axes(graph), Constants(ctx.buffers), ctx.mixes
        output(graph).args = (chain[0].args[0],)
        args = (graph, self._axes, set(ctx.batched), ctx.pieces, self._constants, atom)
        assign_batch(*args, mixes=ctx.mixes, but=set(own))

    def fill(self, node: Node, buffer: str) -> None:
        """Fill the type of a node that only updates read; if it has none, the error names the buffer."""
        # No gradient goes through it.
        note(node).needs_grad = False
        try:
            kind = type_of(node, self._axes, self._constants, self._mixes)
        except PlanError as error:
            fact = f"{error.fact} (for the update of buffer {buffer})"
            raise type(error)(error.site, fact, error.remedy) from error
        note(node).layout = note(node).layout.having(BATCH, kind)


def _atom(graph: Graph, whole: Graph | None, ctx: Context) -> int:
    """Return which atom of the inputs' dim 0 is the batch, by the loss alone."""
    bare = _without_updates(graph)
    Axes(bare)
    return place_batch(bare, replace(ctx, whole=None if whole is None else _without_updates(whole)))


def _without_updates(graph: Graph) -> Graph:
    bare, _ = copy_nodes(graph)
    output(bare).args = (_chain(bare)[0].args[0],)
    _drop_unread(bare)
    return bare


def _ancestors(nodes: list[Node], inner: Collection[Node] | None = None) -> set[Node]:
    """Return `nodes` and their ancestors; with `inner`, do not go past a node outside of it."""
    found, stack = set(nodes), list(nodes)
    while stack:
        node = stack.pop()
        for arg in node.all_input_nodes if inner is None or node in inner else ():
            if arg not in found:
                found.add(arg)
                stack.append(arg)
    return found


def _free(graph: Graph) -> set[Node]:
    """Return the nodes that depend only on buffers and numbers."""
    free: set[Node] = set()
    for node in graph.nodes:
        is_op = node.op == "call_function" and not is_draw(node)
        if note(node).kind == "buffer" or (is_op and all(arg in free for arg in node.all_input_nodes)):
            free.add(node)
    return free


def _readers(chain: list[Node]) -> dict[Node, str]:
    """Map every update and its ancestors to the buffer that is updated."""
    found: dict[Node, str] = {}
    for update in chain:
        found[update] = str(update.args[2])
        for node in _ancestors([update.args[1]]):  # type: ignore[list-item]
            found.setdefault(node, str(update.args[2]))
    return found


def _divide(graph: Graph, plan: _Plan) -> tuple[Graph, Updates]:
    """Return a copy of a graph that keeps the parts, and the updates computed from them."""
    copy, copies = copy_nodes(graph)
    nodes = list(graph.nodes)
    parts = {nodes[place]: is_sum for place, is_sum in plan.parts.items()}
    tail = _tail(graph, [nodes[place] for place in sorted(plan.tail)], parts)
    chain = [copies[node] for node in _chain(graph)]
    loss = chain[0].args[0]
    assert isinstance(loss, Node)
    of_loss = _ancestors([loss])
    last = output(copy)
    for number, (part, is_sum) in enumerate(parts.items()):
        with copy.inserting_before(last):
            made = keep_call(copy, loss, copies[part], number, is_sum)
        made.meta["val"] = tensor(loss)
        record = set_note(made, note(loss).bare())
        record.kind, record.name, record.code = "op", "", ""
        record.of_params = note(loss).of_params or note(copies[part]).of_params
        loss = made
    last.args = (loss,)
    _drop_unread(copy)
    _cut_gradients(copy, of_loss)
    return copy, tail


def _tail(graph: Graph, nodes: list[Node], parts: dict[Node, bool]) -> Updates:
    """Return the updates as a separate graph, computed from parts and old values."""
    tail, made = Graph(), dict[Node, Node]()
    chain = _chain(graph)
    # Values computed elsewhere are parts, which already exist.
    wanted = _ancestors([update.args[1] for update in chain], set(nodes))  # type: ignore[misc]

    def place(node: Node, kind: str, name: str) -> Node:
        made[node] = tail.placeholder(name.replace(".", "_"))
        made[node].meta["val"] = node.meta["val"]
        set_note(made[node], Note(kind=kind, name=name))
        return made[node]

    placed = [place(part, "part", part_name(number)) for number, part in enumerate(parts)]
    for node in graph.nodes:
        if note(node).kind == "buffer" and node in wanted:
            place(node, "buffer", note(node).name)
    for node in nodes:
        if node in wanted and node not in made:
            args, kwargs = map_arg((node.args, node.kwargs), made.__getitem__)
            made[node] = tail.call_function(node.target, args, kwargs)
            made[node].meta["val"] = node.meta["val"]
            set_note(made[node], note(node).copy())
    results = tuple(made[update.args[1]] for update in chain)  # type: ignore[index]
    set_note(tail.output(results), Note(kind="output"))
    names = tuple(str(update.args[2]) for update in chain)
    of_batch = [str(update.args[2]) for update in chain if _reads_batch(update.args[1])]  # type: ignore[arg-type]
    return Updates(tail, names, tuple(of_batch), tuple(placed), tuple(parts.values()))


def _reads_batch(node: Node) -> bool:
    return any(note(read).kind == "input" for read in _ancestors([node]))


def _drop_unread(graph: Graph) -> None:
    """Erase unread operators, parameters and buffers, but no inputs: a step is called with all of them."""
    for node in reversed(list(graph.nodes)):
        if node.op != "output" and not node.users and note(node).kind != "input":
            graph.erase_node(node)


def _cut_gradients(graph: Graph, of_loss: set[Node]) -> None:
    """Detach the values that only updates read."""
    for node in list(graph.nodes):
        record = note(node)
        readers = [user for user in node.users if user not in of_loss and user.op != "output"]
        if node not in of_loss and node.op != "output" and not _keeps(node):
            record.needs_grad = False
        elif record.needs_grad and node in of_loss:
            inner = [user for user in readers if not _keeps(user) or user.args[1] is node]
            _detach(graph, node, inner)


def _keeps(node: Node) -> bool:
    return node.op == "call_function" and op_name(node) == KEEP


def _detach(graph: Graph, node: Node, readers: list[Node]) -> None:
    if not readers:
        return
    with graph.inserting_after(node):
        made = graph.call_function(torch.ops.aten.detach.default, (node,))
    made.meta["val"] = tensor(node).detach()
    record = set_note(made, note(node).bare())
    record.kind, record.name, record.needs_grad = "op", "", False
    for reader in readers:
        if _keeps(reader):
            # The loss itself may be the part.
            reader.args = (reader.args[0], made, *reader.args[2:])
        else:
            reader.replace_input_with(node, made)


__all__ = ["split_updates"]
