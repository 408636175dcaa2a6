"""Divide a program's operators among its files: what each stage has of its own, and what several stages have alike.

In: a LOCAL graph. Out: a `Part` a stage, whose `calls` are the pieces of it that are methods: `Run`s of a layer that repeats
(`repeats.py`), and `Block`s of operators that several stages compute again rather than send.

    parts = divide(graph, crossings(graph), stages=4)
    parts[2].calls      # [Run(repeat, first=6, stop=9, ...)]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch.fx import Graph, Node

from autoptd.codegen.comments import origin_text
from autoptd.codegen.loops import carried_name
from autoptd.codegen.names import choose_names
from autoptd.codegen.repeats import Repeat, find_repeats
from autoptd.codegen.runs import Run, find_runs
from autoptd.ir.notes import note, ops, output, placeholders
from autoptd.ir.periods import MIN_OPERATORS

LINE = 60  # operators that one source line may stand for
MIN_BLOCK = 4  # operators that are worth a method


@dataclass(frozen=True)
class Crossing:
    """A value that one stage makes and later stages read; `name` is its keyword in their forward."""

    node: Node
    name: str
    source: int
    targets: tuple[int, ...]

    @property
    def origin(self) -> str:
        return origin_text(self.node)


@dataclass(frozen=True)
class Block:
    """Operators that all stages of `stages` compute, one after the other, from index `start` of a stage's body."""

    nodes: tuple[Node, ...]
    results: tuple[Node, ...]  # what is read outside of the block, on any stage
    start: int

    @property
    def stages(self) -> tuple[int, ...]:
        return note(self.nodes[0]).stages

    @property
    def end(self) -> int:
        return self.start + len(self.nodes)

    @property
    def read(self) -> list[Node]:
        """The values it is given: all that it reads but its own, and parameters and buffers."""
        found = dict.fromkeys(
            arg for node in self.nodes for arg in node.all_input_nodes if arg not in self.nodes
        )
        return [node for node in found if note(node).kind not in ("param", "buffer")]

    @cached_property
    def result_names(self) -> dict[Node, str]:
        """What its results are called, as far as their operators tell."""
        names = choose_names(list(self.nodes), {}, list(self.results))
        return {node: names[node] for node in self.results}


@dataclass
class Part:
    """What a stage computes: its operators in order, what it reads, what it hands on."""

    index: int
    body: list[Node]
    arriving: list[Crossing]
    leaving: list[Crossing]
    results: list[Node]  # of forward, in order
    calls: list[Run | Block] = field(default_factory=list)

    def read(self, kind: str) -> list[Node]:
        """The inputs, parameters or buffers that it reads, in order of first use."""
        every = dict.fromkeys(
            arg for node in self.body for arg in node.all_input_nodes if arg.op == "placeholder"
        )
        return [node for node in every if note(node).kind == kind]

    @property
    def given(self) -> dict[Node, str]:
        """The arguments of its forward."""
        inputs = {node: note(node).name for node in self.read("input")}
        return {crossing.node: crossing.name for crossing in self.arriving} | inputs

    @property
    def runs(self) -> list[Run]:
        return [call for call in self.calls if isinstance(call, Run)]

    @property
    def blocks(self) -> list[Block]:
        return [call for call in self.calls if isinstance(call, Block)]

    def gaps(self) -> list[tuple[int, int]]:
        """The ranges of its body that no call stands for."""
        ends, starts = (
            [0, *(call.end for call in self.calls)],
            [*(call.start for call in self.calls), len(self.body)],
        )
        return [(low, high) for low, high in zip(ends, starts, strict=True) if low < high]

    def add_calls(self, calls: Sequence[Run | Block]) -> None:
        self.calls = sorted([*self.calls, *calls], key=lambda call: call.start)


def crossings(graph: Graph) -> list[Crossing]:
    """All values that cross from one stage to later ones, in order."""
    found: list[Crossing] = []
    taken: set[str] = set()
    inputs = {note(node).name for node in placeholders(graph, "input")}
    for node in ops(graph):
        home = note(node).stages
        targets = sorted({stage for user in node.users for stage in note(user).stages} - set(home))
        if targets:
            name = base = f"x_from_{home[0]}"
            number = len(taken)
            while name in taken | inputs:
                name, number = f"{base}_{number}", number + 1
            taken.add(name)
            found.append(Crossing(node, name, home[0], tuple(targets)))
    return found


def divide(graph: Graph, crossing: Sequence[Crossing], stages: int) -> list[Part]:
    """The parts of all stages."""
    parts = [_part(graph, stage, crossing) for stage in range(stages)]
    loss: Node = output(graph).args[0]  # type: ignore[assignment]
    repeats = find_repeats(list(ops(graph)), {loss})
    for part in parts:
        part.calls = list(find_runs(repeats, part.body))
    called = Counter(id(run.repeat) for part in parts for run in part.runs for _ in run.rounds)
    for part in parts:  # a layer that is called once is no method
        part.calls = [run for run in part.runs if called[id(run.repeat)] > 1]
        part.add_calls(_own_runs(part))
    _add_blocks(parts)
    return parts


def _part(graph: Graph, stage: int, crossing: Sequence[Crossing]) -> Part:
    leaving = [one for one in crossing if one.source == stage]
    loss: list[Node] = [output(graph).args[0]] if stage in note(output(graph)).stages else []  # type: ignore[list-item]
    return Part(
        index=stage,
        body=[node for node in ops(graph) if stage in note(node).stages],
        arriving=[one for one in crossing if stage in one.targets],
        leaving=leaving,
        results=[one.node for one in leaving] + loss,
    )


def _own_runs(part: Part) -> list[Run]:
    """What repeats within a stage beside the layers of the program: there, other stages may read what goes on inside."""
    found: list[Run] = []
    for low, high in part.gaps():
        if high - low < 2 * MIN_OPERATORS:
            continue
        some = part.body[low:high]
        later = {*part.results, *(arg for node in part.body[high:] for arg in node.all_input_nodes)}
        found += find_runs(find_repeats(some, later.intersection(some)), part.body)
    return found


def _bring_together(part: Part) -> None:
    """Move up what is computed on several stages, between two calls, so that it stands side by side."""
    for low, high in part.gaps():
        groups: list[list[Node]] = []
        place: dict[Node, int] = {}  # index of a node's group
        last: dict[tuple[int, ...], int] = {}  # that of the last group of some stages
        for node in part.body[low:high]:
            stages = note(node).stages
            at = last.get(stages, -1) if len(stages) > 1 else -1
            if any(place.get(arg, -1) > at for arg in node.all_input_nodes) or at < 0:
                at = last[stages] = len(groups)
                groups.append([])
            groups[at].append(node)
            place[node] = at
        part.body[low:high] = [node for group in groups for node in group]


def _add_blocks(parts: Sequence[Part]) -> None:
    """Find what several stages compute alike, between their layers."""
    for part in parts:
        _bring_together(part)
    alike: dict[tuple[int, ...], list[Node]] = {}
    apart: set[Node] = set()  # first operators, of a stage at least, behind something else
    for part in parts:
        for low, high in part.gaps():
            for before, node in zip([None, *part.body[low : high - 1]], part.body[low:high], strict=True):
                stages = note(node).stages
                if len(stages) > 1 and stages[0] == part.index:
                    alike.setdefault(stages, []).append(node)
                if before is None or note(before).stages != stages:
                    apart.add(node)
    for stages, nodes in alike.items():
        for run in _runs_of(nodes, apart):
            homes = [parts[stage] for stage in stages]
            if len(run) >= MIN_BLOCK and all(_is_free(part, run) for part in homes):
                results = _results(run, homes)
                for part in homes:
                    part.add_calls([Block(tuple(run), results, part.body.index(run[0]))])


def _runs_of(nodes: Sequence[Node], apart: set[Node]) -> list[list[Node]]:
    runs: list[list[Node]] = []
    for node in nodes:
        if not runs or node in apart:
            runs.append([])
        runs[-1].append(node)
    return runs


def _is_free(part: Part, nodes: Sequence[Node]) -> bool:
    """Whether the operators stand side by side in a stage, and in no layer of it."""
    start = part.body.index(nodes[0])
    is_side_by_side = part.body[start : start + len(nodes)] == list(nodes)
    return is_side_by_side and any(low <= start and start + len(nodes) <= high for low, high in part.gaps())


def _results(nodes: Sequence[Node], homes: Sequence[Part]) -> tuple[Node, ...]:
    found = []
    for node in nodes:
        is_read = any(
            set(note(user).stages) & set(note(node).stages) for user in node.users if user not in nodes
        )
        if is_read or any(node in part.results for part in homes):
            found.append(node)
    return tuple(found)


def name_values(part: Part) -> dict[Node, str]:
    """The variables of a stage's forward; of a call only what comes out of it."""
    shown: list[Node] = []
    inside: dict[Node, int] = {}
    held: dict[Node, int] = {}
    same: dict[Node, str] = {}
    end = 0
    for call in part.calls:
        shown += part.body[end : call.start]
        results = list(call.results) if isinstance(call, Block) else call.finals
        first, behind = len(shown), len(shown) + len(results)
        inside |= {node: first for node in part.body[call.start : call.end] if node not in results}
        if isinstance(call, Run):
            # What every round reads, and what goes from round to round, must not share a name with another of them.
            outer = [
                node for slots in call.repeat.at.operands for one in slots for node in call.outer(one.nodes)
            ]
            held |= dict.fromkeys([*outer, *results], behind)
            same |= dict(zip(results, _carried_names(call.repeat), strict=True))
        else:
            held |= dict.fromkeys(results, behind)
            same |= call.result_names
        shown += results
        end = call.end
    shown += part.body[end:]
    return choose_names(shown, part.given, part.results, inside, same, held, beyond=_following(part.body))


def _following(body: Sequence[Node]) -> list[Node]:
    """The operators of the model behind the last one of a stage, as far as its layer may reach."""
    found: list[Node] = []
    node = body[-1].next if body else None
    while node is not None and node.op == "call_function" and len(found) < LINE:
        found.append(node)
        node = node.next
    return found


def _carried_names(repeat: Repeat) -> list[str]:
    return [carried_name(repeat, j) for j in repeat.carried]


__all__ = ["Block", "Crossing", "Part", "crossings", "divide", "name_values"]
