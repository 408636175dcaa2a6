"""Plans: the search over the default model is exact, what a plan says is what the model says, and the runtime
reads it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autoptd
from autoptd.errors import InternalError, PlanError
from autoptd.ir.actions import SCHEDULES
from autoptd.options import NOT_YET, make_options
from autoptd.wings.planner import candidates
from autoptd.wings.planner.candidates import DefaultModel
from autoptd.wings.planner.cluster import find_cluster
from autoptd.wings.planner.estimate import WRITTEN, estimate
from autoptd.wings.planner.plan import plan
from autoptd.wings.planner.predict import predict
from autoptd.wings.planner.request import ANY_SCHEDULE, make_request
from autoptd.wings.planner.search import NOT_ASKED, OUT_OF_MEMORY, search
from autoptd.wings.planner.setting import Setting
from tests.parity.models import batch, gpt
from tests.wings.planner.test_search import as_rows, everything, is_bounded

SMALL = {"layers": 12, "hidden": 1024, "heads": 16, "seq": 1024}
GPT_22B = {"layers": 48, "hidden": 6144, "heads": 64, "seq": 2048}


@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from([SMALL, GPT_22B]),
    st.sampled_from([1, 6, 8, 24]),
    st.sampled_from([8, 24]),
    st.sampled_from([8e9, 80e9, 800e9]),
    st.sampled_from([None, "any", "full"]),
    st.sampled_from([None, "any", 1]),
    st.sampled_from(["ranks", "any"]),
    st.sampled_from([None, "gpipe", "interleaved", "zb_h1", "any"]),
)
def test_search_is_exact(shape, gpus, rows, memory, recompute, zero, placement, schedule) -> None:  # type: ignore[no-untyped-def]
    constraints = {
        "memory": memory,
        "recompute": recompute,
        "zero": zero,
        "placement": placement,
        "schedule": schedule,
    }
    request = make_request(
        shape, gpus=gpus, cluster="dgx-a100", batch=rows, c=(1, 2), precision="bf16", **constraints
    )
    model = DefaultModel(request)
    assert as_rows(search(model, 6, at_once=8)) == everything(model, 6)
    assert is_bounded(model)


def test_pins_are_kept() -> None:
    found = plan(SMALL, gpus=16, batch=64, t=(2, 4), p=2, microbatch=1)
    assert {(one.degrees["t"], one.degrees["p"], one.degrees["b"]) for one in found.candidates} <= {
        (2, 2, 1),
        (4, 2, 1),
    }
    assert found.rejected[NOT_ASKED] > 0
    free = plan(SMALL, gpus=16, batch=64)
    assert free.best.seconds <= found.best.seconds
    assert NOT_ASKED not in free.rejected


def test_the_table_has_a_column_for_each_term_that_counts() -> None:
    """Seconds, TFLOP/s and GB, then where the seconds go, in the order of a step; what is 0 in all plans is left out."""
    _, head, *_ = str(plan(SMALL, gpus=1, batch=8)).splitlines()
    assert head.split() == ["seconds", "TFLOP/s", "GB", "compute", "recompute", "optimizer", "plan"]
    _, head, *rows = str(plan(SMALL, gpus=16, batch=64, t=2, p=2, recompute="full")).splitlines()
    parts = ["compute", "recompute", "tensor", "pipeline", "bubble", "data", "optimizer"]
    assert head.split() == ["seconds", "TFLOP/s", "GB", *parts, "plan"]
    # Numbers end where their names do.
    ends = [head.index(name) + len(name) for name in ("seconds", "TFLOP/s", "GB", *parts)]
    assert all(row[end - 1] in "0123456789%" and row[end] == " " for row in rows[:5] for end in ends)


def test_best_is_what_predict_says() -> None:
    """The choice's seconds, bytes and parts are those of `predict`; the listed ones are in order."""
    found = plan(GPT_22B, gpus=64, batch=128, recompute="full", precision="bf16")
    best = found.best
    degrees = {name: best.degrees[name] for name in ("t", "p", "d", "c", "v")}
    options = {
        name: best.options[name]
        for name in ("schedule", "recompute", "sequence_parallel", "zero", "precision")
    }
    said = predict(GPT_22B, "dgx-a100", **degrees, microbatch=best.degrees["b"], batch=128, **options)
    assert best.is_simulated
    assert best.seconds == pytest.approx(said.step_seconds, rel=1e-9)
    assert best.bytes == pytest.approx(max(said.memory), rel=1e-9)
    assert best.flops_per_gpu == pytest.approx(said.flops_per_gpu, rel=1e-9)
    assert best.degrees["m"] == said.num_microbatches
    assert sum(best.seconds_by.values()) == pytest.approx(best.seconds)
    assert [one.seconds for one in found.candidates] == sorted(one.seconds for one in found.candidates)
    assert all(one.bytes <= found.capacity_bytes for one in found.candidates)
    assert best.degrees["t"] * best.degrees["p"] * best.degrees["d"] == 64


def test_closed_form_and_simulation_agree() -> None:
    """On what the search lists; that is what makes its order worth something."""
    model = DefaultModel(
        make_request(GPT_22B, gpus=64, cluster="dgx-a100", batch=128, precision="bf16", zero=1)
    )
    found = search(model, 12)
    for at in range(0, len(found), 3):
        row = {name: int(values[at]) for name, values in found.columns.items()}
        simulated = model.simulated(row)
        assert simulated.formula_seconds == pytest.approx(found.seconds[at])
        assert simulated.seconds == pytest.approx(found.seconds[at], rel=0.03)
        assert simulated.bytes == pytest.approx(found.memory[at], rel=0.05)


def test_what_does_not_fit_when_simulated_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formulas that are wrong by a tenth: nothing is returned that does not fit, and where nothing does, that
    is said.
    """
    right = candidates.fullest_bytes
    monkeypatch.setattr(candidates, "fullest_bytes", lambda *asked: 0.9 * right(*asked))
    way: dict[str, Any] = {"t": 8, "p": 8, "d": 1, "v": 3, "microbatch": 1}
    needed = max(
        predict(GPT_22B | {"seq": 1024}, "dgx-a100", **way | {"batch": 31, "precision": "fp16"}).memory
    )
    asked: dict[str, Any] = {"gpus": 64, "batch": 31, "precision": "fp16", "memory": 0.95 * needed}
    shape = GPT_22B | {"seq": 1024}
    with pytest.raises(PlanError, match="the smallest simulated candidate") as caught:
        plan(shape, **asked, **way, sequence_parallel=False, recompute="none")
    assert "recompute" in caught.value.remedy
    free = plan(shape, **asked)
    assert free.best.is_simulated and free.best.bytes <= free.capacity_bytes


def test_what_is_planned_is_in_the_plan() -> None:
    """ZeRO is not tried unless asked for."""
    usual = plan(SMALL, gpus=8, batch=32)
    assert all(one.options["zero"] == 0 and not one.not_yet for one in usual.candidates)
    asked = plan(SMALL, gpus=8, batch=32, recompute="full", zero=2, precision="fp16", d=8)
    assert asked.best.not_yet == {}
    record = asked.record()
    assert set(record["options"]) == {"sequence_parallel", "precision", "recompute", "zero"}
    assert "* needs" not in str(asked)


def test_precision_and_zero_that_the_runtime_has_are_planned_for_it() -> None:
    asked = plan(SMALL, gpus=8, batch=32, zero=1, precision="bf16", d=8)
    options = make_options(plan=asked.record())
    assert (options.zero.stage, options.precision, asked.best.not_yet) == (1, "bf16", {})
    # 2 for the weight, 4 for the gradient, 12 for float32 weight and moments, of which each of 8 replicas has a part.
    assert options.state_bytes(2).total == 6 + 12 / 8


@pytest.mark.parametrize(
    "constraints", [{}, {"p": 2, "v": 2}, {"t": 2, "sequence_parallel": True}, {"schedule": "gpipe", "p": 4}]
)
def test_options_read_the_plan(constraints: dict[str, Any], tmp_path: Path) -> None:
    found = plan(SMALL, gpus=8, batch=64, **constraints)
    found.save(tmp_path / "plan.json")
    options = make_options(plan=tmp_path / "plan.json")
    best = found.best.degrees
    assert (options.t, options.p, options.d, options.v) == tuple(best[name] for name in "tpdv")
    assert (options.num_microbatches, options.schedule) == (best["m"], found.best.options["schedule"])
    assert options.sequence_parallel == found.best.options["sequence_parallel"]
    with pytest.raises(PlanError, match="the plan sets t="):
        make_options(plan=found.record(), t=best["t"] + 1)


def test_compile_runs_the_plan() -> None:
    """A plan of a small model, in the hands of the compiler."""
    model, rows = gpt(2), 8
    shape = {"layers": 2, "hidden": 32, "heads": 4, "seq": 8, "vocab": 64}
    found = plan(shape, gpus=4, batch=rows, p=2, cluster="dgx-a100")
    program = autoptd.compile(model, example_inputs=batch(rows), plan=found.record())
    best = found.best.degrees
    assert program.plan["mesh"] == {name: best[name] for name in "tpdv"}
    assert program.plan["num_microbatches"] == best["m"]
    assert "planner" not in program.plan


@pytest.mark.parametrize("schedule", ["zbv", "zb_h1", "zb_2p", "gpipe", "looped_bfs"])
def test_schedules(schedule: str) -> None:
    """Whatever formula a schedule has, what leads is simulated, and the runtime takes it."""
    found = plan(SMALL, gpus=4, batch=32, schedule=schedule)
    assert [one.is_simulated for one in found.candidates[:3]] == [True] * 3
    assert str(make_options(plan=found.record()).schedule) == schedule


def test_any_context() -> None:
    found = plan({**SMALL, "seq": 8192}, gpus=8, batch=2, c="any")
    c = found.best.degrees["c"]
    assert c > 1 and f" c={c} " in found.best.name
    assert found.best.not_yet.get("c") == (c if "c" in NOT_YET else None)
    assert {one.degrees["c"] for one in plan({**SMALL, "seq": 8192}, gpus=8, batch=2).candidates} == {1}


def test_any_schedule() -> None:
    """The best over all schedules is the best of the best of each.

    The listed ones run with what they are listed with.
    """
    constraints = {"gpus": 8, "batch": 16, "t": 1, "p": 8, "precision": "bf16", "cluster": "dgx-h100"}
    shape = GPT_22B | {"layers": 16}
    found = plan(shape, **constraints, schedule="any", keep=40, memory=400e9)
    requests = [make_request(shape, **constraints, schedule=name, memory=400e9) for name in ANY_SCHEDULE]
    each = [search(DefaultModel(request), 1, request.only).seconds[0] for request in requests]
    assert found.found.seconds[0] == min(each)
    named = {one.options["schedule"] for one in found.candidates}
    assert named == set(ANY_SCHEDULE)
    for one in found.candidates:
        runs = SCHEDULES[one.options["schedule"]]
        assert one.degrees["v"] == runs if runs else one.degrees["v"] > 1
        assert (one.options["schedule"] in one.name) == (
            one.options["schedule"] not in ("1f1b", "interleaved")
        )
    assert str(make_options(plan=found.record()).schedule) == found.best.options["schedule"]
    assert {one.options["schedule"] for one in plan(SMALL, gpus=1, batch=4, schedule="any").candidates} == {
        "1f1b"
    }
    two = plan(SMALL, gpus=8, batch=64, p=4, schedule=("gpipe", "zbv"), keep=100)
    assert {one.options["schedule"] for one in two.candidates} == {"gpipe", "zbv"}


def test_gpipe_is_never_better_than_1f1b() -> None:
    """In seconds and bytes, by the closed form: why "any" leaves it out."""
    degrees = {"t": np.array([1, 2, 8, 1]), "p": np.array([1, 2, 4, 8]), "d": np.array([2, 1, 1, 2])}
    found = [
        estimate(GPT_22B, "dgx-a100", Setting(**degrees, batch=32, schedule=name))
        for name in ("gpipe", "1f1b")
    ]
    assert (found[0].step_seconds == found[1].step_seconds).all()
    assert (found[0].memory_bytes >= found[1].memory_bytes).all()


def test_every_schedule_has_formulas() -> None:
    """A new one would otherwise get those of 1F1B."""
    assert set(WRITTEN) == set(SCHEDULES)
    with pytest.raises(InternalError, match="no formula"):
        estimate(GPT_22B, "dgx-a100", Setting(t=1, p=2, d=1, batch=32, schedule="foo"))


@pytest.mark.parametrize(
    ("constraints", "site"),
    [
        ({"cost_model": "subramanian"}, "cost_model"),
        ({"gpus": 0}, "gpus"),
        ({"batch": True}, "batch"),
        ({"t": 0}, "t=0"),
        ({"recompute": "some"}, "recompute"),
        ({"zero": 4}, "zero"),
        ({"precision": "int3"}, "precision"),
        ({"schedule": "2f2b"}, "schedule"),
        ({"placement": "here"}, "placement"),
        ({"memory": -1}, "memory"),
        ({"keep": 0}, "keep"),
        ({"q": 3}, "q="),
    ],
)
def test_refused(constraints: dict[str, Any], site: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan(SMALL, **{"gpus": 8, "batch": 8, **constraints})
    assert site in caught.value.site


def test_same_question_same_answer() -> None:
    records = [json.dumps([plan(SMALL, gpus=24, batch=48).record(at) for at in range(3)]) for _ in range(2)]
    assert records[0] == records[1]


def test_rejections_add_up() -> None:
    found = plan(GPT_22B, gpus=64, batch=64, precision="bf16", cluster=find_cluster("dgx-a100"))
    assert found.found.configs == found.found.fitting + sum(found.rejected.values())
    assert found.rejected[OUT_OF_MEMORY] > 0
    assert all(f"{count:,d}  {reason}" in str(found) for reason, count in found.rejected.items())
