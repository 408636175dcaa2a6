"""The repeated layers of a program, as the loops that will be written: what a layer is given, and how that is spelled by `i`.

In: operators in order, of the whole program. Out: `Repeat`s. Layers are found by what they do (`ir/periods.py`); names of
parameters only say how to index them: those of `h.0.ln.weight`, `h.1.ln.weight`, ... become `w.h[i].ln.weight`. What else
differs from layer to layer is spelled by `i`, too: numbers in arithmetic progression (`3 * i + 1`), what alternates
(`(local, full)[i % 2]`), and any other list of values (`scales[i]`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from torch.fx import Node
from torch.fx.node import map_aggregate

from autoptd.codegen.expressions import expression
from autoptd.ir.notes import note, value
from autoptd.ir.periods import Period, find_periods

Path = tuple[int | str, ...]  # where a number stands in the arguments of an operator: ("dim",) or (1, 0)
FEW = 3  # parameters of one layer that all periods share and that are passed one by one
FEWEST = 10  # operators of a repeat that has no parameters of its own


@dataclass(frozen=True)
class Weights:
    """What a layer has under one path: that of period k is `{prefix}.{first + k * step}` (step 0: all share one layer's)."""

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

    def spell(self, values: Sequence[int | float]) -> str:
        """One number per period, as an expression of `i`."""
        if not all(isinstance(one, int) for one in values) or len({b - a for a, b in pairwise(values)}) > 1:
            return self.choose([repr(one) for one in values])
        slope = int(values[1] - values[0])
        if slope % self.step:
            return _times(slope, self.count, int(values[0]))
        return _times(slope // self.step, "i", int(values[0]) - slope // self.step * self.first)

    @property
    def count(self) -> str:
        """The number of the period, 0, 1, ..."""
        text = _times(1, "i", -self.first)
        return text if self.step == 1 else f"({text}) // {self.step}" if self.first else f"i // {self.step}"

    def choose(self, texts: Sequence[str]) -> str:
        """One of `texts` per period; a list that alternates is written once."""
        for every in range(1, len(texts) // 2 + 1):
            if all(text == texts[k % every] for k, text in enumerate(texts)):
                turned = (
                    [texts[(k - self.first) % every] for k in range(every)]
                    if self.step == 1
                    else texts[:every]
                )
                number = "i" if self.step == 1 else f"({self.count})"
                return f"({', '.join(turned)})[{number} % {every}]" if every > 1 else texts[0]
        return f"({', '.join(texts)})[{self.count}]"


@dataclass(frozen=True, eq=False)
class Repeat:
    """A layer and all of its rounds, one after the other in `body`; most often they are spread over several stages."""

    at: Period
    body: tuple[Node, ...]
    weights: tuple[Weights, ...]
    numbers: dict[tuple[int, Path], tuple[int | float, ...]]  # (operator, where) -> one per period

    @property
    def operators(self) -> tuple[Node, ...]:
        """Those of the second round, which is written: in the first, a carried value and an outer one can be the same."""
        return self.round(1)

    def round(self, k: int) -> tuple[Node, ...]:
        """The operators of round k."""
        return self.body[k * self.at.length : (k + 1) * self.at.length]

    @cached_property
    def steps(self) -> Steps:
        return next((Steps(one.first, one.step) for one in self.weights if one.step), Steps(0, 1))

    @property
    def carried(self) -> list[int]:
        """Where in a round the values are made that the next round reads."""
        return sorted(self.at.carried)

    def entering(self, k: int) -> list[Node]:
        """What round k reads of the round before; of the first one, what stands in its place."""
        return [self.round(k - 1)[j] if k else self.at.carried[j] for j in self.carried]

    def leaving(self, k: int) -> list[Node]:
        """What round k hands on."""
        return [self.round(k)[j] for j in self.carried]

    def own(self, nodes: Sequence[Node]) -> tuple[Weights, str] | None:
        """Which of `weights` the nodes of an operand belong to, and the name below it."""
        found = _numbered(nodes)
        return next(((one, rest) for one, rest in found if one in self.weights), None)


def find_repeats(body: list[Node], results: set[Node]) -> list[Repeat]:
    """The repeats in a list of operators, of which `results` are read afterwards, in order."""
    found = find_periods(body, [_signature(node) for node in body], results, _is_alike, _rank)
    return [_repeat(body, one) for one in found]


def _repeat(body: list[Node], at: Period) -> Repeat:
    numbers = {}
    for j in range(at.length):
        every = [_numbers(body[at.start + k * at.length + j]) for k in range(at.count)]
        for path in every[0]:
            if len({repr(one[path]) for one in every}) > 1:
                numbers[j, path] = tuple(one[path] for one in every)
    return Repeat(at, tuple(body[at.start : at.stop]), weights_of(at), numbers)


def _signature(node: Node) -> tuple[str, ...]:
    """What two operators must have in common to be one line: all but the numbers among their arguments."""
    place = {arg: f"node {i}" for i, arg in enumerate(node.all_input_nodes)}  # f(x, x, y) is not f(x, y, y)
    literals = map_aggregate(
        (node.args, node.kwargs),
        lambda arg: place[arg] if isinstance(arg, Node) else "#" if _is_number(arg) else arg,
    )
    made = value(node)
    dtypes = [one.dtype for one in (made if isinstance(made, (tuple, list)) else [made])]
    shapes = note(node).extra.get("local_shapes")
    read = [_shape(arg) for arg in node.all_input_nodes]
    return str(node.target), str(literals), note(node).axis, str(shapes), str(dtypes), str(read)


def _shape(node: Node) -> Any:
    return note(node).extra.get("local_shapes")


def _is_number(arg: Any) -> bool:
    return isinstance(arg, (int, float)) and not isinstance(arg, bool)


def _numbers(node: Node) -> dict[Path, int | float]:
    """All numbers among the arguments, by where they stand."""
    found: dict[Path, int | float] = {}

    def visit(arg: Any, path: Path) -> None:
        if isinstance(arg, (list, tuple)):
            for i, one in enumerate(arg):
                visit(one, (*path, i))
        elif _is_number(arg):
            found[path] = arg

    for i, arg in enumerate(node.args):
        visit(arg, (i,))
    for key, arg in node.kwargs.items():
        visit(arg, (key,))
    return found


def _is_alike(one: Node, other: Node) -> bool:
    """Whether the two are one line of code: the same text, but for numbers that may come from outside."""
    mine, theirs = _numbers(one), _numbers(other)
    different = {path: str(theirs[path]) for path in mine if repr(mine[path]) != repr(theirs[path])}
    if not different:
        return True
    texts = [
        {arg: f"x{i}" for i, arg in enumerate(node.all_input_nodes)}.__getitem__ for node in (one, other)
    ]
    return spelled(one, different, texts[0]) == expression(other, texts[1])


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


def spelled(node: Node, numbers: dict[Path, str], text: Callable[[Node], str], site: str = '""') -> str:
    """The expression of `node` with other texts for some of its numbers."""

    def put(arg: Any, path: Path) -> Any:
        if path in numbers:
            made = _WrittenInt(arg) if isinstance(arg, int) else _WrittenFloat(arg)
            made.text = numbers[path]
            return made
        if isinstance(arg, (list, tuple)):
            return type(arg)(put(one, (*path, i)) for i, one in enumerate(arg))
        return arg

    args = tuple(put(arg, (i,)) for i, arg in enumerate(node.args))
    kwargs = {key: put(arg, (key,)) for key, arg in node.kwargs.items()}
    line: Any = SimpleNamespace(op=node.op, target=node.target, args=args, kwargs=kwargs, meta=node.meta)
    return expression(line, text, site)


def weights_of(at: Period) -> tuple[Weights, ...]:
    """What the parameters and buffers of the periods are numbered by: as few paths as hold all, in order of first use."""
    slots = [one.nodes for operands in at.operands for one in operands if one.kind == "outer"]
    candidates = [found[0][0] for found in map(_numbered, dict.fromkeys(slots)) if found]
    often = Counter(candidates)
    return tuple(one for one in dict.fromkeys(candidates) if one.step or often[one] > FEW)


def _numbered(nodes: Sequence[Node]) -> list[tuple[Weights, str]]:
    """The ways to see parameters or buffers as numbered: `h.0.ln.weight`, `h.1.ln.weight` are (h, from 0 by 1), ln.weight."""
    kinds = {note(node).kind for node in nodes}
    if len(kinds) > 1 or not kinds <= {"param", "buffer"}:
        return []
    names = [note(node).name.split(".") for node in nodes]
    found = []
    for at, part in enumerate(names[0]):
        if not part.isdecimal() or any(len(name) <= at or not name[at].isdecimal() for name in names):
            continue
        numbers = [int(name[at]) for name in names]
        step = numbers[1] - numbers[0]
        rest = {(".".join(name[:at]), ".".join(name[at + 1 :])) for name in names}
        if len(rest) == 1 and numbers == [numbers[0] + k * step for k in range(len(numbers))]:
            prefix, suffix = next(iter(rest))
            found.append((Weights(next(iter(kinds)), prefix, numbers[0], step), suffix))
    return found


def _rank(at: Period) -> tuple[int, ...] | None:
    """Fewest sets of weights first: a period begins where a layer begins."""
    weights = weights_of(at)
    if not any(one.step for one in weights) and (at.length < FEWEST or not _has_weights(at)):
        return None  # three alike lines are easier to read than a loop
    return (len(weights),)


def _has_weights(at: Period) -> bool:
    slots = [one.nodes for operands in at.operands for one in operands if one.kind == "outer"]
    return any(note(nodes[0]).kind == "param" for nodes in slots)


def _times(slope: int, variable: str, offset: int) -> str:
    """`3 * i + 1`, in the shortest form."""
    text = variable if slope == 1 else f"{slope} * {variable}" if re.fullmatch(r"\w+", variable) else ""
    text = text or f"{slope} * ({variable})"
    if slope == 0:
        return str(offset)
    return text if not offset else f"{text} + {offset}" if offset > 0 else f"{text} - {-offset}"
