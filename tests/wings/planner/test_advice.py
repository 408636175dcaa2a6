"""What would fit where nothing does: every remedy is a plan that exists."""

from __future__ import annotations

from typing import Any

import pytest

from autoptd.errors import PlanError
from autoptd.wings.planner.candidates import DefaultModel
from autoptd.wings.planner.plan import plan
from autoptd.wings.planner.request import Request, make_request
from autoptd.wings.planner.search import search
from tests.wings.planner.test_plan import GPT_22B, SMALL

GPT3 = {"layers": 96, "hidden": 12288, "heads": 96, "seq": 2048}


def fits(request: Request) -> bool:
    return len(search(DefaultModel(request), 1, request.only)) > 0


def remedies_of(shape: dict[str, int], **asked: Any) -> tuple[list[str], Request]:
    with pytest.raises(PlanError, match="the smallest") as caught:
        plan(shape, **asked)
    return caught.value.remedy.split("; or "), make_request(shape, cluster="dgx-a100", **asked)


def test_what_would_fit() -> None:
    """Each remedy is a plan that exists, and half as many GPUs would not do."""
    large = {**GPT_22B, "layers": 128}
    found, request = remedies_of(
        large, gpus=16, batch=64, precision="bf16", sequence_parallel=False, recompute="none"
    )
    assert not fits(request)
    assert any(one.startswith("recompute='full'") for one in found)
    assert any(one.startswith("sequence_parallel=True") for one in found) == fits(
        request.but(sequence_parallel=(True,))
    )
    assert fits(request.but(recompute=("full",)))
    assert any(one.startswith("recompute='selective'") for one in found) == fits(
        request.but(recompute=("selective",))
    )
    count = int(found[-1].removesuffix(" GPUs"))
    assert fits(request.but(gpus=count))
    assert not fits(request.but(gpus=count // 2))


def test_zero_would_fit() -> None:
    large = {**GPT_22B, "layers": 128}
    found, request = remedies_of(
        large, gpus=64, batch=64, precision="bf16", t=8, p=1, microbatch=1, recompute="full"
    )
    stages = [int(one[len("zero=")]) for one in found if one.startswith("zero=")]
    assert stages
    assert stages == [stage for stage in (1, 2, 3) if fits(request.but(zero=(stage,)))]
    assert any(one.startswith("another p than 1") for one in found)


def test_all_that_saves_memory_at_once() -> None:
    """Where no single change helps.

    It says what has to be left open, and following it finds the plan that it names.
    """
    asked = {"gpus": 64, "batch": 512, "t": 1, "p": 1, "microbatch": 8, "sequence_parallel": False}
    found, _ = remedies_of(GPT3, **asked)
    text = next(one for one in found if "together" in one)
    assert text.startswith("recompute='full', zero=3, precision='bf16' and sequence_parallel=True together")
    assert "and t, p and microbatch left open (" in text
    done = plan(GPT3, gpus=64, batch=512, recompute="full", zero=3, precision="bf16", sequence_parallel=True)
    assert text.split("(")[-1].startswith(" ".join(f"{name}={done.best.degrees[name]}" for name in "tpd"))
    pins = {"t": 1, "p": 1, "microbatch": 1}
    found, _ = remedies_of(GPT3, gpus=64, batch=64, **pins)
    text = next(one for one in found if "together" in one)
    assert "left open" not in text and "sequence_parallel" not in text  # what was asked for can stay
    assert (
        plan(GPT3, gpus=64, batch=64, recompute="full", zero=3, precision="bf16", **pins).best.degrees["d"]
        == 64
    )


def test_what_would_fit_instead_of_a_pin() -> None:
    with pytest.raises(PlanError, match="another microbatch than 64"):
        plan(GPT_22B, gpus=64, batch=64, microbatch=64, precision="bf16", recompute="none")
    with pytest.raises(PlanError, match="there is no such plan"):
        plan(SMALL, gpus=8, batch=64, t=3)


@pytest.mark.parametrize(
    ("asked", "fact", "remedy"),
    [
        ({"gpus": 13}, "p is more than the layers", "12 GPUs"),
        ({"gpus": 1, "schedule": "zbv"}, "no degrees meet", "2 GPUs"),
        ({"gpus": 8, "t": 3}, "there is no such plan", "another t than 3"),
    ],
)
def test_no_such_plan(asked: dict[str, Any], fact: str, remedy: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan(SMALL, **{"batch": 32, **asked})
    assert fact in caught.value.fact
    assert caught.value.remedy.startswith(remedy)
