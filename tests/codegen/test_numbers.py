"""Every operator with every kind of number in every place, written and read back: Python's precedence is never in the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autoptd.codegen.expressions import expression
from autoptd.codegen.repeats import Steps, expression_with
from autoptd.ir import markers
from autoptd.ir.notes import Note, set_note
from autoptd.ir.operators.table import TABLE

aten = torch.ops.aten
INFIX = [name for name, record in TABLE.items() if record.text and not record.text.strip("=!<>*/+-&|^@")]
X = torch.tensor([[-2, 1, 3], [5, -1, 2]])
HERE = "here"  # where the number stands


def infix_calls() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """(overload, arguments) of all infix operators, a number on either side."""
    for name in INFIX:
        packet = getattr(aten, name.removeprefix("aten."))
        for overload in (getattr(packet, one) for one in packet.overloads()):
            first, second, *rest = overload._schema.arguments
            kinds = [str(one.type) for one in (first, second)]
            has_numbers = {"Tensor", "number"} == set(kinds)
            if (
                has_numbers
                and all(one.has_default_value() for one in rest)
                and "out" not in overload._overloadname
            ):
                yield overload, tuple("x" if kind == "Tensor" else HERE for kind in kinds)
        if "Tensor" in packet.overloads():  # traces have numbers there, too
            yield packet.Tensor, ("x", HERE)


CALLS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    **{f"{op} {args}": (op, args, {}) for op, args in infix_calls()},
    "add alpha": (aten.add.Tensor, ("x", "x"), {"alpha": HERE}),
    "sub alpha": (aten.sub.Tensor, ("x", HERE), {"alpha": 2}),
    "add Scalar alpha": (aten.add.Scalar, ("x", HERE, 3), {}),
    "rsub": (aten.rsub.Scalar, ("x", HERE), {}),
    "div floor": (aten.div.Scalar_mode, ("x", HERE), {"rounding_mode": "floor"}),
    "floor_divide": (aten.floor_divide.Scalar, ("x", HERE), {}),
    "remainder": (aten.remainder.Scalar, ("x", HERE), {}),
    "remainder of a number": (aten.remainder.Scalar_Tensor, (HERE, "x"), {}),
    "clamp": (aten.clamp.default, ("x", HERE, None), {}),
    "clamp both": (aten.clamp.default, ("x", -1, HERE), {}),
    "masked_fill": (aten.masked_fill.Scalar, ("x", "mask", HERE), {}),
    "where": (aten.where.ScalarSelf, ("mask", HERE, "x"), {}),
    "where other": (aten.where.ScalarOther, ("mask", "x", HERE), {}),
    "where both": (aten.where.Scalar, ("mask", HERE, 2), {}),
    "pad": (aten.pad.default, ("x", [1, 0], "constant", HERE), {}),
    "pad size": (aten.pad.default, ("x", [HERE, 2]), {}),
    "full": (aten.full.default, ([2], HERE), {}),
    "full size": (aten.full.default, ([HERE], 1.5), {}),
    "arange": (aten.arange.start, (HERE, 100), {}),
    "roll": (aten.roll.default, ("x", [HERE], [1]), {}),
    "slice": (aten.slice.Tensor, ("long", 0, HERE, None), {}),
    "slice end": (aten.slice.Tensor, ("long", 0, 0, HERE), {}),
    "triu": (aten.triu.default, ("x", HERE), {}),
    "diff": (aten.diff.default, ("x", HERE, 0), {}),
    "pow tensor": (aten.pow.Tensor_Scalar, ("y", HERE), {}),
    "leaky_relu": (aten.leaky_relu.default, ("y", HERE), {}),
    "softplus": (aten.softplus.default, ("y", HERE, 20), {}),
    "share": (markers.share, ("y", HERE), {}),
    "mean": (markers.mean, ("y", [0], False, HERE), {}),
}
TAKE_BOOLS = [name for name in CALLS if name.startswith("aten")] + [
    "masked_fill",
    "where",
    "where other",
    "full",
]
TENSORS = {"x": X, "y": X * 0.7, "mask": X > 0, "long": torch.arange(40)}
MEANT: dict[Any, Callable[..., Any]] = {
    markers.share: lambda x, pieces: x / pieces,
    markers.mean: lambda x, dims, keepdim, count: x.sum(dims) / count,
}
SCOPE = {"torch": torch, "F": F, "self": SimpleNamespace(device="cpu"), **TENSORS}
NUMBERS = [0, 1, -1, 3, -2, 0.5, -1.5, -1e-05, 1e30, math.inf, -math.inf, math.nan, True, False]


def make(name: str, number: Any) -> Node | None:
    """The call as a node, `number` in its place; None where the operator takes no such number."""
    target, args, kwargs = CALLS[name]
    if isinstance(number, bool) and name not in TAKE_BOOLS:
        return None
    graph = Graph()
    tensors = {key: graph.placeholder(key) for key in TENSORS}

    def put(arg: Any) -> Any:
        if isinstance(arg, list):
            return [put(one) for one in arg]
        if arg == HERE:
            return number
        return tensors.get(arg, arg) if isinstance(arg, str) else arg

    for key, node in tensors.items():
        node.meta["val"] = TENSORS[key]
    made = graph.call_function(target, tuple(map(put, args)), {key: put(arg) for key, arg in kwargs.items()})
    read, keywords = map_arg((made.args, made.kwargs), lambda one: TENSORS[one.name])
    try:
        made.meta["val"] = MEANT.get(target, target)(*read, **keywords)
    except (RuntimeError, IndexError, ZeroDivisionError, TypeError, OverflowError):
        return None
    set_note(made, Note())
    return made


def assert_same(text: str, wanted: Any, **scope: Any) -> None:
    found = eval(text, SCOPE | scope)
    assert found.dtype == wanted.dtype and found.shape == wanted.shape, text
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True, msg=text)


def name_of(node: Node) -> str:
    return node.name


def test_every_number_is_read_back_of_every_operator() -> None:
    nodes = [node for name, number in product(CALLS, NUMBERS) if (node := make(name, number)) is not None]
    assert len(nodes) > 400
    for node in nodes:
        assert_same(expression(node, name_of), node.meta["val"])


@given(
    name=st.sampled_from(sorted(CALLS)),
    steps=st.builds(Steps, st.sampled_from([0, 1, 5]), st.sampled_from([1, 2, -1])),
    way=st.sampled_from(["i", "2i+1", "3-i", "-i", "list", "floats", "alternating"]),
    offset=st.integers(-3, 9),
)
@settings(max_examples=500, deadline=None)
def test_a_number_of_a_layer_is_read_back(name: str, steps: Steps, way: str, offset: int) -> None:
    of: dict[str, Callable[[int], int | float]] = {
        "i": lambda k: k + offset,
        "2i+1": lambda k: 2 * k + 1 + offset,
        "3-i": lambda k: 3 - k + offset,
        "-i": lambda k: -k,
        "list": lambda k: (k * k) % 7 - 2,
        "floats": lambda k: offset / (k + 1),
        "alternating": lambda k: (offset, -1)[k % 2],
    }
    numbers = [of[way](k) for k in range(5)]
    nodes = [node for number in numbers if (node := make(name, number)) is not None]
    assume(len(nodes) == len(numbers))
    paths = [
        path
        for path in places(nodes[0])
        if at(nodes[0], path) is numbers[0] or at(nodes[0], path) == numbers[0]
    ]
    path = next(
        path for path in paths if at(nodes[1], path) == numbers[1] and at(nodes[2], path) == numbers[2]
    )
    assume(
        all(
            is_one_line(nodes[1], node, {path: str(number)})
            for node, number in zip(nodes, numbers, strict=True)
        )
    )
    text = expression_with(nodes[1], {path: steps.express(numbers)}, name_of)
    for k, node in enumerate(nodes):
        assert_same(text, node.meta["val"], i=steps.first + k * steps.step)


def is_one_line(node: Node, other: Node, numbers: dict[tuple[Any, ...], str]) -> bool:
    """As find_repeats asks: a slice from 0 is another text than one from 1."""
    same = expression_with(node, numbers, name_of) == expression(other, name_of)
    return same and node.meta["val"].shape == other.meta["val"].shape


def places(node: Node) -> Iterator[tuple[Any, ...]]:
    for key, arg in [*enumerate(node.args), *node.kwargs.items()]:
        yield (key,)
        if isinstance(arg, (list, tuple)):
            yield from ((key, i) for i in range(len(arg)))


def at(node: Node, path: tuple[Any, ...]) -> Any:
    found: Any = node.args[path[0]] if isinstance(path[0], int) else node.kwargs[path[0]]
    return found[path[1]] if len(path) > 1 else found


@pytest.mark.parametrize(
    ("name", "number", "text"),
    [
        ("aten.mul.Tensor ('x', 'here')", "i + 1", "x * (i + 1)"),
        ("aten.sub.Tensor ('x', 'here')", "2 * i + 1", "x - (2 * i + 1)"),
        ("aten.div.Tensor ('x', 'here')", "scales[i - 1]", "x / scales[i - 1]"),
        ("aten.div.Tensor ('x', 'here')", "(1, 2)[i % 2]", "x / (1, 2)[i % 2]"),
        ("aten.pow.Scalar ('here', 'x')", "-1", "(-1) ** x"),
        ("aten.mul.Tensor ('x', 'here')", "-1", "x * -1"),
        ("mean", "3 * i", "y.sum([0]) / (3 * i)"),
    ],
)
def test_parentheses_stand_where_they_matter(name: str, number: str, text: str) -> None:
    node = make(name, 7)
    assert node is not None
    (path,) = [path for path in places(node) if at(node, path) == 7]
    assert expression_with(node, {path: number}, name_of) == text


def test_every_infix_operator_is_tried() -> None:
    written = {str(CALLS[name][0]).split(".")[1] for name in CALLS if name.startswith("aten")}
    tensors_only = {"matmul", "__and__", "__or__", "__xor__"}
    assert {name.removeprefix("aten.") for name in INFIX} - tensors_only <= written
