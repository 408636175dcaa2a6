"""Cut the model into p*v stages that balance the pipeline ranks (CONNECTED -> CUT).

In: a CONNECTED graph. Out: `stages` and `stages_why` of every node, and `ctx.found.cut`.

The *backbone*, the operators that depend on parameters and inputs, is placed in model order. `crossing.py`
places all other values, and decides whether those that cross are sent or computed again. A parameter lives on
every stage that reads it: its owner set.

Cut points are positions in the backbone with GEMMs on both sides; among those between the same two GEMMs, the
one with the fewest bytes crossing is used. The cost of a stage is the time of its operators on one rank,
embedding, head and loss included, plus that of the messages it sends and receives. A rank holds parameters
with their state, and the saved activations of the microbatches in flight (`held_bytes.py`). `balance.py`
minimizes the time of the busiest rank, then of the simulated schedule. Layers stay whole unless a cut inside
one makes a step more than 5% faster, at a size where compute rather than the fixed cost of collectives
dominates, or unless nothing else fits. A plan may pin the cuts (`stages/cut_pins.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch.fx import Graph, Node

from autoptd.errors import InternalError, PlanError
from autoptd.ir.layout import Sizes
from autoptd.ir.machine import Machine
from autoptd.ir.mesh import Mesh
from autoptd.ir.names import layer_of
from autoptd.ir.notes import is_tensor, note, op_name, output
from autoptd.passes.context import Context
from autoptd.passes.ops.costs import flops, local_payload, rank_seconds
from autoptd.passes.runner import Form, graph_pass
from autoptd.passes.stages.balance import Cuts, Line, Value, evaluate, least_memory, place
from autoptd.passes.stages.crossing import is_never_computed_again, place_values
from autoptd.passes.stages.cut_pins import Places
from autoptd.passes.stages.held_bytes import count_bytes, too_full
from autoptd.program.costs import Cut

# A cut inside a layer must reduce the time of a step, or of the busiest rank, below this fraction of that
# with whole layers.
MAX_SHARE_OF_WHOLE_LAYERS = 0.95
# Above this fraction of fixed collective cost the model is a toy, whose timings do not carry over to real
# sizes.
MAX_FIXED_SHARE = 0.5
# Of more cut points, some are left out; a stage keeps at least that many.
MAX_POINTS, MIN_POINTS_PER_STAGE = 2048, 16


@dataclass(frozen=True)
class Point:
    """A place to cut: after operator `at` of the backbone, where `nbytes` cross."""

    at: int
    nbytes: float
    between_layers: bool


@graph_pass(
    takes=Form.CONNECTED,
    gives=Form.CUT,
    changes=("stages", "stages_why"),
    finds=("cut",),
    ensures=lambda graph, ctx: check_cut(graph, len(ctx.ranks)),
)
def cut(graph: Graph, ctx: Context) -> None:
    """Fill `note(node).stages` and `stages_why`; find the cuts with their reason and their costs."""
    backbone = find_backbone(graph)
    pinned = _pinned_cuts(backbone, ctx)
    chooser = _Chooser(graph, backbone, ctx)
    # Pinned cuts are still compared with ours, to report their cost to the user.
    cuts, why = chooser.choose() if pinned is None else chooser.follow(pinned)
    # Cuts 3 and 7 of 12 operators give the stages 0..3, 4..7, 8..11.
    ends = [-1, *cuts.chosen, len(backbone) - 1]
    stages = [slice(before + 1, end + 1) for before, end in pairwise(ends)]
    home: dict[Node, int] = {}
    for number, stage in enumerate(stages):
        home |= dict.fromkeys(backbone[stage], number)
    place_values(graph, home, ctx.mesh, ctx.machine)
    if pinned is not None:
        _check_pinned(backbone, len(ctx.ranks))
    places = Places(backbone)
    ctx.found.cut = Cut(
        after=tuple(places.name(i) for i in cuts.chosen),
        why=why,
        flops=tuple(sum(map(flops, backbone[stage])) for stage in stages),
        seconds=tuple(sum(chooser.line.work[stage]) for stage in stages),
        saved_bytes=cuts.saved,
        rank_seconds=tuple(cuts.loads),
        rank_bytes=ctx.held_bytes(cuts.held),
        makespan=cuts.makespan,
        again_seconds=cuts.again,
        link_seconds=cuts.links,
    )


def _pinned_cuts(backbone: list[Node], ctx: Context) -> Sequence[int] | None:
    """Return the cut positions of the plan, or of the program to follow; None if there is neither."""
    pinned, places = ctx.options.plan.cut, Places(backbone)
    if ctx.like is not None:
        pinned = places.like(Places(find_backbone(ctx.like.graphs["CUT"])), ctx.like.plan["cut"])
    return places.find(pinned, len(ctx.ranks)) if pinned is not None else None


class _Chooser:
    """Choose the cuts of one graph, given its operators in order and its cut points."""

    def __init__(self, graph: Graph, backbone: list[Node], ctx: Context) -> None:
        self.ranks, self.machine, self.live, self.makespan_of = ctx.ranks, ctx.machine, ctx.live, ctx.makespan
        self.ctx = ctx
        self.memory, self.reserve = ctx.machine.memory - ctx.reserve, ctx.reserve
        sizes, machine = ctx.sizes, ctx.machine
        self.sizes, self.backbone = sizes, backbone
        self.points = _find_points(backbone, sizes.mesh)
        held = count_bytes(graph, backbone, ctx)
        work = [rank_seconds(node, sizes.mesh, machine) / _trace_factor(node, sizes) for node in backbone]
        self.line = Line(
            work,
            [point.at for point in self.points],
            _values(backbone, sizes, machine),
            held.kept,
            held.levels,
            held.shared,
            ctx.working,
        )

    def choose(self) -> tuple[Cuts, str]:
        """Return the best cuts and why: between layers, or inside one if it pays off or layers are too few."""
        whole = self._solve([point.at for point in self.points if point.between_layers])
        if len(self.ranks) == 1 and whole:
            return whole, "one stage"
        # Computed even if whole layers fit, to report the cost of keeping layers whole.
        inside = self._solve(self.line.points)
        if inside is None:
            raise self._refusal()
        if whole is None:
            is_short = sum(point.between_layers for point in self.points) < len(self.ranks) - 1
            why = "there are fewer layers than stages" if is_short else "whole layers do not fit"
            return inside, f"inside layers: {why}"
        gain, what = (
            1 - inside.makespan / whole.makespan,
            "a step" if self.makespan_of else "the busiest rank",
        )
        if inside.makespan > MAX_SHARE_OF_WHOLE_LAYERS * whole.makespan:
            return whole, f"between layers: cuts inside of them would make {what} {max(gain, 0.0):.1%} faster"
        if (fixed := self._fixed_share()) > MAX_FIXED_SHARE:
            why = f"at this size {fixed:.0%} of the work is the fixed cost of collectives"
            return (
                whole,
                f"between layers: cuts inside of them would make {what} {gain:.0%} faster, but {why}",
            )
        return inside, f"inside layers: {what} is {gain:.0%} faster than with whole layers"

    def _fixed_share(self) -> float:
        """Return the fraction of all work that is the fixed cost of collectives."""
        without = replace(self.machine, latency=0.0)
        sizes = self.sizes
        bare = sum(
            rank_seconds(node, sizes.mesh, without) / _trace_factor(node, sizes) for node in self.backbone
        )
        whole = sum(self.line.work)
        return 1 - bare / whole if whole else 0.0

    def follow(self, pinned: Sequence[int]) -> tuple[Cuts, str]:
        """Return the pinned cuts, compared with those that would be chosen; raise TooFull if they do not fit."""
        cuts = evaluate(self.line, self.ranks, pinned, self.live, self.memory, self.makespan_of)
        if max(cuts.held) > self.memory:
            raise too_full(max(cuts.held) + self.reserve, self.ctx, "the cut that the plan pins")
        try:
            best, why = self.choose()
        except PlanError:
            # A plan may cut where there is no cut point, so we may not find cuts to compare with.
            return cuts, "as the plan says"
        if cuts.chosen == best.chosen:
            return best, why
        change, what = cuts.makespan / best.makespan - 1, "a step" if self.makespan_of else "the busiest rank"
        how = f"{abs(change):.1%} {'longer' if change > 0 else 'shorter'}"
        return cuts, f"as the plan says: {what} takes {how} than with the cut that would be chosen"

    def _solve(self, points: Sequence[int]) -> Cuts | None:
        return place(self._through(points), self.ranks, self.live, self.memory, self.makespan_of)

    def _through(self, points: Sequence[int]) -> Line:
        return replace(self.line, points=thinned(points, len(self.ranks)))

    def _refusal(self) -> PlanError:
        """Make the error for a model without a cut: too few places, or too little memory."""
        max_stages = len(self.points) + 1
        if max_stages < len(self.ranks):
            fact = f"more stages than the model can be cut into: {max_stages} at most"
            return PlanError(f"p*v={len(self.ranks)}", fact, f"p*v <= {max_stages}, or a deeper model")
        return too_full(
            least_memory(self._through(self.line.points), self.ranks, self.live) + self.reserve,
            self.ctx,
            "the cut that spreads it best",
        )


def _trace_factor(node: Node, sizes: Sizes) -> int:
    """Return the ratio of a value's size in the trace to that in a microbatch."""
    return sizes.rows_divisor if note(node).layout.batch.kind in "SP" else 1


def _values(backbone: list[Node], sizes: Sizes, machine: Machine) -> list[Value]:
    """Return the values that may cross, with the seconds to send (or receive) each and its gradient."""
    order = {node: i for i, node in enumerate(backbone)}
    values = []
    for i, node in enumerate(backbone):
        reads = tuple(sorted(order[user] for user in node.users if user in order))
        if reads and is_tensor(node):
            seconds = local_payload(node, sizes.mesh) / _trace_factor(node, sizes) / machine.link_bandwidth
            values.append(Value(i, reads, (1 + note(node).needs_grad) * seconds))
    return values


def _check_pinned(backbone: list[Node], count: int) -> None:
    """Refuse pinned cuts that leave a stage empty: a view of a crossing value is computed where it is read."""
    for stage in _empty_stages(backbone, count):
        raise PlanError(
            "plan: cut", f"stage {stage} has nothing to compute", "cut after more than a view or a cast"
        )


def _empty_stages(backbone: Iterable[Node], count: int) -> list[int]:
    used: set[int] = set()
    for node in backbone:
        used.update(note(node).stages)
    return [stage for stage in range(count) if stage not in used]


def find_backbone(graph: Graph) -> list[Node]:
    """Return the operators that depend on parameters and on batch inputs, in order; PlanError if none do."""
    of_inputs: set[Node] = set()
    backbone: list[Node] = []
    for node in graph.nodes:
        if note(node).kind == "input" or not of_inputs.isdisjoint(node.all_input_nodes):
            of_inputs.add(node)
            if node.op == "call_function" and note(node).of_params:
                backbone.append(node)
    if not backbone:
        raise PlanError(
            "model", "its loss does not depend on both parameters and inputs", "check what forward returns"
        )
    return backbone


def thinned(points: Sequence[int], stages: int) -> Sequence[int]:
    """Return every k-th of very many cut points, as the search takes their square in time and memory.

    A stage keeps at least `MIN_POINTS_PER_STAGE` of them.
    """
    step = min(math.ceil(len(points) / MAX_POINTS), len(points) // (MIN_POINTS_PER_STAGE * stages))
    return points[:: max(step, 1)]


def _find_points(backbone: list[Node], mesh: Mesh) -> list[Point]:
    """Return the cut points, ascending; between two GEMMs at most two: inside a layer and between layers."""
    last_use = _last_uses(backbone)
    is_gemm = [bool(flops(node)) for node in backbone]
    gemms = [i for i, is_product in enumerate(is_gemm) if is_product]
    norms = _inside_norms(backbone)
    # By the number of GEMMs before the point, and whether it lies between layers.
    best: dict[tuple[int, bool], Point] = {}
    # The values that a cut after operator i would have to send, with their bytes.
    alive: dict[int, float] = {}
    gemms_before = 0
    for i in range(len(backbone) - 1):
        alive[i] = local_payload(backbone[i], mesh)
        alive = {j: nbytes for j, nbytes in alive.items() if last_use[j] > i}
        gemms_before += is_gemm[i]
        if i in norms:
            continue
        # A tuple, such as the pieces of a split, cannot be sent.
        if not gemms or not gemms[0] <= i < gemms[-1] or not all(is_tensor(backbone[j]) for j in alive):
            continue
        between_layers = layer_of(note(backbone[i]).module) != layer_of(note(backbone[i + 1]).module)
        nbytes = sum(alive.values())
        key = (gemms_before, between_layers)
        if key not in best or nbytes < best[key].nbytes:
            best[key] = Point(i, nbytes, between_layers)
    points = sorted(best.values(), key=lambda point: point.at)
    # Of two points with only views between them, drop one, preferably the one inside a layer.
    dropped = []
    for point, following in pairwise(points):
        if _is_idle(backbone[point.at + 1 : following.at + 1], mesh):
            dropped.append(point if following.between_layers else following)
    return [point for point in points if point not in dropped]


def _inside_norms(backbone: list[Node]) -> set[int]:
    """Return the positions inside multi-operator batch norms, which are one operator in eval mode."""
    first: dict[str, int] = {}
    inside: set[int] = set()
    for i, node in enumerate(backbone):
        if norm := note(node).origin.batch_norm:
            inside.update(range(first.setdefault(norm, i), i))
    return inside


def _last_uses(backbone: list[Node]) -> list[int]:
    """Return the position of each value's last reader, or the end if it is read outside of the backbone."""
    order = {node: i for i, node in enumerate(backbone)}
    last = []
    for i, node in enumerate(backbone):
        last.append(max((order.get(user, len(backbone)) for user in node.users), default=i))
    return last


def _is_idle(operators: list[Node], mesh: Mesh) -> bool:
    """Tell whether a stage of these operators would be empty: views are computed where they are read."""
    return not any(rank_seconds(node, mesh, Machine()) for node in operators)


def check_cut(graph: Graph, num_stages: int) -> None:
    """Verify the stages of a CUT graph; raise InternalError with all findings.

    Every node is placed before its readers, and on one stage unless it is marked to be computed again; no
    weight crosses a cut, and no stage is empty.
    """
    backbone = set(find_backbone(graph))
    findings = [text for node in graph.nodes for text in _misplaced(node, backbone)]
    if note(output(graph)).stages != (num_stages - 1,):
        findings.append(f"the loss is in stages {note(output(graph)).stages}")
    empty = _empty_stages(backbone, num_stages)
    if empty:
        findings.append(f"stages {empty} are empty")
    if findings:
        raise InternalError("CUT", "; ".join(findings))


def _misplaced(node: Node, backbone: set[Node]) -> Iterator[str]:
    """Yield the errors in the stages of one node and of its operands."""
    stages = note(node).stages
    if node.op != "placeholder" and not stages:
        yield f"{node.name} is in stages {stages}"
    if node in backbone and len(stages) > 1:
        if not note(node).stages_why.startswith("computed again"):
            yield f"{node.name} is in stages {stages}, but not marked as computed again"
        elif is_never_computed_again(node):
            yield f"{node.name} is in stages {stages}, but {op_name(node)} may not be computed again"
    for arg in node.all_input_nodes:
        made = note(arg).stages
        missing = [stage for stage in stages if stage not in made]
        where = f"{arg.name} of stages {made} is read by {node.name} of stages {stages}"
        if missing and (arg.op == "placeholder" or (note(arg).of_params and arg not in backbone)):
            yield f"{where}: it must be on all of them"
        # Values are only sent forward, so a stage before the producer can never receive one.
        elif any(stage < min(made, default=stage + 1) for stage in missing):
            yield f"{where}, before it is computed"
        elif missing and not is_tensor(arg):
            yield f"{where}, and is not a tensor that could be sent"
