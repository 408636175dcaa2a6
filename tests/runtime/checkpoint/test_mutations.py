"""Defects that must show: each one is put in, and the round trip of `test_save_and_load.py` finds it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoptd.errors import AutoptdError
from autoptd.ir.rectangles import Item, Run, own_runs
from autoptd.program import pieces
from autoptd.program.pieces import Shares, share_stage
from autoptd.runtime.checkpoint import stage
from autoptd.runtime.checkpoint.restore import Restoration
from tests.runtime.checkpoint.test_save_and_load import round_trip

PLAIN: tuple[dict[str, Any], dict[str, Any]] = ({"t": 2, "p": 2}, {"t": 4})
ZERO: tuple[dict[str, Any], dict[str, Any]] = ({"d": 2, "zero": 1}, {"d": 2, "zero": 1})
MIXED: tuple[dict[str, Any], dict[str, Any]] = ({"d": 2, "precision": "bf16"}, {"precision": "bf16", "t": 2})
Patch = pytest.MonkeyPatch


def padding_is_written(patch: Patch) -> None:
    def mutated(size: int, blocks: Any, index: int, degree: int, is_padded: bool = False) -> list[Run]:
        runs = own_runs(size, blocks, index, degree, is_padded)
        width = -(-size // degree)
        return [Run(index * width, 0, width)] if is_padded else runs

    patch.setattr(pieces, "own_runs", mutated)


def a_segment_is_dropped(patch: Patch) -> None:
    def mutated(*args: Any) -> list[Run]:
        runs = own_runs(*args)
        return runs[:-1] if len(runs) == 3 else runs

    patch.setattr(pieces, "own_runs", mutated)


def a_replica_writes_what_another_has(patch: Patch) -> None:
    def mutated(program: Any, pipeline_rank: int, keys: Any) -> Shares:
        shares = share_stage(program, pipeline_rank, keys)
        items: dict[int, list[Item]] = dict.fromkeys(shares.items, shares.items[min(shares.items)])
        return Shares(items, shares.first)

    patch.setattr(stage, "share_stage", mutated)


def moments_are_not_loaded(patch: Patch) -> None:
    patch.setattr(Restoration, "_set_state", lambda self: None)


def the_other_owner_keeps_its_own(patch: Patch) -> None:
    patch.setattr(Restoration, "_spread_tied", lambda self: None)


def copies_keep_their_own(patch: Patch) -> None:
    patch.setattr(Restoration, "_spread_copies", lambda self: None)


DEFECTS: list[tuple[Callable[[Patch], None], tuple[dict[str, Any], dict[str, Any]]]] = [
    (padding_is_written, ({"t": 2, "p": 2}, {})),
    (a_segment_is_dropped, PLAIN),
    (a_replica_writes_what_another_has, ({"d": 2}, {})),
    (moments_are_not_loaded, PLAIN),
    (the_other_owner_keeps_its_own, ({"t": 2}, {"p": 2})),
    (copies_keep_their_own, ({}, {"d": 2})),
]


@pytest.mark.parametrize(("defect", "meshes"), DEFECTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_defect_is_found(
    tmp_path: Path, monkeypatch: Patch, defect: Callable[[Patch], None], meshes: tuple[Any, Any]
) -> None:
    defect(monkeypatch)
    with pytest.raises((AssertionError, AutoptdError)):
        round_trip(tmp_path, *meshes)
