"""Costs as formulas: what people read, evaluated at the traced sizes, is what the solver minimised."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import sympy
from torch import nn

import autoptd
from autoptd.compiler.compiled import Compiled
from autoptd.ir.layout import Layout, Step
from autoptd.ir.types import I, P, R, S, ValueType
from autoptd.passes.ops.costs import conversion_seconds, flops
from autoptd.passes.solve.explain import formulas
from autoptd.passes.solve.symbols import Symbols
from tests.parity.models import batch, encoder_decoder, gpt, separate, source_batch
from tests.passes.graphs import annotate, find

MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "tied GPT": (lambda: gpt(2, vocab=61), batch(vocab=61)),
    "parallel residual": (separate, batch()),
    "encoder and decoder": (lambda: encoder_decoder(2), (source_batch(), *batch())),
}


TOKENS: dict[str, Any] = {"sequence_parallel": True, "p": 2, "machine": {"link_bandwidth": 5e11}}


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("tied GPT", TOKENS),
        pytest.param("parallel residual", {}, marks=pytest.mark.thorough),
        ("encoder and decoder", TOKENS),
        pytest.param("tied GPT", {}, marks=pytest.mark.thorough),
        pytest.param("parallel residual", TOKENS, marks=pytest.mark.thorough),
        pytest.param("encoder and decoder", {}, marks=pytest.mark.thorough),
    ],
)
def test_every_formula_that_is_shown_is_the_number_that_was_minimised(
    name: str, request_: dict[str, Any]
) -> None:
    """After all passes: conversions and hooks are in the graph by then."""
    make, inputs = MODELS[name]
    program = autoptd.compile(
        make(), t=4, example_inputs=inputs, async_tensor_model_parallel_allreduce=True, **request_
    )
    assert isinstance(program, Compiled)
    assignment = program.found.assignments["tp"]
    nodes = [node for node in assignment.problem.variable if flops(node)]
    symbols = Symbols(assignment.splitter, assignment.letters)
    seen = 0
    for node in nodes:
        for one in formulas(assignment, symbols, node):
            assert symbols.number(one.expression) == pytest.approx(one.number, rel=1e-12), str(one)
            seen += bool(one.expression.free_symbols)
    assert seen > len(nodes)


def test_what_is_printed_can_be_evaluated_by_hand() -> None:
    text = autoptd.compile(gpt(2), t=2, example_inputs=batch()).explain("transformer.h.1.mlp.c_fc")
    values = dict(re.findall(r"(\w+) = ([\d.e+-]+)", text.rpartition("where ")[2]))
    assert values["b"] == "2" and values["s"] == "8" and values["h"] == "32" and values["t"] == "2"
    (product,) = re.findall(r"product: (.*) FLOPs.*: (.*)", text)
    (sums,) = re.findall(r"as R: all-reduce backward, (.*) seconds: (.*)", text)
    assert product[0] == "2*b*h*n128*s"
    for formula, number in (product, sums):
        assert float(f"{float(sympy.sympify(formula, locals=names(values)).subs(values)):.3g}") == float(
            number
        )


def names(values: dict[str, str]) -> dict[str, Any]:
    return {name: sympy.Symbol(name) for name in values}


CONVERSIONS = [(I, R), (P, I), (P, R), (P, S(2, 0)), (S(2, 0), R), (S(2, 0), S(1, 0)), (I, S(1, 0))]


@pytest.mark.parametrize(("source", "target"), CONVERSIONS, ids=str)
def test_conversions_have_the_formula_of_their_collectives(source: ValueType, target: ValueType) -> None:
    graph, _, assignment = annotate(gpt(1), *batch(4), t=4, pieces=2)
    assert assignment.splitter is not None
    symbols = Symbols(assignment.splitter, assignment.letters)
    step = Step("tp", source, target, Layout({"tp": target}), 1)
    made = symbols.conversion(find(graph, "layer_norm"), step)
    wanted = conversion_seconds(source, target, 4 * 8 * 32 * 4, 4, assignment.splitter.machine)
    assert symbols.number(made) == pytest.approx(wanted, rel=1e-12)
    b, s, h = (sympy.Symbol(name, positive=True) for name in "bsh")
    if (source, target) == (P, I):
        volume = 2 * 4 * b * s * h * (symbols.degree - 1) / symbols.degree
        assert sympy.simplify(made - volume / symbols.machine.link_bandwidth - symbols.machine.latency) == 0
