"""Local shapes and literals: regenerated from the atoms, and a verifier that finds a wrong one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph

from autoptd.errors import InternalError
from autoptd.ir import markers
from autoptd.ir.notes import Local, note, op_name, ops
from autoptd.ir.types import S
from autoptd.options import Options
from autoptd.passes import localize
from autoptd.passes.context import Context
from autoptd.passes.localize import check_local
from examples.gpt import GPT, GPTConfig
from tests.passes.graphs import Net, connect, find

Tensor = torch.Tensor


def local(
    model: torch.nn.Module, *inputs: Tensor, t: int = 1, pieces: int = 1, rows: int | None = None
) -> Graph:
    graph, _ = connect(model, *inputs, t=t, pieces=pieces)
    traced = inputs[0].shape[0]
    localize(graph, Context(Options(t=t), traced_rows=traced, rows=rows or traced, pieces=pieces))
    check_local(graph)
    return graph


def shapes(graph: Graph, *names: str) -> list[tuple[int, ...]]:
    return [note(find(graph, name)).local.shapes[0] for name in names]


@pytest.fixture
def split() -> Graph:
    """A GPT over t=2, traced with two rows for microbatches of one."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, block_size=16, n_layer=1, n_head=4, n_embd=64))
    ids = torch.zeros(2, 16, dtype=torch.long)
    return local(model, ids, ids.clone(), t=2, pieces=4, rows=1)


def test_shapes_of_one_rank_and_one_microbatch(split: Graph) -> None:
    assert shapes(
        split, "idx", "transformer.h.0.attn.c_attn.weight", "transformer.h.0.mlp.c_proj.weight"
    ) == [
        (1, 16),
        (96, 64),
        (64, 128),
    ]
    assert shapes(split, "scaled_dot_product_attention", "gelu") == [(1, 2, 16, 16), (1, 16, 128)]
    assert note(find(split, "gelu")).local.traced == (2, 16, 256)
    assert find(split, "view").args[1] == [1, 16, 2, 16] and find(split, "split").args[1] == 32


def test_the_loss_is_divided_by_a_global_count(split: Graph) -> None:
    loss = find(split, "cross_entropy")
    assert loss.target is markers.cross_entropy
    assert loss.kwargs["reduction"] == "sum" and loss.kwargs["total"] == 0


def test_a_mean_is_divided_by_the_global_count() -> None:
    graph = local(
        Net(lambda self, x: F.linear(x, self.w).mean(), w=(6, 6)), torch.randn(4, 6), pieces=8, rows=2
    )
    assert find(graph, "mean").args[1:] == ([0, 1], False, 2 * 8 * 6)


def test_sizes_follow_the_microbatch() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        b = x.shape[0]
        y = F.linear(x, self.w) + torch.zeros(b, 6) + x.new_ones(b, 1)
        return (y.view(b, 2, 3).expand(5, b, 2, 3).reshape(5 * b, 6) * 1.0).mean()

    graph = local(Net(forward, w=(6, 6)), torch.randn(4, 6), pieces=8, rows=1)
    assert shapes(graph, "view", "expand", "reshape") == [(1, 2, 3), (5, 1, 2, 3), (5, 6)]
    assert shapes(graph, "zeros", "first_rows") == [
        (4, 6),
        (1, 6),
    ]  # a constant of equal rows is cut to the microbatch
    assert note(find(graph, "reshape")).layout.batch == S(
        0, 1
    )  # five copies of the batch, one after the other

    def apart(self: Net, x: Tensor) -> Tensor:
        b = x.shape[0]
        y = F.linear(x, self.w) + torch.zeros(b, 6) + x.new_ones(b, 1)
        return (y.view(b, 2, 3).unsqueeze(1).expand(b, 5, 2, 3).reshape(b, 5, 6).chunk(2, -1)[1]).mean()

    graph = local(Net(apart, w=(6, 6)), torch.randn(4, 6), pieces=8, rows=1)
    found = {name: shapes(graph, name)[0] for name in ("view", "expand", "reshape", "chunk")}
    assert found == {"view": (1, 2, 3), "expand": (1, 5, 2, 3), "reshape": (1, 5, 6), "chunk": (1, 5, 3)}


def test_a_bound_of_a_split_dim_scales() -> None:
    """gate | up as two slices of one weight: both bounds follow the shard."""

    def forward(self: Net, x: Tensor) -> Tensor:
        h = F.linear(x, self.w)
        return F.linear(F.silu(h[..., :128]) * h[..., 128:], self.out).square().mean()

    graph = local(Net(forward, w=(256, 64), out=(64, 128)), torch.randn(2, 8, 64), t=2)
    assert [find(graph, "slice", i).args[2:] for i in (0, 1)] == [(0, 64), (64, 128)]
    assert note(find(graph, "w")).dims[0] == (2, 128) and shapes(graph, "w") == [(128, 64)]


@pytest.mark.parametrize("name", ["view", "split"])
def test_a_wrong_literal_is_found(split: Graph, name: str) -> None:
    node = find(split, name)
    wrong = node.args[1] * 2 if isinstance(node.args[1], int) else [*node.args[1][:-2], 3, node.args[1][-1]]  # type: ignore
    node.args = (node.args[0], wrong, *node.args[2:])
    with pytest.raises(InternalError, match="LOCAL") as caught:
        check_local(split)
    assert name in str(caught.value)


def test_a_wrong_shape_of_a_parameter_is_found(split: Graph) -> None:
    note(find(split, "transformer.h.0.mlp.c_fc.weight")).local = Local([(256, 64)])
    with pytest.raises(InternalError, match="linear"):
        check_local(split)


def test_all_findings_come_at_once(split: Graph) -> None:
    for name in ("gelu", "scaled_dot_product_attention"):
        note(find(split, name)).local = Local([(1, 1)])
    with pytest.raises(InternalError) as caught:
        check_local(split)
    assert str(caught.value).count("is planned") >= 2


def test_one_piece_on_one_rank_changes_nothing() -> None:
    model = GPT(GPTConfig(vocab_size=64, block_size=16, n_layer=1, n_head=4, n_embd=64))
    ids = torch.zeros(2, 16, dtype=torch.long)
    before, _ = connect(model, ids, ids.clone())
    after = local(model, ids, ids.clone())
    pairs = zip(ops(before), ops(after), strict=True)
    changed = [
        op_name(one) for one, other in pairs if (one.target, str(one.args)) != (other.target, str(other.args))
    ]
    assert changed == ["aten.view", "aten.view"]  # -1 is written out
