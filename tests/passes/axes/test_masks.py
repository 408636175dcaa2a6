"""What is proven of masks, by tiles of a few entries, against the mask itself; large ones are never computed whole."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

import autoptd
from autoptd.ir.notes import Note, output, set_note
from autoptd.passes.axes import constants, masks
from autoptd.passes.axes.constants import Constants, Piece, bounds_of, whole
from autoptd.passes.axes.masks import HIDDEN, SEEN, Masked, leaves_keys, proves_causal, proves_window

S, TILE = 23, 4


@contextmanager
def limits(kept: int, block: int, tile: int) -> Iterator[None]:
    with (
        mock.patch.multiple(constants, KEPT=kept, BLOCK=block, TILE=tile),
        mock.patch.multiple(masks, BLOCK=block, TILE=tile),
    ):
        yield


@pytest.fixture(autouse=True)
def _small_tiles() -> Iterator[None]:
    with limits(3 * S, 2 * TILE * S, TILE):
        yield


def traced(make: Callable[..., Tensor], *buffers: Tensor) -> tuple[Node, Constants]:
    """The node of what `make` computes of buffers, in a graph of their names."""
    graph = make_fx(make, tracing_mode="fake")(*buffers).graph
    names = [node.name for node in graph.find_nodes(op="placeholder")]
    for node in graph.nodes:
        set_note(node, Note(kind="buffer", name=node.name) if node.op == "placeholder" else Note())
    found = output(graph).args[0]
    assert isinstance(found, Node)
    return found, Constants(dict(zip(names, buffers, strict=True)))


def q() -> Tensor:
    return torch.arange(S)[:, None]


def k() -> Tensor:
    return torch.arange(S)[None]


def packed() -> Tensor:
    """As transformers makes masks: of positions of every row of the batch, and of where they start anew."""
    rows = torch.arange(S)[None].expand(3, -1)
    document = (torch.diff(rows, prepend=rows[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    ours = torch.ones((), dtype=torch.bool) & (document[:, None, :, None] == document[:, None, None, :])
    return (ours & (rows[:, None, None, :] <= rows[:, None, :, None])).expand(3, -1, S, S)


CAUSAL = {
    "compared": lambda: k() <= q(),
    "the other way": lambda: ~(q() < k()),
    "tril": lambda: torch.ones(S, S, dtype=torch.bool).tril(),
    "not triu": lambda: ~torch.ones(S, S, dtype=torch.bool).triu(1),
    "a slice": lambda: torch.ones(1, 1, 2 * S, 2 * S, dtype=torch.bool).tril()[:, :, :S, :S],
    "a slice from the middle": lambda: torch.ones(2 * S, 2 * S, dtype=torch.bool).tril()[
        5 : 5 + S, 5 : 5 + S
    ],
    "of packed rows": packed,
    "transposed": lambda: (q() <= k()).t(),
    "added": lambda: torch.zeros(S, S).masked_fill(k() > q(), -math.inf),
    "added, where": lambda: torch.where(k() <= q(), 0.0, -3e38)[None, None],
    "added, triu": lambda: torch.full((S, S), -math.inf).triu(1),
    "differences": lambda: (q() - k()) >= 0,
}
OTHERS = {
    "shifted": lambda: k() < q(),
    "shifted the other way": lambda: k() <= q() + 1,
    "all": lambda: torch.ones(S, S, dtype=torch.bool),
    "one entry": lambda: (k() <= q()) | ((q() == 2) & (k() == S - 1)),
    "one entry less": lambda: (k() <= q()) & ~((q() == S - 1) & (k() == 0)),
    "added, but not hidden": lambda: torch.zeros(S, S).masked_fill(k() > q(), -1e4),
    "nan": lambda: torch.zeros(S, S).masked_fill(k() > q(), math.nan),
    "seen lowered": lambda: torch.where(k() <= q(), -1.0, -math.inf),
    "rows of the batch differ": lambda: (
        (k() <= q())[None]
        & (torch.arange(3)[:, None, None] >= 0)
        & (packed()[:, 0] | True)
        & (torch.arange(3)[:, None, None] + k() < S + 1)
    ),
}


def masked_by(node: Node) -> Masked:
    return Masked(node, node, -math.inf if node.meta["val"].dtype == torch.bool else None, hides=False)


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_however_it_is_made(name: str) -> None:
    node, known = traced(CAUSAL[name])
    size = (3, 2, S, S)
    assert proves_causal(masked_by(node), size, known) and proves_window(masked_by(node), size, known) == S


@pytest.mark.parametrize("name", OTHERS)
def test_near_misses_are_not_causal(name: str) -> None:
    node, known = traced(OTHERS[name])
    assert not proves_causal(masked_by(node), (3, 2, S, S), known)


@pytest.mark.parametrize("width", [1, 2, 5, 8, S - 1])
def test_windows(width: int) -> None:
    for make in (
        lambda: (k() <= q()) & (k() > q() - width),
        lambda: (q() - k() < width) & (q() >= k()),
        lambda: torch.zeros(S, S).masked_fill(~((k() <= q()) & (k() > q() - width)), -math.inf)[None],
    ):
        node, known = traced(make)
        assert proves_window(masked_by(node), (2, 2, S, S), known) == width
        assert not proves_causal(masked_by(node), (2, 2, S, S), known)
    node, known = traced(
        lambda: (k() <= q()) & (k() > q() - width) & ~((q() == width + 3) & (k() == width + 3))
    )
    assert proves_window(masked_by(node), (2, 2, S, S), known) is None or width + 3 >= S


@pytest.mark.parametrize("start", [-S - 9, -S, -5, 3, S + 2])
def test_pieces_of_rows_from_any_place(start: int) -> None:
    """Python lets a slice begin before the first row: that is the first."""
    node, known = traced(lambda: (q() >= k())[start:])
    wanted = (q() >= k())[start:]
    rows = wanted.shape[0]
    for first in range(0, rows, TILE):
        band = Piece(node, ((first, min(first + TILE, rows)), (0, S)))
        assert torch.equal(known.entries(band), wanted[first : first + TILE])


def test_buffers_of_every_head_and_of_meta() -> None:
    mask = torch.ones(2, S, S, dtype=torch.bool).tril()
    node, known = traced(lambda x: x & True, mask)
    assert proves_causal(masked_by(node), (4, 2, S, S), known) and known._buffers.looked_at()[0][0]
    other = mask.clone()
    other[1, 9, 9] = False
    node, known = traced(lambda x: x & True, other)
    assert not proves_causal(masked_by(node), (4, 2, S, S), known)
    node, _ = traced(lambda x: x & True, mask)
    assert not proves_causal(masked_by(node), (4, 2, S, S), Constants({"x_1": mask.to("meta")}))


def test_every_query_has_a_key() -> None:
    for make, wanted in (
        (lambda: torch.where(k() <= q(), 0.0, -3e38), True),
        (lambda: torch.where(k() <= q(), SEEN, HIDDEN), True),
        (lambda: torch.where(k() < q(), 0.0, -3e38), False),
        (lambda: torch.where((k() <= q()) & (q() != S - 2), 0.0, -3e38), False),
    ):
        node, known = traced(make)
        assert leaves_keys(node, known) == wanted


def drawn(draw: random.Random, depth: int = 4) -> Tensor:
    """A random mask of positions."""
    if depth == 0 or draw.random() < 0.2:
        a, b = (q(), k()) if draw.random() < 0.7 else (k(), q())
        a = draw.choice([lambda: a, lambda: a + draw.randint(-6, 6), lambda: -a, lambda: a - b])()
        return draw.choice([torch.le, torch.lt, torch.ge, torch.gt, torch.eq])(a, b)
    one = drawn(draw, depth - 1)
    kind = draw.randrange(8)
    if kind == 0:
        return ~one
    if kind == 1:
        return one.tril(draw.randint(-9, 9)) if draw.random() < 0.5 else one.triu(draw.randint(-9, 9))
    if kind == 2:
        return one.t()
    if kind == 3:
        return torch.where(one, drawn(draw, depth - 1), drawn(draw, depth - 1))
    if kind == 4:
        return one.masked_fill(drawn(draw, depth - 1), draw.random() < 0.5)
    if kind == 5:
        return torch.where(one, 1.0, -2.0) + one > draw.randint(-2, 2)
    return draw.choice([torch.logical_and, torch.logical_or, torch.bitwise_and])(one, drawn(draw, depth - 1))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(60))
def test_random_masks_lie_within_their_bounds_and_pieces_are_theirs(seed: int) -> None:
    node, known = traced(lambda: drawn(random.Random(seed)))
    if node.meta["val"].shape != (S, S):
        return
    wanted = drawn(random.Random(seed))
    assert torch.equal(known.evaluate(node), wanted)
    place = ((3, 17), (6, 19))
    assert torch.equal(known.entries(Piece(node, place)), wanted[3:17, 6:19])
    found = bounds_of(known, whole(node))
    if found is not None:
        tiles = -(-S // TILE)
        lo, hi = (
            x.expand(tiles, tiles).repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)[:S, :S]
            for x in found
        )
        assert (lo <= wanted).all() and (wanted <= hi).all()
    seen = torch.ones(S, S, dtype=torch.bool).tril()
    assert proves_causal(masked_by(node), (1, 1, S, S), known) == torch.equal(wanted, seen)
    same = known.has_equal_rows(node, 0)
    assert same == bool((wanted == wanted[:1]).all())


class Decoder(torch.nn.Module):
    """Attention with a mask made of positions, as transformers' models have it."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window, self.emb, self.head = window, torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8)

    def forward(self, ids: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1], device=ids.device)[None].expand(ids.shape[0], -1)
        mask = (at[:, None, None] <= at[:, None, :, None]) & (
            at[:, None, None] > at[:, None, :, None] - self.window
        )
        lowest = torch.tensor(torch.finfo(torch.float32).min, device=ids.device)
        added = torch.where(mask, torch.zeros((), device=ids.device), lowest)
        x = self.emb(ids)[:, None]
        return (
            self.head(torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=added))
            .square()
            .mean()
        )


@pytest.mark.parametrize("window", [1 << 15, 1000])
def test_long_rows_on_meta_are_compiled_a_block_at_a_time(window: int) -> None:
    length, largest = 1 << 14, 0

    class Counted(Constants):
        def _entries(self, piece: Piece, known: dict[Piece, Tensor]) -> Tensor:
            nonlocal largest
            found = super()._entries(piece, known)
            largest = max(largest, found.untyped_storage().nbytes())
            return found

    with torch.device("meta"):
        model, ids = Decoder(window), torch.zeros(8, length, dtype=torch.long)
    places = ("autoptd.passes.samples.Constants", "autoptd.passes.fusion.fuse.Constants")
    with limits(1 << 22, 1 << 24, 512), mock.patch(places[0], Counted), mock.patch(places[1], Counted):
        program = autoptd.compile(model, d=2, num_microbatches=4, example_inputs=(ids,))
    assert [one.op for one in program.fusions] == (["attention"] if window > length else [])
    assert 0 < largest <= 8 * (1 << 24)
