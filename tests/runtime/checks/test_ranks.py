"""`pm.check_ranks`: replicas that run the same rows compute the same bits, or the rank that does not is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autoptd
from autoptd.errors import RuntimeFault
from autoptd.model.parallel_model import ParallelModel
from examples.gpt import GPT, GPTConfig
from tests.parity.models import VOCAB, batch


def started(rows: int = 8, **keywords: Any) -> ParallelModel:
    model = GPT(GPTConfig(n_layer=2, n_head=4, n_embd=32, block_size=8, vocab_size=VOCAB, dropout=0.1))
    return autoptd.parallelize(model, **keywords, example_inputs=batch(rows), backend="local", timeout=30)


@pytest.mark.parametrize(
    "mesh",
    [
        {"d": 2, "zero": 1, "precision": "fp16"},
        pytest.param({"d": 2, "p": 2, "num_microbatches": 2}, marks=pytest.mark.thorough),
        pytest.param({"d": 2, "t": 2}, marks=pytest.mark.thorough),
        pytest.param({"t": 2, "p": 2}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_a_clean_run_changes_nothing(mesh: dict[str, Any]) -> None:
    """Also between a step and its update: gradients, the number of steps and the masks of dropout are as they were."""
    losses = []
    for checks in (False, True):
        torch.manual_seed(0)
        pm = started(**mesh)
        opt = pm.optimizer(torch.optim.AdamW, lr=1e-3)
        found = []
        for _ in range(3):
            found.append(float(pm.step(*batch(8))))
            if checks:
                before = pm.gradients()
                pm.check_ranks(*batch(8))
                for name, x in pm.gradients().items():
                    # The first loss scale is too large.
                    torch.testing.assert_close(x, before[name], rtol=0, atol=0, equal_nan=True)
            opt.step()
            opt.zero_grad()
        losses.append((found, pm.steps, pm.fingerprint()))
        pm.close()
    assert losses[0] == losses[1]


def flip(x: torch.Tensor, bit: int) -> None:
    x.data.view(torch.int32).view(-1)[0] ^= 1 << bit


STAGE_0, STAGE_1 = "transformer.h.0.mlp.c_fc.weight", "transformer.h.1.mlp.c_fc.weight"
PIPELINE = {"d": 2, "p": 2}


@pytest.mark.parametrize(
    "mesh, victim, name, bit, told",
    [
        ({"d": 3}, 2, STAGE_1, 29, "the output of stage 0 on rank 2 differs from rank 0 and most others"),
        # Where it began comes first.
        (
            PIPELINE,
            1,
            STAGE_0,
            29,
            "the same rows give other bits: the output of stage 0 .*between ranks 0, 1; ",
        ),
        (
            PIPELINE,
            3,
            STAGE_1,
            12,
            "the same rows give other bits: the (output|gradient) of .*between ranks 2, 3; ",
        ),
    ],
    ids=str,
)
def test_a_flipped_bit_is_named(mesh: dict[str, int], victim: int, name: str, bit: int, told: str) -> None:
    rows = 2 * mesh["d"]
    pm = started(rows, **mesh)
    pm.check_ranks(*batch(rows))
    flip(pm.rank_parameters(victim)[name], bit)
    with pytest.raises(RuntimeFault, match=told):
        pm.check_ranks(*batch(rows))
    flip(pm.rank_parameters(victim)[name], bit)
    pm.check_ranks(*batch(rows))
    pm.close()


@pytest.mark.parametrize("is_always", [True, False])
def test_a_rank_that_computes_wrongly(is_always: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In backward alone: its gradients are named; where it does so now and then, it is said not to be steady."""
    pm = started(d=3, rows=6)
    assert pm.run.ranks is not None
    (bucket, *_) = pm.run.ranks.here[1].executor.gradients.buckets
    right, calls = bucket.start, [0]

    def start() -> None:
        calls[0] += 1
        if bucket.note is not None and (is_always or calls[0] == 2):
            assert bucket.flat is not None
            bucket.flat.view(torch.int32)[3] ^= 1
        right()

    monkeypatch.setattr(bucket, "start", start)
    told = "the gradient of .* on rank 1 differs from rank 0 and most others"
    if not is_always:
        told = "the same rows give other bits the second time: the gradient of .* on rank 1. Remedy: torch.use_det"
    with pytest.raises(RuntimeFault, match=told):
        pm.check_ranks(*batch(6))
    pm.close()
