"""Divide the operators of a program into those of each stage and those that several stages share.

In: a LOCAL graph. Out: a `Part` per stage, whose `calls` are the pieces of it that become methods: `Run`s of
a repeated layer (`repeats.py`), and `Block`s of operators that several stages compute instead of sending a
value.

    parts = divide(graph, crossings(graph), stages=4)
    parts[2].calls      # [Run(repeat, first=6, stop=9, ...)]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch.fx import Graph, Node

from autoptd.codegen.body import origin_text
from autoptd.codegen.names import choose_names
from autoptd.codegen.repeats import Repeat, Run, carried_name, find_repeats, find_runs
from autoptd.ir import markers
from autoptd.ir.names import layer_of
from autoptd.ir.notes import note, ops, ops_of_stages, output, placeholders
from autoptd.ir.periods import MIN_OPERATORS

# One source line yields at most this many operators.
MAX_OPERATORS_OF_LINE = 60
# The least number of operators that is worth a method.
MIN_BLOCK = 4


@dataclass(frozen=True)
class Crossing:
    """A value that one stage computes and later stages read; `name` is its keyword in their forward."""

    node: Node
    name: str
    source: int
    targets: tuple[int, ...]

    @property
    def origin(self) -> str:
        return origin_text(self.node)


@dataclass(frozen=True)
class Block:
    """Operators that become a method, contiguous in a stage's body from index `start` on.

    They are computed by all of `stages`, or have values that backward recomputes. `results` are those that
    are read outside of the block, on any stage.
    """

    nodes: tuple[Node, ...]
    results: tuple[Node, ...]
    start: int
    stages: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.nodes)

    @property
    def read(self) -> list[Node]:
        """Its arguments: all operands except values of the block, parameters and buffers."""
        read: dict[Node, None] = {}
        for node in self.nodes:
            for arg in node.all_input_nodes:
                if arg not in self.nodes and note(arg).kind not in ("param", "buffer"):
                    read[arg] = None
        return list(read)

    @cached_property
    def result_names(self) -> dict[Node, str]:
        """The names of its results, chosen from its own operators alone."""
        names = choose_names(list(self.nodes), {}, list(self.results))
        return {node: names[node] for node in self.results}


@dataclass
class Part:
    """The contents of a stage: its operators in order, the crossings that it reads and writes, the results of
    forward.

    `summed` are the operators that only batch sums depend on: they run before the first forward.
    """

    index: int
    body: list[Node]
    arriving: list[Crossing]
    leaving: list[Crossing]
    results: list[Node]
    calls: list[Run | Block] = field(default_factory=list)
    summed: tuple[Node, ...] = ()

    def read(self, kind: str) -> list[Node]:
        """Return the inputs, parameters or buffers that it reads, in order of first use."""
        every = dict.fromkeys(
            arg
            for node in (*self.body, *self.summed)
            for arg in node.all_input_nodes
            if arg.op == "placeholder"
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
        """Return the ranges (low, high) of its body outside of its calls."""
        gaps = []
        low = 0
        for call in self.calls:
            gaps.append((low, call.start))
            low = call.end
        gaps.append((low, len(self.body)))
        return [(low, high) for low, high in gaps if low < high]

    def add_calls(self, calls: Sequence[Run | Block]) -> None:
        self.calls = sorted([*self.calls, *calls], key=lambda call: call.start)


def crossings(graph: Graph) -> list[Crossing]:
    """Return all values that cross from one stage to later ones, in order."""
    found: list[Crossing] = []
    taken: set[str] = set()
    inputs = {note(node).name for node in placeholders(graph, "input")}
    for node in ops(graph):
        home = note(node).stages
        readers: set[int] = set()
        for user in node.users:
            readers.update(note(user).stages)
        targets = sorted(readers - set(home))
        if targets:
            name = base = f"x_from_{home[0]}"
            number = len(taken)
            while name in taken | inputs:
                name, number = f"{base}_{number}", number + 1
            taken.add(name)
            found.append(Crossing(node, name, home[0], tuple(targets)))
    return found


def divide(graph: Graph, crossing: Sequence[Crossing], stages: int) -> list[Part]:
    """Return the parts of all stages."""
    bodies = ops_of_stages(graph)
    parts = [_part(graph, stage, bodies[stage], crossing) for stage in range(stages)]
    loss: Node = output(graph).args[0]  # type: ignore[assignment]
    # Search the whole program first: a layer that occurs once on each of 8 stages repeats in none of them.
    repeats = find_repeats(list(ops(graph)), {loss})
    for part in parts:
        part.calls = list(find_runs(repeats, part.body))
    # The number of rounds that are complete in some stage: a cut inside a layer leaves fewer than the repeat
    # has.
    rounds: Counter[int] = Counter()
    for part in parts:
        for run in part.runs:
            rounds[id(run.repeat)] += run.count
    for part in parts:
        # A layer that is called once is not worth a method.
        part.calls = [run for run in part.runs if rounds[id(run.repeat)] > 1]
        part.add_calls(_own_runs(part))
    _add_blocks(parts)
    for part in parts:
        part.add_calls(list(_pieces(part)))
    return parts


def _part(graph: Graph, stage: int, body: Sequence[Node], crossing: Sequence[Crossing]) -> Part:
    leaving = [each for each in crossing if each.source == stage]
    results = [each.node for each in leaving]
    # The loss comes last, after the crossings: the executor takes it from the end.
    if stage in note(output(graph)).stages:
        results.append(output(graph).args[0])  # type: ignore[arg-type]
    summed = _only_summed(body, results)
    return Part(
        index=stage,
        body=[node for node in body if node not in summed],
        arriving=[each for each in crossing if stage in each.targets],
        leaving=leaving,
        results=results,
        summed=tuple(node for node in body if node in summed),
    )


def _only_summed(body: Sequence[Node], results: Sequence[Node]) -> set[Node]:
    """Find the operators of a stage that only batch sums depend on."""
    summed: set[Node] = set()
    if not any(node.target is markers.batch_sum for node in body):
        return summed
    for node in reversed(body):
        readers = [user for user in node.users if user in body]
        is_summed = all(user.target is markers.batch_sum or user in summed for user in readers)
        if readers and is_summed and node not in results:
            summed.add(node)
    return summed


def _own_runs(part: Part) -> list[Run]:
    """Find repeats within a stage besides the program's layers, judged by the readers on this stage alone."""
    found: list[Run] = []
    for low, high in part.gaps():
        if high - low < 2 * MIN_OPERATORS:
            continue
        operators = part.body[low:high]
        # Values read after the gap must be results of a loop, so none may be inside a round.
        later = set(part.results)
        for node in part.body[high:]:
            later.update(node.all_input_nodes)
        found += find_runs(find_repeats(operators, later.intersection(operators)), part.body)
    return found


def _bring_together(part: Part) -> None:
    """Make the operators of the same several stages contiguous, between two calls, by moving later ones up."""
    for low, high in part.gaps():
        groups: list[list[Node]] = []
        # The index of a node's group, and of the last group of the same stages.
        group_of: dict[Node, int] = {}
        last: dict[tuple[int, ...], int] = {}
        for node in part.body[low:high]:
            stages = note(node).stages
            # -1: a separate group.
            group = last.get(stages, -1) if len(stages) > 1 else -1
            # Not above what it reads.
            if any(group_of.get(arg, -1) > group for arg in node.all_input_nodes) or group < 0:
                group = last[stages] = len(groups)
                groups.append([])
            groups[group].append(node)
            group_of[node] = group
        part.body[low:high] = [node for group in groups for node in group]


def _add_blocks(parts: Sequence[Part]) -> None:
    """Find the operators that several stages compute, between their layers."""
    for part in parts:
        _bring_together(part)
    # The operators by stages, and those that follow an operator of other stages somewhere, so begin a block.
    # {(0, 3): [arange, unsqueeze, ...]}
    alike: dict[tuple[int, ...], list[Node]] = {}
    apart: set[Node] = set()
    for part in parts:
        for low, high in part.gaps():
            for before, node in zip([None, *part.body[low : high - 1]], part.body[low:high], strict=True):
                stages = note(node).stages
                # Once for all of their stages: at the first.
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
                    part.add_calls([Block(tuple(run), results, part.body.index(run[0]), stages)])


def _pieces(part: Part) -> Iterator[Block]:
    """Yield the operators of layers outside of methods that have values to recompute in backward."""
    for low, high in part.gaps():
        pieces: list[list[Node]] = []
        for node in part.body[low:high]:
            layer = layer_of(note(node).module)
            if not pieces or layer_of(note(pieces[-1][0]).module) != layer:
                pieces.append([])
            pieces[-1].append(node)
        for nodes in pieces:
            if any(note(node).keep.dropped for node in nodes):
                start = part.body.index(nodes[0])
                yield Block(tuple(nodes), _results(nodes, [part]), start, (part.index,))


def _runs_of(nodes: Sequence[Node], apart: set[Node]) -> list[list[Node]]:
    runs: list[list[Node]] = []
    for node in nodes:
        if not runs or node in apart:
            runs.append([])
        runs[-1].append(node)
    return runs


def _is_free(part: Part, nodes: Sequence[Node]) -> bool:
    """Tell whether the operators are contiguous in a stage, and outside of its layers."""
    start = part.body.index(nodes[0])
    is_side_by_side = part.body[start : start + len(nodes)] == list(nodes)
    return is_side_by_side and any(low <= start and start + len(nodes) <= high for low, high in part.gaps())


def _results(nodes: Sequence[Node], homes: Sequence[Part]) -> tuple[Node, ...]:
    """Return the nodes that are read outside of this group, or returned, on one of these stages."""
    stages = {part.index for part in homes}
    results = []
    for node in nodes:
        readers: set[int] = set()
        for user in node.users:
            if user not in nodes:
                readers.update(note(user).stages)
        is_read = not readers.isdisjoint(stages)
        if is_read or any(node in part.results for part in homes):
            results.append(node)
    return tuple(results)


def name_values(part: Part) -> dict[Node, str]:
    """Choose the variables of a stage's forward; a call has its results only."""
    # The body with each call replaced by its results. For the other three, see `choose_names`.
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
            # Values that rounds read or pass on live to the end of the loop, so none may reuse another's
            # name.
            for slots in call.repeat.at.operands:
                for operand in slots:
                    held |= dict.fromkeys(call.outer(operand.nodes), behind)
            held |= dict.fromkeys(results, behind)
            same |= dict(zip(results, _carried_names(call.repeat), strict=True))
        else:
            held |= dict.fromkeys(results, behind)
            same |= call.result_names
        shown += results
        end = call.end
    shown += part.body[end:]
    return choose_names(shown, part.given, part.results, inside, same, held, beyond=_following(part.body))


def _following(body: Sequence[Node]) -> list[Node]:
    """Return the operators after the last one of a stage that may belong to the same source line."""
    following: list[Node] = []
    node = body[-1].next if body else None
    while node is not None and node.op == "call_function" and len(following) < MAX_OPERATORS_OF_LINE:
        following.append(node)
        node = node.next
    return following


def _carried_names(repeat: Repeat) -> list[str]:
    return [carried_name(repeat, j) for j in repeat.carried]
