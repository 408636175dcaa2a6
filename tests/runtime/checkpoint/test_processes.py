"""Checkpoints of real processes over gloo: resumed to the bit, read by another mesh, and errors that all ranks share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forks import told

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("ranks", [2, pytest.param(8, marks=pytest.mark.thorough)])
def test_processes_save_and_resume(tmp_path: Path, ranks: int) -> None:
    script = Path(__file__).parent / "save_and_resume.py"
    found = told(script, ranks, str(tmp_path))[0]
    went_on, resumed, other = found["losses"]
    assert resumed == went_on
    assert max(abs(one - two) for one, two in zip(other, went_on, strict=True)) <= 1e-12
    differs, none, state, in_thread, changed = found["errors"]
    assert "got the folder" in differs and "there is no such folder" in none
    fact = "extra['loader']: its state_dict raised KeyError: 'position'"
    assert state.startswith(f"{fact} (on rank 1).") and f"a save failed: rank 1: {fact}." in in_thread
    assert "__1_0.distcp" in changed and "was changed after it was written" in changed
