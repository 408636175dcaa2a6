"""Initial weights of a deferred model in real processes: each rank makes its own, and all are those of one device."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.forks import finish, start, told
from tests.waits import LONG

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_every_rank_makes_its_slices(ranks: int) -> None:
    found = told(Path(__file__).parent / "make_weights.py", ranks, timeout=LONG)
    assert found[0]["names"] > 20 and all(rank["other"] == [] for rank in found)
    assert all(math.isfinite(rank["loss"]) for rank in found)


@pytest.mark.thorough
def test_a_draw_from_numpy_is_a_fault_that_names_the_parameter() -> None:
    results = finish(start(Path(__file__).parent / "make_weights.py", 2, "--own-bias"), timeout=LONG)
    for code, _, err in results:
        assert code != 0
        assert "RuntimeFault" in err and "rank 1 makes other initial values of transformer.ln_f.bias" in err
        assert "numpy.random.seed(0)" in err
