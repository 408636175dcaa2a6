"""Runs of real processes: killed at random, asked to end by a signal, restarted with other numbers of ranks."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

import autoptd
from tests.forks import told
from tests.parity.models import gpt
from tests.runtime.checkpoint.forked_runs import ROWS, Texts

HERE = Path(__file__).parent
FOUR, EIGHT = {"t": 2, "p": 2}, {"t": 2, "p": 2, "d": 2}
PHASES = ("forward", "write", "optimizer", "evaluation", "compile")

pytestmark = pytest.mark.processes


def forked(what: str, meshes: Any, *rest: str, timeout: float = 300.0) -> Any:
    """What `forked_runs.py` found."""
    return told(HERE / "forked_runs.py", 1, what, json.dumps(meshes), *rest, timeout=timeout)[0]


@pytest.mark.parametrize(
    "mesh, count",
    [(FOUR, 2), pytest.param(EIGHT, 30, marks=pytest.mark.thorough)],
    ids=["4 ranks", "8 ranks"],
)
def test_a_run_that_is_killed_again_and_again_ends_as_if_it_was_not(mesh: dict[str, int], count: int) -> None:
    # 30 lives of 8 ranks: three minutes by themselves, over fifteen beside another worker on two cores.
    found = forked("kills", mesh, str(count), timeout=2400.0)
    assert set(found["codes"]) == {0} and found["equal"], found
    # What was complete when the rest of the run was killed is where the next one began, at least.
    assert len(found["resumed"]) == count + 1 and found["resumed"][0] == 0
    assert all(begun >= last for last, begun in zip(found["committed"], found["resumed"][1:], strict=True)), (
        found
    )
    assert found["resumed"][-1] > 0, "no save was ever complete: nothing was tried"
    assert not [name for name in found["names"] if ".part-" in name or ".gone-" in name], found["names"]


@pytest.mark.parametrize(
    "mesh, phases",
    [(FOUR, PHASES[:1]), pytest.param(EIGHT, PHASES, marks=pytest.mark.thorough)],
    ids=["4 ranks", "8 ranks"],
)
def test_a_signal_to_one_rank_lets_all_save_the_same_step_and_end(
    mesh: dict[str, int], phases: tuple[str, ...]
) -> None:
    found = forked("signals", mesh, *phases, timeout=900.0)
    assert [one["phase"] for one in found] == list(phases)
    for one in found:
        assert set(one["codes"]) == {0}, one
        (step,) = {rank["steps"] for rank in one["said"]}
        assert one["names"][-1] == f"step-{step:08d}", one
        # Seen in this step, in the next one where it came behind the loss; the thread that writes may be later.
        assert one["phase"] == "write" or step in (3, 4), one


@pytest.mark.thorough
def test_eight_ranks_go_on_as_four_and_then_as_six() -> None:
    """The same global batches, and the losses of one device."""
    found = forked("meshes", [EIGHT, {"t": 2, "p": 2}, {"t": 2, "p": 3}], timeout=900.0)
    model, data = gpt(2).double(), Texts()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = autoptd.Batches(data, ROWS, 1)
    wanted = []
    for step in range(12):
        columns = zip(*(data[row] for row in batches.rows_of(step)), strict=True)
        loss = model(*(torch.stack(column) for column in columns))[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        wanted.append(loss.item())
    for number, (codes, ranks) in enumerate(found):
        assert set(codes) == {0}, ranks
        rows: dict[int, list[list[int]]] = {}
        for began, ended in ranks:
            assert began["resumed"] == 4 * number
            here = wanted[4 * number : 4 * number + 4]
            assert max(abs(a - b) for a, b in zip(ended["losses"], here, strict=True)) <= 1e-9
            assert rows.setdefault(ended["replica"], ended["rows"]) == ended["rows"]
        for step in range(4):
            own = list(chain(*(rows[replica][step] for replica in sorted(rows))))
            assert own == batches.rows_of(4 * number + step)
