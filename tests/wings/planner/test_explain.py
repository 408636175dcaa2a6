"""The explanation says what the table and the searches behind it say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autoptd.wings.planner.candidates import Candidate
from autoptd.wings.planner.plan import Plan, plan
from tests.wings.planner.test_plan import GPT_22B, SMALL


def percent(text: str, before: str) -> float:
    """The number before a word, of `12.3% more`."""
    return float(text.split(before)[0].rsplit(" ", 1)[-1].rstrip("%")) / 100


def test_explain_says_what_the_table_says() -> None:
    found = plan(GPT_22B, gpus=64, batch=128, recompute="full", precision="bf16")
    lines = found.explain().splitlines()
    best, next_ = found.candidates[:2]
    assert lines[0].startswith(f"Chosen: {best.name}: {best.seconds:.4g} s")
    assert lines[3].startswith(f"Next: {next_.name}: {next_.seconds:.4g} s, ")
    assert percent(lines[3], " more") == pytest.approx(next_.seconds / best.seconds - 1, abs=6e-3)
    apart = {name: next_.seconds_by[name] - best.seconds_by[name] for name in best.seconds_by}
    worst = max(apart, key=lambda name: apart[name])
    meaning = {"tp_comm": "communication of tensor ranks", "dp_comm": "communication of data ranks"}
    meaning |= {
        "bubble": "the pipeline bubble",
        "compute": "computation",
        "pp_comm": "messages between pipeline stages",
    }
    assert f"The difference is {meaning[worst]}: {apart[worst]:.3g} s more" in lines[3]
    assert "up to 8.2% in measurements" in lines[4]  # SC'21's points: from 4.2% too low to 3.7% too high
    close = sum(one.seconds <= 1.037 / 0.958 * best.seconds for one in found.candidates[1:])
    assert (f"{close} more of the {len(found.candidates)} listed" in lines[4]) == (close > 0)
    assert str(found).splitlines()[2].split()[1:4] == [
        f"{best.seconds:.4g}",
        f"{best.flops_per_gpu / 1e12:.1f}",
        f"{best.bytes / 1e9:.1f}",
    ]


def best_where(found: Plan, keep: Any) -> Candidate | None:
    """The fastest candidate that satisfies a test on its degrees, by going through all."""
    model: Any = found.model
    configs, asked = model.configs(), model.request.only(model.configs().columns)
    chosen = np.flatnonzero((configs.reason < 0) & asked)
    columns = {name: values[chosen] for name, values in configs.columns.items()}
    where, added = model.variants(columns)
    rows = {**{name: values[where] for name, values in columns.items()}, **added}
    held, seconds = model.memory_bytes(rows), model.seconds(rows)
    wanted = np.array(
        [keep({name: int(values[at]) for name, values in rows.items()}) for at in range(len(where))]
    )
    seconds = np.where(wanted & (held <= model.capacity_bytes), seconds, np.inf)
    at = int(np.argmin(seconds))
    return (
        model.candidate({name: int(values[at]) for name, values in rows.items()})
        if np.isfinite(seconds[at])
        else None
    )


def test_takeaways_are_searched_for() -> None:
    """Each takeaway's alternative is the best of its kind, found here by going through all candidates."""
    found = plan(GPT_22B, gpus=64, batch=128, recompute="full", precision="bf16")
    one, two, three = found.explain().splitlines()[5:8]
    t, size, b = (
        found.best.degrees["t"],
        found.best.degrees["t"] * found.best.degrees["p"],
        found.best.degrees["b"],
    )
    assert t <= 8
    assert "takeaway 1" in one and f"holds: t={t}. With t over 8" in one
    for text, keep in (
        (one, lambda row: row["t"] > 8),
        (two.split("With more")[1], lambda row: row["t"] * row["p"] > size),
        (three.split("With a larger one")[1], lambda row: row["b"] > b),
    ):
        other = best_where(found, keep)
        if other is None:
            assert "nothing fits" in text
            continue
        assert other.name in text or f"{other.seconds:.4g}" == f"{best_named(found, text):.4g}"
        apart = other.seconds / found.best.formula_seconds - 1
        assert percent(text, " more") == pytest.approx(apart, abs=6e-3)
    fewer = best_where(found, lambda row: row["t"] * row["p"] < size)
    assert (f"t*p={size} is the least that fits" in two) == (fewer is None)


def best_named(found: Plan, text: str) -> float:
    """Seconds of the candidate that a sentence names in parentheses, for ties."""
    degrees = dict(part.split("=") for part in text.split("(")[-1].split(",")[0].split())
    other = best_where(
        found, lambda row: all(row[name] == int(value) for name, value in degrees.items() if name != "m")
    )
    assert other is not None
    return other.seconds


def test_what_was_asked_for_is_no_limit_of_the_memory() -> None:
    """Pins are told of as pins: t=1 fits, it was not asked for."""
    found = plan(SMALL, gpus=64, batch=64, t=8, p=4, microbatch=1)
    one, two, three = found.explain().splitlines()[-3:]
    assert "nothing fits" not in found.explain() and "least that fits" not in found.explain()
    assert "With t over 8 a step takes" in one and one.endswith("outside of the request.")
    assert "is excluded by the request: less than t*p=32 fits. With less a step takes" in two
    best = plan(SMALL, gpus=64, batch=64).best
    assert f"less ({best.name}), outside of the request. With more" in two
    assert "With a larger one a step takes" in three and three.endswith("outside of the request.")
    some = plan(SMALL, gpus=64, batch=64, t=(4, 8), p=4)
    assert (some.best.degrees["t"], "does not hold" in some.explain()) == (4, False)


def test_doubt_is_said_where_nothing_was_compared() -> None:
    for cluster, software, precision in (
        ("dgx-b200", None, "bf16"),
        ("dgx-a100", "autoptd", "bf16"),
        ("dgx-a100", None, "fp32"),
    ):
        told = plan(SMALL, gpus=8, batch=8, cluster=cluster, software=software, precision=precision).explain()
        assert "none was measured" in told and "in measurements" not in told
    assert (
        "up to 87% in measurements"
        in plan({**SMALL, "layers": 2}, gpus=2, batch=8, cluster="laptop-cpu").explain()
    )


def test_one_gpu_and_one_node() -> None:
    assert "nothing to divide: the only choice" in plan(SMALL, gpus=1, batch=8).explain()
    assert "all GPUs share a node" in plan(SMALL, gpus=8, batch=8).explain()
