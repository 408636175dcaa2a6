"""Stages: any number of layers, balanced, everything placed exactly once; and a verifier that finds what is misplaced."""

from __future__ import annotations

import importlib
import re

import pytest
import torch
from torch import nn
from torch.fx import Graph

import autoptd
from autoptd import passes
from autoptd.errors import InternalError, PlanError
from autoptd.ir.machine import Machine
from autoptd.ir.markers import convert
from autoptd.ir.notes import note, op_name, ops, output, placeholders
from autoptd.passes.context import Context
from autoptd.passes.cut import check_cut, find_backbone
from autoptd.passes.ops.costs import flops
from autoptd.program.costs import Cut
from autoptd.schedule import build_orders
from examples.gpt import GPT, GPTConfig
from tests.parity.models import batch
from tests.parity.rotary import neox
from tests.passes.graphs import find, traced

Tensor = torch.Tensor
cut_pass = importlib.import_module("autoptd.passes.cut")


def gpt(layers: int) -> Graph:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=64, block_size=8, n_layer=layers, n_head=2, n_embd=16))
        ids = torch.zeros(2, 8, dtype=torch.long)
    return traced(model, ids, ids.clone())


def cut(graph: Graph, stages: int) -> Cut:
    """Cut for as many pipeline ranks, and verify."""
    ctx = Context(traced_rows=2, rows=2, orders=build_orders("gpipe", stages, 1, 1))
    passes.cut(graph, ctx)
    check_cut(graph, stages)
    return ctx.found.cut


def layers_of(graph: Graph, stage: int) -> list[int]:
    """Layers that have an operator in a stage."""
    modules = [
        note(node).module for node in ops(graph) if note(node).of_params and stage in note(node).stages
    ]
    return sorted({int(found[1]) for one in modules if (found := re.match(r"transformer\.h\.(\d+)", one))})


# Fewer than stages, as many, and a number that they do not divide.
@pytest.mark.parametrize(
    "layers", [3, 4, 6, *(pytest.param(n, marks=pytest.mark.thorough) for n in (5, 7, 8))]
)
def test_any_number_of_layers_over_four_stages(layers: int) -> None:
    graph = gpt(layers)
    told = cut(graph, 4)
    backbone = find_backbone(graph)
    assert sorted({stage for node in backbone for stage in note(node).stages}) == [0, 1, 2, 3]
    assert all(len(note(node).stages) == 1 for node in backbone)
    order = [note(node).stages[0] for node in backbone]
    assert order == sorted(order)
    assert sum(told.flops) == sum(map(flops, backbone)) and len(told.after) == 3
    found = [layers_of(graph, stage) for stage in range(4)]
    assert sorted({one for some in found for one in some}) == list(range(layers))
    split = [one for some in found for one in some] != list(range(layers))
    assert split == told.why.startswith(
        "inside layers"
    )  # a layer is split where that is worth it only, and said so


def test_seven_layers_are_balanced() -> None:
    graph = gpt(7)
    told = cut(graph, 4)
    sizes = [len(layers_of(graph, stage)) for stage in range(4)]
    assert sorted(sizes) == [1, 2, 2, 2]
    assert sizes[3] == 1 or told.flops[3] == max(told.flops)  # the head counts as work
    assert max(told.flops) <= 1.5 * sum(told.flops) / 4


def test_the_balance_is_the_best_there_is() -> None:
    """Against every choice of cut points between layers."""
    from itertools import combinations

    graph = gpt(6)
    told = cut(graph, 3)
    backbone = find_backbone(graph)
    work = [flops(node) for node in backbone]
    modules = [note(node).module.split(".")[2] if ".h." in note(node).module else "" for node in backbone]
    ends = [i for i in range(len(backbone) - 1) if modules[i] != modules[i + 1] and modules[i]]
    best = min(
        max(sum(work[:a]), sum(work[a:b]), sum(work[b:]))
        for a, b in combinations([end + 1 for end in ends], 2)
    )
    assert (
        max(told.flops) <= 1.06 * best
    )  # FLOPs are most of the time; cuts inside layers are worth 5% at least


def test_a_toy_keeps_its_layers_whole_where_fixed_costs_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.zeros(8, 64, dtype=torch.long)
    mesh = {"t": 2, "p": 2, "v": 2, "num_microbatches": 4, "machine": Machine(), "example_inputs": (ids, ids)}
    found = autoptd.compile(GPT(GPTConfig()), **mesh).costs.cut
    assert found.after == tuple(f"transformer.h.{k}" for k in range(3))
    assert re.search(r"\d+% faster, but at this size 9\d% of the work is the fixed cost", found.why)
    monkeypatch.setattr(cut_pass, "MAX_FIXED_SHARE", 1.0)
    assert autoptd.compile(GPT(GPTConfig()), **mesh).costs.cut.why.startswith("inside layers: a step is")


@pytest.mark.parametrize(("layers", "stages"), [(1, 1), (2, 2), (2, 3), (1, 2)])
def test_few_layers(layers: int, stages: int) -> None:
    graph = gpt(layers)
    cut(graph, stages)
    assert note(output(graph)).stages == (stages - 1,)


def test_more_stages_than_cut_points() -> None:
    with pytest.raises(PlanError, match="more stages than the model can be cut into") as caught:
        cut(gpt(1), 64)
    most = int(re.findall(r"p\*v <= (\d+)", caught.value.remedy)[0])
    cut(gpt(1), most)  # the remedy is true
    with pytest.raises(PlanError):
        cut(gpt(1), most + 1)


def test_a_stage_that_is_left_a_collective_makes_it_and_sends_it() -> None:
    """Twelve stages of six layers: some hold nothing but the sum behind a layer, which their readers could make again."""
    program = autoptd.compile(
        neox(), t=2, p=4, v=3, schedule="looped_bfs", num_microbatches=3, example_inputs=batch(3)
    )
    alone = [
        [node for node in find_backbone(program.graphs["CUT"]) if stage in note(node).stages]
        for stage in range(12)
    ]
    assert all(alone) and any(all(node.target is convert for node in nodes) for nodes in alone)


def test_a_tied_weight_lives_on_both_its_stages() -> None:
    graph = gpt(4)
    cut(graph, 4)
    stages = {note(node).name: note(node).stages for node in placeholders(graph, "param")}
    assert stages["transformer.wte.weight"] == (0, 3) and stages["transformer.wpe.weight"] == (0,)
    alone = [name for name, found in stages.items() if len(found) != 1]
    assert alone == ["transformer.wte.weight"]


def test_inputs_go_to_the_stages_that_read_them() -> None:
    graph = gpt(4)
    cut(graph, 4)
    assert [note(node).stages for node in placeholders(graph, "input")] == [(0,), (3,)]


def test_what_depends_on_inputs_alone_is_computed_where_it_is_read() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            keep = mask.cumsum(-1) > 1
            for layer in self.layers:
                x = torch.where(keep, layer(x), x)
            return x.mean()

    graph = traced(Masked(), torch.randn(2, 8), torch.ones(2, 8))
    cut(graph, 4)
    choices = {stage for node in ops(graph) if op_name(node) == "aten.where" for stage in note(node).stages}
    assert set(note(find(graph, "cumsum")).stages) == choices and len(choices) >= 3


def test_frozen_parameters_are_placed_too() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    model[0].requires_grad_(False)
    graph = traced(nn.Sequential(model, Mean()), torch.randn(2, 8))
    cut(graph, 2)
    assert [note(node).stages for node in placeholders(graph, "param")][:2] == [(0,), (0,)]


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


def test_a_model_without_inputs_or_parameters_is_refused() -> None:
    with pytest.raises(PlanError, match="depend on both"):
        cut(traced(Mean(), torch.randn(2, 8)), 1)


# Misplaced nodes: each must be found.


@pytest.fixture
def placed() -> Graph:
    graph = gpt(4)
    cut(graph, 4)
    check_cut(graph, 4)
    return graph


def test_a_node_in_two_stages_is_found(placed: Graph) -> None:
    note(find(placed, "gelu")).stages = (0, 1)
    with pytest.raises(InternalError, match="is in stages"):
        check_cut(placed, 4)


def test_a_node_in_no_stage_is_found(placed: Graph) -> None:
    note(find(placed, "gelu")).stages = ()
    with pytest.raises(InternalError, match="is in stages"):
        check_cut(placed, 4)


def test_a_value_that_flows_backwards_is_found(placed: Graph) -> None:
    note(find(placed, "gelu")).stages = (3,)
    with pytest.raises(InternalError, match="is read by"):
        check_cut(placed, 4)


def test_an_operand_that_is_not_there_is_found(placed: Graph) -> None:
    """A parameter or a mask must live on every stage that reads it."""
    weight = find(placed, "transformer.wte.weight")
    note(weight).stages = (0,)
    with pytest.raises(InternalError, match="is read by"):
        check_cut(placed, 4)


def test_a_weight_that_would_cross_is_found(placed: Graph) -> None:
    weight = find(placed, "transformer.h.3.mlp.c_fc.weight")
    note(weight).stages = (0,)
    with pytest.raises(InternalError, match="it must be on all of them"):
        check_cut(placed, 4)


def test_a_product_that_is_computed_again_is_found(placed: Graph) -> None:
    for node in ops(placed):
        if op_name(node) == "aten.linear" and note(node).stages == (0,):
            note(node).stages, note(node).stages_why = (0, 1), "computed again"
    with pytest.raises(InternalError, match=r"but aten\.linear may not be computed again"):
        check_cut(placed, 4)


def test_an_empty_stage_is_found(placed: Graph) -> None:
    for node in placed.nodes:
        if node.op == "call_function" and op_name(node) != "output":
            note(node).stages = tuple(0 if one == 1 else one for one in note(node).stages)
    with pytest.raises(InternalError, match=r"stages \[1\] are empty"):
        check_cut(placed, 4)


def test_a_loss_elsewhere_is_found(placed: Graph) -> None:
    note(output(placed)).stages = (1,)
    with pytest.raises(InternalError, match="the loss is in stages"):
        check_cut(placed, 4)


def test_of_very_many_cut_points_some_are_left_out() -> None:
    assert cut_pass.thinned(range(2048), 2) == range(2048)
    assert cut_pass.thinned(range(10_000), 16) == range(0, 10_000, 5)
    # A stage keeps 16 of them.
    assert len(cut_pass.thinned(range(10_000), 300)) == 5000
    assert len(cut_pass.thinned(range(3000), 200)) == 3000


def test_a_model_with_too_many_cut_points_is_balanced_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_pass, "MAX_POINTS", 32)
    found = cut(gpt(36), 2)
    assert max(found.rank_seconds) < 1.1 * sum(found.rank_seconds) / 2
