"""Cut the model into p*v stages so that the busiest pipeline rank is least busy (CONNECTED -> CUT).

Values that depend on parameters and inputs (the *backbone*) are placed exactly once, in model order. What depends on inputs or
constants alone (position ids, masks) or on parameters alone is cheap and is computed on every stage that needs it; batch inputs
go to their stages directly. A parameter lives on every stage that reads it: its owner set.

Cut points are the positions in backbone order with GEMMs on both sides where few bytes cross; of those with the same GEMMs
before them the thinnest. A stage costs its operators' seconds on one rank, embedding, head and loss included, and the
transfer of what crosses at its ends; `balance.py` chooses. Whole layers stay together unless cutting inside of one makes the
busiest rank faster by more than 5%.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch.fx import Graph, Node

from autoptd.errors import InternalError, PlanError
from autoptd.ir.machine import Machine
from autoptd.ir.notes import is_tensor, note, op_name, output
from autoptd.passes.balance import Cuts, Line, place
from autoptd.passes.costs import flops, local_payload, rank_seconds
from autoptd.passes.crossing import is_never_computed_again, place_values

WORTH = 0.95  # cutting inside a layer must bring the busiest rank's time down to this share


@dataclass(frozen=True)
class Point:
    """A place to cut: behind operator `at` of the backbone, where `nbytes` cross."""

    at: int
    nbytes: float
    between_layers: bool


def cut(graph: Graph, ranks: Sequence[int], t: int = 1, machine: Machine | None = None) -> dict[str, Any]:
    """Fill `note(node).stages`; `ranks` is the pipeline rank of every stage.

    Returns what to write into the plan: the modules where it was cut and why, FLOPs and seconds per stage.
    """
    machine = machine or Machine()
    backbone = find_backbone(graph)
    points = _find_points(backbone, t)
    seconds = [rank_seconds(node, t, machine) for node in backbone]
    cuts, why = _choose(points, seconds, ranks, machine)
    bounds = [-1, *cuts.chosen, len(backbone) - 1]
    home = {node: k for k, (a, b) in enumerate(pairwise(bounds)) for node in backbone[a + 1 : b + 1]}
    place_values(graph, home, t, machine)
    check_cut(graph, len(ranks))
    return {
        "after": [note(backbone[i]).module for i in cuts.chosen],
        "why": why,
        "flops": [sum(map(flops, backbone[a + 1 : b + 1])) for a, b in pairwise(bounds)],
        "seconds": [sum(seconds[a + 1 : b + 1]) for a, b in pairwise(bounds)],
        "rank_seconds": list(cuts.loads),
    }


def find_backbone(graph: Graph) -> list[Node]:
    """Operators that depend on parameters and on batch inputs, in order."""
    of_inputs: set[Node] = set()
    for node in graph.nodes:
        if note(node).kind == "input" or any(arg in of_inputs for arg in node.all_input_nodes):
            of_inputs.add(node)
    found = [node for node in graph.nodes if node.op == "call_function" and note(node).of_params and node in of_inputs]
    if not found:
        raise PlanError("model", "its loss does not depend on both parameters and inputs", "check what forward returns")
    return found


def _find_points(backbone: list[Node], t: int) -> list[Point]:
    """Where the backbone can be cut, ascending; between two GEMMs at most two points: inside a layer and between layers."""
    order = {node: i for i, node in enumerate(backbone)}
    last_use = [
        max((order.get(user, len(backbone)) for user in node.users), default=i) for i, node in enumerate(backbone)
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
        between = layer_of(backbone[i]) != layer_of(backbone[i + 1])
        found = Point(i, sum(local_payload(backbone[j], t) for j in alive), between)
        key = (before, between)
        if key not in best or found.nbytes < best[key].nbytes:
            best[key] = found
    return sorted(best.values(), key=lambda point: point.at)


def _choose(points: list[Point], seconds: list[float], ranks: Sequence[int], machine: Machine) -> tuple[Cuts, str]:
    """The best cuts between layers, or inside of them where that is worth it or there are too few layers."""

    def solve(among: list[Point]) -> Cuts | None:
        crossing = [2 * point.nbytes / machine.link_bandwidth + 2 * machine.latency for point in among]
        return place(Line(seconds, [point.at for point in among], crossing), ranks)

    whole = solve([point for point in points if point.between_layers])
    if len(ranks) == 1 and whole:
        return whole, "one stage"
    inside = solve(points)
    if inside is None:
        most = len(points) + 1
        fact = f"more stages than the model can be cut into: {most} at most"
        raise PlanError(f"p*v={len(ranks)}", fact, f"p*v <= {most}, or a deeper model")
    if whole is None:
        return inside, "inside layers: there are fewer layers than stages"
    gain = 1 - inside.busiest / whole.busiest
    if inside.busiest > WORTH * whole.busiest:
        return whole, f"between layers: cuts inside of them would make the busiest rank {max(gain, 0.0):.1%} faster"
    return inside, f"inside layers: the busiest rank is {gain:.0%} faster than with whole layers"


def layer_of(node: Node) -> str:
    """The module path up to its first number: `transformer.h.3` for anything inside that layer, else the path's first name."""
    parts = note(node).module.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return parts[0]


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
