"""Models by which `verify` was fooled: its copy in float64 cut what they share, or widened what they lost."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd

VOCAB, WIDTH = 32, 16
verify_module = importlib.import_module("autoptd.verify.verify")
FLOATS = [torch.float32, torch.float64]


@pytest.fixture(autouse=True)
def all_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "CHECKS", ("own dtype", "reload", "evaluation"))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(0, VOCAB, (8, 6), generator=generator) for _ in range(2))
    return x, y


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embed(x)).flatten(0, 1), y.flatten())


class TiedByStorage(Language):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.data = self.embed.weight.data


class Overlapping(Language):
    """Two parameters in one flat buffer, the second begins within the first."""

    def __init__(self) -> None:
        super().__init__()
        flat = 0.3 * torch.randn(VOCAB * WIDTH + WIDTH)
        self.embed.weight = nn.Parameter(flat[WIDTH:].view(VOCAB, WIDTH))
        self.head.weight = nn.Parameter(flat[:-WIDTH].view(VOCAB, WIDTH))

    def double(self) -> Overlapping:
        return self


class BufferOfParameter(Language):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("targets", self.embed.weight.data)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) + 0.1 * (self.embed(x) - self.targets[y]).square().mean()


class AttributeOfParameter(Language):
    def __init__(self) -> None:
        super().__init__()
        self.kept = self.embed.weight.data

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) + 0.1 * (self.embed(x) - self.kept[y]).square().mean()


def made(kind: type[Language], dtype: torch.dtype) -> Language:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # a cast of the model would cut what it shares
    try:
        return kind()
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", [TiedByStorage, Overlapping, BufferOfParameter, AttributeOfParameter])
def test_shared_storage_is_refused(kind: type[Language], dtype: torch.dtype) -> None:
    with pytest.raises(autoptd.TraceError, match=r"storage|memory"):
        autoptd.verify(made(kind, dtype), t=2, d=2, example_inputs=batch(), steps=3)


def test_a_tie_by_the_parameter_itself_is_right() -> None:
    model = Language()
    model.head.weight = model.embed.weight
    assert autoptd.verify(model, t=2, d=2, example_inputs=batch(), steps=3).passed


class MeanInFloat32(Language):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(self.head(self.embed(x)).flatten(0, 1), y.flatten(), reduction="none")
        return losses.mean(dtype=torch.float32)


def test_the_dtype_of_a_mean_is_looked_at() -> None:
    """The loss that `step` returns is in the dtype of the model's, or verify says that it is not."""
    model = MeanInFloat32().bfloat16()
    pm = autoptd.parallelize(model, num_microbatches=2, backend="local", example_inputs=batch())
    try:
        is_right = pm.step(*batch()).dtype == model(*batch()).dtype
    finally:
        pm.close()
    if is_right:
        assert autoptd.verify(model, num_microbatches=2, example_inputs=batch(), steps=2).passed
        return
    with pytest.raises(autoptd.InternalError, match=r"loss, of torch\.bfloat16 for torch\.float32"):
        autoptd.verify(model, num_microbatches=2, example_inputs=batch(), steps=2)
