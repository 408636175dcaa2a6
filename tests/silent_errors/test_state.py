"""Random numbers, saved state on another mesh, buffers and initial values. See `docs/silent-errors.md`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoptd
from autoptd.verify.one_device import masks_of
from tests.silent_errors.models import (
    HEADS,
    ROWS,
    WIDTH,
    Block,
    Mlp,
    batch,
    decoder,
    of_blocks,
)
from tests.silent_errors.pair import Pair, near

IDS, LABELS = batch()


class Fused(nn.Module):
    """Queries, keys and values of all heads in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def test_a_fused_weight_on_another_mesh(tmp_path: Path) -> None:
    """Fails if weights are permuted, or moments left out: `load(strict=False)` without the optimizer."""
    model = of_blocks(lambda: Block(Fused()), lambda: Block(Fused()))
    with Pair(model, (IDS, LABELS), t=2) as pair:
        pair.train(IDS, LABELS)
        assert pair.kind("layers.0.attention.qkv.weight") == "S"
        with pair.resumed(tmp_path / "saved", (IDS, LABELS), t=4, p=2, zero=1) as other:
            for step in (1, 2):
                other.train(IDS.roll(step, 0), LABELS)


def test_tied_embeddings_on_another_mesh(tmp_path: Path) -> None:
    """Fails if one of two copies is loaded: `+ 1` to the values that `load` leaves."""
    with Pair(decoder(2, tied=True), (IDS, LABELS), p=2, d=2) as pair:
        pair.train(IDS, LABELS)
        with pair.resumed(tmp_path / "saved", (IDS, LABELS), t=2) as other:
            other.train(IDS, LABELS)


def dropping(**asked: Any) -> Pair:
    model = of_blocks(*[lambda: Block(mlp=Mlp(drop=0.25))] * 2)
    return Pair(model, (IDS, LABELS), **asked)


def test_dropout_after_resuming_on_another_mesh(tmp_path: Path) -> None:
    """Fails if masks do not continue: those of the next step on one device after the load."""
    with dropping(t=2, sequence_parallel=True) as pair:
        for _ in range(2):
            pair.train(IDS, LABELS)
        with pair.resumed(tmp_path / "saved", (IDS, LABELS), d=2, p=2) as other:
            assert other.pm.steps == 2
            other.train(IDS, LABELS)


def test_replicas_drop_other_elements() -> None:
    """Fails for masks of a replica's own rows: `first_row % 4` in `draw_masks`. All rows are alike."""
    ids, labels = IDS[:1].expand(ROWS, -1), LABELS[:1].expand(ROWS, -1)
    with dropping(d=2, num_microbatches=2) as pair:
        pair.train(ids, labels)
        with masks_of(pair.pm.program, pair.pm.steps):
            rows = F.dropout(torch.ones(ROWS, 8, 2 * WIDTH), 0.25)
        assert len({tuple(row.flatten().tolist()) for row in rows}) == ROWS


@pytest.mark.parametrize("split", [False, True], ids=["whole", "tokens"])
def test_tensor_ranks_drop_the_elements_of_one_device(split: bool) -> None:
    """Fails for any other mask: those of the next step on one device."""
    with dropping(t=2, sequence_parallel=split) as pair:
        pair.train(IDS, LABELS)


def test_recomputation_drops_the_same_elements() -> None:
    """Fails if backward draws again: the masks of another step in the recomputation."""
    with dropping(t=2, recompute="full") as pair:
        pair.train(IDS, LABELS)
        pair.train(IDS, LABELS)


class NormalisedBlock(nn.Module):
    """An MLP and a batch norm of its result over all rows and tokens."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.mlp, self.norm, self.checkpointed = Mlp(), nn.BatchNorm1d(WIDTH), checkpointed

    def body(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.mlp(x).transpose(1, 2)).transpose(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)


def normalised() -> nn.Module:
    return of_blocks(NormalisedBlock, NormalisedBlock)


def test_statistics_of_the_whole_batch() -> None:
    """Fails for statistics of a replica's rows: the mean of two halves' losses on one device."""
    with Pair(normalised(), (IDS, LABELS), d=2) as pair:
        pair.train(IDS, LABELS)
        pair.train(IDS.flip(1), LABELS)
        assert "layers.0.norm.running_var" in pair.pm.state_dict()


@pytest.mark.parametrize("asked", [{"recompute": "full"}, {}], ids=["asked for", "in the model"])
@pytest.mark.filterwarnings("error:recompute")
def test_statistics_under_recomputation(asked: dict[str, Any]) -> None:
    """Fails if the second forward updates them again: two forwards on one device."""
    model = of_blocks(*[lambda: NormalisedBlock(checkpointed=not asked)] * 2)
    with Pair(model, (IDS, LABELS), d=2, **asked) as pair:
        for layer in pair.plain.layers:
            layer.checkpointed = False  # torch updates twice
        pair.train(IDS, LABELS)


def test_statistics_over_microbatches_are_refused() -> None:
    """Fails if nothing is raised: a microbatch cannot know the rows of the next."""
    with pytest.raises(autoptd.PlanError, match="batch norm"):
        Pair(normalised(), (IDS, LABELS), num_microbatches=2)


def test_ranks_begin_with_equal_weights() -> None:
    """Fails if any rank has other values than `materialize` gives: `+ 1e-3` to one of them there."""
    torch.manual_seed(0)
    with autoptd.deferred():
        model = decoder(2)
    made = autoptd.materialize(model).state_dict()
    pm = autoptd.parallelize(model, t=2, d=2, backend="local", example_inputs=(IDS, LABELS))
    near(pm.state_dict(), made)
    whole = pm.rank_parameters(0)
    for rank in range(1, 4):
        for name, x in pm.rank_parameters(rank).items():
            if x.shape == made[name].shape:
                assert torch.equal(x, whole[name]) and torch.equal(x, made[name]), name
    pm.close()
