"""Sizes that nobody chose for parallel training: vocabularies that t does not divide, odd widths, few layers, one token.

Vocabularies are made to be split here wherever they may be: models this small would rather split another dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.passes import assign
from tests.parity.models import batch, gpt, uneven


@pytest.fixture
def split_vocabularies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take the choice away: a parameter with a vocabulary in it is sharded by it."""
    every = assign._parameter_strategies

    def only(node: Any, splitter: assign.Splitter) -> list[assign.Strategy]:
        made = every(node, splitter)
        sharded = [one for one in made if one.gives.kind == "S"]
        by_vocabulary = [one for one in sharded if splitter.padding.may_pad(node, (one.gives.dim, one.gives.atom))]
        return by_vocabulary or made

    monkeypatch.setattr(assign, "_parameter_strategies", only)
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


MESHES = [(2, 1, 1, 1), (4, 1, 1, 1), (3, 2, 1, 1), (2, 2, 2, 1), (4, 2, 1, 2)]


@pytest.mark.parametrize(("t", "p", "d", "v"), MESHES)
@pytest.mark.parametrize("vocab", [61, 5])
def test_tied_gpt(split_vocabularies: None, vocab: int, t: int, p: int, d: int, v: int) -> None:
    heads, width = (3, 24) if t == 3 else (4, 16)
    model, (ids, targets) = gpt(4, heads, width, vocab), batch(8, vocab)
    program = autoptd.compile(model, t=t, p=p, d=d, v=v, example_inputs=(ids, targets))
    each = -(-vocab // t)
    assert program.param("lm_head.weight").local_shape(t) == (each, width)
    loss = program.sources[f"stage_{program.loss_stage}.py"]
    assert f"size={vocab})" in loss and f"padded: {vocab} = {t} x {each} - {each * t - vocab}" in loss
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


@pytest.mark.parametrize(("t", "p", "d"), [(2, 1, 2), (4, 2, 1), (3, 1, 1)])
@pytest.mark.parametrize("which", HEADS)
def test_heads(split_vocabularies: None, which: str, t: int, p: int, d: int) -> None:
    vocab = 61
    ids, labels = batch(4, vocab)
    model = head(vocab, **HEADS[which])
    program = autoptd.compile(model, t=t, p=p, d=d, example_inputs=(ids, labels))
    assert "padded: 61" in "".join(program.sources.values())
    autoptd.verify(model, t=t, p=p, d=d, example_inputs=(ids, uneven(labels)), steps=3)


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


@pytest.mark.parametrize("edit", [(", size=5", ""), (", size=5", ", size=6")], ids=["forgotten", "wrong"])
def test_a_padding_that_leaks_is_found(
    split_vocabularies: None, monkeypatch: pytest.MonkeyPatch, edit: tuple[str, str]
) -> None:
    from tests.parity.test_mutations import edit_source

    model, call = head(5), batch(4, 5)
    edited = edit_source(
        monkeypatch, 'reduction="sum", ignore_index=-100' + edit[0], 'reduction="sum", ignore_index=-100' + edit[1]
    )
    with pytest.raises(autoptd.InternalError, match="differs"):
        autoptd.verify(model, t=4, example_inputs=call, steps=1)
    assert edited
