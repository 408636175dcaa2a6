from itertools import product

import pytest

from autoptd.ir.mesh import Coordinate, Mesh

MESHES = [Mesh(), Mesh(t=4), Mesh(t=2, p=2, d=2), Mesh(t=2, p=3, d=4)]


def test_tp_is_fastest_and_pp_slowest():
    mesh = Mesh(t=2, p=2, d=2)
    assert [mesh.coordinate(rank) for rank in (0, 1, 2, 4)] == [
        Coordinate(pp=0, dp=0, tp=0),
        Coordinate(pp=0, dp=0, tp=1),
        Coordinate(pp=0, dp=1, tp=0),
        Coordinate(pp=1, dp=0, tp=0),
    ]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_rank_is_the_inverse_of_coordinate(mesh: Mesh):
    places = [mesh.coordinate(rank) for rank in range(mesh.size)]
    assert len(set(places)) == mesh.size
    assert [mesh.rank(place) for place in places] == list(range(mesh.size))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("axes", [("tp",), ("dp",), ("pp",), ("dp", "tp"), ("tp", "pp"), ("tp", "dp", "pp"), ()])
def test_groups_hold_every_rank_once_and_differ_along_their_axes_only(mesh: Mesh, axes: tuple[str, ...]):
    groups = mesh.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for group in groups:
        assert list(group) == sorted(group)
        for one, other in product(group, group):
            here, there = mesh.coordinate(one), mesh.coordinate(other)
            assert {axis for axis in ("tp", "dp", "pp") if getattr(here, axis) != getattr(there, axis)} <= set(axes)
            assert mesh.group(one, axes) == group


def test_degree_and_size():
    mesh = Mesh(t=2, p=3, d=4)
    assert (mesh.degree("tp"), mesh.degree("pp"), mesh.degree("dp"), mesh.size) == (2, 3, 4, 24)
