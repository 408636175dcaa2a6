"""Cut the model into p*v stages so that the busiest pipeline rank is least busy (CONNECTED -> CUT).

Values that depend on parameters and inputs (the *backbone*) are placed in model order; what becomes of all other values, and
of those that cross, is decided in `crossing.py`. A parameter lives on every stage that reads it: its owner set.

Cut points are the positions in backbone order with GEMMs on both sides where few bytes cross; of those with the same GEMMs
before them the thinnest. A stage costs its operators' seconds on one rank, embedding, head and loss included, and the
messages that it sends and receives; a rank holds parameters with their state, and what backward needs of the microbatches
in flight (`memory.py`). `balance.py` chooses: for the busiest rank, then for the simulated schedule. Whole layers stay
together unless cutting inside of one makes a step faster by more than 5%, or is what it takes to fit. A plan may pin the cuts
instead (`stages/cut_pins.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch.fx import Graph, Node

from autoptd.errors import InternalError, PlanError
from autoptd.ir.machine import Machine
from autoptd.ir.mesh import Mesh
from autoptd.ir.notes import is_tensor, note, op_name, output
from autoptd.ir.sizes import Sizes
from autoptd.passes.context import Context
from autoptd.passes.ops.costs import flops, local_payload, rank_seconds
from autoptd.passes.runner import Form, graph_pass
from autoptd.passes.stages.balance import Cuts, Line, Value, evaluate, least_memory, place
from autoptd.passes.stages.crossing import is_never_computed_again, place_values
from autoptd.passes.stages.cut_pins import Places, layer_of
from autoptd.passes.stages.memory import count_bytes
from autoptd.program.costs import Cut

WORTH = 0.95  # cutting inside a layer must bring the busiest rank's time down to this share
GIB = 1 << 30


class TooFull(PlanError):
    """No cut leaves every rank within its memory."""


@dataclass(frozen=True)
class Point:
    """A place to cut: behind operator `at` of the backbone, where `nbytes` cross."""

    at: int
    nbytes: float
    between_layers: bool


@graph_pass(
    takes=Form.CONNECTED,
    gives=Form.CUT,
    changes=("stages", "placement"),
    finds=("cut",),
    ensures=lambda graph, ctx: check_cut(graph, len(ctx.ranks)),
)
def cut(graph: Graph, ctx: Context) -> None:
    """Fill `note(node).stages` and `placement`; finds where it was cut, why, and what it costs."""
    backbone = find_backbone(graph)
    wanted = _wanted_cuts(backbone, ctx)
    chooser = _Chooser(graph, backbone, ctx)
    cuts, why = chooser.choose() if wanted is None else chooser.follow(wanted)
    bounds = [-1, *cuts.chosen, len(backbone) - 1]
    home = {node: k for k, (a, b) in enumerate(pairwise(bounds)) for node in backbone[a + 1 : b + 1]}
    place_values(graph, home, ctx.mesh, ctx.machine)
    if wanted is not None:
        _check_pinned(backbone, len(ctx.ranks))
    pieces, places = [slice(a + 1, b + 1) for a, b in pairwise(bounds)], Places(backbone)
    ctx.found.cut = Cut(
        after=tuple(places.name(i) for i in cuts.chosen),
        why=why,
        flops=tuple(sum(map(flops, backbone[piece])) for piece in pieces),
        seconds=tuple(sum(chooser.line.work[piece]) for piece in pieces),
        saved_bytes=tuple(sum(chooser.line.saved[piece]) for piece in pieces),
        rank_seconds=tuple(cuts.loads),
        rank_bytes=tuple(cuts.held),
        finish=cuts.finish,
    )


def _wanted_cuts(backbone: list[Node], ctx: Context) -> Sequence[int] | None:
    """Where a plan, or the program to follow, has this model cut; None: wherever is best."""
    pinned, places = ctx.options.plan.cut, Places(backbone)
    if ctx.like is not None:
        pinned = places.like(Places(find_backbone(ctx.like.graphs["CUT"])), ctx.like.plan["cut"])
    return places.find(pinned, len(ctx.ranks)) if pinned is not None else None


class _Chooser:
    """The choice of cuts for one graph: the line of its operators, and where it may be cut."""

    def __init__(self, graph: Graph, backbone: list[Node], ctx: Context) -> None:
        self.ranks, self.machine, self.live, self.finish = ctx.ranks, ctx.machine, ctx.live, ctx.makespan
        sizes, machine = ctx.sizes, ctx.machine
        self.points = _find_points(backbone, sizes.mesh)
        held = count_bytes(graph, backbone, sizes, ctx.options.accumulate_allreduce_grads_in_fp32)
        self.line = Line(
            [rank_seconds(node, sizes.mesh, machine) / _trace_factor(node, sizes) for node in backbone],
            [point.at for point in self.points],
            _values(backbone, sizes, machine),
            held.kept,
            held.saved,
            held.shared,
        )

    def choose(self) -> tuple[Cuts, str]:
        """The best cuts between layers, or inside of them where that is worth it or there are too few layers."""
        whole = self._solve([point.at for point in self.points if point.between_layers])
        if len(self.ranks) == 1 and whole:
            return whole, "one stage"
        inside = self._solve(self.line.points)
        if inside is None:
            raise self._refusal()
        if whole is None:
            few = sum(point.between_layers for point in self.points) < len(self.ranks) - 1
            return (
                inside,
                f"inside layers: {'there are fewer layers than stages' if few else 'whole layers do not fit'}",
            )
        gain, what = 1 - inside.finish / whole.finish, "a step" if self.finish else "the busiest rank"
        if inside.finish > WORTH * whole.finish:
            return whole, f"between layers: cuts inside of them would make {what} {max(gain, 0.0):.1%} faster"
        return inside, f"inside layers: {what} is {gain:.0%} faster than with whole layers"

    def follow(self, wanted: Sequence[int]) -> tuple[Cuts, str]:
        """The cuts of a plan, held against those that would be chosen."""
        cuts = evaluate(self.line, self.ranks, wanted, self.live, self.finish)
        if max(cuts.held) > self.machine.memory:
            raise self._too_full(max(cuts.held), "the cut that the plan pins")
        try:
            best, why = self.choose()
        except PlanError:  # a plan may cut where no point is
            return cuts, "as the plan says"
        if cuts.chosen == best.chosen:
            return best, why
        change, what = cuts.finish / best.finish - 1, "a step" if self.finish else "the busiest rank"
        how = f"{abs(change):.1%} {'longer' if change > 0 else 'shorter'}"
        return cuts, f"as the plan says: {what} takes {how} than with the cut that would be chosen"

    def _solve(self, points: Sequence[int]) -> Cuts | None:
        return place(self._line(points), self.ranks, self.live, self.machine.memory, self.finish)

    def _line(self, points: Sequence[int]) -> Line:
        line = self.line
        return Line(line.work, points, line.values, line.kept, line.saved, line.shared)

    def _refusal(self) -> PlanError:
        """Why there is no cut: too few places, or too little memory."""
        most = len(self.points) + 1
        if most < len(self.ranks):
            fact = f"more stages than the model can be cut into: {most} at most"
            return PlanError(f"p*v={len(self.ranks)}", fact, f"p*v <= {most}, or a deeper model")
        return self._too_full(least_memory(self.line, self.ranks, self.live), "the cut that spreads it best")

    def _too_full(self, needed: float, which: str) -> TooFull:
        fact = f"with {which}, the fullest rank holds {_gib(needed)} and has {_gib(self.machine.memory)}"
        fact += " (parameters, gradients, AdamW's two moments; activations of the microbatches in flight)"
        remedy = "a larger t or p, smaller microbatches (a larger num_microbatches), a schedule with fewer of them in flight"
        return TooFull("memory", fact, remedy + " (1f1b), sequence_parallel='auto', or more memory")


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:,.2f} GiB" if nbytes >= GIB / 100 else f"{nbytes:,.0f} bytes"


def _trace_factor(node: Node, sizes: Sizes) -> int:
    """How much more of a value the trace saw than a microbatch has."""
    return sizes.rows_divisor if note(node).layout.batch.kind in "SP" else 1


def _values(backbone: list[Node], sizes: Sizes, machine: Machine) -> list[Value]:
    """What may cross, with the seconds that it takes a stage to send it (or to receive it) and its gradient."""
    order = {node: i for i, node in enumerate(backbone)}
    values = []
    for i, node in enumerate(backbone):
        reads = tuple(sorted(order[user] for user in node.users if user in order))
        if reads and is_tensor(node):
            once = local_payload(node, sizes.mesh) / _trace_factor(node, sizes) / machine.link_bandwidth
            values.append(Value(i, reads, (1 + note(node).needs_grad) * once))
    return values


def _check_pinned(backbone: list[Node], count: int) -> None:
    """A stage of a plan must have something to do: a view of what crosses is computed where it is read."""
    for stage in set(range(count)) - {stage for node in backbone for stage in note(node).stages}:
        raise PlanError(
            "plan: cut", f"stage {stage} has nothing to compute", "cut behind more than a view or a cast"
        )


def find_backbone(graph: Graph) -> list[Node]:
    """Operators that depend on parameters and on batch inputs, in order."""
    of_inputs: set[Node] = set()
    for node in graph.nodes:
        if note(node).kind == "input" or any(arg in of_inputs for arg in node.all_input_nodes):
            of_inputs.add(node)
    found = [
        node
        for node in graph.nodes
        if node.op == "call_function" and note(node).of_params and node in of_inputs
    ]
    if not found:
        raise PlanError(
            "model", "its loss does not depend on both parameters and inputs", "check what forward returns"
        )
    return found


def _find_points(backbone: list[Node], mesh: Mesh) -> list[Point]:
    """Where the backbone can be cut, ascending; between two GEMMs at most two points: inside a layer and between layers."""
    order = {node: i for i, node in enumerate(backbone)}
    last_use = [
        max((order.get(user, len(backbone)) for user in node.users), default=i)
        for i, node in enumerate(backbone)
    ]
    gemms = [i for i, node in enumerate(backbone) if flops(node)]
    best: dict[tuple[int, bool], Point] = {}
    alive: list[int] = []
    before = 0
    for i in range(len(backbone) - 1):
        alive = [j for j in [*alive, i] if last_use[j] > i]
        before += bool(flops(backbone[i]))
        if not gemms or not gemms[0] <= i < gemms[-1] or not all(is_tensor(backbone[j]) for j in alive):
            continue
        between = layer_of(note(backbone[i]).module) != layer_of(note(backbone[i + 1]).module)
        found = Point(i, sum(local_payload(backbone[j], mesh) for j in alive), between)
        key = (before, between)
        if key not in best or found.nbytes < best[key].nbytes:
            best[key] = found
    points = sorted(best.values(), key=lambda point: point.at)
    same = [pair for pair in pairwise(points) if _is_idle(backbone[pair[0].at + 1 : pair[1].at + 1], mesh)]
    dropped = [a if b.between_layers else b for a, b in same]
    return [point for point in points if point not in dropped]


def _is_idle(operators: list[Node], mesh: Mesh) -> bool:
    """Whether a stage of these would have nothing to do: views are computed where they are read."""
    return not any(rank_seconds(node, mesh, Machine()) for node in operators)


def check_cut(graph: Graph, num_stages: int) -> None:
    """Everything is placed, once where it says no more, before it is read; no weight crosses; no stage is empty."""
    backbone = set(find_backbone(graph))
    findings = [text for node in graph.nodes for text in _misplaced(node, backbone)]
    if note(output(graph)).stages != (num_stages - 1,):
        findings.append(f"the loss is in stages {note(output(graph)).stages}")
    empty = set(range(num_stages)) - {stage for node in backbone for stage in note(node).stages}
    if empty:
        findings.append(f"stages {sorted(empty)} are empty")
    if findings:
        raise InternalError("CUT", "; ".join(findings))


def _misplaced(node: Node, backbone: set[Node]) -> Iterator[str]:
    """What is wrong with the stages of one node, and with those of what it reads."""
    stages = note(node).stages
    if node.op != "placeholder" and not stages:
        yield f"{node.name} is in stages {stages}"
    if node in backbone and len(stages) > 1:
        if not note(node).placement.startswith("computed again"):
            yield f"{node.name} is in stages {stages}, and not said to be computed again"
        elif is_never_computed_again(node):
            yield f"{node.name} is in stages {stages}, which {op_name(node)} may not be"
    for arg in node.all_input_nodes:
        made = note(arg).stages
        missing = [stage for stage in stages if stage not in made]
        where = f"{arg.name} of stages {made} is read by {node.name} of stages {stages}"
        if missing and (arg.op == "placeholder" or (note(arg).of_params and arg not in backbone)):
            yield f"{where}: it must be on all of them"
        elif any(stage < min(made, default=stage + 1) for stage in missing):
            yield f"{where}, before it is made"
        elif missing and not is_tensor(arg):
            yield f"{where}, and is no tensor that could be sent"
