"""Sizes that nobody chose for parallel training: vocabularies that t does not divide, odd widths, few layers, one token.

Vocabularies are made to be split here wherever they may be: models this small would rather split another dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.ir import machine, types
from autoptd.passes.solve import strategies
from autoptd.passes.solve.splits import Splitter
from autoptd.passes.solve.ties import Strategy
from tests.parity.checks import as_planned, check_is_found
from tests.parity.models import LENGTH, batch, gpt, uneven


@pytest.fixture
def split_vocabularies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take the choice away: a parameter with a vocabulary in it is sharded by it, and even five logits are not gathered."""
    every = strategies.parameter_strategies

    def only(node: Any, splitter: Splitter) -> list[Strategy]:
        made = every(node, splitter)
        shards = {one.gives: kind for one in made for _, kind in one.gives.shards}
        by_vocabulary = [
            one
            for one in made
            if (kind := shards.get(one.gives)) and splitter.padding.may_pad(node, (kind.dim, kind.atom))
        ]
        return by_vocabulary or made

    monkeypatch.setattr(strategies, "parameter_strategies", only)
    monkeypatch.setattr(machine, "DEFAULT", machine.Machine(latency=1e-12, per_saved_byte=1e-12))
    yield


class Head(nn.Module):
    """Embedding, a little network, a head: `logits` and `loss` say how."""

    def __init__(
        self,
        vocab: int,
        loss: Callable[..., Tensor] = F.cross_entropy,
        width: int = 12,
        tied: bool = False,
        logits: Callable[[Head, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, vocab)
        nn.init.normal_(self.head.bias)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("class_weights", torch.rand(vocab) + 0.1)
        self.loss, self.logits = loss, logits

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = self.head(x) if self.logits is None else self.logits(self, x)
        keywords = {"weight": self.class_weights} if self.loss is weighted else {}
        return self.loss(logits.view(-1, logits.shape[-1]), labels.view(-1), **keywords)


def smooth(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, label_smoothing=0.1)


def weighted(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, weight, label_smoothing=0.2)


def other_ignored(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels.clamp(min=0), ignore_index=0)


def z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels) + 1e-2 * logits.logsumexp(-1).square().mean()


def scores_of_embedding(self: Head, x: Tensor) -> Tensor:
    return x @ self.embed.weight.t() + self.head.bias


def soft_capped(self: Head, x: Tensor) -> Tensor:
    return 5.0 * torch.tanh(self.head(x) / 5.0)


def head(vocab: int, **keywords: Any) -> Head:
    torch.manual_seed(0)
    return Head(vocab, **keywords)


@pytest.fixture
def aligned_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards as those of a large vocabulary are: of 61 rows over 8 ranks each has 16, and the last four are all padding."""
    monkeypatch.setattr(types, "ALIGNED", 16)
    monkeypatch.setattr(types, "MIN_ALIGNED", 8)


MESHES = [(2, 2, 2, 1), (3, 2, 1, 1), (4, 2, 1, 2)]


@pytest.mark.one_in(24)
@pytest.mark.parametrize(("t", "p", "d", "v"), MESHES)
@pytest.mark.parametrize("vocab", [61, 5])
def test_tied_gpt(split_vocabularies: None, vocab: int, t: int, p: int, d: int, v: int) -> None:
    heads, width = (3, 24) if t == 3 else (4, 16)
    model, (ids, targets) = gpt(2 * v, heads, width, vocab), batch(8, vocab)
    program = autoptd.compile(model, t=t, p=p, d=d, v=v, example_inputs=(ids, targets))
    each = types.shard_size(vocab, t)
    assert program.param("lm_head.weight").local_shape(program.mesh) == (each, width)
    loss = program.sources[f"stage_{program.loss_stage}.py"]
    assert f"size={vocab}, site=" in loss and f"padded: {vocab} = {t} x {each} - {each * t - vocab}" in loss
    autoptd.verify(model, t=t, p=p, d=d, v=v, example_inputs=(ids, uneven(targets)), steps=3)


HEADS: dict[str, dict[str, Any]] = {
    "a bias": {},
    "tied, with a bias": {"tied": True},
    "smoothed": {"loss": smooth},
    "weighted and smoothed": {"loss": weighted, "tied": True},
    "another ignored label": {"loss": other_ignored},
    "logits are read by others": {"loss": z_loss, "tied": True},
    "transposed and tied": {"logits": scores_of_embedding},
    "soft-capped": {"logits": soft_capped, "loss": smooth},
}


@pytest.mark.one_in(96)
@pytest.mark.parametrize(("mesh", "which"), list(itertools.product([(2, 1, 2), (4, 2, 1), (3, 1, 1)], HEADS)))
def test_heads(split_vocabularies: None, mesh: tuple[int, int, int], which: str) -> None:
    (t, p, d), vocab = mesh, 61
    ids, labels = batch(4, vocab)
    model = head(vocab, **HEADS[which])
    program = autoptd.compile(model, t=t, p=p, d=d, example_inputs=(ids, labels))
    assert "padded: 61" in "".join(program.sources.values())
    autoptd.verify(model, t=t, p=p, d=d, example_inputs=(ids, uneven(labels)), steps=3)


@pytest.mark.thorough
def test_aligned_shards(split_vocabularies: None, aligned_shards: None) -> None:
    """They end earlier than the ranks do: parity, and a checkpoint that moves between meshes."""
    assert [types.shard_size(61, t) for t in (1, 2, 3, 4, 8)] == [61, 32, 32, 16, 16]
    test_tied_gpt(None, 61, 3, 2, 1, 1)
    test_checkpoints_move_between_meshes_bit_for_bit(None, 61)
    for loss in (smooth, weighted):
        autoptd.verify(head(61, loss=loss, tied=True), t=8, example_inputs=batch(4, 61), steps=2)


@pytest.mark.parametrize("vocab", [2, 3, 7])
def test_fewer_rows_than_ranks(split_vocabularies: None, vocab: int) -> None:
    """Some of 8 (or 4) ranks own no row at all."""
    for t, loss in ((8, smooth), (4, F.cross_entropy)):
        if vocab % t:
            autoptd.verify(head(vocab, loss=loss), t=t, example_inputs=batch(4, vocab), steps=3)


@pytest.mark.parametrize("t", [2, 4])
def test_a_vocabulary_of_one_row(t: int) -> None:
    model = head(1)
    report = autoptd.verify(model, t=t, example_inputs=batch(4, 1), steps=2)
    assert report.passed


def test_the_padding_is_nowhere_but_on_the_ranks(split_vocabularies: None) -> None:
    """Zeros with zero gradients under AdamW with weight decay; not in state dicts, gradients or the norm."""
    vocab, t = 5, 4
    model, (ids, labels) = head(vocab, tied=True).double(), batch(4, vocab)
    reference = head(vocab, tied=True).double()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.1, weight_decay=0.1)
    pm = autoptd.parallelize(model, t=t, backend="local", example_inputs=(ids, labels))
    try:
        ours = pm.optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.1)
        for _ in range(3):
            reference(ids, labels).backward()
            pm.step(ids, labels)
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            torch.testing.assert_close(pm.clip_grad_norm_(0.1), norm, rtol=1e-9, atol=0)
            padded = [pm.rank_parameters(rank)["embed.weight"] for rank in (2, 3)]
            for rows, real in zip(padded, (1, 0), strict=True):
                assert rows.shape == (2, 12) and rows.grad is not None
                assert not rows[real:].any() and not rows.grad[real:].any()
            assert all(
                one.shape == dict(reference.named_parameters())[name].shape
                for name, one in pm.gradients().items()
                if name != "head.weight"
            )
            optimizer.step(), ours.step()
            optimizer.zero_grad(), ours.zero_grad()
        state, moments = pm.state_dict(), ours.state_dict()["state"]
        for name, wanted in reference.state_dict().items():
            torch.testing.assert_close(state[name], wanted, rtol=1e-9, atol=1e-12)
        assert moments["embed.weight"]["exp_avg"].shape == (vocab, 12)
        assert moments["head.bias"]["exp_avg_sq"].shape == (vocab,)
    finally:
        pm.close()


def test_an_optimizer_without_epsilon_leaves_the_padding_zero(split_vocabularies: None) -> None:
    """AdamW makes 0 / 0 of a row whose gradient is always zero; that row would spoil every gradient of the hidden state."""
    model, call = head(5).double(), batch(4, 5)
    pm = autoptd.parallelize(model, t=4, backend="local", example_inputs=call)
    try:
        optimizer = pm.optimizer(torch.optim.AdamW, lr=0.1, eps=0.0)
        for _ in range(2):
            optimizer.zero_grad()
            pm.step(*call)
            optimizer.step()
        assert all(one.isfinite().all() for one in pm.gradients().values())
        assert not pm.rank_parameters(3)["head.weight"].any()
    finally:
        pm.close()


@pytest.mark.parametrize("vocab", [61, 5])
def test_checkpoints_move_between_meshes_bit_for_bit(split_vocabularies: None, vocab: int) -> None:
    """t=4 to t=1 to t=3 to t=2: parameters and optimizer state; each world then takes the same step as the one before."""
    ids, labels = batch(4, vocab)
    state: dict[str, Tensor] = head(vocab, tied=True).state_dict()
    moments: dict[str, Any] | None = None
    for t in (4, 1, 3, 2):
        torch.manual_seed(t)
        pm = autoptd.parallelize(head(vocab, tied=True), t=t, backend="local", example_inputs=(ids, labels))
        try:
            optimizer = pm.optimizer(torch.optim.AdamW, lr=0.1)
            pm.load_state_dict(state)
            assert same(pm.state_dict(), state)
            if moments is not None:
                optimizer.load_state_dict(moments)
                found = optimizer.state_dict()["state"]
                assert all(same(found[name], one) for name, one in moments["state"].items())
            pm.step(ids, labels)
            optimizer.step()
            state, moments = pm.state_dict(), optimizer.state_dict()
        finally:
            pm.close()


def same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    assert list(found) == list(wanted)
    return all(torch.equal(found[name], one) for name, one in wanted.items())


@pytest.mark.thorough
@pytest.mark.parametrize("fuse", ["eager", False])
@pytest.mark.parametrize("wrong", ["", ", size=6"], ids=["forgotten", "wrong"])
def test_a_padding_that_leaks_is_found(
    split_vocabularies: None, monkeypatch: pytest.MonkeyPatch, wrong: str, fuse: str | bool
) -> None:
    model, call = head(5), batch(4, 5)
    before = f"chunk={LENGTH}" if fuse else "total=self.totals[0]"
    edit = f"{before}, size=5", before + wrong
    check_is_found(monkeypatch, edit, model, t=4, num_microbatches=4, example_inputs=call, fuse=fuse)


EDGES: dict[str, tuple[dict[str, Any], tuple[int, int], dict[str, int]]] = {  # model, (rows, tokens), mesh
    "one layer, four stages": ({"layers": 1}, (4, LENGTH), {"p": 4}),
    "one layer, two chunks a rank": ({"layers": 1}, (4, LENGTH), {"p": 2, "v": 2}),
    "three layers, four stages": ({"layers": 3}, (4, LENGTH), {"t": 2, "p": 2, "v": 2}),
    "one token": ({"layers": 2}, (4, 1), {"t": 2, "p": 2, "d": 2}),
    "one row": ({"layers": 2}, (1, LENGTH), {"t": 4, "p": 2}),
    "one row of one token": ({"layers": 2}, (1, 1), {"t": 2, "p": 2}),
    "an odd head size": ({"layers": 2, "width": 12}, (4, LENGTH), {"t": 4, "p": 2}),
    "a prime width": ({"layers": 2, "heads": 1, "width": 31}, (4, LENGTH), {"t": 2, "p": 2}),
    "as many heads, of one entry each": (
        {"layers": 1, "heads": 31, "width": 31},
        (4, LENGTH),
        {"t": 2, "d": 2},
    ),
    "six heads over four ranks": ({"layers": 2, "heads": 6, "width": 36}, (4, LENGTH), {"t": 4, "d": 2}),
    "six heads of eight over four ranks": (
        {"layers": 2, "heads": 6, "width": 48},
        (4, LENGTH),
        {"t": 4, "p": 2},
    ),
}


@pytest.mark.parametrize("which", EDGES)
def test_edges(which: str) -> None:
    config, (rows, tokens), mesh = EDGES[which]
    ids, targets = (one[:rows, :tokens] for one in batch(4))
    autoptd.verify(gpt(**config), example_inputs=(ids, targets), steps=2, **mesh)


def test_a_width_that_does_not_divide_beside_one_that_does() -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(64, 30)
            self.wide, self.wide_back = nn.Linear(30, 64), nn.Linear(64, 30)
            self.odd, self.odd_back = nn.Linear(30, 50), nn.Linear(50, 30)
            self.head = nn.Linear(30, 64)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            x = self.embed(ids)
            x = x + self.wide_back(F.gelu(self.wide(x)))
            x = x + self.odd_back(F.gelu(self.odd(x)))
            return F.cross_entropy(self.head(x).view(-1, 64), labels.view(-1))

    torch.manual_seed(0)
    model, call = Mlp(), batch(4)
    with pytest.warns(UserWarning, match="do not divide over t=4"):
        program = autoptd.compile(model, t=4, example_inputs=call)
    assert [one.site for one in program.fallbacks] == ["odd", "odd_back"]
    assert (
        program.param("wide.weight").use.layout["tp"].kind == "S"
        and program.param("odd.weight").use.layout["tp"].is_whole
    )
    autoptd.verify(model, t=4, p=2, example_inputs=call, steps=2)


def test_as_many_stages_as_there_are_places_to_cut_and_no_more() -> None:
    """Between six matrix products, and at the end of the layer."""
    autoptd.verify(gpt(1), p=7, num_microbatches=4, example_inputs=batch(), steps=1)
    with pytest.raises(autoptd.PlanError) as caught:
        autoptd.compile(gpt(1), p=8, example_inputs=batch())
    assert (caught.value.site, caught.value.remedy) == ("p*v=8", "p*v <= 7, or a deeper model")
    assert caught.value.fact == "more stages than the model can be cut into: 7 at most"


def test_one_row_cannot_be_two_replicas() -> None:
    with pytest.raises(autoptd.PlanError, match=r"do not divide over d=2\. Remedy: a multiple of 2 rows"):
        autoptd.compile(gpt(1), d=2, example_inputs=tuple(one[:1] for one in batch()))


@pytest.mark.parametrize("which", ["logits are read by others", "weighted and smoothed"])
def test_bytes_with_padding_are_those_of_the_program(split_vocabularies: None, which: str) -> None:
    """Gathers and scatters of padded shards move the padding too, and the list of collectives says so."""
    as_planned(head(61, **HEADS[which]), batch(4, 61), t=4)
