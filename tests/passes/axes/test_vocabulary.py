"""Where a vocabulary that t does not divide may be split, and where it must be whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph

from autoptd.errors import InternalError
from autoptd.ir.machine import Machine
from autoptd.ir.mesh import Mesh
from autoptd.ir.notes import note, op_name, ops
from autoptd.ir.types import S
from autoptd.passes.axes.axes import Axes
from autoptd.passes.connected import check_connected
from autoptd.passes.solve.splits import Padding
from tests.passes.graphs import Net, connect, find

Tensor = torch.Tensor
V, H = 61, 512
FULL = Machine(latency=1e-9, per_parameter_byte=1.0, per_saved_byte=1e-12)  # whose memory is dear
IDS, LABELS = torch.zeros(2, 4, dtype=torch.long), torch.ones(2, 4, dtype=torch.long)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def embed(self: Any, ids: Tensor) -> Tensor:
    return F.gelu(F.embedding(ids, self.w))


HEADS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "tied": lambda self, x, y: loss_of(F.linear(embed(self, x), self.w), y),
    "tied, transposed": lambda self, x, y: loss_of(embed(self, x) @ self.w.t(), y),
    "einsum": lambda self, x, y: loss_of(torch.einsum("bsh,vh->bsv", embed(self, x), self.w), y),
    "a bias": lambda self, x, y: loss_of(F.linear(embed(self, x), self.w, self.bias), y),
    "soft-capped": lambda self, x, y: loss_of(30 * (F.linear(embed(self, x), self.w) / 30).tanh(), y),
    "cast, shifted": lambda self, x, y: loss_of(F.linear(embed(self, x), self.w)[:, :-1].double(), y[:, 1:]),
    "a scale per class": lambda self, x, y: loss_of(F.linear(embed(self, x), self.w) * self.bias, y),
}
WHOLE: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "divided by values per class": lambda self, x, y: loss_of(
        F.linear(embed(self, x), self.w) / self.bias, y
    ),
    "roots": lambda self, x, y: loss_of(F.linear(embed(self, x), self.w).abs().sqrt(), y),
    "joined": lambda self, x, y: loss_of(torch.cat([F.linear(embed(self, x), self.w), self.extra], -1), y),
}


def connected(forward: Callable[..., Tensor], t: int = 4) -> tuple[Graph, Axes]:
    """Memory is so dear here that whatever may be sharded is."""
    model = Net(forward, w=(V, 6), bias=(V,), extra=(2, 4, 3))  # 6: its hidden size is of no use to 4 ranks
    graph, axes = connect(model, IDS, LABELS, t=t, machine=FULL)
    check_connected(graph, axes, "tp", Mesh(t=t))
    return graph, axes


@pytest.mark.parametrize("which", HEADS)
def test_a_head_is_split_in_padded_shards(which: str) -> None:
    graph, _ = connected(HEADS[which])
    assert note(find(graph, "w")).layout["tp"] == S(0, 0)
    loss = find(graph, "cross_entropy_loss")
    assert (
        loss.args
        and note(loss).forms.get("tp", "") == "vocab_cross_entropy"
        and "padded: 61 = 4 x 16 - 3" in note(loss).why
    )
    assert not any(note(node).conversion in ("s_to_i", "s_to_r") for node in ops(graph))


@pytest.mark.parametrize("which", WHOLE)
def test_padding_stops_at_other_operators(which: str) -> None:
    """The logits are made whole before an operator that the padding could leak through."""
    graph, axes = connected(WHOLE[which])
    padding = Padding(graph, axes, 4)
    assert note(find(graph, "w")).layout["tp"] == S(0, 0) and padding.may_pad(find(graph, "w"), (0, 0))
    for name in ("div", "sqrt", "cat"):
        for node in (one for one in ops(graph) if op_name(one) == f"aten.{name}"):
            assert note(node).layout["tp"].is_whole
    assert any(
        note(node).conversion.startswith("s_to_") and node.kwargs == {"size": V} for node in ops(graph)
    )


def test_other_odd_dims_are_whole() -> None:
    forward = lambda self, x, y: F.linear(F.linear(F.embedding(x, self.w), self.up).tanh(), self.down).sum()  # noqa: E731
    graph, axes = connect(Net(forward, w=(8, 6), up=(61, 6), down=(6, 61)), IDS, LABELS, t=4)
    check_connected(graph, axes, "tp", Mesh(t=4))
    assert all(note(find(graph, name)).layout["tp"].is_whole for name in ("up", "down"))


def test_a_vocabulary_in_several_pieces_is_not_padded() -> None:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        logits = F.linear(F.embedding(x, self.w), self.w)
        return loss_of(logits.unflatten(-1, (31, 2)).tanh().flatten(-2), y)

    graph, axes = connect(Net(forward, w=(62, 6)), IDS, LABELS, t=4, machine=FULL)
    check_connected(graph, axes, "tp", Mesh(t=4))
    assert note(find(graph, "w")).layout["tp"].is_whole


def test_an_odd_shard_elsewhere_is_found() -> None:
    graph, axes = connected(HEADS["tied"])
    note(find(graph, "gelu")).layout = note(find(graph, "gelu")).layout.having("tp", S(2, 0))
    with pytest.raises(InternalError, match=r"gelu.* S\(2, 0\) of \(6,\), which 4 ranks do not divide"):
        check_connected(graph, axes, "tp", Mesh(t=4))


def test_a_conversion_without_the_size_is_found() -> None:
    graph, axes = connected(WHOLE["roots"])
    made = next(node for node in ops(graph) if node.kwargs == {"size": V})
    made.kwargs = {}
    with pytest.raises(InternalError, match="a dim of 61 that is padded with size 0"):
        check_connected(graph, axes, "tp", Mesh(t=4))
