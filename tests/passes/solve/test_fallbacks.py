"""What is not split as one would expect: every such operator is named, with the fact and the remedy."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import autoptd
from autoptd.ir.notes import Fallback, divisors, note
from autoptd.passes import describe
from autoptd.passes.ops.costs import flops
from autoptd.passes.solve.fallbacks import fallbacks
from tests.parity.models import batch, gpt, separate, skipping
from tests.passes.graphs import Net, connect, find

X, Y = torch.zeros(2, 4, dtype=torch.long), torch.ones(2, 4, dtype=torch.long)
SIX = ("6 heads do not divide over t=4", "t in {1, 2, 3, 6}")


def facts(found: Any) -> set[tuple[str, str]]:
    return {(one.fact, one.remedy) for one in found}


def test_divisors() -> None:
    assert divisors([6]) == [1, 2, 3, 6] and divisors([4, 6]) == [1, 2, 3, 4, 6]


@pytest.mark.parametrize(
    "make", [lambda: gpt(2, heads=6, width=36), lambda: heads_by_hand(6)], ids=["fused", "by hand"]
)
def test_attention_whose_heads_do_not_divide(make: Any) -> None:
    graph, _ = connect(make(), X, Y, t=4)
    found = fallbacks(graph)
    assert facts(found) == {SIX}
    whole = [one for one in found if one.op.endswith(("attention", "matmul"))]
    assert whole and all(one.flops > 0 and "att" in one.site for one in whole)
    assert f"whole on every rank: {SIX[0]}" in describe(graph)
    mlp = find(graph, "gelu", 0) if len(found) == 6 else find(graph, "silu", 0)
    assert note(mlp).layout["tp"].kind == "S"  # what divides is split


def heads_by_hand(heads: int) -> torch.nn.Module:
    from tests.parity.models import Separate

    torch.manual_seed(0)
    return Separate(2, width=36, heads=heads)


def test_attention_that_is_split_otherwise() -> None:
    """8 entries of a head divide by 4: attention is split by them, and says so."""
    graph, _ = connect(gpt(1, heads=6, width=48), X, Y, t=4)
    attention = find(graph, "scaled_dot_product_attention")
    assert (
        note(attention).layout["tp"].kind == "S"
        and note(attention).why == f"split by e: 8 = 4 x 2, because {SIX[0]}"
    )
    assert note(attention).fallback == Fallback(
        "transformer.h.0.attn", "aten.scaled_dot_product_attention", *SIX
    )


def test_grouped_queries() -> None:
    """2 KV heads of 3 query heads each: neither divides by 4."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        h = F.embedding(x, self.w)
        q = F.linear(h, self.q).view(2, 4, 6, 7).transpose(1, 2)
        k, v = (F.linear(h, one).view(2, 4, 2, 7).transpose(1, 2) for one in (self.k, self.v))
        z = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).reshape(2, 4, 42)
        return F.linear(z, self.o).square().sum()

    graph, _ = connect(Net(forward, w=(8, 12), q=(42, 12), k=(14, 12), v=(14, 12), o=(12, 42)), X, Y, t=4)
    attention = note(find(graph, "scaled_dot_product_attention")).fallback
    assert attention is not None and attention.remedy == "t in {1, 2, 3}"
    assert attention.fact == "2 KV heads and 3 query heads per KV head do not divide over t=4"


def test_grouped_queries_of_which_one_factor_divides() -> None:
    """4 ranks split 4 query heads per KV head; the 3 KV heads themselves are on every rank, as are their projections."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        h = F.embedding(x, self.w)
        q = F.linear(h, self.q).view(2, 4, 12, 7).transpose(1, 2)
        k, v = (F.linear(h, one).view(2, 4, 3, 7).transpose(1, 2) for one in (self.k, self.v))
        z = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).reshape(2, 4, 84)
        return F.linear(z, self.o).square().sum()

    graph, _ = connect(Net(forward, w=(8, 12), q=(84, 12), k=(21, 12), v=(21, 12), o=(12, 84)), X, Y, t=4)
    attention = note(find(graph, "scaled_dot_product_attention"))
    assert (
        attention.why == "split by repeat: 4 query heads per KV head over 4 ranks"
        and attention.fallback is None
    )
    assert {one.op for one in fallbacks(graph)} == {"aten.linear"}
    assert facts(fallbacks(graph)) == {("3 KV heads do not divide over t=4", "t in {1, 3}")}


def test_widths_that_do_not_divide() -> None:
    forward = lambda self, x, y: F.linear(F.linear(F.embedding(x, self.w), self.up).tanh(), self.down).sum()  # noqa: E731
    graph, _ = connect(Net(forward, w=(8, 6), up=(50, 6), down=(6, 50)), X, Y, t=4)
    up, down = fallbacks(graph)
    assert (
        up.fact == "input width 6 and output width 50 do not divide over t=4"
        and up.remedy == "t in {1, 2, 3, 5, 6, 10, 25, 50}"
    )
    assert (up.flops, down.flops) == tuple(flops(find(graph, "linear", i)) for i in (0, 1))


def test_unknown_operators_are_on_the_same_list() -> None:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.linear(F.embedding(x, self.w).as_strided((16, 4), (1, 2)), self.o).sum()

    graph, _ = connect(Net(forward, w=(8, 16), o=(16, 4)), X, Y, t=2)
    found = next(one for one in fallbacks(graph) if "as_strided" in one.op)
    assert "has no rule" in found.fact and "register_rule" in found.remedy


def test_what_divides_has_no_fallback() -> None:
    for model in (gpt(2), separate(2)):
        graph, _ = connect(model, X, Y, t=4)
        assert fallbacks(graph) == []


def test_program_plan_and_files_tell_it(tmp_path: Any) -> None:
    with pytest.warns(UserWarning, match=r"33% of .*h\.\*\.attn.*5 heads .* t=4 \(t in \{1, 5\}\)") as said:
        program = autoptd.compile(gpt(2, heads=5, width=35), t=4, example_inputs=batch())
    assert len(said) == 1
    assert len(program.fallbacks) == 6
    record = program.plan["fallbacks"]
    assert [one["site"] for one in record] == [
        f"transformer.h.*.attn{end}" for end in (".c_attn", "", ".c_proj")
    ]
    assert sum(one["flops"] for one in record) == program.costs.redundant_gemm_flops > 0
    assert "whole on every rank: 5 heads do not divide over t=4" in program.sources["stage_0.py"]
    program.save(tmp_path)
    assert autoptd.Program.load(tmp_path).fallbacks == program.fallbacks
    assert "5 heads do not divide" in (tmp_path / "plan.json").read_text()


@pytest.mark.filterwarnings("ignore:.*of the FLOPs of matrix products")
@pytest.mark.parametrize("m", [1, 4])
def test_flops_are_those_of_a_microbatch(m: int) -> None:
    """Of one row as well, where two were traced."""
    program = autoptd.compile(skipping(), t=3, num_microbatches=m, example_inputs=batch(4))
    assert sum(one.flops for one in program.fallbacks) == program.costs.redundant_gemm_flops > 0


def test_no_warning_where_nothing_is_repeated() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        autoptd.compile(gpt(2, heads=6, width=48), t=4, example_inputs=batch())  # split, if not by heads
        autoptd.compile(gpt(2), t=2, example_inputs=batch())
