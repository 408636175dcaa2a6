"""What is said of a call with other sizes than `example_inputs`: what was expected, why, and what helps.

A world of processes is simulated by its own half of the rows: `replicas=1` of d=2.
"""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.errors import PlanError
from autoptd.program.program import Program
from autoptd.runtime.step.microbatches import check_call

IDS = torch.zeros(8, 5, dtype=torch.long)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 8)

    def forward(self, ids: Tensor, scale: Tensor, mode: Any = None) -> Tensor:
        return (self.embed(ids) * scale[:, None, None].mean(0)).square().mean()


# `scale` is as long as one replica's share, and is not batched.
EXAMPLE = (IDS, torch.ones(4), "fast")


@pytest.fixture(scope="module")
def program() -> Program:
    return autoptd.compile(Model(), d=2, num_microbatches=2, example_inputs=EXAMPLE)


def test_the_global_batch_says_what_is_batched(program: Program) -> None:
    assert {spec.name: spec.batched for spec in program.inputs} == {"ids": True, "scale": False}
    check_call(program, EXAMPLE, {}, replicas=2)
    check_call(program, (IDS[:4], *EXAMPLE[1:]), {}, replicas=1)


@pytest.mark.parametrize(
    ("ids", "replicas", "fact", "remedy"),
    [
        (IDS, 1, "8 rows; step takes the 4 of one of 2 replicas", r"pm\.local_batch"),
        (IDS[:3], 1, "8 rows; step takes the 4 of one of 2 replicas", "drop_last=True"),
        (IDS[:6], 2, "8 rows; step takes all of them", "drop_last=True"),
        (torch.cat([IDS, IDS]), 2, "8 rows; step takes all of them", "pass a global batch as large"),
        (IDS[:, :3], 2, r"ids is \[8, 3\] int64, expected \[8, 5\] int64", "pad or cut dim 1 to 5"),
        (IDS.int(), 2, r"ids is \[8, 5\] int32", r"ids\.to\(torch\.int64\)"),
        (IDS[0], 2, r"ids is \[5\] int64", "what example_inputs holds"),
        ("text", 2, "ids is 'text', expected a tensor", "what example_inputs holds"),
    ],
)
def test_a_wrong_size_says_what_was_expected(
    program: Program, ids: Any, replicas: int, fact: str, remedy: str
) -> None:
    with pytest.raises(PlanError, match=f"{fact}.*Remedy: .*{remedy}") as caught:
        check_call(program, (ids, *EXAMPLE[1:]), {}, replicas)
    assert ("drop_last" in str(caught.value)) == ("drop_last" in remedy)


def test_a_tensor_for_a_constant_is_not_printed(program: Program) -> None:
    with pytest.raises(PlanError, match=r"argument 2 is \[100, 100\] float32, but was compiled as 'fast'"):
        check_call(program, (*EXAMPLE[:2], torch.ones(100, 100)), {}, replicas=2)


def test_an_argument_that_would_get_a_gradient(program: Program) -> None:
    """Of a prompt that is trained outside of the model, or of what another model computed before it."""
    prompt = torch.ones(4, requires_grad=True)
    for scale, origin in (
        (prompt, "is a leaf with requires_grad"),
        (2 * prompt, "was computed from tensors with"),
    ):
        with pytest.raises(PlanError, match=rf"^step: scale {origin}.*a part of the model, or detach\(\)"):
            check_call(program, (IDS, scale, "fast"), {}, replicas=2)
        check_call(program, (IDS, scale.detach(), "fast"), {}, replicas=2)
        # An evaluation gives none on one device either.
        check_call(program, (IDS, scale, "fast"), {}, replicas=2, call="eval_step")


def test_a_mapping_is_a_batch() -> None:
    call = UserDict(ids=IDS, scale=torch.ones(4))  # as BatchEncoding of transformers is
    pm = autoptd.parallelize(Model(), d=2, backend="local", example_inputs=call)
    lazy = autoptd.parallelize(Model(), d=2, backend="local")
    try:
        wanted = pm.step(**call)
        pm.load_state_dict(pm.state_dict())
        assert pm.step(call) == pm.step(pm.local_batch(call)) == pm.eval_step(call) == wanted
        assert pm.step(ids=IDS, scale=torch.ones(4)) == wanted and lazy.step(call).isfinite()
    finally:
        pm.close()
        lazy.close()
    assert autoptd.verify(Model(), d=2, example_inputs=call, batches=[call] * 2, steps=2).passed
