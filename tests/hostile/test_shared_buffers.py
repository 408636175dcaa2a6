"""Buffers that share their memory: what is loaded into one is loaded into the others, or refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoptd
from autoptd import trace
from autoptd.errors import PlanError
from autoptd.subject.storage import shared_buffers
from autoptd.trace.capture import capture

X, Y = (torch.randint(0, 16, (8, 6), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
SCALE = torch.linspace(0.5, 1.5, 8, dtype=torch.float64)


@pytest.fixture(autouse=True)
def traced_anew(traced_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace that other tests have made says nothing about what is shared or kept here."""
    monkeypatch.setattr(trace, "capture", capture)


class Scaled(nn.Module):
    """`first` and `second` are one buffer under two names, `part` is its first entry."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.head = nn.Embedding(16, 8).double(), nn.Linear(8, 16).double()
        first = SCALE.clone()
        self.register_buffer("first", first)
        second = {"same": first, "view": first.view(8), "part": first[:1], "apart": first.clone()}
        if kind == "attribute":
            self.second = first[None]
        else:
            self.register_buffer("second", second.get(kind, first), persistent=kind != "hidden")

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.emb(x) * (self.second if self.training else self.first + self.second)
        return F.cross_entropy(self.head(h * self.first).mT, y)


def loaded(model: nn.Module, values: dict[str, torch.Tensor]) -> tuple[nn.Module, autoptd.ParallelModel]:
    """The model and the partitioned one, after the same state was loaded into both."""
    pm = autoptd.parallelize(model, t=2, num_microbatches=2, backend="local", example_inputs=(X, Y))
    pm.load_state_dict(values, strict=False)
    model.load_state_dict(values, strict=False)
    return model, pm


@pytest.mark.parametrize("kind", ["same", "view", "hidden", "apart"])
@pytest.mark.parametrize(
    "names", [("first",), ("second",), ("first", "second"), ("second", "first")], ids=str
)
def test_one_buffer_under_two_names_has_one_value(kind: str, names: tuple[str, ...]) -> None:
    if kind == "hidden" and "second" in names:
        return
    model, pm = loaded(Scaled(kind), {name: SCALE * (2 + n) for n, name in enumerate(names)})
    assert float(pm.step(X, Y)) == pytest.approx(float(model(X, Y)), rel=1e-12)
    assert float(pm.eval_step(X, Y)) == pytest.approx(float(model.eval()(X, Y)), rel=1e-12)
    state = pm.state_dict()
    assert all(torch.equal(state[name], one) for name, one in model.state_dict().items())
    pm.close()


@pytest.mark.parametrize("kind", ["part", "attribute"])
def test_another_value_under_a_view_is_refused(kind: str) -> None:
    with pytest.raises(PlanError, match="has another value for first, which shares its memory with second"):
        loaded(Scaled(kind), {"first": SCALE * 2})
    model, pm = loaded(Scaled(kind), {"first": SCALE.clone()})
    assert float(pm.step(X, Y)) == pytest.approx(float(model(X, Y)), rel=1e-12)
    pm.close()


def test_what_shares_memory_is_found() -> None:
    assert shared_buffers(Scaled("apart")).twins == ()
    assert shared_buffers(Scaled("view")).twins == (("first", "second"),)
    assert dict(shared_buffers(Scaled("part")).overlaps) == {"first": "second", "second": "first"}
