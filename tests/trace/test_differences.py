"""Two runs are compared gradient by gradient, piece by piece, and with the verdicts that whole tensors would get."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from torch import nn

from autoptd import trace
from autoptd.trace import differences
from autoptd.trace.differences import Reference, difference, largest_entry

INF, NAN = math.inf, math.nan


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def test_one_gradient_of_the_traced_graph_is_alive_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it leaves no gradient at the model's parameters, whose own are untouched."""
    model, x = Deep(), torch.randn(2, 8)
    found = trace.capture(model, (x,), {}, None)
    mine = [torch.randn_like(p) for p in model.parameters()]
    for parameter, gradient in zip(model.parameters(), mine, strict=True):
        parameter.grad = gradient
    kept, before = [gradient.clone() for gradient in mine], differences.difference
    met: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def counted(one: torch.Tensor, other: torch.Tensor) -> float:
        met.append(weakref.ref(other))
        alive.append(sum(one() is not None for one in met))
        return before(one, other)

    monkeypatch.setattr(differences, "difference", counted)
    trace.compare(model, None, found.graph, found.buffers, (x,), {})
    assert len(alive) == 1 + 12 and max(alive) == 1
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), mine, strict=True))
    assert all(map(torch.equal, mine, kept))


@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_pieces_give_what_whole_tensors_do(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(differences, "PIECE", piece)
    one = torch.randn(5, 7, dtype=torch.bfloat16).t()
    other = one + torch.randn(7, 5, dtype=torch.bfloat16)
    assert difference(one, other) == float((one.double() - other.double()).abs().max())
    assert largest_entry(one) == float(one.abs().max())
    assert difference(one, None) == difference(None, one) == largest_entry(one)
    assert difference(torch.ones(0), torch.ones(0)) == 0.0 == largest_entry(None)
    assert difference(torch.tensor(3.0), torch.tensor(1.0)) == 2.0


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        ([1.0, NAN, 2.0], [1.0, 0.0, 2.0], INF),
        ([1.0, 0.0, INF], [1.0, 0.0, 2.0], INF),
        ([1.0, 0.0, 2.0], [NAN, 0.0, 2.0], INF),
        ([1.0, NAN, 2.0], [9.0, 0.0, INF], 0.0),  # neither is finite
    ],
)
def test_what_is_not_finite(
    monkeypatch: pytest.MonkeyPatch, one: list[float], other: list[float], wanted: float
) -> None:
    monkeypatch.setattr(differences, "PIECE", 1)
    assert difference(torch.tensor(one), torch.tensor(other)) == wanted


def test_a_gradient_that_one_run_lacks_differs_by_all_of_it() -> None:
    """And one that neither has is left out."""
    names = {name: torch.full((3,), 2.0, requires_grad=True) for name in ("a", "b", "c")}
    wanted = Reference((names["a"] * 4).sum() + names["b"].sum(), names, share=0.5)
    assert wanted.differences((names["a"] * 4).sum() + names["b"].sum(), names) == {
        "loss": 0.0,
        "gradient of a": 0.0,
        "gradient of b": 0.0,
    }
    found = wanted.differences((names["a"] * 4).sum() + names["c"].sum(), names)
    assert found == {"loss": 0.0, "gradient of a": 0.0, "gradient of b": 1 / 2, "gradient of c": 1 / 2}
    assert all(leaf.grad is None and not leaf._backward_hooks for leaf in names.values())


def test_a_gradient_of_zeros_beside_infinite_ones() -> None:
    """Sizes that are no numbers divide nothing."""
    leaf, other = torch.tensor([1.0], requires_grad=True), torch.tensor([0.0], requires_grad=True)
    wanted = Reference((leaf * NAN).sum() + (other * 0.0).sum(), {"a": leaf, "b": other}, share=0.1)
    assert (
        wanted.differences((leaf * NAN).sum() + (other * 1e-3).sum(), {"a": leaf, "b": other})[
            "gradient of b"
        ]
        > 0.5
    )
