"""Which meshes are looked at, if none is asked for: every axis but cp, which has ranks where it is asked for, has several
on one of them, and ranks that share values (tp) fill a node.

In: the number of ranks, and how many share a node. Out: meshes, in the order in which they are looked at.

    meshes_for(4, per_node=4)       # t=2 p=2 d=1, t=1 p=2 d=2, t=4 p=1 d=1
    meshes_for(3072, per_node=8)    # t=8 p=16 d=24
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet

from autoptd.errors import PlanError
from autoptd.ir.mesh import DEGREES, MESH_AXES, TABLE, USUAL_DEGREES, Mesh, Role


def meshes_for(size: int, per_node: int) -> list[Mesh]:
    """Return the meshes to check of `size` ranks, `per_node` of them on a machine; tp stays within one."""
    # With 8 ranks on a node t=2 p=2 d=2 covers all axes; 4 ranks take several meshes.
    found = [_best(size, per_node, frozenset())]
    seen = _wide(found[0])
    # Until no mesh makes an axis wide that none before it did.
    while (more := _best(size, per_node, _wide_anywhere(size, per_node) - seen)) and _wide(more) - seen:
        found.append(more)
        seen |= _wide(more)
    node = _divisor(size, per_node)
    if node > 1 and all(mesh.value_ranks != node for mesh in found):
        filling = [mesh for mesh in _meshes(size, per_node) if mesh.value_ranks == node]
        found.append(max(filling, key=_quality))
    return found


def asked_mesh(size: int, degrees: Mapping[str, int | None]) -> Mesh | None:
    """Return the mesh that is asked for, None where no degree is given; what is left out fills the ranks.

    PlanError where it does not fit.
    """
    given = {name: degree for name in DEGREES if (degree := degrees.get(name)) is not None}
    if not given:
        return None
    known, is_full = math.prod(given.values()), given.keys() >= set(USUAL_DEGREES)
    if size % known or (is_full and known != size):
        site = " ".join(f"{name}={degree}" for name, degree in given.items())
        fact = f"{size} ranks do not divide by {known}"
        if is_full:
            fact = f"{'*'.join(given)} is {known}, and there are {size} ranks"
        remedy = (
            f"{', '.join(given if is_full else USUAL_DEGREES)} whose product is {size}, or leave them out"
        )
        raise PlanError(site, fact, remedy)
    # What is left of the ranks goes to the first open degree: more replicas before more stages.
    rows = [row for role in (Role.BATCH, Role.STAGES, Role.VALUES) for row in TABLE if row.role is role]
    if left_out := [row.degree for row in rows if row.degree not in given and not row.is_optional]:
        given[left_out[0]] = size // known
    return Mesh.of(given)


def _wide_anywhere(size: int, per_node: int) -> set[str]:
    """Return the axes that can have several ranks: no ranks share values where each is alone on its machine."""
    axes: set[str] = set()
    for mesh in _meshes(size, per_node):
        axes |= _wide(mesh)
    return axes


def _best(size: int, per_node: int, missing: AbstractSet[str]) -> Mesh:
    """Return the mesh with most axes wide, the missing ones first.

    Then a pipeline, most ranks that share values, and as many stages as replicas.
    """
    return max(_meshes(size, per_node), key=lambda mesh: (len(_wide(mesh) & missing), *_quality(mesh)))


def _quality(mesh: Mesh) -> tuple[int, bool, int, int]:
    # Compared in this order; the last one is 0 where there are as many stages as replicas.
    stages = mesh.pipeline_ranks
    return len(_wide(mesh)), stages > 1, mesh.value_ranks, -abs(stages - mesh.replicas)


def _wide(mesh: Mesh) -> set[str]:
    return {axis for axis in MESH_AXES if mesh.degree(axis) > 1}


def _meshes(size: int, per_node: int) -> Iterator[Mesh]:
    """Yield all meshes whose tp stays within a node, smaller p first."""
    for t in range(1, _divisor(size, per_node) + 1):
        if _divisor(size, per_node) % t == 0:
            rest = size // t
            for p in range(1, rest + 1):
                if rest % p == 0:
                    yield Mesh(t, p, rest // p)


def _divisor(size: int, per_node: int) -> int:
    """Return how many ranks may share values such that all their groups stay within nodes."""
    return max(degree for degree in range(1, per_node + 1) if per_node % degree == 0 and size % degree == 0)


__all__ = ["asked_mesh", "meshes_for"]
