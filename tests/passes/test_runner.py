"""Contracts: a pass that breaks its own is named, with what it violates; and what a run leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from torch.fx import Graph

import autoptd
from autoptd import passes
from autoptd.errors import InternalError
from autoptd.ir import markers
from autoptd.ir.notes import note, op_name, ops, placeholders
from autoptd.ir.types import R, S
from autoptd.passes import PASSES, Form, Record, passes_for, run_passes, up_to
from autoptd.passes.context import Context
from autoptd.passes.runner import CALLS, Pass, divides_tokens, graph_pass
from tests.parity.models import batch, gpt
from tests.passes.graphs import context

Fault = Callable[[Graph, Context], None]


def traced() -> tuple[Graph, Context]:
    return context(gpt(1), *batch(4), t=2, pieces=2)


def broken(each: Pass, fault: Fault) -> Pass:
    """The pass, with a fault at its end."""

    def run(graph: Graph, ctx: Context) -> Graph:
        graph = each(graph, ctx)
        fault(graph, ctx)
        return graph

    run.__name__ = each.name
    return replace(each, run=run)


def with_fault(name: str, fault: Fault) -> tuple[Pass, ...]:
    """All passes, that of this name with a fault."""
    return tuple(
        broken(each, fault) if each.name == name else each
        for each in PASSES
        if each.when is not divides_tokens
    )


def drop_a_conversion(graph: Graph, ctx: Context) -> None:
    node = next(node for node in ops(graph) if node.target is markers.convert)
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    graph.erase_node(node)


def turn_a_type(graph: Graph, ctx: Context) -> None:
    """As solved, and not a type that the value has room for."""
    node = next(placeholders(graph, "param"))
    note(node).layout = note(node).layout.having("tp", S(7, 0))


def another_type(graph: Graph, ctx: Context) -> None:
    node = next(node for node in ops(graph) if op_name(node) == "aten.layer_norm")
    note(node).layout = note(node).layout.having("tp", R)


def forget_a_stage(graph: Graph, ctx: Context) -> None:
    note(next(ops(graph))).stages = ()


def keep_a_global_size(graph: Graph, ctx: Context) -> None:
    node = next(node for node in ops(graph) if op_name(node) == "aten.view")
    node.args = (node.args[0], [1, *node.args[1]])  # type: ignore[misc]


def move_a_stage(graph: Graph, ctx: Context) -> None:
    note(next(ops(graph))).stages = (1,)


def rewire(graph: Graph, ctx: Context) -> None:
    node = next(node for node in ops(graph) if op_name(node) == "aten.gelu")
    node.args = (node.args[0],)
    node.kwargs = {"approximate": "tanh"}


def find_nothing(graph: Graph, ctx: Context) -> None:
    del ctx.found.cut


FAULTS: dict[str, tuple[str, Fault, str]] = {  # name -> pass, what it does wrong, what is said
    "a type without its dim": (
        "annotate",
        turn_a_type,
        r"annotate \(TRACED -> ANNOTATED\) ensures ANNOTATED: .*S\(7",
    ),
    "another type than was solved": (
        "annotate",
        another_type,
        "annotate .* is tp: R over tp, and was solved as",
    ),
    "an edge without its conversion": (
        "communicate",
        drop_a_conversion,
        r"communicate .* ensures CONNECTED: .* maps",
    ),
    "a type changed by communicate": (
        "communicate",
        another_type,
        "communicate .*: changes layout of layer_norm",
    ),
    "a type changed by the search for patterns": (
        "find_fusions",
        another_type,
        "find_fusions .*: changes layout of",
    ),
    "a call changed by the search for patterns": (
        "find_fusions",
        rewire,
        "find_fusions .*: changes calls of gelu",
    ),
    "an operator without a stage": ("cut", forget_a_stage, r"cut \(CONNECTED -> CUT\) ensures CUT: "),
    "a cut that is not told": ("cut", find_nothing, r"cut .*: should find cut, and has not"),
    "a type changed by the cut": (
        "cut",
        another_type,
        "cut .*: changes layout of .*, and may change stages, stages_why",
    ),
    "a global size": ("localize", keep_a_global_size, r"localize \(CUT -> LOCAL\) ensures LOCAL: "),
    "a stage changed by hooks": ("hook_gemms", move_a_stage, "hook_gemms .*: changes stages of"),
    "a call changed by a pass that marks": ("mark_owned", rewire, "mark_owned .*: changes calls of gelu"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_pass_that_breaks_its_contract_is_named(what: str) -> None:
    name, fault, said = FAULTS[what]
    graph, ctx = traced()
    run_passes(passes_for(ctx), graph, replace(ctx), Record())  # without the fault all is well
    with pytest.raises(InternalError, match=said):
        run_passes(with_fault(name, fault), graph, ctx, Record())


def test_contracts_hold_in_every_compilation() -> None:
    faulty = mock.patch("autoptd.passes.PASSES", with_fault("communicate", drop_a_conversion))
    with faulty, pytest.raises(InternalError, match="communicate"):
        autoptd.compile(gpt(1), t=2, example_inputs=batch(4))


def test_a_graph_that_is_not_traced_well_is_not_annotate_s_fault() -> None:
    graph, ctx = traced()
    note(next(placeholders(graph, "param"))).of_params = False
    with pytest.raises(InternalError, match=r"annotate .* requires TRACED: .*its note says otherwise"):
        run_passes(passes_for(ctx), graph, ctx, Record())


def test_passes_in_another_order() -> None:
    graph, ctx = traced()
    with pytest.raises(InternalError, match=r"cut .*takes .* CONNECTED, and gets one that is ANNOTATED"):
        run_passes((passes.annotate, passes.cut), graph, ctx, Record())


def test_what_no_pass_has_found() -> None:
    graph, ctx = traced()
    with pytest.raises(InternalError, match="assignments is read, and no pass has found it yet"):
        passes.communicate(graph, ctx)
    passes.annotate(graph, ctx)
    assert ctx.found.has("assignments") and not replace(ctx).found.has("assignments")


def test_a_contract_names_fields_of_notes() -> None:
    with pytest.raises(InternalError, match="notes have no colour"):
        graph_pass(takes=Form.LOCAL, gives=Form.LOCAL, changes=(CALLS, "colour"))


def test_the_forms_of_a_run() -> None:
    graph, ctx = traced()
    before, record = passes.describe(graph), Record(every_pass=True)
    made = run_passes(up_to(Form.CUT, passes_for(ctx)), graph, ctx, record)
    assert list(record.graphs) == ["TRACED", "ANNOTATED", "CONNECTED", "CUT"] and record.graphs["CUT"] is made
    assert record.graphs["TRACED"] is graph and passes.describe(graph) == before  # it can be run again
    assert all(node.graph is made for node in ctx.found.assignments["tp"].strategies)
    local = run_passes([each for each in passes_for(ctx) if each.gives > Form.CUT], made, ctx, record)
    assert record.graphs["LOCAL"] is local and record.graphs["CUT"] is not made
    names = [each.name for each in passes_for(ctx)]
    assert list(record.after) == names and set(record.seconds) == {*names, "copies", "contracts"}
    texts = [passes.describe(record.graphs[form.name]) for form in Form]
    assert len(set(texts)) == len(Form)


def test_the_graph_is_written_after_every_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPTD_DUMP", str(tmp_path))
    graph, ctx = traced()
    with pytest.raises(InternalError):
        run_passes(with_fault("communicate", drop_a_conversion), graph, ctx, Record())
    assert sorted(file.name for file in (tmp_path / "passes").iterdir()) == [
        "00_trace.txt",
        "01_raise_attention.txt",
        "02_read_causal.txt",
        "03_annotate.txt",
        "04_take_whole_numbers.txt",
    ]
