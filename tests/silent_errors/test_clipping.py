"""The norm of all gradients, and decisions that all ranks take alike. See `docs/silent-errors.md`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from tests.parity.models import batch as gpt_batch
from tests.parity.models import gpt
from tests.parity.test_fp16 import planted
from tests.silent_errors.models import HEADS, Attention, Block, Latent, batch, decoder, of_blocks
from tests.silent_errors.pair import Pair

IDS, LABELS = batch()


def test_replicated_weights_count_once_in_the_norm() -> None:
    """Fails if tensor ranks each count them: the squares of `narrow` and the norms * 2 on one device."""
    whole = {"shard": [{"pattern": "layers.*.attention.narrow.weight", "dim": None, "axis": "tp"}]}
    with Pair(of_blocks(lambda: Block(Latent())), (IDS, LABELS), t=2, plan=whole) as pair:
        pair.train(IDS, LABELS, max_norm=0.1)
        assert pair.kind("layers.0.attention.narrow.weight") != "S"
        assert pair.kind("layers.0.attention.wide.weight") == "S"


class Sinks(Attention):
    """A learned score per head that takes part in every softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def forward(self, x: Tensor, sees: Tensor | None = None) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        places = torch.arange(x.shape[1], device=x.device)
        scores = (q @ k.mT / 2).masked_fill(places[:, None] < places, float("-inf"))
        sinks = self.sinks[:, None, None].expand(x.shape[0], -1, x.shape[1], 1)
        y = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1] @ v
        return self.out(y.transpose(1, 2).flatten(2))


def test_weights_with_one_entry_per_head_count_in_the_norm() -> None:
    """Fails if those of the first rank alone count: `sinks.grad[2:] = 0` on one device."""
    with Pair(of_blocks(lambda: Block(Sinks())), (IDS, LABELS), t=2) as pair:
        pair.train(IDS, LABELS, max_norm=0.1)
        assert pair.kind("layers.0.attention.sinks") == "S"


def test_one_norm_for_all_stages() -> None:
    """Fails for the norm of one stage, and for a tied weight that counts twice, in the norm of one device."""
    with Pair(decoder(2, tied=True), (IDS, LABELS), p=2, d=2, zero=1) as pair:
        pair.train(IDS, LABELS, max_norm=0.1)


def test_gradients_are_multiplied_by_the_clip_factor() -> None:
    """Fails if only the norm is right: `max_norm=inf` on one device. Clipping comes after all sums."""
    with Pair(decoder(), (IDS, LABELS), t=2, d=2, num_microbatches=2) as pair:
        pair.backward(IDS, LABELS)
        largest = max(float(x.abs().max()) for x in pair.gradients().values())
        assert pair.clip(1e-3) > 1e-2
        assert max(float(x.abs().max()) for x in pair.pm.gradients().values()) < largest / 10


def test_the_norm_of_a_part_is_refused() -> None:
    """Fails if nothing is raised: torch's own clipping would see the shards of one rank."""
    with Pair(decoder(), (IDS, LABELS), t=2, d=2, zero=1) as pair:
        pair.backward(IDS, LABELS)
        with pytest.raises(autoptd.PlanError, match=r"pm\.clip_grad_norm_"):
            torch.nn.utils.clip_grad_norm_(pair.pm.parameters(), 0.1)


def test_an_overflow_on_one_rank_skips_the_step_of_all() -> None:
    """Fails if a rank decides without the others: a norm of 1 in `optimizer.py`. One rank has an infinity."""
    data = gpt_batch(8)
    asked: dict[str, Any] = {
        "precision": "fp16",
        "loss_scale": autoptd.LossScale(initial=2.0**8, hysteresis=1),
    }
    pm = autoptd.parallelize(
        gpt(2), p=2, d=2, num_microbatches=2, backend="local", example_inputs=data, **asked
    )
    optimizer = pm.optimizer(torch.optim.AdamW, lr=1e-2)
    before = pm.state_dict()
    with planted(pm, (3, 1, 0)):
        pm.step(*data)
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(x, before[name]) for name, x in pm.state_dict().items())
    assert pm.loss_scale == 2.0**7
    pm.step(*data)
    optimizer.step()
    assert not torch.equal(pm.state_dict()["transformer.wte.weight"], before["transformer.wte.weight"])
    pm.close()


def decayed(named: Sequence[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Matrices decay; biases, norms and sinks do not."""
    return [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": 0.5},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]


def test_weight_decay_by_groups_with_a_divided_optimizer() -> None:
    """Fails if shards mix the groups: one group with 0.5 on one device."""
    with Pair(of_blocks(lambda: Block(Sinks())), (IDS, LABELS), decayed, t=2, d=2, zero=1) as pair:
        for _ in range(2):
            pair.train(IDS, LABELS)
