"""Calls of ranks that must come in one order: what is found, and what is no fault."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from autoptd.errors import InternalError
from autoptd.ir.deadlock import find_deadlock
from autoptd.ir.layout import Layout
from autoptd.ir.mesh import Mesh, Role
from autoptd.ir.placement import placements
from autoptd.ir.types import R
from autoptd.program.buckets import BucketPlan
from autoptd.program.calls import check_call_order
from autoptd.program.specs import Collective, ParamSpec


@dataclass(eq=False)
class Joint:
    ranks: tuple[int, ...]


def test_calls_in_one_order_end() -> None:
    a, b, c = Joint((0, 1)), Joint((1, 2)), Joint((0, 2))
    assert find_deadlock([[a, c], [a, b], [b, c]]) == []
    assert find_deadlock([[], [], []]) == []


def test_ranks_that_wait_in_a_circle_are_named_in_the_order_of_waiting() -> None:
    a, b, c = Joint((0, 1)), Joint((1, 2)), Joint((0, 2))
    assert find_deadlock([[c, a], [a, b], [b, c]]) == [(0, c), (2, b), (1, a)]


def test_two_orders_of_two_groups() -> None:
    """Tensor ranks 0, 1 and 2, 3, replicas 0, 2 and 1, 3: each group has one order, and yet nobody goes on."""
    tp, other_tp, dp, other_dp = Joint((0, 1)), Joint((2, 3)), Joint((0, 2)), Joint((1, 3))
    assert find_deadlock([[tp, dp], [tp, other_dp], [other_tp, dp], [other_tp, other_dp]]) == []
    assert find_deadlock([[tp, dp], [other_dp, tp], [other_tp, dp], [other_dp, other_tp]]) == []
    assert len(find_deadlock([[tp, dp], [other_dp, tp], [dp, other_tp], [other_tp, other_dp]])) == 4


def test_a_rank_that_makes_fewer_calls_is_waited_for() -> None:
    a, b = Joint((0, 1)), Joint((0, 1))
    assert find_deadlock([[a, b], [a]]) == [(0, b)]


MESH = Mesh(t=2, p=2, d=2)


def plan(
    name: str, number: int, axes: tuple[str, ...], owners: tuple[int, ...], shape: tuple[int, ...] = (4,)
) -> BucketPlan:
    storage, use = placements(Layout({"tp": R} if "tp" in axes else {}), "float32", stages=owners)
    spec = ParamSpec(name, (name,), shape, tuple((n,) for n in shape), True, owners, storage, use)
    return BucketPlan(
        number, (spec,), tuple(step for step in spec.sums if step.axis in (*axes, "pp")), owners
    )


def microbatch(axis: str, forward: str = "none", backward: str = "all-reduce", pp: int = 0) -> Collective:
    return Collective("h.0.mlp", pp, "i_to_r", axis, forward, backward, 64, 2, "why", pp_ranks=(pp,))


def test_a_program_in_order_passes() -> None:
    tied = plan("wte", 0, ("dp",), (0, 1))
    rows = [[plan("scale", 1, ("dp", "tp"), (0,)), tied], [tied, plan("bias", 2, ("dp",), (1,))]]
    check_call_order(
        [microbatch("tp"), microbatch("tp", "all-reduce", "none", 1), microbatch("pp", "send")], rows, MESH
    )


def test_an_early_sum_over_an_axis_that_backward_uses_is_found() -> None:
    rows = [[plan("scale", 0, ("dp",), (0,))], []]
    check_call_order([microbatch("dp", "none", "slice")], rows, MESH)
    with pytest.raises(InternalError, match=r"gradients scale.*pipeline rank 0.*over dp: h\.0\.mlp"):
        check_call_order([microbatch("dp")], rows, MESH)


def test_the_axes_of_early_sums_carry_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was wrong once: sums over tp that started in a backward."""
    monkeypatch.setattr("autoptd.program.buckets.EARLY", (Role.BATCH, Role.VALUES))
    with pytest.raises(InternalError, match="over tp"):
        check_call_order([microbatch("tp")], [[plan("scale", 0, ("tp",), (0,))], []], MESH)


def test_owners_that_sum_in_different_orders_are_found() -> None:
    one, other = plan("one", 0, (), (0, 1)), plan("other", 1, (), (0, 1), (8,))
    swapped = [replace(one, number=1), replace(other, number=0)]
    check_call_order([], [[one, other], [other, one]], MESH)  # by number, in whatever order they are complete
    with pytest.raises(
        InternalError,
        match=r"pipeline rank 1 makes 'tied gradients other'.*rank 0 makes 'tied gradients one'",
    ):
        check_call_order([], [[one, other], swapped], MESH)


def test_owners_that_wait_for_each_other_are_found() -> None:
    def numbered(**numbers: int) -> list[BucketPlan]:
        owners = {"ab": (0, 1), "bc": (1, 2), "ac": (0, 2)}
        return [plan(name, number, (), owners[name]) for name, number in numbers.items()]

    check_call_order([], [numbered(ab=0, ac=2), numbered(ab=0, bc=1), numbered(bc=1, ac=2)], Mesh(p=3))
    with pytest.raises(InternalError, match="wait for each other: pipeline rank 0 makes 'tied gradients ac'"):
        check_call_order([], [numbered(ac=0, ab=1), numbered(ab=0, bc=1), numbered(bc=0, ac=1)], Mesh(p=3))
