"""TRACED to CUT: every value gets its type over tp, every node its stage.

In: what was traced and is to be placed (`Traced`), and options. Out: a graph with its cut, and what was found out about it.
`fit` calls `place` with rising prices of memory until a rank's bytes fit.

    placed = place(traced, options, forms.add, memory_price=0.0)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from torch.fx import Graph

from autoptd import passes, schedule
from autoptd.batch import Batch
from autoptd.errors import PlanError
from autoptd.ir.actions import Kind, Orders, ranks_of_stages
from autoptd.ir.buffers import Buffers
from autoptd.ir.fallback import Fallback
from autoptd.ir.machine import Machine
from autoptd.ir.notes import copy_graph
from autoptd.ir.plan import Plan
from autoptd.ir.sizes import Sizes
from autoptd.options import Options
from autoptd.program.costs import Cut
from autoptd.program.program import Program
from autoptd.program.weighed import weighed_record

Keep = Callable[[str, Graph], None]


@dataclass(frozen=True)
class Traced:
    """A TRACED graph, and what its placement depends on beside the options.

    `whole` is a second trace with all rows of the batch (None where it is not split), `batched` names the inputs that carry it.
    With `like`, a program of the same model, parameters are stored and layers cut as there.
    """

    graph: Graph
    whole: Graph | None
    buffers: Buffers
    batched: set[str]
    batch: Batch
    orders: Orders
    like: Program | None = None

    @cached_property
    def live(self) -> list[tuple[int, ...]]:
        """How many microbatches are in flight on the stages of each rank, at the moments when they are most."""
        return schedule.live_moments(self.orders)


class Connected(NamedTuple):
    """What was found out about a graph in which everything has its type over tp."""

    assignment: passes.Assignment
    fallbacks: list[Fallback]
    groups: passes.Groups
    sizes: Sizes


class Placed(NamedTuple):
    """A graph in which everything has its type over tp and its stage."""

    graph: Graph
    connected: Connected
    cut: Cut


def place(traced: Traced, options: Options, keep: Keep, memory_price: float) -> Placed:
    """TRACED to CUT, where every byte that a rank holds costs `memory_price` seconds more; TooFull if it does not fit."""
    options, like, orders = replace(options, memory_price=memory_price), traced.like, traced.orders
    graph, connected = connect(traced, options, keep)
    cut = passes.cut(
        graph,
        ranks_of_stages(orders),
        connected.sizes,
        price_of_memory(options, traced),
        live=traced.live,
        finish=schedule.finish_of(orders),
        main_grads=options.accumulate_allreduce_grads_in_fp32,
        pinned=options.plan.cut if like is None else like.plan["cut"],
        like=None if like is None else like.graphs["CUT"],
    )
    keep("CUT", graph)
    return Placed(graph, connected, cut)


def price_of_memory(options: Options, traced: Traced) -> Machine:
    """The machine that plans are weighed for, with what each byte that a rank holds costs beside."""
    batch = traced.batch
    in_flight = max(map(max, traced.live)) * batch.rows / batch.traced_rows
    return passes.price_memory(options.rank_machine, options.memory_price or 0.0, in_flight)


def connect(traced: Traced, options: Options, keep: Keep = lambda form, graph: None) -> tuple[Graph, Connected]:
    """TRACED to CONNECTED, on a copy; `keep` is shown the forms."""
    graph, batch = copy_graph(traced.graph), traced.batch
    axes, assignment = passes.annotate(
        graph,
        traced.whole,
        traced.buffers,
        traced.batched,
        batch.pieces,
        options.mesh,
        price_of_memory(options, traced),
        sequence_parallel=options.sequence_parallel,
        shard=options.plan.shard,
        layouts=None if traced.like is None else layouts_of(traced.like),
    )
    keep("ANNOTATED", graph)

    found = passes.fallbacks(graph)  # FLOPs of the traced rows
    fallbacks = [replace(one, flops=one.flops * batch.rows // batch.traced_rows) for one in found]
    passes.communicate(graph, assignment, batch.pieces, options.mesh)
    passes.check_connected(graph, axes, assignment.axis, options.mesh)
    groups = passes.find_fusions(graph, traced.buffers, options.fuse or False, options.fuse_only)
    keep("CONNECTED", graph)
    sizes = Sizes(options.mesh, batch.traced_rows, batch.rows, batch.pieces)
    return graph, Connected(assignment, fallbacks, groups, sizes)


def weigh_known(traced: Traced, found: Graph, options: Options, sizes: Sizes) -> dict[str, Any] | None:
    """What was found beside the plans that people know, where tokens may be split by price."""
    if options.t == 1 or options.sequence_parallel != "auto":
        return None
    machine = options.rank_machine
    weights, missing = {"auto": passes.weigh(found, sizes, machine)}, {}
    for known in (True, False):
        try:
            graph, _ = connect(traced, replace(options, sequence_parallel=known, plan=Plan()))
        except PlanError as error:
            missing[str(known)] = error.fact
        else:
            weights[str(known)] = passes.weigh(graph, sizes, machine)
    return weighed_record(weights, missing)


def layouts_of(program: Program) -> dict[str, tuple[Any, ...]]:
    """Where the elements of every parameter lie on the tensor ranks, by first name."""
    return {spec.name: spec.placement(program.mesh) for spec in program.params}


def has_weight_gradients(orders: Orders) -> bool:
    """Whether the schedule has actions for the weights' gradients."""
    return any(action.kind is Kind.W for order in orders for action in order)
