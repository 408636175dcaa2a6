"""Models whose forward updates buffers, by what the update depends on; each takes (x [rows, 8], y [rows])."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Updating(nn.Module):
    """Three linear layers; `update` is called with what the second one gives, and returns what the third one takes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4)
        for name, shape in (("kept", (8,)), ("bias", (4,)), ("ema", ())):
            self.register_buffer(name, torch.zeros(shape))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("hidden", torch.zeros(8), persistent=False)
        self.prepare()

    def prepare(self) -> None:
        pass

    def update(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.down(self.update(self.mid(torch.relu(self.up(x))))), y)


class Counter(Updating):
    """Counts its calls, and reads the count after."""

    def update(self, h: Tensor) -> Tensor:
        self.steps += 1
        return h * (1 + 0.01 * self.steps)


class WeightNorm(Updating):
    """Follows the norm of a weight that is split, and reads what it was before."""

    def update(self, h: Tensor) -> Tensor:
        out = h * (1 + 0.1 * self.ema)
        self.ema = 0.9 * self.ema + 0.1 * self.up.weight.detach().norm()
        return out


class Spectral(Updating):
    """torch's spectral norm, which writes its vectors by `out=`."""

    def prepare(self) -> None:
        self.mid = nn.utils.parametrizations.spectral_norm(self.mid)


class Statistics(Updating):
    """Follows a function of two means of the batch that is not linear; one buffer is not in the state dict."""

    def update(self, h: Tensor) -> Tensor:
        out = h + self.kept + self.hidden
        with torch.no_grad():
            self.kept.lerp_((h.square().mean(0) - h.mean(0).square()).sqrt(), 0.1)
        self.hidden = 0.5 * self.hidden + h.detach().abs().sum(0) / h.shape[0]
        return out


class Router(Updating):
    """Balances experts as DeepSeek-V3 does: by the sign of what each got too little, in training only."""

    def prepare(self) -> None:
        self.gate = nn.Linear(8, 4)

    def update(self, h: Tensor) -> Tensor:
        scores = self.gate(h).sigmoid()
        chosen = (scores + self.bias).topk(2, -1).indices
        if self.training:
            with torch.no_grad():
                counts = F.one_hot(chosen, 4).sum((0, 1))
                self.bias += 0.05 * torch.sign(counts.float().mean() - counts)
                self.steps += counts.max()
        return h * scores.gather(-1, chosen).sum(-1, keepdim=True)


class LossAverage(Updating):
    """Follows the loss itself, with its gradient."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        self.ema = 0.9 * self.ema + 0.1 * loss
        return loss


class Norm(Updating):
    """Batch norm, twice over."""

    def prepare(self) -> None:
        self.norm, self.last = nn.BatchNorm1d(8), nn.BatchNorm1d(4, affine=False, momentum=0.3)

    def update(self, h: Tensor) -> Tensor:
        return self.norm(h)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.down(self.update(self.mid(torch.relu(self.up(x)))))), y)


class CumulativeNorm(Norm):
    """Batch norms whose statistics are averages over all steps, one of them called twice."""

    def prepare(self) -> None:
        super().prepare()
        self.norm.momentum = self.last.momentum = None

    def update(self, h: Tensor) -> Tensor:
        return self.norm(h.sin() + self.norm(h))


class Images(Updating):
    """Convolutions with BatchNorm2d."""

    def prepare(self) -> None:
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.conv(x.view(-1, 1, 2, 4)))).mean((2, 3))
        return F.cross_entropy(self.down(F.pad(h, (0, 4))), y)


BY_SUMS = (Counter, WeightNorm, Spectral, Statistics, Router, LossAverage)
NORMS = (Norm, CumulativeNorm, Images)


def batches(count: int, rows: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        x = torch.randn(rows, 8, generator=generator, dtype=torch.float64)
        found.append((x, torch.randint(0, 4, (rows,), generator=generator)))
    return found


def make(kind: type[Updating]) -> Updating:
    torch.manual_seed(0)
    return kind().double()
