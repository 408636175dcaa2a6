"""Parameters that many layers share tie all layers to each other: what the solver decides then can be run, and evaluated."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.passes.solve import minimize as minimizer

W, L, V = 8, 8, 11


class Block(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer
        self.up, self.down = nn.Linear(W, 4 * W), nn.Linear(4 * W, W)
        self.norm1, self.norm2 = nn.LayerNorm(W), nn.LayerNorm(W)

    def forward(self, h: Tensor, memory: Tensor) -> Tensor:
        mixed, weights = self.mixer(self.norm1(h), memory, memory, average_attn_weights=False)
        h = h + mixed + weights.sum((1, 3))[..., None]
        x = self.up(self.norm2(h)).view(-1, L, 4, W).clone()
        for n in range(4):
            x[:, :, n].mul_(n - 1.5)
        return h + self.down(x.flatten(2))


class Shared(nn.Module):
    """One attention for all blocks, and the first block runs twice."""

    def __init__(self) -> None:
        super().__init__()
        mixer = nn.MultiheadAttention(W, 2, batch_first=True)
        self.blocks = nn.ModuleList(Block(mixer) for _ in range(2))
        self.emb, self.remember = nn.Embedding(V, W), nn.Linear(3, W)
        self.norm, self.head = nn.LayerNorm(W), nn.Linear(W, V, bias=False)

    def forward(self, ids: Tensor, values: Tensor) -> Tensor:
        h, memory = self.emb(ids), self.remember(values)
        for block in (self.blocks[0], *self.blocks):
            h = block(h, memory)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), ids.roll(1, 1).flatten())


def batch(rows: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, V, (rows, L), generator=draw)
    return ids, torch.randn(rows, L, 3, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("largest", [1_000, 30_000])
def test_what_is_voted_on_can_be_run_and_evaluated(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tables bounded as for a deep model, the readers of a shared parameter vote; evaluation keeps what they decided."""
    monkeypatch.setattr(minimizer, "LARGEST_TABLE", largest)
    torch.manual_seed(0)
    model = Shared().double()
    pm = autoptd.parallelize(model, t=2, backend="local", example_inputs=batch(1))
    assert pm.step(*batch(1)).item() == pytest.approx(model(*batch(1)).item(), rel=1e-12)
    with torch.no_grad():
        assert pm.eval_step(*batch(2)).item() == pytest.approx(model(*batch(2)).item(), rel=1e-12)
    pm.close()
