"""Every way to store queries, keys and values: attention is split by heads, and weights keep their global layout.

Three promises for each layout: parity with the model on one device, Megatron's two collectives forward and two backward per
layer (so attention was not computed whole), and state dicts that go through every mesh bit by bit.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from tests.parity.models import batch

VOCAB, WIDTH, HEADS, SIZE = 64, 32, 8, 4
Parts = tuple[Tensor, Tensor, Tensor]


class Attention(nn.Module):
    """Causal attention; subclasses store and compute `[b, heads, s, size]` of q, k and v in their own way."""

    kv_heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def parts(self, x: Tensor) -> Parts:
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads != HEADS)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attend(*self.parts(x))
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Fused(Attention):
    """One weight for all three: `[3, heads, size]`."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * self.kv_heads) * SIZE)


class ThreeByUnbind(Fused):
    def parts(self, x: Tensor) -> Parts:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v


class ThreeByIndex(Fused):
    def parts(self, x: Tensor) -> Parts:
        b, s, _ = x.shape
        qkv = self.qkv(x).view(b, s, 3, HEADS, SIZE).transpose(1, 3)
        return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]


class ThreeByChunk(Fused):
    def parts(self, x: Tensor) -> Parts:
        b, s, _ = x.shape
        q, k, v = (y.view(b, s, HEADS, SIZE).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return q, k, v


class ThreeBySlices(Fused):
    def parts(self, x: Tensor) -> Parts:
        b, s, h = x.shape
        y = self.qkv(x)
        q, k, v = (
            y[..., first : first + h].view(b, s, HEADS, SIZE).transpose(1, 2) for first in (0, h, 2 * h)
        )
        return q, k, v


class ThreeTransposed(ThreeByChunk):
    """The weight is stored `[in, out]`, as GPT-2's Conv1D has it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Identity()  # type: ignore[assignment]
        self.weight, self.bias = (
            nn.Parameter(0.2 * torch.randn(WIDTH, 3 * WIDTH)),
            nn.Parameter(torch.randn(3 * WIDTH)),
        )

    def parts(self, x: Tensor) -> Parts:
        y = torch.addmm(self.bias, x.view(-1, WIDTH), self.weight)
        return super().parts(y.view(*x.shape[:-1], 3 * WIDTH))


class PerHead(Fused):
    """`[heads, 3, size]`, as GPT-NeoX and BLOOM have it."""

    def parts(self, x: Tensor) -> Parts:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, HEADS, 3 * SIZE).transpose(1, 2).chunk(3, dim=-1)
        return q, k, v


class PerHeadByIndex(Fused):
    def parts(self, x: Tensor) -> Parts:
        b, s, _ = x.shape
        y = self.qkv(x).view(b, s, HEADS, 3, SIZE)
        return y[..., 0, :].transpose(1, 2), y[..., 1, :].transpose(1, 2), y[..., 2, :].transpose(1, 2)


class Grouped(Fused):
    """`[kv_heads, queries of the group + 2, size]`, as Falcon and InternLM2 have it."""

    kv_heads = 4

    def parts(self, x: Tensor) -> Parts:
        b, s, _ = x.shape
        y = self.qkv(x).view(b, s, self.kv_heads, HEADS // self.kv_heads + 2, SIZE)
        q, k, v = y[..., :-2, :], y[..., -2, :], y[..., -1, :]
        return q.reshape(b, s, HEADS, SIZE).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class GroupedBySplit(Grouped):
    def parts(self, x: Tensor) -> Parts:
        b, s, _ = x.shape
        y = self.qkv(x).view(b, s, self.kv_heads, -1, SIZE)
        q, k, v = y.split([HEADS // self.kv_heads, 1, 1], dim=3)
        return tuple(z.flatten(2, 3).transpose(1, 2) for z in (q, k, v))  # type: ignore[return-value]


class Separate(Attention):
    """Three weights; fewer heads for keys and values in the subclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (
            nn.Linear(WIDTH, heads * SIZE, bias=False) for heads in (HEADS, self.kv_heads, self.kv_heads)
        )

    def parts(self, x: Tensor) -> Parts:
        q, k, v = (layer(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return q, k, v


class SeparateGrouped(Separate):
    kv_heads = 4


class OneKeyHead(Separate):
    """Multi-query attention: the one head of keys and values is every rank's."""

    kv_heads = 1


class KeyValueFused(Attention):
    """Queries apart, `[2, kv_heads, size]` for keys and values."""

    kv_heads = 4

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * self.kv_heads * SIZE)

    def parts(self, x: Tensor) -> Parts:
        b, s, _ = x.shape
        k, v = self.kv(x).view(b, s, 2, self.kv_heads, SIZE).permute(2, 0, 3, 1, 4)
        return self.q(x).view(b, s, HEADS, SIZE).transpose(1, 2), k, v


class KeyValuePerHead(KeyValueFused):
    """Queries apart, `[kv_heads, 2, size]` for keys and values."""

    def parts(self, x: Tensor) -> Parts:
        b, s, _ = x.shape
        k, v = self.kv(x).view(b, s, self.kv_heads, 2 * SIZE).transpose(1, 2).split(SIZE, dim=-1)
        return self.q(x).view(b, s, HEADS, SIZE).transpose(1, 2), k, v


class ByEinsum(Attention):
    """Weights of three dims and einsum throughout, written without views."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (
            nn.Parameter(0.3 * torch.randn(WIDTH, HEADS, SIZE)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bsd,dhk->bhsk", x, weight) for weight in (self.wq, self.wk, self.wv))
        scores = torch.einsum("bhqk,bhsk->bhqs", q, k) / SIZE**0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(mask, float("-inf")).softmax(-1)
        return torch.einsum("bhqs,bhsk,dhk->bqd", scores, v, self.wo)


class NormedQueries(Separate):
    """Queries and keys are normalised per head (one weight for all heads): its gradient is a sum over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(SIZE), nn.LayerNorm(SIZE)

    def parts(self, x: Tensor) -> Parts:
        q, k, v = super().parts(x)
        return self.q_norm(q), self.k_norm(k), v


class RotaryHalves(SeparateGrouped):
    """Rotary positions as Llama has them: a half of a head is turned against the other; keys are repeated by expand."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 10.0 ** -torch.arange(SIZE // 2), persistent=False)

    def turn(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[-2]).to(x.dtype), self.frequencies).repeat(1, 2)
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, _, s, _ = q.shape
        k, v = (
            y[:, :, None].expand(b, self.kv_heads, HEADS // self.kv_heads, s, SIZE).reshape(b, HEADS, s, SIZE)
            for y in (self.turn(k), v)
        )
        return F.scaled_dot_product_attention(self.turn(q), k, v, is_causal=True)


class RotaryPairs(ThreeByUnbind):
    """Rotary positions as GPT-J has them: neighbours are turned; the softmax is written out."""

    def turn(self, x: Tensor) -> Tensor:
        s = x.shape[-2]
        angles = torch.outer(torch.arange(s), 10.0 ** -torch.arange(SIZE // 2)).repeat_interleave(2, dim=-1)
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        return x * angles.cos().to(x) + turned * angles.sin().to(x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = self.turn(q) @ self.turn(k).mT * SIZE**-0.5
        mask = torch.full(scores.shape[-2:], float("-inf"), dtype=scores.dtype).triu(1)
        return F.softmax(scores + mask, dim=-1) @ v


class Decoder(nn.Module):
    """Pre-norm blocks of one kind of attention and an MLP."""

    def __init__(self, attention: type[Attention], layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm_1": nn.LayerNorm(WIDTH),
                    "attention": attention(),
                    "norm_2": nn.LayerNorm(WIDTH),
                    "mlp": nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)),
                }
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer["attention"](layer["norm_1"](x))  # type: ignore[index]
            x = x + layer["mlp"](layer["norm_2"](x))  # type: ignore[index]
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


LAYOUTS: list[type[Attention]] = [
    *(ThreeByUnbind, ThreeByIndex, ThreeByChunk, ThreeBySlices, ThreeTransposed, PerHead, PerHeadByIndex),
    *(Grouped, GroupedBySplit, Separate, SeparateGrouped, OneKeyHead, KeyValueFused, KeyValuePerHead),
    *(ByEinsum, NormedQueries, RotaryHalves, RotaryPairs),
]
MESHES = [{"t": 4, "num_microbatches": 2}, {"t": 2, "p": 2, "d": 2, "v": 2}]


def decoder(attention: type[Attention], layers: int = 2) -> Decoder:
    torch.manual_seed(0)
    return Decoder(attention, layers)


@pytest.mark.one_in(96)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parity(layout: type[Attention], mesh: dict[str, int]) -> None:
    layers = mesh.get("p", 1) * mesh.get("v", 1) // 2 + 1
    autoptd.verify(decoder(layout, layers), **mesh, example_inputs=batch(4), steps=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_is_split_by_heads(layout: type[Attention]) -> None:
    """Two all-reduces forward and two backward of the residual, in a layer between others; heads of one token are not moved.

    The one head of multi-query attention is no rank's own: its keys and values may be computed in pieces and gathered.
    """
    program = autoptd.compile(decoder(layout, 3), t=4, num_microbatches=2, example_inputs=batch(4))
    mine = [one for one in program.collectives if one.site.startswith("layers.1")]
    moving = {"all-reduce", "all-gather", "reduce-scatter", "all-to-all"}
    residual = 2 * 8 * WIDTH * 4  # rows of a microbatch, tokens, width, bytes
    large = [one for one in mine if one.payload_bytes >= residual]
    assert [one.forward for one in large if one.forward in moving] == ["all-reduce"] * 2
    assert [one.backward for one in large if one.backward in moving] == ["all-reduce"] * 2
    small = [one for one in mine if one not in large and {one.forward, one.backward} & moving]
    assert len(small) <= (2 if layout is OneKeyHead else 0)
    assert all(one.payload_bytes == residual * SIZE // WIDTH for one in small)
    assert program.costs.redundant_gemm_flops == 0


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS[::3])
def test_state_dict_goes_through_meshes_unchanged(layout: type[Attention]) -> None:
    """Random weights into t=4 p=2; what comes out of it into t=2 d=2: bit by bit the same each time."""
    model = decoder(layout)
    wanted = {
        name: torch.randn_like(x) if x.is_floating_point() else x for name, x in model.state_dict().items()
    }
    state = wanted
    for mesh in ({"t": 4, "p": 2}, {"t": 2, "d": 2}):
        pm = autoptd.parallelize(model, **mesh, backend="local", example_inputs=batch(4))
        try:
            pm.load_state_dict(state)
            state = pm.state_dict()
        finally:
            pm.close()
        assert list(state) == list(wanted)
        assert all(torch.equal(state[name], x) for name, x in wanted.items())
