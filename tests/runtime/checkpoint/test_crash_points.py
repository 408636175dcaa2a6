"""A3: wherever a save ends, the folder holds the checkpoint before it or its own, whole; bytes reach the disk in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autoptd.runtime.checkpoint import commit
from tests.forks import told
from tests.runtime.checkpoint.crash_points import Operation, operations, save, saves


def rows(folder: Path, step: int, *more: str) -> list[dict[str, Any]]:
    script = Path(__file__).parent / "crash_points.py"
    return told(script, 1, str(folder), str(step), *more, timeout=600)[0]  # type: ignore[no-any-return]


def check(found: list[dict[str, Any]]) -> None:
    committed = False
    for row in found:
        assert row["findings"] == [], row
        # From one operation on it is the new one.
        assert row["steps"] in ((2,) if committed else (1, 2)), row
        committed = row["steps"] == 2
        assert row["left"] == [], row
        assert row["then"] == 2, row
    assert committed


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_save_that_replaces_another_ends_anywhere(tmp_path: Path, step: int) -> None:
    found = rows(tmp_path, step)
    check(found)
    if step == 1:
        # Between two renames, what was there stands beside.
        assert any(row["is_beside"] for row in found)
        assert {row["operation"] for row in found} == {
            "open",
            "write",
            "fsync",
            "rename",
            "unlink",
            "mkdir",
            "rmdir",
        }


@pytest.mark.thorough
def test_a_first_save_ends_anywhere(tmp_path: Path) -> None:
    """There is no checkpoint then, or the new one."""
    for row in rows(tmp_path, 1, "first"):
        assert row.get("findings", []) == [] and row.get("steps", 2) == 2 and row["left"] == []


def first(found: list[Operation], name: str, path: str) -> int:
    return next(i for i, one in enumerate(found) if one.name == name and one.path.endswith(path))


def last(found: list[Operation], name: str, path: str) -> int:
    return max(i for i, one in enumerate(found) if one.name == name and path in one.path)


def check_order(found: list[Operation], folder: Path) -> None:
    """Files < their folder < the rename < the folder above < what is removed."""
    commits = [i for i, one in enumerate(found) if one.name == "rename" and ".part-" in Path(one.path).name]
    [committed] = commits
    inside = [one for one in found[:committed] if ".part-" in one.path and one.name == "write"]
    for path in {one.path for one in inside}:
        assert last(found, "write", path) < last(found, "fsync", path) < committed, path
    part = found[committed].path
    of_folder = max(i for i, one in enumerate(found) if one == Operation("fsync", part))
    changes = [i for i, one in enumerate(found) if one.path.startswith(part + "/")]
    assert max(changes) < of_folder < committed
    above = [i for i, one in enumerate(found) if one == Operation("fsync", str(folder.parent))]
    assert max(above) > committed
    removed = [i for i, one in enumerate(found) if one.name in ("unlink", "rmdir") and ".old-" in one.path]
    assert removed and min(removed) > max(above)


def test_bytes_reach_the_disk_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = saves((1, 2))
    save(tmp_path / "saved", before)
    found = operations(tmp_path / "saved", after)
    check_order(found, tmp_path / "saved")
    assert len(found) > 40
    # The same with the folder synced behind the rename: this test sees it.
    sync = commit.sync_folder
    monkeypatch.setattr(commit, "sync_folder", lambda path: None if ".part-" in path.name else sync(path))
    with pytest.raises((AssertionError, ValueError)):
        check_order(operations(tmp_path / "saved", after), tmp_path / "saved")
