import copy
import pickle
from itertools import product

import pytest

from autoptd.errors import InternalError, PlanError
from autoptd.ir.mesh import Coordinate, Mesh

MESHES = [
    Mesh(),
    Mesh(t=4),
    Mesh(t=2, p=2, d=2),
    Mesh(t=2, p=3, d=4),
    Mesh(t=2, p=3, d=4, order="pp-tp-dp"),
    Mesh(d=3, order="dp"),
]


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
@pytest.mark.parametrize(
    "axes", [("tp",), ("dp",), ("pp",), ("dp", "tp"), ("tp", "pp"), ("tp", "dp", "pp"), ()]
)
def test_groups_hold_every_rank_once_and_differ_along_their_axes_only(mesh: Mesh, axes: tuple[str, ...]):
    groups = mesh.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for group in groups:
        assert list(group) == sorted(group)
        for one, other in product(group, group):
            here, there = mesh.coordinate(one), mesh.coordinate(other)
            assert {axis for axis in ("tp", "dp", "pp") if here[axis] != there[axis]} <= set(axes)
            assert mesh.group(one, axes) == group


def test_degree_and_size():
    mesh = Mesh(t=2, p=3, d=4)
    assert (mesh.degree("tp"), mesh.degree("pp"), mesh.degree("dp"), mesh.size) == (2, 3, 4, 24)


def test_order_says_which_ranks_are_neighbours():
    mesh = Mesh(t=2, p=3, d=2, order="pp-dp-tp")
    assert (mesh.strides, mesh.axes) == ({"pp": 1, "dp": 3, "tp": 6}, ("pp", "dp", "tp"))
    assert mesh.coordinate(10) == Coordinate(tp=1, dp=1, pp=1)
    assert mesh.group(0, ("pp",)) == (0, 1, 2)
    assert mesh.group(0, ("tp",)) == (0, 6)
    assert Mesh(t=2, order="tp").coordinate(1) == Coordinate(tp=1)  # what is left out has one rank


@pytest.mark.parametrize("order", ["", "t-d-p", "tp-tp-pp", "tp,dp,pp", "dp-pp", 3, None])
def test_an_order_that_is_none_is_refused(order: object):
    with pytest.raises(PlanError, match="order="):
        _ = Mesh(t=2, order=order).axes  # type: ignore[arg-type]


def test_roles():
    mesh = Mesh(t=2, p=3, d=4)
    assert (mesh.batch_axes, mesh.stage_axes, mesh.replicas, mesh.pipeline_ranks) == (("dp",), ("pp",), 4, 3)


def test_a_coordinate_is_a_mapping_by_name():
    at = Coordinate(pp=1)
    assert (at.pp, at["dp"], dict(at)) == (1, 0, {"tp": 0, "cp": 0, "dp": 0, "pp": 1})
    assert at == Coordinate(pp=1, tp=0) != Coordinate()
    assert pickle.loads(pickle.dumps(at)) == copy.deepcopy(at) == at
    with pytest.raises(InternalError, match="no mesh axis ep"):
        Coordinate(ep=1)
    with pytest.raises(AttributeError):
        _ = at.ep


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_places_by_role(mesh: Mesh):
    for rank in range(mesh.size):
        at = mesh.coordinate(rank)
        assert (mesh.replica_of(rank), mesh.pipeline_rank_of(rank)) == (at.dp, at.pp)
        assert [mesh.at_stage(rank, pp) for pp in range(mesh.p)] == [
            mesh.rank({**at, "pp": pp}) for pp in range(mesh.p)
        ]
    for pp in range(mesh.p):
        assert mesh.ranks_at(pp) == [mesh.at_stage(rank, pp) for rank in mesh.ranks_at(0)]
        assert {mesh.pipeline_rank_of(rank) for rank in mesh.ranks_at(pp)} == {pp}
