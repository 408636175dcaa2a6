"""Sub-axes: names, groups, and the types and conversions of values over them."""

from __future__ import annotations

import pytest

from autoptd.errors import InternalError
from autoptd.ir.layout import BATCH, Layout, copy_axes, shard_places, steps
from autoptd.ir.mesh import Mesh, SubAxis, base, covers, parse_sub_axis
from autoptd.ir.types import I, P, R, S
from autoptd.program.calls import axis_text

SLOW, FAST = "tp:(1)2", "tp:(2)4"
KEYS = Layout({SLOW: S(2, 0), FAST: R})
QUERIES = Layout({SLOW: S(2, 0), FAST: S(2, 1)})
HEADS = ((2,), (6,), (2, 4, 16))


def test_a_name_says_which_factor_it_is() -> None:
    assert (
        str(SubAxis("tp", 2, 4)) == FAST
        and parse_sub_axis(FAST) == ("tp", 2, 4)
        and base(FAST) == base("tp") == "tp"
    )
    with pytest.raises(InternalError):
        parse_sub_axis("tp:2")


@pytest.mark.parametrize(
    ("axis", "part", "expected"),
    [
        ("tp", "tp", True),
        ("tp", FAST, True),
        (FAST, "tp", False),
        (FAST, "tp:(4)2", True),
        (FAST, "tp:(2)2", True),
        (SLOW, FAST, False),
        ("dp", FAST, False),
    ],
)
def test_what_covers_what(axis: str, part: str, expected: bool) -> None:
    assert covers(axis, part) is expected


def test_the_parts_of_an_axis_are_as_few_as_can_be() -> None:
    mesh = Mesh(t=8)
    assert mesh.parts("tp", []) == mesh.parts("tp", ["tp"]) == ("tp",)
    assert mesh.parts("tp", [SLOW]) == (SLOW, FAST)
    assert mesh.parts("tp", [SLOW, "tp:(4)2"]) == (SLOW, "tp:(2)2", "tp:(4)2")
    assert Mesh(t=6).parts("tp", ["tp:(1)2", "tp:(1)3"]) == ()


@pytest.mark.parametrize(
    "mesh", [Mesh(t=8), Mesh(t=8, d=2, p=3), Mesh(t=8, d=2, p=3, order="dp-tp-pp")], ids=str
)
def test_groups_of_sub_axes_are_a_grid_of_the_axis(mesh: Mesh) -> None:
    for axis in (SLOW, FAST):
        groups = mesh.groups((axis,))
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
        assert {len(group) for group in groups} == {mesh.degree(axis)}
        assert all(axis_text(mesh, group) == axis for group in groups)
    for rank in range(mesh.size):
        place = mesh.coordinate(rank)["tp"]
        assert mesh.group(rank, (SLOW,)).index(rank) == place // 4
        assert mesh.group(rank, (FAST,)).index(rank) == place % 4
        assert mesh.group(rank, (SLOW, FAST)) == mesh.group(rank, ("tp",))
        assert mesh.group(rank, ("tp:(1)8",)) == mesh.group(rank, ("tp",))


def test_a_layout_knows_types_over_parts() -> None:
    mesh = Mesh(t=8)
    assert KEYS[SLOW] == S(2, 0) and KEYS[FAST] == KEYS["tp:(4)2"] == R
    assert Layout({"tp": P})[FAST] == P
    with pytest.raises(InternalError, match="no type over all of tp"):
        KEYS["tp"]
    assert KEYS.local_shape(HEADS, mesh) == (2, 6, 64) and KEYS.pieces(mesh) == 2
    assert QUERIES.local_shape(HEADS, mesh) == (2, 6, 16) and QUERIES.pieces(mesh) == 8
    assert (KEYS.letter, Layout({FAST: R}).letter, Layout({BATCH: S(0, 0)}).letter) == ("S", "R", "I")
    assert KEYS.text(HEADS) == "S(tp:(1)2, dim 2: [2] x 4 x 16), R(tp:(2)4)"


def test_which_ranks_hold_the_same() -> None:
    mesh = Mesh(t=8, d=2)
    assert copy_axes(KEYS, mesh) == [FAST] and copy_axes(QUERIES, mesh) == []
    assert copy_axes(Layout({SLOW: S(0, 0)}), mesh) == [FAST] and copy_axes(Layout(), mesh) == ["tp"]


def test_neighbouring_atoms_are_one_chunk() -> None:
    mesh = Mesh(t=8)
    assert QUERIES.chunk_axis(HEADS, mesh) == "tp" and KEYS.chunk_axis(HEADS, mesh) == SLOW
    apart = Layout({SLOW: S(2, 0), FAST: S(2, 2)})
    assert not apart.is_chunk(HEADS) and not Layout({SLOW: S(2, 1), FAST: S(2, 0)}).is_chunk(HEADS)
    with pytest.raises(InternalError, match="consecutive"):
        apart.chunk_axis(HEADS, mesh)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (KEYS, KEYS, []),
        (Layout({"tp": R}), KEYS, ["tp:(1)2 R S 1"]),
        (Layout(), KEYS, ["tp:(1)2 I S 1", "tp:(2)4 I R 2"]),
        (Layout({"tp": P}), KEYS, ["tp:(1)2 P S 1", "tp:(2)4 P R 2"]),
        (KEYS, Layout(), ["tp:(2)4 R I 2", "tp:(1)2 S I 1"]),
        (QUERIES, Layout({"tp": R}), ["tp:(2)4 S R 2", "tp:(1)2 S R 1"]),
        (QUERIES, KEYS, ["tp:(2)4 S R 2"]),
        (Layout({"tp": P}), Layout(), ["tp P I 1"]),
        (Layout({"tp": S(1, 0)}), Layout({"tp": R}), ["tp S R 1"]),
        (Layout({"tp": S(1, 0)}), KEYS, None),
        (KEYS, Layout({"tp": S(1, 0)}), None),
        (Layout({"tp:(1)4": S(1, 0), "tp:(4)2": R}), KEYS, None),
    ],
    ids=str,
)
def test_conversions_over_sub_axes(source: Layout, target: Layout, expected: list[str] | None) -> None:
    """Slow factors are cut first and gathered last."""
    found = steps("tp", source, target, Mesh(t=8))
    if expected is None or found is None:
        assert found is expected
        return
    shown = [f"{step.axis} {step.before.kind} {step.after.kind} {step.others}" for step in found]
    assert shown == expected and (not found or found[-1].layout == target)


def test_blocks_are_those_of_what_other_axes_leave() -> None:
    mesh = Mesh(t=8)
    assert shard_places(HEADS, FAST, (QUERIES, KEYS), mesh) == (2, 1)
    assert shard_places(HEADS, FAST, (Layout({FAST: S(2, 1)}),), mesh) == (2, 2)
    assert I not in (kind for _, kind in Layout({SLOW: I}).types)
