"""The kinds of model of the covering array: tiny, written as users write them, each with dropout where it is asked for.

In: a rate of dropout. Out: a `Kind` whose `make(rate)` is the model in float64, `batch(rows, step)` new keyword arguments for
every step, `loss_fn` where the model returns none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  # registers a grouped product
from torch import Tensor, nn

VOCAB, LENGTH, WIDTH, HEADS = 30, 12, 12, 6  # heads and tokens divide over t = 2 and t = 3, tokens over t x c
Batch = dict[str, Tensor]


class Mlp(nn.Sequential):
    def __init__(self, drop: float, width: int = WIDTH) -> None:
        super().__init__(
            nn.Linear(width, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(drop)
        )


class Attention(nn.Module):
    """Fused q, k and v, of `kv` heads of keys; `memory` is attended to where it is given."""

    def __init__(self, drop: float, kv: int = HEADS) -> None:
        super().__init__()
        self.sizes, self.drop = [WIDTH, 2 * kv, 2 * kv], drop
        self.qkv, self.out = nn.Linear(WIDTH, sum(self.sizes)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, 2)).transpose(1, 2) for y in self.qkv(x).split(self.sizes, dim=-1))
        if memory is not None:
            _, k, v = (
                y.unflatten(-1, (-1, 2)).transpose(1, 2) for y in self.qkv(memory).split(self.sizes, dim=-1)
            )
        k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
        rate = self.drop if self.training else 0.0
        z = F.scaled_dot_product_attention(q, k, v, is_causal=memory is None, dropout_p=rate)
        return self.out(z.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, drop: float, norm: type[nn.Module] = nn.LayerNorm, kv: int = HEADS) -> None:
        super().__init__()
        self.norm_1, self.attention = norm(WIDTH), Attention(drop, kv)
        self.norm_2, self.mlp = norm(WIDTH), Mlp(drop)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Model(nn.Module):
    """Embedding, what a subclass makes of it, a head of its own."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(VOCAB, WIDTH), nn.Dropout(drop)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def body(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.norm(self.body(self.drop(self.embed(ids)))))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Tied(Model):
    """GPT-2's: learned positions, tied embeddings."""

    def __init__(self, drop: float) -> None:
        super().__init__(drop)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(Block(drop) for _ in range(3))
        self.head.weight = self.embed.weight

    def body(self, x: Tensor) -> Tensor:
        x = x + self.positions[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return x


class Grouped(Model):
    """RMS norms, fewer heads of keys, and numbers of every layer's own on both sides of operators."""

    def __init__(self, drop: float) -> None:
        super().__init__(drop)
        self.layers = nn.ModuleList(Block(drop, nn.RMSNorm, kv=3) for _ in range(4))

    def body(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = (x + layer(x) / (i + 2)) * 0.9 - (i - 1) * 0.01
        return x


class UNet(Model):
    """Skips that nest: the first layer's output is read by the last."""

    def __init__(self, drop: float) -> None:
        super().__init__(drop)
        self.down, self.up = (nn.ModuleList(Mlp(drop) for _ in range(3)) for _ in range(2))
        self.joins = nn.ModuleList(Mlp(0.0, 2 * WIDTH) for _ in range(3))

    def body(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = x + layer(x)
            skips.append(x)
        for layer, join in zip(self.up, self.joins, strict=True):
            x = x + layer(join(torch.cat((x, skips.pop()), dim=-1)))
        return x


class Shared(Model):
    """ALBERT's: one block four times."""

    def __init__(self, drop: float) -> None:
        super().__init__(drop)
        self.block = Block(drop)

    def body(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.block(x)
        return x


class Experts(Model):
    """All experts, weighed by a gate; a frozen layer; a buffer that is saved."""

    def __init__(self, drop: float) -> None:
        super().__init__(drop)
        self.gates = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(2))
        self.experts = nn.ModuleList(nn.ModuleList(Mlp(drop) for _ in range(2)) for _ in range(2))
        self.first = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("mean", torch.randn(WIDTH))

    def body(self, x: Tensor) -> Tensor:
        x = x + self.first(x - self.mean)
        for gate, experts in zip(self.gates, self.experts, strict=True):
            weights = gate(x).softmax(-1).unsqueeze(-1)
            x = x + (torch.stack([expert(x) for expert in experts], dim=-2) * weights).sum(-2)  # type: ignore[union-attr]
        return x


class SortedExperts(Model):
    """Two of several experts a token, whose tokens the model sorts for a grouped product, as transformers does."""

    experts = 3

    def __init__(self, drop: float) -> None:
        super().__init__(drop)
        count = self.experts
        self.blocks = nn.ModuleList(Block(drop) for _ in range(2))
        self.gates = nn.ModuleList(nn.Linear(WIDTH, count) for _ in range(2))
        self.up = nn.ParameterList(torch.empty(count, 4 * WIDTH, WIDTH) for _ in range(2))
        self.down = nn.ParameterList(torch.empty(count, WIDTH, 2 * WIDTH) for _ in range(2))

    def body(self, x: Tensor) -> Tensor:
        # Of float64, torch.nn.functional.grouped_mm has no kernel.
        product = torch.ops.transformers.grouped_mm_fallback
        for i, (block, gate, up, down) in enumerate(
            zip(self.blocks, self.gates, self.up, self.down, strict=True)
        ):
            x = block(x)
            tokens = x.flatten(0, 1)
            weights, chosen = gate(tokens).softmax(-1).topk(2)
            ids, order = chosen.flatten().sort()
            ends = torch.histc(ids.float(), self.experts, 0, self.experts - 1).cumsum(0, dtype=torch.int32)
            both = product(tokens[order // 2], up.transpose(1, 2), ends)
            left, right = self.biased(both, "up_bias", i, ids).chunk(2, -1)
            made = product(F.silu(left) * right, down.transpose(1, 2), ends)
            made = self.biased(made, "down_bias", i, ids)
            made = (made * weights.flatten()[order].unsqueeze(-1))[order.argsort()]
            x = x + made.unflatten(0, (-1, 2)).sum(1).view_as(x)
        return x

    def biased(self, rows: Tensor, name: str, layer: int, ids: Tensor) -> Tensor:
        return rows


class NumberedExperts(SortedExperts):
    """Six experts with biases, which t = 2 and 3 divide by their number (`Kind.shard`)."""

    experts = 6

    def __init__(self, drop: float) -> None:
        super().__init__(drop)
        self.up_bias = nn.ParameterList(torch.empty(6, 4 * WIDTH) for _ in range(2))
        self.down_bias = nn.ParameterList(torch.empty(6, WIDTH) for _ in range(2))

    def biased(self, rows: Tensor, name: str, layer: int, ids: Tensor) -> Tensor:
        biases: nn.ParameterList = getattr(self, name)
        return rows + biases[layer][ids]


class EncoderDecoder(Model):
    """A second input of another length, whose encoding all layers of the decoder read."""

    def __init__(self, drop: float) -> None:
        super().__init__(drop)
        self.encoder = nn.ModuleList(Mlp(drop) for _ in range(2))
        self.decoder = nn.ModuleList(Block(drop) for _ in range(2))
        self.cross = nn.ModuleList(Attention(drop) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor, source: Tensor) -> Tensor:  # type: ignore[override]
        memory, x = self.embed(source), self.drop(self.embed(ids))
        for layer in self.encoder:
            memory = memory + layer(memory)
        for layer, cross in zip(self.decoder, self.cross, strict=True):
            x = layer(x + cross(x, memory))
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Mixing(Model):
    """Every row is compared with all others, and the choices of a gate are balanced over the batch."""

    def __init__(self, drop: float) -> None:
        super().__init__(drop)
        self.layers = nn.Sequential(*(Block(drop) for _ in range(4)))
        self.gate, self.scale = nn.Linear(WIDTH, 3), nn.Parameter(torch.empty(1))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(self.layers(self.drop(self.embed(ids))))
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        left, right = F.normalize(x[:, 0], dim=-1), F.normalize(x[:, -1], dim=-1)
        scores, rows = self.drop(left @ right.T * self.scale.exp()), torch.arange(len(ids))
        loss = loss + F.cross_entropy(scores, rows) / 2 + F.cross_entropy(scores.T, rows) / 2
        shares = self.gate(x).softmax(-1).flatten(0, 1)
        chosen = F.one_hot(shares.argmax(-1), 3).to(shares.dtype)
        return loss + (chosen.mean(0) * shares.mean(0)).sum()


class Adapted(Model):
    """All of it frozen, and in every layer adapters of PEFT of another method."""

    def __init__(self, drop: float) -> None:
        super().__init__(drop)
        self.requires_grad_(False)
        linear = ["qkv", "out", "mlp.0", "mlp.2"]
        methods = (
            peft.LoraConfig(r=3, target_modules=linear, lora_dropout=drop),
            peft.LoraConfig(r=2, target_modules=linear, use_dora=True),
            peft.IA3Config(target_modules=["qkv", "mlp.2"], feedforward_modules=["mlp.2"]),
        )
        self.layers = nn.ModuleList(peft.get_peft_model(Block(drop), how) for how in methods)

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Headless(Model):
    """Logits only: the loss is the user's own function."""

    def __init__(self, drop: float) -> None:
        super().__init__(drop)
        self.layers = nn.Sequential(Block(drop), Block(drop))

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        return self.head(self.norm(self.layers(self.drop(self.embed(ids)))))


def smoothed(logits: Tensor, targets: Tensor) -> Tensor:
    """A loss of two parts over the valid labels."""
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)
    return loss + 1e-2 * logits.logsumexp(-1).square().mean()


@dataclass(frozen=True)
class Kind:
    """A kind of model and what it is called with."""

    model: Callable[[float], nn.Module]
    labels: str = "labels"
    has_source: bool = False
    loss_fn: Callable[..., Tensor] | None = None
    # Its loss is that of one microbatch.
    mixes: bool = False
    # Parameters that tensor ranks, where there are several, divide along dim 0.
    shard: tuple[str, ...] = ()

    def make(self, drop: float) -> nn.Module:
        torch.manual_seed(0)
        model = self.model(drop).double()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
        return model

    def batch(self, rows: int, step: int) -> Batch:
        """New tokens, and labels of which other ones are ignored, for every step."""
        generator = torch.Generator().manual_seed(100 + step)

        def tokens(length: int) -> Tensor:
            return torch.randint(0, VOCAB, (rows, length), generator=generator)

        labels = tokens(LENGTH)
        labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
        labels[0, 0] = step
        more = {"source": tokens(LENGTH - 2)} if self.has_source else {}
        return {"ids": tokens(LENGTH), self.labels: labels, **more}


KINDS: dict[str, Kind] = {
    "tied": Kind(Tied),
    "grouped": Kind(Grouped),
    "unet": Kind(UNet),
    "shared": Kind(Shared),
    "experts": Kind(Experts),
    "sorted experts": Kind(SortedExperts),
    "numbered experts": Kind(NumberedExperts, shard=("up.*", "down.*", "up_bias.*", "down_bias.*")),
    "encoder-decoder": Kind(EncoderDecoder, has_source=True),
    "adapters": Kind(Adapted),
    "loss_fn": Kind(Headless, labels="targets", loss_fn=smoothed),
    "mixing": Kind(Mixing, mixes=True),
}


def call(kind: Kind, model: nn.Module, batch: Batch) -> Any:
    """The plain loss of a model."""
    if kind.loss_fn is None:
        return model(**batch)
    return kind.loss_fn(model(ids=batch["ids"]), batch[kind.labels])
