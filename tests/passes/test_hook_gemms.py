"""Which GEMMs get a hook, and what the program says about them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

import autoptd
from autoptd.ir import markers
from autoptd.ir.notes import Note, set_note
from autoptd.passes.kept.requested import gather_again
from autoptd.passes.solve.ties import Ties
from autoptd.program.program import Program
from tests.parity.models import batch, gpt, separate

aten = torch.ops.aten
OVERLAP: dict[str, Any] = {"async_tensor_model_parallel_allreduce": True}
MAIN: dict[str, Any] = {"accumulate_allreduce_grads_in_fp32": True}
DELAY: dict[str, Any] = {"delay_wgrad_compute": "before_reduce"}


def compiled(model: nn.Module, **keywords: Any) -> Program:
    return autoptd.compile(model, example_inputs=batch(), **keywords)


def text(program: Program) -> str:
    return "\n".join(program.sources.values())


def test_without_hooks_nothing_is_emitted() -> None:
    program = compiled(gpt(2), t=2, p=2)
    assert "rt.linear" not in text(program)
    assert "W0.0" not in program.schedule and {spec.storage.grad_dtype for spec in program.params} == {""}
    assert {spec.adds for spec in program.params} == {(1,), (1, 1)}


def test_an_f_with_one_reader_becomes_part_of_it() -> None:
    program = compiled(gpt(2), t=2, **OVERLAP)
    lines = text(program).splitlines()
    at = next(i for i, line in enumerate(lines) if "w.mlp.c_fc.weight" in line)
    call = 'rt.linear(ln_2, w.mlp.c_fc.weight, w.mlp.c_fc.bias, overlap=tp, site=w.at("mlp.c_fc"))'
    assert f"c_fc = {call}" in lines[at]
    assert lines[at - 1].strip() == "# column: 128 = 2 x 64  [2, 8, 64]"
    above = "# overlap: AR bwd, 2,048 B: column-parallel input: gradient all-reduced over tp"
    assert lines[at - 2].strip() == above
    assert "c_proj = F.linear(gelu," in text(program)  # a row-split GEMM has no such input


def test_the_collectives_are_listed_as_before() -> None:
    for model in (gpt(2), separate(2)):
        assert compiled(model, t=2, **OVERLAP).collectives == compiled(model, t=2).collectives
    assert compiled(gpt(2), t=2, **OVERLAP, **DELAY, **MAIN).collectives == compiled(gpt(2), t=2).collectives


def test_an_f_with_several_readers_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are not tied here: with two of them the first, behind the embedding, would move the f of both before the norm."""
    monkeypatch.setattr("autoptd.passes.solve.assign.find_ties", lambda *_: Ties())
    found = text(compiled(separate(2), t=2, **OVERLAP))
    assert "y = rt.i_to_r(y, tp, " in found
    assert "q_proj = F.linear(y, w.layers[1].attention.q_proj.weight" in found
    assert "overlap=tp, " in found  # the head's input is read once


@pytest.mark.parametrize("keywords", [MAIN, DELAY])
def test_every_gemm_brings_the_gradient_of_its_weight(keywords: dict[str, Any]) -> None:
    program = compiled(gpt(2), t=2, p=2, **keywords)
    assert "F.linear(" not in text(program)
    adds = {spec.name: spec.adds for spec in program.params}
    assert adds["transformer.wte.weight"] == (1, 1)  # by autograd in the embedding, by the GEMM in the head
    assert set(adds.values()) == {(1,), (1, 1)}
    assert compiled(gpt(2), **keywords).param("transformer.wte.weight").adds == (2,)  # both in one stage


def test_a_frozen_weight_is_left_alone() -> None:
    model = gpt(2)
    model.transformer.h[0].mlp.c_fc.weight.requires_grad_(False)
    found = text(compiled(model, t=2, **OVERLAP, **DELAY))
    assert "F.linear(ln_2, w.transformer.h[0].mlp.c_fc.weight, w.transformer.h[0].mlp.c_fc.bias)" in found


class Conv1D(nn.Module):
    """GPT-2's: a weight stored as [in, out], applied to rows."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(0.1 * torch.randn(width, out)), nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return y.view(*x.shape[:-1], y.shape[-1])


class ConvMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norms = nn.Embedding(64, 16), nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.ups = nn.ModuleList(Conv1D(16, 32) for _ in range(2))
        self.downs = nn.ModuleList(Conv1D(32, 16) for _ in range(2))
        self.head = nn.Linear(16, 64)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(up(norm(x)).relu())
        return nn.functional.cross_entropy(self.head(x).view(-1, 64), targets.view(-1))


def conv() -> ConvMLP:
    torch.manual_seed(0)
    return ConvMLP()


def test_a_transposed_weight_gets_the_same_hooks() -> None:
    found = text(compiled(conv(), t=2, **MAIN))
    assert ".bias, wgrad=self.main_grads, transposed=True)" in found
    assert "torch.addmm" not in found


@pytest.mark.thorough
def test_an_f_is_found_behind_a_view() -> None:
    pytest.importorskip("transformers")
    from tests.parity.test_transformers import gpt2

    ids, _ = batch()
    program = autoptd.compile(
        gpt2().train(), example_inputs={"input_ids": ids, "labels": ids}, t=2, **OVERLAP
    )
    assert "w.attn.c_attn.weight, w.attn.c_attn.bias, overlap=tp, transposed=True," in text(program)
    assert "i_to_r" not in text(program)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"async_tensor_model_parallel_allreduce": 1}, "no such choice"),
        ({"accumulate_allreduce_grads_in_fp32": "yes"}, "no such choice"),
        ({"delay_wgrad_compute": True}, "no such choice"),
        ({"delay_wgrad_compute": "later"}, "'after_b', 'before_reduce' or None"),
        ({**DELAY, "p": 2, "schedule": "zb_h1"}, "schedule='zb_h1' places the weight gradients itself"),
    ],
)
def test_options_are_checked(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(autoptd.PlanError, match=message):
        compiled(gpt(1), **keywords)


@pytest.mark.parametrize(
    ("fold", "is_gathered_again"), [(aten.reshape.default, True), (aten.flatten.using_ints, False)]
)
def test_what_is_gathered_again_may_be_reshaped_on_the_way_and_nothing_else(
    fold: Any, is_gathered_again: bool
) -> None:
    graph = Graph()

    def noted(node: Node, *size: int, **fields: Any) -> Node:
        set_note(node, Note(stages=(0,), needs_grad=True, **fields))
        node.meta["val"] = torch.empty(size, device="meta")
        return node

    shard, weight = (
        noted(graph.placeholder("shard"), 2, 2, 8),
        noted(graph.placeholder("weight"), 6, 8, kind="param"),
    )
    whole = noted(graph.call_function(markers.convert, (shard, "s_to_r")), 2, 4, 8, conversion="s_to_r")
    rows = [[8, 8]] if fold is aten.reshape.default else [0, 1]
    folded = noted(graph.call_function(fold, (whole, *rows)), 8, 8)
    gemm = noted(graph.call_function(aten.linear.default, (folded, weight)), 8, 6)
    assert gather_again(whole) == ([gemm] if is_gathered_again else [])
