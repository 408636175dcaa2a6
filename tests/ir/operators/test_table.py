"""What follows from the records: views by memory, arguments by name, and that no other file has a table of operators."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from autoptd.ir.notes import is_tensor, op_name, ops
from autoptd.ir.operators.record import argument, operands, set_arguments
from autoptd.ir.operators.table import TABLE, is_view, operator_of
from tests.ir.operators.test_examples import EXAMPLES, traced

ROOT = Path(__file__).parents[3] / "autoptd"
aten = torch.ops.aten
# What shares memory only where strides, or the operands' values, allow it.
MAY_COPY = (
    "aten.reshape",
    "aten.flatten",
    "aten._unsafe_view",
    "aten.contiguous",
    "aten.resolve_conj",
    "aten.einsum",
)


def memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_view_shares_the_memory_of_its_operand_and_nothing_else_does(name: str) -> None:
    graph, env, _ = traced(name)
    for node in ops(graph):
        if is_tensor(node) and op_name(node) not in (*MAY_COPY, "getitem"):
            read = [memory(env[operand]) for operand in operands(node) if is_tensor(operand)]
            result = node.target(*_values(node.args, env), **_values(node.kwargs, env))  # type: ignore[operator]
            assert (memory(result) in read) == is_view(node), op_name(node)


def _values(arg: object, env: dict[Node, Tensor]) -> object:
    return torch.fx.node.map_arg(arg, lambda node: env[node])  # type: ignore[arg-type]


SQUEEZES: list[Callable[[Tensor], Tensor]] = [
    lambda x: aten.squeeze.default(x),
    lambda x: aten.squeeze.dim(x, 1),
    lambda x: aten.squeeze.dims(x, [1]),
]


@pytest.mark.parametrize("squeeze", SQUEEZES)
def test_every_squeeze_is_a_view(squeeze: Callable[[Tensor], Tensor]) -> None:
    graph = torch.fx.symbolic_trace(squeeze).graph
    assert [is_view(node) for node in ops(graph)] == [True]


def call(target: object, *args: object, **kwargs: object) -> Node:
    graph = Graph()
    return graph.call_function(target, (graph.placeholder("x"), *args), kwargs)  # type: ignore[arg-type]


def test_arguments_are_read_by_name_wherever_they_stand() -> None:
    assert argument(call(aten.sum.dim_IntList, [1]), "dim") == [1]
    assert argument(call(aten.sum.dim_IntList, [1], keepdim=True), "keepdim") is True
    assert argument(call(aten.softmax.int, dim=-1), "dim") == -1
    assert argument(call(aten.slice.Tensor), "step") == 1  # the schema's default
    assert argument(call(aten.slice.Tensor), "end", 7) == 7  # where that is None
    assert argument(call(aten.sum.default), "dim") is None  # an overload that has none
    assert argument(call(aten.var.default, False), "dim") is None  # its second argument is another one


def test_arguments_are_set_where_they_stand() -> None:
    node = call(aten.slice.Tensor, 1, 0, 8)
    set_arguments(node, {"start": 2, "end": 4})
    assert node.args[1:] == (1, 2, 4) and node.kwargs == {}
    node = call(aten.slice.Tensor, 1, start=0)
    set_arguments(node, {"start": 2, "end": 4})
    assert node.args[1:] == (1,) and node.kwargs == {"start": 2, "end": 4}
    node = call(aten.slice.Tensor, 1, 0)
    set_arguments(node, {"end": 4})
    assert node.args[1:] == (1, 0, 4)


def test_an_overload_of_its_own_has_a_record_of_its_own() -> None:
    assert operator_of(call(aten.view.default, [4])).moves == "fold"
    assert operator_of(call(aten.view.dtype, torch.int64)).moves == ""
    assert operator_of(call(aten.erfinv.default)).name == "aten.erfinv"  # nothing but its name


def test_names_of_records_are_operators_and_stand_once() -> None:
    from autoptd.ir.operators import table

    names = [record.name for record in table.OPERATORS]
    assert len(set(names)) == len(names) == len(TABLE)
    for name in names:
        packet = getattr(aten, name.removeprefix("aten.").split(".")[0], None)
        assert packet is not None or not name.startswith("aten."), name


# Constants outside of ir/operators that hold names of operators. What adds a well-behaved operator touches none of them.
ELSEWHERE = {
    "ir/markers.py: OVER_CLASSES": "markers of our own, with the names of operators that they stand for",
    "passes/axes/constants.py: CHOOSES": "where the condition of a choice stands",
    "passes/axes/constants.py: ROWS": "windows of constants, for what is not derived from how entries move",
    "passes/fusion/pointwise.py: FORMULA": "a pattern",
    "passes/fusion/attention.py: PRODUCTS": "a pattern",
    "passes/fusion/norms.py: SQUARES": "a pattern",
    "passes/reader_names.py: NORM": "a pattern, for names that people know",
    "passes/tokens/shift.py: ENTRYWISE": "whose derivatives are finite, whatever the operands",
    "passes/tokens/shift.py: FINITE": "whose derivatives are finite, whatever the operands",
    "passes/tokens/shift.py: PADDED": "operands whose value does not matter where nothing reads the result",
    "passes/tokens/attention_rewrites.py: SCORED": "attention in either of its forms, before the table's names",
    "program/about.py: LEFT_OUT": "what precision and evaluation add to a graph or take away",
    "subject/initial/recording.py: OVERWRITING": "what fills a tensor without reading it, which torch's schema does not say",
    "subject/initial/tape.py: UNINITIALIZED": "what gives memory that nobody has filled, which torch's schema does not say",
    "runtime/measure/work.py: SAME_PRODUCTS": "what torch's registry of formulas lacks",
    "runtime/measure/work.py: VECTOR_PRODUCTS": "what torch's registry of formulas lacks",
    "runtime/measure/work.py: SILENT": "what torch's schema does not say of kernels",
    "model/parallel_model.py: INSTEAD": "methods of nn.Module, some of which torch has as operators too",
    "trace/calls.py: READS": "methods of Python's containers, some of which torch has too",
    "trace/users.py: NO_STATE": "methods of nn.Module, some of which torch has as operators too",
    "trace/functionalize.py: FORMS": "the normal form of a trace",
    "trace/record.py: COPIES": "what torch.tensor calls, which no graph has",
    "trace/precision.py: TAKES_ANY": "which dtypes kernels mix, which torch's schema does not say",
    "trace/tensor_values.py: COMPARISONS": "what is compared while a forward is traced",
    "trace/statistics.py: DEVIATIONS": "the normal form of a trace",
    "trace/statistics.py: EXPONENTIALS": "the normal form of a trace",
    "trace/statistics.py: PAIRS": "the normal form of a trace",
    "trace/statistics.py: NORMS": "the normal form of a trace",
    "trace/autocast.py: NO_WORK": "what autocast itself calls, beside the operator that is looked at",
    "trace/autocast.py: SOFTMAXES": "inner operators of torch, which no graph has",
    "trace/draws.py: OTHERS": "the normal form of a trace",
    "trace/functionalize.py: MAY_ALIAS": "the normal form of a trace",
    "trace/functionalize.py: ASSIGNS": "the normal form of a trace",
    "trace/draws.py: LIKE": "the normal form of a trace",
    "trace/draws.py: SIZED": "the normal form of a trace",
    "trace/draws.py: FILLED": "the normal form of a trace",
    "trace/draws.py: STEPS": "names of arguments",
    "runtime/__init__.py: __all__": "names of our own, some of which torch has too",
    "trace/draws.py: SHAPES": "the normal form of a trace",
    "trace/normalize.py: IDENTITIES": "the normal form of a trace",
    "trace/normalize.py: SIZES_OF_ANOTHER": "the normal form of a trace",
    "trace/normalize.py: NEW": "the normal form of a trace",
    "trace/normalize.py: RECURRENT": "the normal form of a trace",
}
FEW = 4  # words that happen to be names of operators


def names_in(value: ast.expr) -> tuple[set[str], set[str]]:
    """Names of operators in an expression: those said to be of torch, and words that are called like one."""
    texts = [
        node.value
        for node in ast.walk(value)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    explicit = {text for text in texts if text.startswith(("aten.", "aten::"))}
    for node in ast.walk(value):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "aten":
            explicit.add(node.attr)
    words: set[str] = set()
    for text in texts:
        called = {word for word in text.split() if word.isidentifier() and hasattr(aten, word)}
        words |= called if 2 * len(called) > len(text.split()) else set()  # else it is prose
    return explicit, words


def constants(source: str) -> Iterator[tuple[str, ast.expr]]:
    """(name, value) of what a module assigns and adds to."""
    for line in ast.parse(source).body:
        if isinstance(line, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and line.value is not None:
            target = line.targets[0] if isinstance(line, ast.Assign) else line.target
            if isinstance(target, ast.Name):
                yield target.id, line.value


def tables(source: str) -> set[str]:
    """Constants of a module that are tables of operators."""
    found = {name: names_in(value) for name, value in constants(source)}
    return {name for name, (explicit, words) in found.items() if len(explicit) > 1 or len(words) >= FEW}


def test_no_other_file_has_a_table_of_operators() -> None:
    found = set()
    for file in ROOT.rglob("*.py"):
        path = file.relative_to(ROOT).as_posix()
        if not path.startswith("ir/operators/"):
            found |= {f"{path}: {name}" for name in tables(file.read_text())}
    assert found == set(ELSEWHERE)


@pytest.mark.parametrize(
    ("source", "is_table"),
    [
        ('VIEWS = {"aten.view", "aten.reshape"}', True),
        ('VIEWS = {f"aten.{name}" for name in "reshape transpose permute squeeze".split()}', True),
        ("SAME = {aten.mm: 1, aten.bmm: 2}", True),
        ('DROPOUT = "aten.dropout"', False),
        ('WORDS = "one two three four five"', False),
    ],
)
def test_a_table_is_found(source: str, is_table: bool) -> None:
    assert bool(tables(source)) == is_table
