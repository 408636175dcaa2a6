"""The ways people write decoders, each once: models that were silently wrong, crashed or were refused without need.

Every model here runs through `verify` on a mesh that showed the fault, or must be refused with a remedy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.compat import tree_map

VOCAB, LENGTH, WIDTH, HEADS = 32, 8, 16, 4
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
Model = tuple[nn.Module, tuple[Any, ...]]


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(0, VOCAB, (rows, LENGTH), generator=generator) for _ in range(2))
    return ids, labels


def ragged(labels: Tensor) -> Tensor:
    """The first row without a label, the others with different numbers of them."""
    labels = labels.clone()
    for row in range(1, labels.shape[0]):
        labels[row, : (5 * row) % LENGTH] = -100
    labels[0] = -100
    return labels


def loss_of(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


class RmsNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def turn(x: Tensor) -> Tensor:
    """Rotary positions by complex numbers."""
    angles = torch.outer(torch.arange(LENGTH).double(), torch.tensor([1.0, 0.1], dtype=torch.float64))
    turned = torch.view_as_complex(x.reshape(*x.shape[:-1], 2, 2)) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.view_as_real(turned).flatten(-2).type_as(x)


class Attention(nn.Module):
    """Grouped queries with rotary positions and a mask by torch.where."""

    def __init__(self, kv_heads: int = 2) -> None:
        super().__init__()
        self.kv_heads, size = kv_heads, WIDTH // HEADS
        self.q, self.k = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, kv_heads * size, bias=False)
        self.v, self.out = nn.Linear(WIDTH, kv_heads * size, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (
            y.view(b, s, -1, WIDTH // HEADS).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x))
        )
        k, v = (y.repeat_interleave(HEADS // self.kv_heads, dim=1) for y in (turn(k), v))
        scores = torch.where(CAUSAL, turn(q) @ k.mT / 2, -1e9)
        return self.out(
            (F.softmax(scores, dim=-1, dtype=torch.float32).type_as(v) @ v).transpose(1, 2).flatten(2)
        )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2, self.attention = RmsNorm(), RmsNorm(), Attention()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.glu(self.up(self.norm_2(x)), -1))


class Decoder(nn.Module):
    """`layers` blocks; subclasses change one thing."""

    def __init__(self, layers: int = 2, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(layers))
        self.norm, self.head = RmsNorm(), nn.Linear(WIDTH, VOCAB)

    def body(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return loss_of(self.head(self.body(ids)), labels)


class EarlyExits(Decoder):
    """A loss behind every layer: they are computed, and their labels counted, on different stages."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, losses = self.embed(ids), []
        for layer in self.layers:
            x = layer(x)
            losses.append(loss_of(self.head(x), labels))
        return torch.stack(losses).mean()


class HalfDetached(Decoder):
    """The first half of the layers, and a gate, get no gradient: AdamW must not decay their weights."""

    def __init__(self) -> None:
        super().__init__(4)
        self.gate = nn.Linear(WIDTH, WIDTH)

    def body(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for i, layer in enumerate(self.layers):
            x = layer(x) if i >= 2 else layer(x).detach()
            with torch.no_grad():
                gate = self.gate(x).sigmoid()
            x = x * gate
        return self.norm(x)


class FoldedHeads(Decoder):
    """Batch and heads folded into one dim, sloped biases from the attention mask (as BLOOM has them)."""

    def __init__(self) -> None:
        super().__init__(2, lambda: Attention(HEADS))

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        x, (b, s) = self.embed(ids), ids.shape
        slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
        slope = (
            (((mask.cumsum(-1) - 1) * mask)[:, None, :] * slopes[:, None])
            .reshape(b * HEADS, 1, s)
            .to(x.dtype)
        )
        for one in self.layers:
            assert isinstance(one, Attention)
            parts = (
                layer(x).view(b, s, HEADS, -1).transpose(1, 2).reshape(b * HEADS, s, -1)
                for layer in (one.q, one.k, one.v)
            )
            q, k, v = parts
            scores = slope.baddbmm(batch1=q, batch2=k.mT, alpha=0.5).masked_fill(~CAUSAL, -1e9).softmax(-1)
            x = x + one.out(torch.bmm(scores, v).view(b, HEADS, s, -1).transpose(1, 2).reshape(b, s, WIDTH))
        return loss_of(self.head(x), labels)


class OddNames(nn.Module):
    """Names that Python, or the emitted file, cannot take as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.d = nn.ModuleDict(
            {
                "my-emb": nn.Embedding(VOCAB, WIDTH),
                "class": nn.Linear(WIDTH, WIDTH),
                "_put": nn.Linear(WIDTH, WIDTH),
            }
        )
        self.x = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.b = nn.ParameterDict({"import": nn.Parameter(0.3 * torch.randn(WIDTH, VOCAB))})
        self.register_buffer("mask", torch.rand(2, WIDTH))

    def forward(self, w: tuple[Tensor, Tensor], w_1: Tensor) -> Tensor:
        x = self.d["_put"](self.d["class"](self.d["my-emb"](w[0])))
        for layer in self.layers:
            mask = self.mask[:1]
            x = x + torch.tanh(layer(x)) * mask * self.x + self.mask[1:] * w_1[..., None]
        return loss_of(x @ self.b["import"], w[1])


class Shared(nn.Module):
    """Layers without parameters of their own; two of them read the same values in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.w = nn.Embedding(VOCAB, WIDTH), nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH))
        self.layers = nn.ModuleList(nn.Identity() for _ in range(6))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for i, layer in enumerate(self.layers):
            y = torch.tanh(layer(x) @ self.w)
            x = torch.addcmul(x, x, y) if i in (0, 2) else torch.addcmul(x, y, y)
        return loss_of(x @ self.embed.weight.t(), labels)


class Saturated(Decoder):
    """Large scores and no norms: gradients behind the softmax are next to nothing, and AdamW makes them large."""

    def __init__(self) -> None:
        super().__init__(
            4, lambda: nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("q", "k", "v", "out")})
        )
        for p in self.parameters():
            nn.init.normal_(p, std=0.4)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            q, k, v = (layer[name](x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for name in "qkv")  # type: ignore[index]
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer["out"](y.transpose(1, 2).flatten(2))  # type: ignore[index]
        return loss_of(self.head(x), labels)


class VocabularyInPieces(Decoder):
    """The logits are joined from pieces of the tied embedding: a rank's ids must still be consecutive."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.body(ids)
        return loss_of(torch.cat([x @ piece.t() for piece in self.embed.weight.chunk(4)], -1), labels)


class Weighted(Decoder):
    """Class weights in a buffer, label smoothing, a second pointwise loss, and one over the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.rand(VOCAB) + 0.2)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.body(ids))
        main = loss_of(logits, labels, weight=self.weights, label_smoothing=0.1)
        far = F.mse_loss(logits, logits.detach().roll(1, -1)) + 1e-2 * logits.logsumexp(-1).square().mean()
        return main + far + 1e-3 * sum(p.square().sum() for p in self.parameters())


class ByHand(Decoder):
    """Losses by gather, one_hot and nll_loss; squeeze without a dim; positions looked up in a table."""

    def __init__(self) -> None:
        super().__init__(1)
        self.register_buffer("table", torch.randn(LENGTH, WIDTH))

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        logs = self.head(self.body(ids) + self.table[positions]).log_softmax(-1)
        picked = (
            logs.gather(-1, labels.unsqueeze(-1)).squeeze().mean()
            + (F.one_hot(labels, VOCAB) * logs).sum(-1).mean()
        )
        return F.nll_loss(logs.flatten(0, 1), labels.flatten()) - picked


class InPlace(Decoder):
    """Shifts tokens by writing into zeros, changes a few, looks its mask up as torch.vmap does; has a GELU of its own."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.body(ids)
        before = torch.zeros_like(x)
        before[:, 1:] = x[:, :-1]
        before[:, 0] = 0.5
        before[:, 2:4].mul_(2.0)
        before[:, 5] += 1.0
        rows, places = torch.arange(ids.shape[0]), torch.arange(LENGTH)
        seen = (ids > 3)[rows[:, None, None], places]
        x = x + Gelu.apply(before) * seen.transpose(1, 2)
        return loss_of(self.head(x), labels)


class Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(1.702 * x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(1.702 * x)
        return grad * (gate + 1.702 * x * gate * (1 - gate))


def albert() -> nn.Module:
    block = Block()
    return Decoder(4, lambda: block)


def with_labels(make: Callable[[], nn.Module]) -> Callable[[], Model]:
    ids, labels = batch()
    return lambda: (make(), (ids, ragged(labels)))


IDS, LABELS = batch()
STYLES: dict[str, tuple[Callable[[], Model], dict[str, Any]]] = {
    "grouped queries, complex rotary, glu": (with_labels(Decoder), {"t": 2, "p": 2, "num_microbatches": 4}),
    "early exits": (with_labels(lambda: EarlyExits(3)), {"p": 3, "num_microbatches": 3, "schedule": "gpipe"}),
    "early exits interleaved": (
        with_labels(lambda: EarlyExits(4)),
        {"p": 2, "v": 2, "d": 2, "num_microbatches": 2},
    ),
    "half detached": (with_labels(HalfDetached), {"p": 4}),
    "folded heads, one row": (
        lambda: (FoldedHeads(), (IDS, torch.ones_like(IDS), LABELS)),
        {"t": 2, "num_microbatches": 8},
    ),
    "odd names": (
        lambda: (OddNames(), ((IDS, LABELS), torch.rand(8, LENGTH))),
        {"t": 2, "p": 2, "num_microbatches": 2},
    ),
    "saturated softmax": (with_labels(Saturated), {"t": 2, "d": 2}),
    "shared weight": (with_labels(Shared), {"t": 2, "d": 2}),
    "one block for all layers": (with_labels(albert), {"t": 2, "p": 2, "num_microbatches": 2}),
    "vocabulary in pieces": (with_labels(lambda: VocabularyInPieces(1)), {"t": 2, "num_microbatches": 2}),
    "weighted losses": (with_labels(Weighted), {"t": 2, "d": 2, "num_microbatches": 2}),
    "writes in place": (with_labels(lambda: InPlace(1)), {"t": 2, "d": 2, "num_microbatches": 2}),
    "losses by hand": (
        lambda: (ByHand(), (IDS, torch.arange(LENGTH).expand(8, -1).clone(), LABELS)),
        {"d": 2, "num_microbatches": 4},
    ),
}


@pytest.mark.one_in(96)
@pytest.mark.parametrize("style", STYLES)
def test_style(style: str) -> None:
    make, mesh = STYLES[style]
    torch.manual_seed(0)
    model, call = make()
    rows = 8 - 8 % (mesh.get("d", 1) * mesh.get("num_microbatches", 1))
    call = tree_map(lambda x: x[:rows], call)
    autoptd.verify(model, **mesh, example_inputs=call, steps=2)


def changed(forward: Callable[[Decoder, Tensor, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: type("Changed", (Decoder,), {"forward": forward})(1)


def rows_of(x: Tensor) -> Tensor:
    """0 for the first four rows of the batch, 1 for the next four: the same in any small part of it."""
    return (torch.arange(x.shape[0]) // 4)[:, None]


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "constants that follow the rows": (
        changed(
            lambda self, ids, labels: (
                (self.body(ids).mean(-1) * rows_of(ids)).mean() + loss_of(self.head(self.body(ids)), labels)
            )
        ),
        "differs from row to row",
    ),
    "bounds that follow the rows": (
        changed(
            lambda self, ids, labels: (
                self.body(ids) * self.embed.weight[ids.shape[0] : ids.shape[0] + LENGTH]
            ).mean()
        ),
        "computed from the number of rows",
    ),
    "labels by the model itself": (
        changed(lambda self, ids, labels: loss_of(self.head(self.body(ids)), self.body(ids).argmax(-1))),
        "not known before the forward",
    ),
    "gradients by frequency": (
        changed(
            lambda self, ids, labels: (
                F.embedding(ids, self.embed.weight, scale_grad_by_freq=True).square().mean()
            )
        ),
        "how the batch is divided",
    ),
    "labelled rows only": (
        changed(
            lambda self, ids, labels: F.cross_entropy(
                self.head(self.body(ids))[labels > 3], labels[labels > 3]
            )
        ),
        "depends on the values|a size may depend on it",  # torch 2.11 asks for the number earlier
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_wrong_is_refused(what: str) -> None:
    make, fact = REFUSED[what]
    with pytest.raises(autoptd.AutoptdError, match=fact) as caught:
        autoptd.compile(make(), t=2, d=2, num_microbatches=2, example_inputs=batch())
    assert caught.value.site and caught.value.remedy
