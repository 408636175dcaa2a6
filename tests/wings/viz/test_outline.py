"""What a picture shows of a graph: every operator and every collective once, equal layers folded."""

from __future__ import annotations

from collections import Counter

import pytest

from autoptd.ir.notes import note, ops
from autoptd.program.program import Program
from autoptd.wings.viz.outline import Box, calls_of_nodes, is_shown, layer_of, outline
from tests.wings.viz.programs import InlinedStack, Skipping, Stack, deep, full, gpt, of, staged


def calls_in(program: Program, **keywords: bool) -> Counter:
    drawn = outline(program, **keywords)
    parts = [*drawn.boxes, *drawn.columns]
    return Counter([one for part in parts for one in part.calls] + list(drawn.others))


@pytest.mark.parametrize("folds", [True, False])
@pytest.mark.parametrize("make", [full, deep, staged, lambda: gpt(4, t=2, p=2, sequence_parallel=True)])
def test_every_collective_is_told_once(make, folds: bool) -> None:
    program = make()
    assert program.collectives and calls_in(program, folds=folds) == Counter(program.collectives)


def test_a_hooked_gemm_has_the_all_reduce_that_became_part_of_it() -> None:
    program = gpt(2, t=2, async_tensor_model_parallel_allreduce=True)
    made, _ = calls_of_nodes(program)
    absorbed = [node for node in ops(program.graphs["LOCAL"]) if note(node).gemm.absorbed is not None]
    assert absorbed and all(made[node, 0][0].backward == "all-reduce" for node in absorbed)
    assert calls_in(program) == Counter(program.collectives)


@pytest.mark.parametrize("folds", [True, False])
def test_every_operator_is_in_one_box_of_each_of_its_stages_unless_it_is_a_view(folds: bool) -> None:
    program = full()
    drawn = outline(program, folds=folds)
    within = [box for box in drawn.boxes if not box.is_received and box.sent_to < 0]
    in_boxes = [(box.column, node) for box in within for node in box.nodes]
    assert len(in_boxes) == len(set(in_boxes))
    nodes = [node for node in ops(program.graphs["LOCAL"]) if is_shown(node)]
    expected = {(stage, node) for node in nodes for stage in note(node).stages}
    assert {(stage, node) for stage, node in in_boxes if node.op == "call_function"} == expected


def test_each_crossing_is_sent_and_received_and_every_operator_is_fed() -> None:
    program = full()
    drawn = outline(program)
    received = [(note(box.nodes[0]).stages[0], box.column) for box in drawn.boxes if box.is_received]
    sent = [(box.column, box.sent_to) for box in drawn.boxes if box.sent_to >= 0]
    crossing = sorted((one.source, target) for one in program.crossings for target in one.targets)
    assert sorted(received) == sorted(sent) == crossing
    assert all({one.conversion for one in box.calls} == {"send"} for box in drawn.boxes if box.is_received)
    fed = {edge.target for edge in drawn.edges}
    roots = {title(box) for box in drawn.boxes if box.id not in fed and not box.is_received}
    assert roots == {"idx", "targets", "arange"}


def title(box: Box) -> str:
    return note(box.nodes[0]).name or box.nodes[0].name


def test_a_tied_parameter_joins_its_readers() -> None:
    program = full()
    drawn = outline(program)
    ((param, readers),) = drawn.ties.items()
    assert note(param).name == "transformer.wte.weight"
    assert [note(box.nodes[-1]).module for box in readers] == ["transformer.wte", ""]  # part of the loss
    assert any(call.conversion == "tied sum" for column in drawn.columns for call in column.calls)


def test_layers_like_one_drawn_before_are_folded_and_all_are_there() -> None:
    drawn = outline(deep())
    folded = [box for box in drawn.boxes if box.folded]
    assert [box.column for box in folded] == [0, 1]
    assert all(like.layer == "transformer.h.0" for box in folded for like in box.folded.values())
    in_full = {
        layer_of(node)
        for box in drawn.boxes
        if not (box.folded or box.is_received or box.sent_to >= 0)
        for node in box.nodes
    }
    assert in_full == {""}
    layers = [f"transformer.h.{k}" for k in range(7)]
    assert [layer for box in folded for layer in box.folded] == layers
    (sample,) = drawn.samples
    assert (sample.layer, list(sample.layers), sample.stages) == (layers[0], layers, (0, 1))
    whole = outline(deep(), folds=False)
    assert not whole.samples and not any(box.folded for box in whole.boxes)


def test_a_layer_drawn_apart_has_all_its_operators_its_collectives_and_what_it_reads() -> None:
    program = full()
    (sample,) = outline(program).samples
    own = [node for box in sample.boxes if not box.is_received for node in box.nodes]
    nodes = [node for node in ops(program.graphs["LOCAL"]) if is_shown(node)]
    assert own == [node for node in nodes if layer_of(node) == sample.layer]
    kinds = [kind for box in sample.boxes for call in box.calls for kind in (call.forward, call.backward)]
    assert kinds.count("all-reduce") == 4  # those of the first stage, shown a second time
    outer = [box.id for box in sample.boxes if box.is_received]
    assert len(outer) == 1 and {edge.source for edge in sample.edges} >= set(outer)
    assert not {edge.target for edge in sample.edges} & set(outer)


def folded(program: Program) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    boxes = [box for box in outline(program).boxes if box.folded]
    return [(tuple(box.folded), tuple(one.layer for one in box.folded.values())) for box in boxes]


def test_only_equal_layers_in_one_piece_are_folded() -> None:
    assert folded(of(Stack(16, 16, 32, 16))) == [
        (("layers.0", "layers.1"), ("layers.0", "layers.0")),
        (("layers.3",), ("layers.0",)),
    ]
    alternating = of(Stack(16, 32, 16, 32))
    (row,) = folded(alternating)
    assert row[1] == ("layers.0", "layers.1", "layers.0", "layers.1")
    assert [sample.layers for sample in outline(alternating).samples] == [
        ("layers.0", "layers.2"),
        ("layers.1", "layers.3"),
    ]
    assert folded(of(Stack(16, 32, 64))) == []
    assert folded(of(InlinedStack(16, 16, 16))) == []


def test_a_part_of_a_layer_is_told_by_the_whole() -> None:
    program = of(Stack(16, 16), p=3)  # 2 layers on 3 stages: one of them is cut
    parts = [like.part for box in outline(program).boxes for like in box.folded.values()]
    assert any(parts) and all(part.endswith(" operators") for part in parts if part)
    assert calls_in(program) == Counter(program.collectives)


def test_of_many_stages_those_that_only_repeat_layers_are_one_column() -> None:
    drawn = outline(staged())
    assert [one.stages for one in drawn.columns] == [(0,), tuple(range(1, 7)), (7,)]
    assert len([one for one in drawn.columns[1].calls if one.conversion == "send"]) == 2 * 5  # within it
    assert len(outline(staged(), folds=False).columns) == 8


def test_a_value_that_passes_stages_by_is_received_where_it_is_read() -> None:
    program = of(Skipping(), p=4)
    drawn = outline(program)
    passing = [
        box for box in drawn.boxes if box.is_received and box.column - note(box.nodes[0]).stages[0] > 1
    ]
    assert len(passing) == 1 and passing[0].column == 3
    assert calls_in(program) == Counter(program.collectives)


def test_one_stage_has_ends_for_what_it_gets_and_sends() -> None:
    drawn = outline(full(), stage=1)
    assert [one.stages for one in drawn.columns] == [(1,)]
    assert [note(box.nodes[0]).stages[0] for box in drawn.boxes if box.is_received] == [0]
    assert {box.sent_to for box in drawn.boxes if box.sent_to >= 0} == {2}
    ends = [box for box in drawn.boxes if box.is_received or box.sent_to >= 0]
    assert all([call.conversion for call in box.calls] == ["send", "send"] for box in ends)
    assert {edge.target for edge in drawn.edges} >= {box.id for box in ends if box.sent_to >= 0}
