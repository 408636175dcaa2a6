"""Axes found in small graphs, as text: a dim is written as the product of its atoms."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from autoptd.ir.notes import note
from autoptd.ir.types import Segmented
from autoptd.passes.axes.axes import Axes, Axis, atoms, unify
from tests.passes.graphs import Net, dims_text, find, traced

Tensor = torch.Tensor
X = torch.randn(2, 5, 24)


def attention_thirds(self: Net, x: Tensor) -> Tensor:
    """nanoGPT's layout: q, k and v are three column blocks, each heads x head_dim."""
    q, k, v = F.linear(x, self.qkv).split(24, -1)
    q, k, v = (one.view(2, 5, 6, 4).transpose(1, 2) for one in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(y.transpose(1, 2).reshape(2, 5, 24), self.out).sum()


def attention_per_head(self: Net, x: Tensor) -> Tensor:
    """GPT-NeoX's layout: q, k and v of one head after the other."""
    q, k, v = F.linear(x, self.qkv).view(2, 5, 6, 12).transpose(1, 2).chunk(3, -1)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(y.transpose(1, 2).reshape(2, 5, 24), self.out).sum()


def attention_folded(self: Net, x: Tensor) -> Tensor:
    """[3, heads, head_dim] unfolded by one view and taken apart with select."""
    qkv = F.linear(x, self.qkv).view(2, 5, 3, 6, 4).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
    return F.linear(y.transpose(1, 2).reshape(2, 5, 24), self.out).sum()


def attention_grouped(self: Net, x: Tensor) -> Tensor:
    """Three query heads for each of two KV heads, repeated by expand as Llama does."""
    q = F.linear(x, self.q).view(2, 5, 6, 4).transpose(1, 2)
    k, v = (F.linear(x, w).view(2, 5, 2, 4).transpose(1, 2) for w in (self.k, self.v))
    k, v = (one[:, :, None].expand(2, 2, 3, 5, 4).reshape(2, 6, 5, 4) for one in (k, v))
    y = F.scaled_dot_product_attention(q, k, v)
    return F.linear(y.transpose(1, 2).reshape(2, 5, 24), self.out).sum()


@pytest.mark.parametrize(
    ("forward", "wanted"),
    [
        (
            attention_thirds,
            {"qkv": "3x6x4, 24", "out": "24, 6x4", "linear": "2, 5, 3x6x4", "reshape": "2, 5, 6x4"},
        ),
        (attention_per_head, {"qkv": "6x3x4, 24", "out": "24, 6x4", "linear": "2, 5, 6x3x4"}),
        (attention_folded, {"qkv": "3x6x4, 24", "out": "24, 6x4", "permute": "3, 2, 6, 5, 4"}),
    ],
)
def test_heads_are_found_in_a_fused_weight(forward: object, wanted: dict[str, str]) -> None:
    graph = traced(Net(forward, qkv=(72, 24), out=(24, 24)), X)  # type: ignore[arg-type]
    Axes(graph)
    assert {name: dims_text(find(graph, name)) for name in wanted} == wanted


def test_kv_heads_are_found_in_all_weights() -> None:
    graph = traced(Net(attention_grouped, q=(24, 24), k=(8, 24), v=(8, 24), out=(24, 24)), X)
    axes = Axes(graph)
    found = {name: dims_text(find(graph, name)) for name in ("q", "k", "v", "out")}
    assert found == {"q": "2x3x4, 24", "k": "2x4, 24", "v": "2x4, 24", "out": "24, 2x3x4"}
    heads = [axes.atoms(find(graph, name), 0)[0] for name in ("q", "k", "v")] + [
        axes.atoms(find(graph, "out"), 1)[0]
    ]
    assert all(one is heads[0] for one in heads)


def test_grouped_attention_by_keyword() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        q = F.linear(x, self.q).view(2, 5, 6, 4).transpose(1, 2)
        k, v = (F.linear(x, w).view(2, 5, 2, 4).transpose(1, 2) for w in (self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.linear(y.transpose(1, 2).reshape(2, 5, 24), self.out).sum()

    graph = traced(Net(forward, q=(24, 24), k=(8, 24), v=(8, 24), out=(24, 24)), X)
    axes = Axes(graph)
    found = {name: dims_text(find(graph, name)) for name in ("q", "k", "v", "out")}
    assert found == {"q": "2x3x4, 24", "k": "2x4, 24", "v": "2x4, 24", "out": "24, 2x3x4"}
    letters = {one.name: one.size for one in axes.letters(find(graph, "scaled_dot_product_attention"))}
    assert letters == {"b0": 2, "kv": 2, "repeat": 3, "l": 5, "e": 4}


def test_an_incompatible_view_runs_whole_there() -> None:
    graph = traced(
        Net(lambda self, x: F.linear(x, self.w).view(2, 5, 4, 6).view(2, 5, 3, 8).sum(), w=(24, 24)), X
    )
    axes = Axes(graph)
    first, second = find(graph, "view"), find(graph, "view", 1)
    assert [one.size for one in axes.letters(first)] == [2, 5, 4, 6] and dims_text(first) == "2, 5, 4, 6"
    assert [one.size for one in axes.letters(second)] == [2, 5]
    assert axes.whole_because(second, first, (2, 0)) == "its rule does not keep this dim"


def test_both_dims_of_a_square_weight_are_different_axes() -> None:
    graph = traced(Net(lambda self, x: F.linear(x, self.w).sum(), w=(24, 24)), X)
    axes = Axes(graph)
    weight, product = find(graph, "w"), find(graph, "linear")
    assert axes.atoms(weight, 0)[0] is not axes.atoms(weight, 1)[0]
    letters = {
        one.name: (one.places[weight], one.out) for one in axes.letters(product) if weight in one.places
    }
    assert letters == {"i": ((1, 0), None), "o": ((0, 0), (2, 0))}


def test_a_residual_joins_both_dims_of_a_square_weight_but_not_its_letters() -> None:
    """x + x W: rows and columns are one axis then, and still two letters: the operator decides, not the class."""
    graph = traced(Net(lambda self, x: (x + F.linear(x, self.w)).sum(), w=(24, 24)), X)
    axes = Axes(graph)
    weight = find(graph, "w")
    assert axes.atoms(weight, 0)[0] is axes.atoms(weight, 1)[0]
    assert {one.name for one in axes.letters(find(graph, "linear"))} == {".0", ".1", "i", "o"}


def test_a_weight_that_is_used_twice_has_the_atoms_of_both_uses() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        heads = F.linear(x, self.w).view(2, 5, 6, 4).tanh()
        return F.linear(heads.flatten(2), self.w).sum()

    graph = traced(Net(forward, w=(24, 24)), X)
    Axes(graph)
    assert dims_text(find(graph, "w")) == "6x4, 6x4"


def test_a_slice_of_a_rotary_half_needs_the_whole_head() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        q = F.linear(x, self.w).view(2, 5, 6, 4)
        return (torch.cat([-q[..., 2:], q[..., :2]], -1) * q).sum()

    graph = traced(Net(forward, w=(24, 24)), X)
    axes = Axes(graph)
    assert dims_text(find(graph, "w")) == "6x2x2, 24"  # head_dim is two halves
    product = find(graph, "mul")
    assert [one.size for one in axes.letters(product)] == [2, 5, 6, 2, 2]
    assert [one.size for one in axes.letters(find(graph, "cat"))] == [2, 5, 6, 2]


def test_unequal_pieces_are_segments() -> None:
    """A rank has a chunk of each, so 2 ranks may share them: 2 is what 24, 2 and 2 x 4 have in common at their front."""

    def forward(self: Net, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, self.w, self.b).split([24, 8, 8], -1)
        return (q.sum() + (k * v).view(2, 5, 2, 4).sum()).sum()

    graph = traced(Net(forward, w=(40, 24), b=(40,)), X)
    axes = Axes(graph)
    for name in ("w", "b", "linear"):
        (atom,) = note(find(graph, name)).dims[2 if name == "linear" else 0]
        assert isinstance(atom, Segmented) and atom.blocks == (24, 8, 8)
    assert dims_text(find(graph, "slice")) == "2, 5, 24" and dims_text(find(graph, "slice", 1)) == "2, 5, 2x4"
    column = next(one for one in axes.letters(find(graph, "linear")) if one.name == "o")
    assert column.size == 2 and column.has_segments


@pytest.mark.parametrize(
    ("sizes", "blocks"),
    [([20, 14, 6], (20, 14, 6)), ([21, 13, 6], None), ([39, 1], None), ([10, 10, 20], (10, 10, 20))],
)
def test_segments_without_a_common_divisor_are_none(sizes: list[int], blocks: tuple[int, ...] | None) -> None:
    graph = traced(
        Net(lambda self, x: sum(one.sum() for one in F.linear(x, self.w).split(sizes, -1)), w=(40, 24)), X
    )
    axes = Axes(graph)
    (atom,) = note(find(graph, "w")).dims[0]
    assert getattr(atom, "blocks", None) == blocks
    assert [one.size for one in axes.letters(find(graph, "slice"))] == (
        [2, 5, math.gcd(*sizes)] if blocks else [2, 5]
    )


def test_rows_and_vocabularies_have_no_segments() -> None:
    """A microbatch is no chunk of each; a vocabulary is split as a whole even where a slice of its logits is read."""

    def forward(self: Net, ids: Tensor) -> Tensor:
        logits = F.linear(F.embedding(ids, self.w), self.w)
        return logits[..., :30].sum() + logits[:4].sum()

    graph = traced(Net(forward, w=(40, 24)), torch.zeros(6, 5, dtype=torch.long))
    Axes(graph)
    assert dims_text(find(graph, "w")) == "40, 24"
    assert not any(isinstance(one, Segmented) for dim in note(find(graph, "linear")).dims for one in dim)


def test_dims_of_size_one_have_no_atoms() -> None:
    graph = traced(Net(lambda self, x: (x[:, :1] * self.w).sum(), w=(1, 24)), X)
    Axes(graph)
    assert dims_text(find(graph, "slice")) == "2, 1, 24" and dims_text(find(graph, "w")) == "1, 24"


def test_unify_refines_both_sides() -> None:
    left, right = [Axis(12), Axis(10)], [Axis(4), Axis(30)]
    unify(left, right)
    assert [one.size for one in atoms(left)] == [4, 3, 10] == [one.size for one in atoms(right)]
    assert atoms(left) == atoms(right)


def test_unify_stops_at_the_first_disagreement() -> None:
    left, right = [Axis(2), Axis(6), Axis(4)], [Axis(2), Axis(8), Axis(3)]
    unify(left, right)
    assert atoms(left)[0] is atoms(right)[0]
    assert [one.size for one in atoms(left)] == [2, 6, 4] and [one.size for one in atoms(right)] == [2, 8, 3]


def test_dims_are_a_function_of_the_graph() -> None:
    model = Net(attention_grouped, q=(24, 24), k=(8, 24), v=(8, 24), out=(24, 24))
    texts = []
    for _ in range(2):
        graph = traced(model, X)
        Axes(graph)
        texts.append([dims_text(node) for node in graph.nodes if node.op != "output"])
    assert texts[0] == texts[1]
