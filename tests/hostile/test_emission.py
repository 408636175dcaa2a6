"""Names of the user's that emitted files use themselves, and views to scalars. Numbers of layers: `numbers` of `recipes.py`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hostile.against_torch import assert_parity

VOCAB, WIDTH = 32, 16


def ids_and_labels(seed: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, VOCAB, (8, 6), generator=source) for _ in range(2))
    return ids, labels


CLASHING = "w input b class tp lambda F w_ rt x i loss self layer torch µ math sum range".split()


class Named(nn.Module):
    """One parameter and one buffer of a given name, viewed, converted, and used plainly."""

    def __init__(self, name: str, repeated: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.called, self.emb = name, nn.Embedding(VOCAB, WIDTH)
        self.register_parameter(name, nn.Parameter(torch.randn(1, 1, WIDTH)))
        self.repeated = repeated
        self.own = nn.ModuleList(self.holder(name) for _ in range(3))
        self.shared = self.holder(name)
        self.out = nn.Linear(WIDTH, VOCAB)

    def holder(self, name: str) -> nn.Module:
        made = nn.Module()
        made.register_parameter(name, nn.Parameter(torch.randn(1, 1, WIDTH)))
        made.register_buffer(f"{name}2", torch.randn(WIDTH))
        made.add_module("linear", nn.Linear(WIDTH, WIDTH))
        made.linear.register_parameter(name, nn.Parameter(torch.randn(1, WIDTH)))
        return made

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.emb(ids)
        for one in self.own if self.repeated else self.own[:1]:
            h = (
                h
                + torch.tanh(
                    one.linear(h * getattr(one, self.called).expand_as(h))
                    * getattr(one, f"{self.called}2").view(1, WIDTH)
                )
                * 0.5
            )
            h = h + getattr(one.linear, self.called).view(WIDTH).expand_as(h) * getattr(
                self.shared, self.called
            ).view(1, WIDTH)
        h = h * getattr(self, self.called).expand_as(h)
        h = h.masked_fill(h > 5, float("-inf")).clamp(min=-9)
        return F.cross_entropy(self.out(h).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("name", CLASHING)
@pytest.mark.parametrize("repeated", [False, True])
def test_a_parameter_may_have_any_name(name: str, repeated: bool) -> None:
    mesh = {"t": 2, "p": 2, "num_microbatches": 2} if repeated else {"d": 2}
    assert_parity(Named(name, repeated), [ids_and_labels(0)], **mesh)
