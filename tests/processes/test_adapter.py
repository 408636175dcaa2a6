"""Adapters over processes: every rank reads its own part, rank 0 writes, and all ranks refuse what one cannot read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forks import told
from tests.parity.test_peft import adapted

pytestmark = pytest.mark.processes


@pytest.mark.thorough
def test_processes_load_and_save_an_adapter(tmp_path: Path) -> None:
    adapted("LoRA").save_pretrained(tmp_path / "given")  # type: ignore[operator]
    found = told(Path(__file__).parent / "share_an_adapter.py", 4, str(tmp_path))
    assert all(rank["is_same"] for rank in found) and len({rank["loss"] for rank in found}) == 1
    for rank in found:
        assert "there is no such folder (on rank 3)" in rank["said"]
