"""Which meshes are looked at."""

from __future__ import annotations

import pytest

from autoptd.errors import PlanError
from autoptd.ir.mesh import Mesh
from autoptd.wings.doctor.meshes import asked_mesh, meshes_for


@pytest.mark.parametrize(
    ("size", "per_node", "meshes"),
    [
        (1, 1, [Mesh()]),
        (2, 2, [Mesh(p=2), Mesh(t=2), Mesh(d=2)]),
        (4, 4, [Mesh(t=2, p=2), Mesh(p=2, d=2), Mesh(t=4)]),
        (4, 1, [Mesh(p=2, d=2)]),
        (8, 8, [Mesh(t=2, p=2, d=2), Mesh(t=8)]),
        (16, 8, [Mesh(t=4, p=2, d=2), Mesh(t=8, p=2)]),
        (3072, 8, [Mesh(t=8, p=16, d=24)]),
    ],
)
def test_the_usual_meshes(size: int, per_node: int, meshes: list[Mesh]) -> None:
    assert meshes_for(size, per_node) == meshes


@pytest.mark.parametrize("size", range(1, 40))
def test_each_axis_has_several_ranks_on_some_mesh(size: int) -> None:
    for per_node in {1, 2, 4, 8, size}:
        meshes = meshes_for(size, per_node)
        assert all(mesh.size == size and per_node % mesh.t == 0 for mesh in meshes) and len(meshes) <= 4
        assert size == 1 or (any(mesh.p > 1 for mesh in meshes) and any(mesh.d > 1 for mesh in meshes))
        shares_node = any(per_node % t == 0 and size % t == 0 for t in range(2, per_node + 1))
        assert any(mesh.t > 1 for mesh in meshes) == shares_node


def test_a_part_of_a_mesh_is_made_whole() -> None:
    assert asked_mesh(8, {}) is None and asked_mesh(8, {"t": None}) is None
    assert asked_mesh(8, {"t": 2, "p": 2, "d": 2}) == asked_mesh(8, {"t": 2, "p": 2}) == Mesh(2, 2, 2)
    assert asked_mesh(8, {"t": 2, "c": 2}) == Mesh(2, 1, 2, c=2)
    assert asked_mesh(8, {"t": 1, "p": 2, "d": 2, "c": 2}) == Mesh(1, 2, 2, c=2)
    assert asked_mesh(8, {"t": 2}) == Mesh(2, 1, 4) and asked_mesh(8, {"d": 2, "p": 2}) == Mesh(2, 2, 2)


@pytest.mark.parametrize(
    ("size", "t", "p", "d", "told"),
    [
        (
            8,
            2,
            2,
            1,
            r"t=2 p=2 d=1: t\*p\*d is 4, and there are 8 ranks\. Remedy: t, p, d whose product is 8",
        ),
        (8, 3, None, None, "t=3: 8 ranks do not divide by 3"),
        (2, 2, 2, None, "t=2 p=2: 2 ranks do not divide by 4"),
    ],
)
def test_what_does_not_fit_is_refused(
    size: int, t: int | None, p: int | None, d: int | None, told: str
) -> None:
    with pytest.raises(PlanError, match=told):
        asked_mesh(size, {"t": t, "p": p, "d": d})
