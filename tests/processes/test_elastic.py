"""`d="auto"`: a run is started again on another number of ranks, and its losses are those of the uninterrupted run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.forks import finish, start, told

HERE = Path(__file__).parent

pytestmark = pytest.mark.processes


def run(ranks: int, folder: Path, last: int) -> dict[str, Any]:
    return told(HERE / "elastic.py", ranks, str(folder), str(last))[0]  # type: ignore[no-any-return]


def test_fewer_ranks_go_on_with_the_same_global_batches(tmp_path: Path) -> None:
    whole = run(4, tmp_path / "whole", 8)
    parts = [run(4, tmp_path / "parts", 4), run(2, tmp_path / "parts", 6), run(4, tmp_path / "parts", 8)]
    assert [(one["t"], one["d"], one["m"]) for one in parts] == [(2, 2, 4), (2, 1, 4), (2, 2, 4)]
    # Each goes on where the one before it had saved.
    assert [list(one["losses"]) for one in parts] == [["1", "2", "3", "4"], ["5", "6"], ["7", "8"]]
    found = {step: loss for one in parts for step, loss in one["losses"].items()}
    assert len(set(found.values())) == len(found) == 8
    assert max(abs(found[step] - loss) for step, loss in whole["losses"].items()) <= 1e-12


def test_ranks_that_t_does_not_divide_all_tell(tmp_path: Path) -> None:
    results = finish(start(HERE / "elastic.py", 3, str(tmp_path), "1"), 120)
    assert all(code and 'd="auto": 3 ranks do not divide over t=2' in err for code, _, err in results), (
        results
    )
