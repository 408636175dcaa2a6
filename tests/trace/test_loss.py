"""Which tensor of what a model returns is its loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.errors import TraceError
from autoptd.trace.loss import find_loss
from tests.hostile.against_torch import assert_parity


class Losses(nn.Module):
    """Losses of shape [1], as a model returns them that was written for DataParallel, and as sums over kept dims."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.scale = nn.Linear(8, 16), nn.Linear(16, 8), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, is_mapping: bool = False) -> Any:
        h = self.down(self.up(x).tanh())
        if is_mapping:
            return {"loss": h.square().mean().unsqueeze(0), "logits": h}
        return h.square().mean((0, 1)).mean(0, keepdim=True) * self.scale


@pytest.mark.parametrize("is_mapping", [False, True])
@pytest.mark.parametrize("mesh", [{"t": 2, "p": 2}, {"d": 2}], ids=str)
def test_a_loss_of_one_entry(mesh: dict[str, int], is_mapping: bool) -> None:
    batches = [(torch.randn(8, 3, 8), is_mapping) for _ in range(2)]
    assert_parity(Losses(), batches, num_microbatches=2, **mesh)


def test_where_the_loss_is_found() -> None:
    loss, one, many = torch.zeros(()), torch.ones(1), torch.zeros(3)
    assert find_loss(loss) is loss and find_loss((many, loss, one)) is loss
    for output in (one, (many, one), {"loss": one, "aux": loss}, [one.view(1, 1)]):
        found = find_loss(output)
        assert found.shape == () and found == 1.0
    for output in (many, (one, one), one.long(), None):
        with pytest.raises(TraceError, match=r"no loss found|2 scalars found"):
            find_loss(output)


class Logits(nn.Linear):
    def forward(self, x: Tensor, labels: Tensor | None = None, label_weight: float = 1.0) -> Any:
        return self.loss(x, labels) if labels is not None else super().forward(x)

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(super().forward(x), labels)


def test_targets_that_were_left_out_are_named() -> None:
    x, labels = torch.ones(2, 4), torch.zeros(2, dtype=torch.long)
    with pytest.raises(TraceError, match=r"no loss found.*: pass labels= in example_inputs") as told:
        autoptd.compile(Logits(4, 3), d=2, example_inputs=(x,))
    assert "label_weight" not in told.value.remedy
    autoptd.compile(Logits(4, 3), d=2, example_inputs=(x, labels))
    with pytest.raises(TraceError, match="Remedy: return") as told:
        autoptd.compile(nn.Linear(4, 3), d=2, example_inputs={"input": x})


def test_what_another_library_said_ends_with_one_stop() -> None:
    error = TraceError("model", "IndexError: Target 9 is out of bounds.", "other labels")
    assert str(error) == "model: IndexError: Target 9 is out of bounds. Remedy: other labels."
