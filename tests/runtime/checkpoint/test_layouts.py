"""A1 for parameters that are cut in every way: heads side by side, unequal segments, shared KV heads, transposed weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoptd
from tests.parity.models import batch, gpt
from tests.parity.test_layouts import Grouped, OneKeyHead, PerHead, SeparateGrouped, ThreeTransposed, decoder
from tests.parity.test_segments import example, phi
from tests.parity.test_sharing import grouped
from tests.runtime.checkpoint.models import assert_same, assert_used, state_of


def conv1d() -> nn.Module:
    """GPT-2 of transformers: its linear layers keep their weights transposed."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 8, "vocab_size": 64, "use_cache": False}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropouts))  # type: ignore[no-any-return]


def labelled() -> dict[str, torch.Tensor]:
    ids, labels = batch()
    return {"input_ids": ids, "labels": labels}


Row = tuple[Callable[[], nn.Module], Callable[[], Any], dict[str, Any], dict[str, Any]]
ROWS: dict[str, Row] = {
    "one weight for q, k and v of each head": (lambda: decoder(PerHead), batch, {"t": 4}, {"t": 2, "d": 2}),
    "groups of queries and their keys": (lambda: decoder(Grouped), batch, {"t": 2, "p": 2}, {"t": 4}),
    "transposed": (lambda: decoder(ThreeTransposed), batch, {"t": 2}, {"t": 4, "d": 2, "zero": 1}),
    "separate, grouped": (lambda: decoder(SeparateGrouped), batch, {"t": 4, "d": 2, "zero": 1}, {"p": 2}),
    "one key head": (lambda: decoder(OneKeyHead), batch, {"t": 4}, {"t": 2, "p": 2}),
    "unequal segments": (lambda: phi(parallel=True, slices=False), example, {"t": 2, "p": 2}, {"t": 4}),
    "unequal segments, shared": (
        lambda: phi(parallel=False, slices=True),
        example,
        {"d": 2, "zero": 1},
        {"t": 4},
    ),
    "two key heads of four ranks": (grouped, batch, {"t": 4}, {"t": 2, "d": 2}),
    "two key heads of eight ranks": (grouped, batch, {"d": 2}, {"t": 8}),
    "two key heads of eight ranks, back": (grouped, batch, {"t": 8}, {"t": 2, "zero": 1, "d": 2}),
    "padded by three": (
        lambda: gpt(2, vocab=61, heads=3, width=33),
        lambda: batch(8, 61),
        {"t": 3},
        {"t": 2},
    ),
    "padded by three, chunks": (
        lambda: gpt(4, vocab=61),
        lambda: batch(8, 61),
        {"t": 2, "p": 2, "v": 2},
        {"t": 3},
    ),
    "Conv1D": (conv1d, labelled, {"t": 2, "p": 2}, {"t": 4}),
}
USUAL = (
    "groups of queries and their keys",
    "unequal segments",
    "two key heads of eight ranks",
    "padded by three",
)
CASES = [
    pytest.param(*row, id=name, marks=() if name in USUAL else (pytest.mark.thorough,))
    for name, row in ROWS.items()
]


def running(
    model: nn.Module, inputs: Any, mesh: dict[str, Any]
) -> tuple[autoptd.ParallelModel, torch.optim.Optimizer]:
    pm = autoptd.parallelize(model.double(), **mesh, example_inputs=inputs, backend="local", timeout=60)
    return pm, pm.optimizer(torch.optim.AdamW, lr=1e-2)


def losses(
    pm: autoptd.ParallelModel, optimizer: torch.optim.Optimizer, inputs: Any, steps: int
) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(float(pm.step(**inputs) if isinstance(inputs, dict) else pm.step(*inputs)))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize(("make", "example_inputs", "source", "target"), CASES)
def test_any_layout_to_any_other(
    tmp_path: Path,
    make: Callable[[], nn.Module],
    example_inputs: Callable[[], Any],
    source: dict[str, Any],
    target: dict[str, Any],
) -> None:
    inputs = example_inputs()
    pm, optimizer = running(make(), inputs, source)
    losses(pm, optimizer, inputs, 2)
    pm.save(tmp_path / "saved", optimizer=optimizer)
    expected = state_of(pm, optimizer)
    other, others = running(make(), inputs, target)
    other.load(tmp_path / "saved", optimizer=others)
    assert_same(state_of(other, others), expected)
    assert_used(other)
    for one, two in zip(losses(pm, optimizer, inputs, 2), losses(other, others, inputs, 2), strict=True):
        # Models of transformers compute their loss in float32.
        assert abs(one - two) <= (1e-6 if isinstance(inputs, dict) else 1e-12)
    pm.close()
    other.close()


def test_two_key_heads_are_stored_by_four_ranks_each() -> None:
    """What the rows above mean to be about."""
    program = autoptd.compile(grouped().double(), t=8, example_inputs=batch())
    assert set(program.sub_axes) == {"tp:(1)2", "tp:(2)4"}


class Positions(nn.Module):
    """Learned positions, of which as many are read as a row has tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.at = nn.Embedding(64, 16), nn.Parameter(torch.randn(12, 16))
        self.inner, self.head = nn.Linear(16, 32), nn.Linear(32, 64)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.inner(self.embed(ids) + self.at[: ids.shape[1]]).relu()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("lengths", [(12, 6), (6, 12), (6, 4)], ids=str)
def test_rows_of_another_length(tmp_path: Path, lengths: tuple[int, int]) -> None:
    """A run that goes on with longer or shorter rows reads other slices of the same positions."""
    torch.manual_seed(1)
    first, second = (tuple(torch.randint(0, 64, (4, length)) for _ in range(2)) for length in lengths)
    pm, optimizer = running(Positions(), first, {"t": 2})
    losses(pm, optimizer, first, 2)
    pm.save(tmp_path / "saved", optimizer=optimizer)
    model = Positions().double()
    model.load_state_dict(pm.state_dict())
    pm.close()
    other, others = running(Positions(), second, {"t": 2, "d": 2})
    other.load(tmp_path / "saved", optimizer=others)
    assert losses(other, others, second, 1) == pytest.approx([model(*second).item()], rel=1e-12)
    other.close()
