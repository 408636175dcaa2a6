"""Values of a rank that lie in memory otherwise than those of the whole model, before operators that look at memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd


class Turned(nn.Module):
    """Heads of two numbers, seen as complex ones. Ranks that cannot divide the three heads of k divide each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 12)
        self.q, self.k, self.v = (nn.Parameter(0.3 * torch.randn(12, heads, 2)) for heads in (6, 3, 3))
        self.out = nn.Parameter(0.3 * torch.randn(6, 2, 12))
        self.head = nn.Linear(12, 16)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = (torch.einsum("bsd,dhk->bhsk", x, w) for w in (self.q, self.k, self.v))
        k, v = (x.repeat_interleave(2, dim=1) for x in (turn(k), v))
        y = F.scaled_dot_product_attention(turn(q), k, v, is_causal=True)
        x = x + torch.einsum("bhsk,hkd->bsd", y, self.out)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def turn(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[-2]).double().unsqueeze(1)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], 1, 2).double())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2).type_as(x)


def test_pairs_are_complex_numbers_where_they_were_gathered() -> None:
    """Parts that could be channels-last, since their last dim is 1, are concatenated as if they were."""
    torch.manual_seed(0)
    batch = torch.randint(16, (16, 4)), torch.randint(16, (16, 4))
    cheap = autoptd.Machine(latency=1e-9, per_saved_byte=1e-12)
    model = Turned()
    program = autoptd.compile(model, t=2, num_microbatches=8, machine=cheap, example_inputs=batch)
    assert "rt.s_to_r(einsum_2, tp, dim=3" in program.sources["stage_0.py"]
    assert autoptd.verify(model, t=2, num_microbatches=8, machine=cheap, example_inputs=batch, steps=2).passed
