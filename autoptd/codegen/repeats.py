"""Find the repeated layers of a program, and express their differences by the layer number `i`.

In: the operators of the whole program, in order. Out: `Repeat`s, and in each stage the `Run`s of their rounds: their
position among its operators, and the values that they read and pass on. Layers are found by their computation
(`ir/periods.py`); parameter names only determine the index: `h.0.ln.weight`, `h.1.ln.weight`, ... become
`w.h[i].ln.weight`. Other differences are expressed by `i` too: numbers in arithmetic progression (`3 * i + 1`),
alternating values (`(local, full)[i % 2]`), and any other list of values (`scales[i]`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby, pairwise
from types import SimpleNamespace
from typing import Any

from torch.fx import Node
from torch.fx.node import map_aggregate

from autoptd.codegen.expressions import expression
from autoptd.codegen.names import assigned_name
from autoptd.ir.names import layer_of
from autoptd.ir.notes import note, value
from autoptd.ir.periods import Period, find_periods

# The position of a number among the arguments of an operator: ("dim",) or (1, 0).
Path = tuple[int | str, ...]
# Up to this many parameters shared by all periods are passed one by one.
MAX_PASSED = 3
# A repeat without parameters has at least this many operators: a few equal lines are easier to read than a
# loop.
MIN_OPERATORS = 10


@dataclass(frozen=True)
class Weights:
    """The parameters or buffers of a layer: in period k those below `{prefix}.{first + k * step}` (step 0:
    shared by all).
    """

    kind: str
    prefix: str
    first: int
    step: int

    def path(self, k: int) -> str:
        number = str(self.first + k * self.step)
        return f"{self.prefix}.{number}" if self.prefix else number


@dataclass(frozen=True)
class Steps:
    """The loop's `i`: `first`, `first + step`, ... for period 0, 1, ..."""

    first: int
    step: int

    def express(self, values: Sequence[int | float]) -> str:
        """Return one number per period, as an expression of `i`."""
        differences = {after - before for before, after in pairwise(values)}
        # Not floats: 3 * 0.1 is 0.30000000000000004, where the model's own list has 0.3.
        is_linear = len(differences) <= 1 and all(isinstance(number, int) for number in values)
        if not is_linear:
            return self.choose([repr(number) for number in values])
        start, slope = int(values[0]), int(values[1] - values[0])
        if slope % self.step:
            return _times(slope, self.count, start)
        # In `i` itself: with i = 6, 7, 8 and the values 19, 22, 25, `3 * i + 1`.
        per_i = slope // self.step
        return _times(per_i, "i", start - per_i * self.first)

    @property
    def count(self) -> str:
        """The number of the period, 0, 1, ..."""
        text = _times(1, "i", -self.first)
        if self.step == 1:
            return text
        return f"({text}) // {self.step}" if self.first else f"i // {self.step}"

    def choose(self, texts: Sequence[str]) -> str:
        """Return an expression that selects one of `texts` per period; an alternating list is written once."""
        # The shortest pattern that repeats: (local, local, full, local, local, full) has length 3.
        for length in range(1, len(texts) // 2 + 1):
            if any(text != texts[k % length] for k, text in enumerate(texts)):
                continue
            if length == 1:
                return texts[0]
            if self.step == 1:
                # Rotated so that `i` itself can be the index.
                rotated = [texts[(k - self.first) % length] for k in range(length)]
                return f"({', '.join(rotated)})[i % {length}]"
            return f"({', '.join(texts[:length])})[({self.count}) % {length}]"
        return f"({', '.join(texts)})[{self.count}]"


@dataclass(frozen=True, eq=False)
class Repeat:
    """A layer and all of its rounds, one after the other in `body`; usually several stages share them.

    `numbers` has the numbers that differ, one per period, by (operator, position among its arguments).
    """

    at: Period
    body: tuple[Node, ...]
    weights: tuple[Weights, ...]
    numbers: dict[tuple[int, Path], tuple[int | float, ...]]

    @property
    def operators(self) -> tuple[Node, ...]:
        """The second round, which is written: in the first, a carried value and an outer one can be the same."""
        return self.round(1)

    def round(self, k: int) -> tuple[Node, ...]:
        """Return the operators of round k."""
        return self.body[k * self.at.length : (k + 1) * self.at.length]

    @cached_property
    def steps(self) -> Steps:
        """The loop's `i`: the numbers of its layers in the model, else 0, 1, ..."""
        for weights in self.weights:
            if weights.step:
                return Steps(weights.first, weights.step)
        return Steps(0, 1)

    @property
    def carried(self) -> list[int]:
        """The operators of a round, by index, whose results the next round reads."""
        return sorted(self.at.carried)

    def entering(self, k: int) -> list[Node]:
        """Return the values that round k reads from the previous round; the initial values if k is 0."""
        return [self.round(k - 1)[j] if k else self.at.carried[j] for j in self.carried]

    def leaving(self, k: int) -> list[Node]:
        """Return the values of round k that the next round reads."""
        return [self.round(k)[j] for j in self.carried]

    def own(self, nodes: Sequence[Node]) -> tuple[Weights, str] | None:
        """Return the entry of `weights` that an operand belongs to, and its name below; None for others."""
        for weights, name in _numbered(nodes):
            if weights in self.weights:
                return weights, name
        return None


@dataclass(frozen=True)
class Run:
    """Rounds `first` to `stop - 1` of a repeat, contiguous in the body of a stage from index `start` on."""

    repeat: Repeat
    first: int
    stop: int
    start: int

    @property
    def count(self) -> int:
        return self.stop - self.first

    @property
    def end(self) -> int:
        """The index after its last operator."""
        return self.start + self.count * self.repeat.at.length

    @property
    def rounds(self) -> range:
        return range(self.first, self.stop)

    @property
    def steps(self) -> Steps:
        """The `i` of this run."""
        every = self.repeat.steps
        return Steps(every.first + self.first * every.step, every.step)

    @property
    def initials(self) -> list[Node]:
        return self.repeat.entering(self.first)

    @property
    def finals(self) -> list[Node]:
        return self.repeat.leaving(self.stop - 1)

    def outer(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """Select the values of an operand in the rounds of this run from those in all rounds."""
        return nodes[self.first : self.stop]


def find_repeats(body: list[Node], results: set[Node]) -> list[Repeat]:
    """Return the repeats in a list of operators, in order; `results` are read after it."""
    signatures = {node: _signature(node) for node in body}
    rank = partial(_rank, body, signatures)
    periods = find_periods(body, list(signatures.values()), results, _is_alike, rank)
    return [_repeat(body, period) for period in periods]


def find_runs(repeats: Sequence[Repeat], body: Sequence[Node]) -> list[Run]:
    """Return the complete rounds among the operators `body` of a stage, consecutive ones as one run."""
    position = {node: i for i, node in enumerate(body)}
    runs: list[Run] = []
    for repeat in repeats:
        for k in range(repeat.at.count):
            if not all(node in position for node in repeat.round(k)):
                continue
            # The stages have the operators in the program's order, so a complete round is contiguous.
            start = position[repeat.round(k)[0]]
            last = runs[-1] if runs else None
            # Layers 6 to 8 and 9 to 11 are two runs if the stage has an operator between 8 and 9.
            if last and last.repeat is repeat and last.stop == k and last.end == start:
                runs[-1] = replace(last, stop=k + 1)
            else:
                runs.append(Run(repeat, k, k + 1, start))
    return runs


def _repeat(body: list[Node], at: Period) -> Repeat:
    numbers = {}
    for j in range(at.length):
        by_period = [_numbers(body[at.start + k * at.length + j]) for k in range(at.count)]
        for path in by_period[0]:
            values = tuple(numbers_of_period[path] for numbers_of_period in by_period)
            # By text, since -0.0 is not 0.0, nor 1.0 the same as 1.
            if len(set(map(repr, values))) > 1:
                numbers[j, path] = values
    return Repeat(at, tuple(body[at.start : at.stop]), weights_of(at), numbers)


def weights_of(at: Period) -> tuple[Weights, ...]:
    """Return the `Weights` that number the parameters and buffers of the periods, in order of first use."""
    candidates: list[Weights] = []
    for nodes in dict.fromkeys(_outer_slots(at)):
        if ways := _numbered(nodes):
            # The first way has the shortest prefix, and so holds the most.
            candidates.append(ways[0][0])
    uses = Counter(candidates)
    # Step 0: all rounds call one module, as in ALBERT.
    return tuple(weights for weights in uses if weights.step or uses[weights] > MAX_PASSED)


def _outer_slots(at: Period) -> list[tuple[Node, ...]]:
    """Return the operands from outside of the periods, each with one node per period."""
    return [operand.nodes for operands in at.operands for operand in operands if operand.kind == "outer"]


def _numbered(nodes: Sequence[Node]) -> list[tuple[Weights, str]]:
    """Return ways to number parameters or buffers: `h.0.ln.weight`, `h.1.ln.weight` are (h, from 0 by 1),
    ln.weight.
    """
    kinds = {note(node).kind for node in nodes}
    if len(kinds) > 1 or not kinds <= {"param", "buffer"}:
        return []
    names = [note(node).name.split(".") for node in nodes]
    # At every place where all names have a number: "blocks.0.layers.3.w" can be numbered by 0 or by 3.
    ways = []
    for i in range(len(names[0])):
        if any(len(name) <= i or not name[i].isdecimal() for name in names):
            continue
        numbers = [int(name[i]) for name in names]
        step = numbers[1] - numbers[0]
        # Around the number, all names must be the same.
        rest = {(".".join(name[:i]), ".".join(name[i + 1 :])) for name in names}
        if len(rest) == 1 and numbers == [numbers[0] + k * step for k in range(len(numbers))]:
            prefix, suffix = next(iter(rest))
            ways.append((Weights(next(iter(kinds)), prefix, numbers[0], step), suffix))
    return ways


def carried_name(repeat: Repeat, j: int) -> str:
    """Return the model's name of a value passed from round to round: `hidden_states`."""
    return assigned_name(list(repeat.operators), j) or "x"


def expression_with(
    node: Node, numbers: dict[Path, str], text: Callable[[Node], str], site: str = '""'
) -> str:
    """Return the expression of `node` with other texts for some of its numbers."""

    def replaced(arg: Any, path: Path) -> Any:
        if path in numbers:
            number = _WrittenInt(arg) if isinstance(arg, int) else _WrittenFloat(arg)
            number.text = numbers[path]
            return number
        if isinstance(arg, (list, tuple)):
            return type(arg)(replaced(item, (*path, i)) for i, item in enumerate(arg))
        return arg

    args = tuple(replaced(arg, (i,)) for i, arg in enumerate(node.args))
    kwargs = {key: replaced(arg, (key,)) for key, arg in node.kwargs.items()}
    # A stand-in: a node of the graph itself cannot have other arguments for a moment.
    line: Any = SimpleNamespace(op=node.op, target=node.target, args=args, kwargs=kwargs, meta=node.meta)
    return expression(line, text, site)


class _WrittenInt(int):
    """A number that prints as a text."""

    text: str

    def __repr__(self) -> str:
        return self.text

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return self.text


class _WrittenFloat(float):
    """A number that prints as a text."""

    text: str
    __repr__ = __str__ = _WrittenInt.__repr__  # type: ignore[assignment]
    __format__ = _WrittenInt.__format__  # type: ignore[assignment]


def _signature(node: Node) -> tuple[str, ...]:
    """Return the key that operators on one line share: everything but the numbers among their arguments."""
    # Operands by position, because f(x, x, y) is not f(x, y, y).
    place = {arg: f"node {i}" for i, arg in enumerate(node.all_input_nodes)}

    def described(arg: Any) -> Any:
        if isinstance(arg, Node):
            return place[arg]
        return "#" if _is_number(arg) else arg

    literals = map_aggregate((node.args, node.kwargs), described)
    result = value(node)
    results = result if isinstance(result, (tuple, list)) else [result]
    dtypes = [x.dtype for x in results]
    # Shapes of operands too: the shapes in an emitted comment must be true in every round.
    read = [_shape(arg) for arg in node.all_input_nodes]
    # Layers that keep different values are different.
    kept = [note(node).keep.again is not None, bool(note(node).keep.dropped)]
    return (
        str(node.target),
        str(literals),
        note(node).axis,
        str(_shape(node)),
        str(dtypes),
        str(read),
        str(kept),
    )


def _shape(node: Node) -> Any:
    return note(node).local.shapes or None


def _is_number(arg: Any) -> bool:
    # True is an int, but changes the form of the line: `keepdim=True`.
    return isinstance(arg, (int, float)) and not isinstance(arg, bool)


def _numbers(node: Node) -> dict[Path, int | float]:
    """Return all numbers among the arguments, by position."""
    found: dict[Path, int | float] = {}

    def visit(arg: Any, path: Path) -> None:
        if isinstance(arg, (list, tuple)):
            for i, item in enumerate(arg):
                visit(item, (*path, i))
        elif _is_number(arg):
            found[path] = arg

    for i, arg in enumerate(node.args):
        visit(arg, (i,))
    for key, arg in node.kwargs.items():
        visit(arg, (key,))
    return found


def _is_alike(node: Node, other: Node) -> bool:
    """Tell whether two operators are one line of code: their expressions differ only in numbers."""
    mine, theirs = _numbers(node), _numbers(other)
    different = {path: str(theirs[path]) for path in mine if repr(mine[path]) != repr(theirs[path])}
    if not different:
        return True
    # Some numbers change the form of an expression: a slice from 0 is written without it.
    names = {arg: f"x{i}" for i, arg in enumerate(node.all_input_nodes)}
    names_of_other = {arg: f"x{i}" for i, arg in enumerate(other.all_input_nodes)}
    text = expression_with(node, different, names.__getitem__)
    return text == expression(other, names_of_other.__getitem__)


def _rank(
    body: Sequence[Node], signatures: Mapping[Node, tuple[str, ...]], at: Period
) -> tuple[int, ...] | None:
    """Rank by the number of `Weights`: fewest if a period begins where a layer does; None: not worth a loop."""
    if _joins_equal_layers(body[at.start + at.length : at.start + 2 * at.length], signatures):
        return None
    weights = weights_of(at)
    # The same operators repeat from every start, also from the middle of a layer, but such a period would
    # have weights of h[i] and h[i + 1].
    is_numbered = any(each.step for each in weights)
    if not is_numbered and (at.length < MIN_OPERATORS or not _has_weights(at)):
        return None
    return (len(weights),)


def _joins_equal_layers(operators: Sequence[Node], signatures: Mapping[Node, tuple[str, ...]]) -> bool:
    """Tell whether one recipe would recompute the values of several equal layers at once, not layer by layer."""
    if not any(note(node).keep.dropped for node in operators):
        return False
    layers = groupby(operators, key=lambda node: layer_of(note(node).module))
    texts = [list(map(signatures.__getitem__, layer)) for _, layer in layers]
    return any(one == other and len(one) >= MIN_OPERATORS for one, other in pairwise(texts))


def _has_weights(at: Period) -> bool:
    return any(note(nodes[0]).kind == "param" for nodes in _outer_slots(at))


def _times(slope: int, variable: str, offset: int) -> str:
    """Return `3 * i + 1`, in the shortest form."""
    if slope == 0:
        return str(offset)
    text = variable
    if slope != 1:
        is_name = re.fullmatch(r"\w+", variable)
        text = f"{slope} * {variable}" if is_name else f"{slope} * ({variable})"
    if offset > 0:
        text += f" + {offset}"
    elif offset < 0:
        text += f" - {-offset}"
    return text
