"""Cut the model into p*v stages, balanced by FLOPs, at the thinnest crossings (CONNECTED -> CUT).

Values that depend on parameters and inputs (the *backbone*) are placed exactly once, in model order. What depends on inputs or
constants alone (position ids, masks) or on parameters alone is cheap and is computed on every stage that needs it; batch inputs
go to their stages directly. A parameter lives on every stage that reads it: its owner set.

Cut points are the positions in backbone order with GEMMs on both sides where the fewest values cross; positions between layers
are preferred to positions inside of one, and thin crossings to thicker ones, as long as there are enough of them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch.fx import Graph, Node

from autoptd.errors import InternalError, PlanError
from autoptd.ir.notes import is_tensor, note, output
from autoptd.passes.costs import flops


def cut(graph: Graph, num_stages: int) -> dict[str, Any]:
    """Fill `note(node).stages`; returns what to write into the plan: FLOPs per stage and the modules where it was cut."""
    backbone = find_backbone(graph)
    points = _cut_points(backbone, num_stages) if num_stages > 1 else []
    work = [flops(node) for node in backbone]
    chosen = _balance(work, points, num_stages)
    stage = 0
    for i, node in enumerate(backbone):
        note(node).stages = (stage,)
        if stage < len(chosen) and i == chosen[stage]:
            stage += 1
    _place_the_rest(graph, set(backbone))
    check_cut(graph, num_stages)
    bounds = [-1, *chosen, len(backbone) - 1]
    shares = [sum(work[a + 1 : b + 1]) for a, b in pairwise(bounds)]
    return {"after": [note(backbone[i]).module for i in chosen], "flops": shares}


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


def _cut_points(backbone: list[Node], num_stages: int) -> list[int]:
    """Positions i such that backbone[:i+1] and the rest can be different stages."""
    order = {node: i for i, node in enumerate(backbone)}
    last_use = [
        max((order.get(user, len(backbone)) for user in node.users), default=i) for i, node in enumerate(backbone)
    ]
    gemms = [i for i, node in enumerate(backbone) if flops(node)]
    width: dict[int, int] = {}  # how many values cross
    alive: list[int] = []
    for i in range(len(backbone) - 1):
        alive = [j for j in [*alive, i] if last_use[j] > i]
        if gemms and gemms[0] <= i < gemms[-1] and all(is_tensor(backbone[j]) for j in alive):
            width[i] = len(alive)
    before = {i: sum(1 for g in gemms if g <= i) for i in width}
    distinct: list[int] = []
    for thin in sorted(set(width.values())):
        points = [i for i, count in width.items() if count <= thin]
        between_layers = [i for i in points if layer_of(backbone[i]) != layer_of(backbone[i + 1])]
        for candidates in (between_layers, points):
            # Several positions can have the same work before them: keep the thinnest, of those the first.
            ranked = sorted(candidates, key=lambda i: (-width[i], -i))
            distinct = sorted({before[i]: i for i in ranked}.values())
            if len(distinct) >= num_stages - 1:
                return distinct
    raise PlanError(
        f"p*v={num_stages}",
        f"more stages than the model can be cut into: {len(distinct) + 1} at most",
        f"p*v <= {len(distinct) + 1}, or a deeper model",
    )


def layer_of(node: Node) -> str:
    """The module path up to its first number: `transformer.h.3` for anything inside that layer, else the path's first name."""
    parts = note(node).module.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return parts[0]


def _balance(work: list[int], points: list[int], num_stages: int) -> list[int]:
    """Choose num_stages - 1 of the points so that the heaviest stage is lightest, then the squares' sum least (exact)."""
    if num_stages == 1:
        return []
    total = [0]
    for one in work:
        total.append(total[-1] + one)
    ends = [*points, len(work) - 1]
    best: dict[int, tuple[tuple[int, int], list[int]]] = {-1: ((0, 0), [])}
    for stage in range(num_stages):
        after: dict[int, tuple[tuple[int, int], list[int]]] = {}
        for end in ends:
            if (end == ends[-1]) != (stage == num_stages - 1):
                continue
            for start, ((peak, squares), chosen) in best.items():
                if start < end:
                    load = total[end + 1] - total[start + 1]
                    score = (max(peak, load), squares + load * load)
                    if end not in after or score < after[end][0]:
                        after[end] = (score, [*chosen, end])
        best = after
    return best[ends[-1]][1][:-1]


def _place_the_rest(graph: Graph, backbone: set[Node]) -> None:
    """Everything that is not backbone goes wherever it is read."""
    last = output(graph)
    note(last).stages = note(last.args[0]).stages  # type: ignore[arg-type]
    for node in reversed(graph.nodes):
        if node not in backbone and node.op != "output":
            note(node).stages = tuple(sorted({stage for user in node.users for stage in note(user).stages}))


def check_cut(graph: Graph, num_stages: int) -> None:
    """Backbone nodes are in one stage and read there or later; all else is wherever it is read; no stage is empty."""
    backbone = set(find_backbone(graph))
    findings = [f"{one.name} is in stages {note(one).stages}" for one in backbone if len(note(one).stages) != 1]
    for node in graph.nodes:
        for arg in node.all_input_nodes:
            first = min(note(arg).stages, default=num_stages)
            far = [k for k in note(node).stages if k not in note(arg).stages and (arg not in backbone or k < first)]
            if far:
                where = f"{arg.name} of stages {note(arg).stages}"
                findings.append(f"{where} is read by {node.name} of stages {note(node).stages}")
    if note(output(graph)).stages != (num_stages - 1,):
        findings.append(f"the loss is in stages {note(output(graph)).stages}")
    empty = set(range(num_stages)) - {stage for node in find_backbone(graph) for stage in note(node).stages}
    if empty:
        findings.append(f"stages {sorted(empty)} are empty")
    if findings:
        raise InternalError("CUT", "; ".join(findings))
