"""Attention under a window, of which a rank has the queries of its tokens: it reads the keys in their window, and no mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from tests.parity.models import VOCAB, batch, uneven

IDS, TARGETS = batch()


class Windowed(nn.Module):
    """Layers that see three tokens, and all before them, in turn; KV heads that are repeated by torch; masks of both kinds."""

    def __init__(
        self, layers: int = 3, width: int = 16, heads: int = 4, kv: int = 2, *, added: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.kv, self.added = heads, kv, added
        size = width // heads
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.qkv = nn.ModuleList(nn.Linear(width, (heads + 2 * kv) * size) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        places = torch.arange(ids.shape[1], device=ids.device)
        behind = places[:, None] - places
        window, causal = (behind >= 0) & (behind < 3), behind >= 0
        if self.added:
            hidden = torch.finfo(x.dtype).min
            window, causal = (
                torch.zeros_like(m, dtype=x.dtype).masked_fill(~m, hidden) for m in (window, causal)
            )
        for i, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            y = (
                qkv(F.layer_norm(x, x.shape[-1:]))
                .unflatten(-1, (self.heads + 2 * self.kv, -1))
                .transpose(1, 2)
            )
            q, k, v = y.split((self.heads, self.kv, self.kv), 1)
            mask = causal if i % 2 else window
            z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, scale=0.3)
            x = x + out(z.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def windowed(**how: Any) -> Windowed:
    torch.manual_seed(0)
    return Windowed(**how)


GATHERED: dict[str, Any] = {"context": "all_gather"}
MESHES: list[dict[str, Any]] = [
    {"c": 2},
    {"c": 4},
    {"c": 2, "token_order": "contiguous"},
    {"c": 2, "t": 2, "sequence_parallel": True},
    {"c": 2, "p": 2, "d": 2, "zero": 1},
    {"c": 2, "recompute": "full"},
]


@pytest.mark.one_in(99)
@pytest.mark.parametrize("mesh", MESHES, ids=map(str, MESHES))
@pytest.mark.parametrize("added", [False, True], ids=["what is seen", "what is added"])
def test_parity(mesh: dict[str, Any], *, added: bool) -> None:
    model = windowed(added=added)
    program = autoptd.compile(model, **mesh, **GATHERED, example_inputs=(IDS, TARGETS))
    files = "".join(program.sources.values())
    assert "window=3" in files and "attn_mask" not in files and "arange" not in files
    autoptd.verify(model, **mesh, **GATHERED, example_inputs=(IDS, uneven(TARGETS)), steps=2)


def test_by_heads_the_mask_is_read() -> None:
    program = autoptd.compile(windowed(), c=2, context="ulysses", example_inputs=(IDS, TARGETS))
    files = "".join(program.sources.values())
    assert "window=" not in files and "attn_mask" in files
