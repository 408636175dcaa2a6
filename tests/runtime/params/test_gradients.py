"""Gradient buckets, their order and overlap, the global norm; each removal must show."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from autoptd.compat import add_mm
from autoptd.errors import PlanError
from autoptd.program import buckets
from autoptd.runtime.measure.record import recording
from autoptd.runtime.params.full_values import gather_gradients
from autoptd.runtime.params.grad_norm import checked_norm_type, clip_gradients, grad_norm, sum_of_powers
from autoptd.runtime.params.gradient_buckets import Bucket
from autoptd.runtime.params.gradients import Gradients
from autoptd.runtime.step.launch import Rank
from tests.parity.checks import sum_only_over
from tests.runtime.step.test_executor import running, step
from tests.runtime.tied_model import Case, make_batch, make_model, make_program

FULL = Case(t=2, p=2, d=2, v=2, m=2, schedule="interleaved")


def small_buckets(monkeypatch: pytest.MonkeyPatch, size: int = 1) -> None:
    """One bucket per parameter."""
    monkeypatch.setattr(buckets, "usual_bytes", lambda *_: size)


def reference(case: Case) -> dict[str, Tensor]:
    model = make_model(case.layers)
    model(*make_batch(case.rows)).backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def worst(case: Case) -> float:
    """Largest difference of any gradient after one step."""
    model, expected = make_model(case.layers), reference(case)
    program = make_program(case, model)
    with running(program, model) as ranks:
        step(ranks, program, make_batch(case.rows))
        found = ranks.run("gradients", lambda rank: gather_gradients(rank.params))
        again = ranks.here[-1].params.local  # a rank whose copies are not what is gathered
        for name, parameter in again.items():
            assert (parameter.grad is None) == (not parameter.requires_grad), name
    return max((found[name] - expected[name]).abs().max().item() for name in expected)


@pytest.mark.parametrize("size", [1, 500, 10**9])
def test_gradients_do_not_depend_on_bucket_size(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    small_buckets(monkeypatch, size)
    assert worst(FULL) < 1e-14


def test_gradients_do_not_depend_on_the_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    # They say which gradients there are, and start no sum.
    monkeypatch.setattr(Gradients, "grew", lambda self, name: self._bucket_of[name].present.add(name))
    assert worst(FULL) < 1e-14


def test_gradients_do_not_depend_on_reduce_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gradients, "reduce", lambda self, stage: None)
    assert worst(FULL) < 1e-14


def test_buckets_start_while_the_last_backward_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, the action in which each bucket starts; later parameters first, and the same on every rank of a group."""
    small_buckets(monkeypatch)
    starts: dict[int, list[tuple[str, str]]] = {}
    model, case = make_model(), Case(d=2, p=2)
    program = make_program(case, model)
    start = Bucket.start
    with running(program, model) as ranks:

        def noted(self: Bucket) -> None:
            rank = next(one for one in ranks.here if self in one.executor.gradients.buckets)
            starts.setdefault(rank.world.rank, []).append((self.specs[0].name, rank.world.at))
            start(self)

        monkeypatch.setattr(Bucket, "start", noted)
        step(ranks, program, make_batch())
    assert starts[0] == starts[1] and starts[2] == starts[3]
    assert [at for _, at in starts[2]] == ["B1.1"] * len(starts[2])
    names = [name for name, _ in starts[2]]
    assert names.index("layers.3.down.bias") < names.index("layers.3.scale") < names.index("layers.2.scale")


def test_owners_of_a_tied_parameter_make_the_same_buckets() -> None:
    model = make_model()
    program = make_program(Case(p=2, d=2), model)
    with running(program, model) as ranks:
        tied = [
            [
                (one.number, [spec.name for spec in one.specs])
                for one in rank.executor.gradients.buckets
                if one.owners.size > 1
            ]
            for rank in ranks.here
        ]
    assert tied == [[(0, ["wte.weight"])]] * 4


@pytest.mark.parametrize("without", [(0,), (1,), (0, 1)])
def test_owners_agree_whether_a_tied_gradient_exists(
    monkeypatch: pytest.MonkeyPatch, without: tuple[int, ...]
) -> None:
    """One that no owner has stays None; one that some owner has, all have. They ask each other in the first step only."""
    model, start = make_model(), Bucket.start
    program = make_program(Case(p=2), model)
    asked: list[str] = []

    def without_some(self: Bucket) -> None:
        if self.params.world.coordinate.pp in without:
            self.present.discard("wte.weight")
        start(self)

    with running(program, model) as ranks:
        monkeypatch.setattr(Bucket, "start", without_some)
        for rank in ranks.here:
            for group in rank.world.communicators()[0]:
                ask = group.gather_objects
                monkeypatch.setattr(
                    group,
                    "gather_objects",
                    lambda one, site, ask=ask: (asked.append(site), ask(one, site))[1],
                )
        for _ in range(2):
            step(ranks, program, make_batch())
        found = [rank.params.local["wte.weight"].grad is not None for rank in ranks.here]
    assert found == [len(without) == 1] * 2
    assert asked.count("tied gradients wte.weight: which exist") == 2


def test_sums_over_tp_wait_for_the_last_action(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a backward they would come between its own calls over tp, at another place on every tensor rank."""
    small_buckets(monkeypatch)
    model, case = make_model(), Case(t=2, p=2, d=2)
    program = make_program(case, model)
    with running(program, model) as ranks:
        step(ranks, program, make_batch())
        with recording(ranks) as (recorded, record):
            step(recorded, program, make_batch())
            found = {rank.world.rank: record.of(rank.world.rank) for rank in ranks.here}
    for calls in found.values():
        sums = [(one.axis, one.site) for one in calls if one.site.startswith("gradients")]
        assert [site for axis, site in sums if axis == "tp"] == ["gradients layers.*.scale"] * 2
        last_over_dp = max(i for i, (axis, _) in enumerate(sums) if axis == "dp")
        assert last_over_dp < min(i for i, (axis, _) in enumerate(sums) if axis == "tp")
        assert all(one.phase == "step" for one in calls[-4:])


@pytest.mark.parametrize("removed", ["dp", "tp", "pp"])
def test_a_removed_sum_shows(monkeypatch: pytest.MonkeyPatch, removed: str) -> None:
    """Of all parameters over dp, of R parameters over tp, of tied ones over their owners."""
    sum_only_over(monkeypatch, *({"dp", "tp", "pp"} - {removed}))
    assert worst(FULL) > 1e-3


def test_a_tied_sum_that_owners_make_alone_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoptd.runtime.world.threads.ThreadRank.owners", lambda self, pp_ranks: self._solo)
    assert worst(FULL) > 1e-3


def test_gradients_are_added_to_those_that_are_there() -> None:
    model, expected = make_model(), reference(FULL)
    program = make_program(FULL, model)
    with running(program, model) as ranks:
        for rank in ranks.here:
            for parameter in rank.params.local.values():
                parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        step(ranks, program, make_batch())
        found = ranks.run("gradients", lambda rank: gather_gradients(rank.params))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient + 1, rtol=1e-12, atol=1e-13)


def on_all(ranks: Any, fn: Callable[[Rank], Tensor]) -> list[Tensor]:
    results: dict[int, Tensor] = {}
    ranks.run("test", lambda rank: results.update({rank.world.rank: fn(rank)}))
    return [results[rank] for rank in sorted(results)]


@pytest.mark.parametrize("case", [Case(), Case(t=2), Case(p=2), FULL], ids=str)
@pytest.mark.parametrize(("max_norm", "p"), [(1e-2, 2.0), (1e3, 2.0), (1e-3, inf), (1e-2, 1.0), (1e-2, 2.5)])
def test_norm_counts_every_parameter_once(case: Case, max_norm: float, p: float) -> None:
    model = make_model()
    model(*make_batch()).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, p)
    program = make_program(case, model)
    with running(program, model) as ranks:
        step(ranks, program, make_batch())
        for norm in on_all(ranks, lambda rank: clip_gradients(rank.params, max_norm, p)):
            torch.testing.assert_close(norm, expected, rtol=1e-13, atol=0)
        found = ranks.run("gradients", lambda rank: gather_gradients(rank.params))
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                # The factor has 36 significant bits.
                torch.testing.assert_close(found[name], parameter.grad, rtol=2e-11, atol=1e-15)


@pytest.mark.parametrize("norm_type", [0, -1.0, -inf, nan, "two", None])
def test_what_is_the_p_of_no_norm(norm_type: Any) -> None:
    assert checked_norm_type("inf") == inf and checked_norm_type(1) == 1.0
    with pytest.raises(PlanError, match=r"norm_type=.* is not a valid norm type. .*inf, 1"):
        checked_norm_type(norm_type)


@pytest.mark.parametrize("p", [2.0, inf, 1.0])
def test_norm_without_gradients_is_zero(p: float) -> None:
    model = make_model()
    program = make_program(Case(t=2, p=2), model)
    with running(program, model) as ranks:
        assert [norm.item() for norm in on_all(ranks, lambda rank: grad_norm(rank.params, p))] == [0.0] * 4


@pytest.mark.parametrize("p", [2.0, inf, 1.0])
@pytest.mark.parametrize("planted", [nan, inf, -inf])
def test_a_gradient_that_is_not_finite_shows_on_all_ranks(planted: float, p: float) -> None:
    """In the part of one rank, which may be any in the order of a maximum."""
    model = make_model()
    program = make_program(Case(t=2, p=2), model)
    with running(program, model) as ranks:
        for place in range(4):
            step(ranks, program, make_batch())
            params = ranks.here[place].params
            name = next(x.name for x in params.specs if x.name in params.counted)
            params.gradient(name).view(-1)[0] = planted
            for norm in on_all(ranks, lambda rank: grad_norm(rank.params, p)):
                assert norm.isnan() if planted != planted else norm == inf


def test_squares_are_summed_in_float64_whatever_the_dtypes() -> None:
    """Squares of these overflow float32, and those of the small ones vanish in it."""
    large = [
        torch.full((3,), 1e25),
        torch.full((4,), 2.0, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.float64),
    ]
    assert sum_of_powers(large, torch.device("cpu")).item() == pytest.approx(3e50, rel=1e-6)
    small = [torch.full((5,), 1e-30), torch.full((2, 2), 1e-30)]
    assert sum_of_powers(small, torch.device("cpu")).item() == pytest.approx(9e-60, rel=1e-6)
    mixed = sum_of_powers([*large[1:], torch.zeros(0)], torch.device("cpu"))
    assert mixed.dtype == torch.float64 and mixed.item() == 18.0
    assert sum_of_powers([torch.tensor([3.0 + 4.0j])], torch.device("cpu")).item() == 25.0


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_product_is_added_in_the_dtype_of_the_sum(dtype: torch.dtype, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    a, b = (torch.randn(64, 64, device=device).to(dtype) for _ in range(2))
    start = torch.randn(64, 64, device=device)
    total = start.clone()
    for transposed in (False, True):
        left, right = (a.t(), b.t()) if transposed else (a, b)
        total = add_mm(total, left, right, torch.float32)
        start = start.double() + left.double() @ right.double()
    torch.testing.assert_close(total.double(), start, rtol=1e-4, atol=1e-4)
