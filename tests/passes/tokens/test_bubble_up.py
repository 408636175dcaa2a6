"""What depends on no parameter is made by every rank for its own tokens: no rank has all of a mask of tokens by tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, Node

import autoptd
from autoptd.errors import InternalError
from autoptd.ir import markers
from autoptd.ir.layout import Layout
from autoptd.ir.notes import converted_types, note, op_name, ops, shape
from autoptd.ir.types import I
from autoptd.passes.context import Context
from autoptd.passes.tokens import bubble_up
from autoptd.program.program import Program
from tests.parity.models import VOCAB
from tests.parity.test_context import shifted

# Not a size of anything else.
LENGTH = 24
Mask = Callable[[Tensor], Tensor]


def documents(ids: Tensor) -> Tensor:
    """A mask of documents, which end at token 0."""
    number = (ids == 0).cumsum(-1)
    return (number[:, :, None] == number[:, None])[:, None]


def near(ids: Tensor) -> Tensor:
    places = torch.arange(ids.shape[1], device=ids.device)
    return ((places[:, None] - places).abs() < 3)[None, None]


def padded(ids: Tensor) -> Tensor:
    """Keys alone are masked: there are no rows to slice."""
    return (ids != 1)[:, None, None]


def far(ids: Tensor) -> Tensor:
    """An addend of a float mask, that grows with the distance."""
    places = torch.arange(ids.shape[1], device=ids.device)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
    return -(slopes[:, None, None] * (places[:, None] - places).abs())[None]


def in_pieces(ids: Tensor) -> Tensor:
    """A mask of the pieces of a table, as of the halves of one of sines and cosines."""
    table = torch.stack((ids, ids * ids), -1).double()
    first, second = table.chunk(2, -1)
    return ((first - second.transpose(1, 2)).abs() < table.max(-1, keepdim=True).values + 1)[:, None]


class Masked(nn.Module):
    """Two layers of attention with a mask."""

    def __init__(self, mask: Mask, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mask, self.heads = mask, heads
        self.embed, self.qkv = nn.Embedding(VOCAB, width), nn.Linear(width, 3 * width)
        self.out, self.head = nn.Linear(width, width), nn.Linear(width, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, mask = self.embed(ids), self.mask(ids)
        for _ in range(2):
            parts = self.qkv(x).chunk(3, -1)
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
            z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + self.out(z.transpose(1, 2).flatten(2))
        # Of another kind than the numbers of a loss: these would be counted by parts, if they were cut before.
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.to(torch.int64).flatten())


def call() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 8, (4, LENGTH), generator=generator)
    labels = torch.randint(0, VOCAB, (4, LENGTH), generator=generator, dtype=torch.int32)
    # A rank without labels, for one of the orders.
    labels[:, LENGTH // 2 :] = -100
    return ids, labels


def compiled(mask: Mask, **mesh: Any) -> Program:
    model = Masked(mask).double()
    return autoptd.compile(model, example_inputs=call(), context="all_gather", num_microbatches=1, **mesh)


def squares(graph: Graph) -> list[Node]:
    """The values of all tokens by all tokens that a rank has whole."""
    found = []
    for node in ops(graph):
        is_square = shape(node).count(LENGTH) > 1
        if is_square and note(node).layout["cp"] == I and node.target is not markers.convert:
            found.append(node)
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("mask", [documents, near, far])
def test_no_rank_makes_the_mask_of_the_other_ranks_queries(mask: Mask, order: str) -> None:
    graph = compiled(mask, c=2, token_order=order).graphs["LOCAL"]
    assert not squares(graph), [op_name(node) for node in squares(graph)]
    made = [node for node in ops(graph) if shape(node).count(LENGTH) > 1]
    assert made and all(note(node).layout["cp"].order == order.replace("contiguous", "") for node in made)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("mask", [documents, near, padded, far, in_pieces])
@pytest.mark.parametrize(
    "mesh", [{"c": 2}, {"c": 2, "t": 2, "sequence_parallel": True}, {"c": 4, "p": 2, "token_order": "zigzag"}]
)
def test_the_numbers_are_those_of_one_device(mask: Mask, mesh: dict[str, Any]) -> None:
    autoptd.verify(Masked(mask).double(), example_inputs=call(), context="all_gather", steps=2, **mesh)


def test_labels_are_counted_whole() -> None:
    """Of another dtype than the input's: what is sliced stands behind the cast, not before it."""
    graph = compiled(documents, c=2).graphs["CONNECTED"]
    (loss,) = (node for node in ops(graph) if op_name(node) == "aten.cross_entropy_loss")
    labels = loss.args[1]
    assert labels.target is markers.convert and converted_types(labels)[0] == I  # type: ignore[union-attr]


def test_labels_that_are_converted_over_tp_too_are_counted_whole() -> None:
    """Two labels a token are more than what they are made of; tp divides the tokens that cp leaves."""
    width, length = 256, 512

    class TwoLabels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.norm, self.out = (
                nn.Embedding(8, width),
                nn.LayerNorm(width),
                nn.Linear(width, width),
            )

        def forward(self, ids: Tensor) -> Tensor:
            x = self.norm(self.embed(ids) + self.out(self.norm(self.embed(ids))))
            labels = torch.stack((ids, ids * 2 % 8), -1)
            both = torch.stack((x, x.tanh()), 2).permute(0, 3, 1, 2)
            return F.cross_entropy(both, labels.masked_fill(labels == 1, -100))

    ids = torch.randint(0, 8, (2, length), generator=torch.Generator().manual_seed(1))
    ids[:, : length // 2][ids[:, : length // 2] > 2] = 1
    model, how = TwoLabels().double(), {"c": 2, "t": 2, "sequence_parallel": True, "num_microbatches": 1}
    pm = autoptd.parallelize(model, **how, backend="local", token_order="contiguous", example_inputs=(ids,))  # type: ignore[arg-type]
    (loss,) = (
        node for node in ops(pm.program.graphs["CONNECTED"]) if op_name(node) == "aten.cross_entropy_loss"
    )
    assert note(loss).forms == {"tp": "token_loss", "cp": "token_loss"}
    torch.testing.assert_close(pm.step(ids), model(ids), rtol=1e-9, atol=0)
    pm.close()


def test_without_context_parallel_ranks_it_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: Graph, ctx: Context) -> None:
        raise AssertionError

    monkeypatch.setattr(autoptd.passes, "bubble_up_slices", fail)
    compiled_without = autoptd.compile(Masked(near).double(), t=2, example_inputs=call(), num_microbatches=1)
    assert squares(compiled_without.graphs["LOCAL"])


def test_a_slice_of_the_wrong_part_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys' part instead of the queries': no rule of the table allows it."""
    right = bubble_up.convert_before

    def wrong(graph: Graph, source: Node, axis: str, types: Layout, *rest: Any) -> Node:
        ((_, kind),) = types.shards
        other = {"dim": 0, "atom": 0} if len(shape(source)) > 1 else {"order": "zigzag"}
        changed = Layout({axis: type(kind)(**{**vars(kind), **other})})
        return right(graph, source, axis, changed, *rest)

    monkeypatch.setattr(bubble_up, "convert_before", wrong)
    for mask in (documents, near):
        with pytest.raises(InternalError, match=r"bubble_up_slices .* ensures"):
            compiled(mask, c=2, token_order="contiguous")


def test_values_that_are_read_whole_as_well_stay_whole() -> None:
    """The loss averages what attention reads a part of."""

    class AlsoWhole(Masked):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return super().forward(ids, labels) + 0.1 * self.mask(ids).sum((2, 3)).double().mean()

    model = AlsoWhole(near).double()
    for order in ("contiguous", "zigzag"):
        asked: dict[str, Any] = {"c": 2, "context": "all_gather", "token_order": order}
        autoptd.verify(model, example_inputs=call(), num_microbatches=1, steps=2, **asked)


def test_the_model_of_the_parity_tests_has_no_square() -> None:
    ids = torch.arange(4 * LENGTH).reshape(4, LENGTH) % 7
    program = autoptd.compile(
        shifted().double(), example_inputs=(ids, ids), c=2, context="all_gather", num_microbatches=1
    )
    assert not squares(program.graphs["LOCAL"])


def test_labels_that_are_counted_in_parts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever would make them local: the number of labels that count would be that of one rank."""
    monkeypatch.setattr(bubble_up, "COUNTS", "")
    monkeypatch.setattr(bubble_up, "_entries", lambda node: -1 if note(node).kind == "input" else 0)
    with pytest.raises(InternalError, match="count would count only a part of the values: cp divides them"):
        compiled(documents, c=2)
