"""Which meshes are looked at, if none is asked for: every axis has several ranks on one of them, and tp has a whole
node.

In: the number of ranks, and how many share a node. Out: meshes, in the order in which they are looked at.

    meshes_for(4, per_node=4)       # t=2 p=2 d=1, t=1 p=2 d=2, t=4 p=1 d=1
    meshes_for(3072, per_node=8)    # t=8 p=16 d=24
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from autoptd.errors import PlanError
from autoptd.ir.mesh import MESH_AXES, Mesh


def meshes_for(size: int, per_node: int) -> list[Mesh]:
    """The meshes of `size` ranks, `per_node` of them on a machine; tp stays within one."""
    found = [_best(size, per_node, frozenset())]
    seen = _wide(found[0])
    while (more := _best(size, per_node, _wide_anywhere(size, per_node) - seen)) and _wide(more) - seen:
        found.append(more)
        seen |= _wide(more)
    node = _divisor(size, per_node)
    if node > 1 and all(mesh.t != node for mesh in found):
        found.append(max((one for one in _meshes(size, per_node) if one.t == node), key=_quality))
    return found


def asked_mesh(size: int, t: int | None, p: int | None, d: int | None) -> Mesh | None:
    """The mesh that is asked for: one degree may be left out; None where none is given. PlanError where it does not fit."""
    given = {"t": t, "p": p, "d": d}
    if all(one is None for one in given.values()):
        return None
    known = 1
    for one in given.values():
        known *= one or 1
    told = " ".join(f"{name}={one}" for name, one in given.items() if one is not None)
    if size % known or (None not in given.values() and known != size):
        fact = f"t*p*d is {known}, and there are {size} ranks" if None not in given.values() else f"{size} ranks"
        fact = fact if None not in given.values() else f"{size} ranks do not divide by {known}"
        raise PlanError(told, fact, f"t, p, d whose product is {size}, or leave them out")
    left = size // known
    # What is left open: the first of these that is.
    for name in ("d", "p", "t"):
        if given[name] is None:
            given[name], left = left, 1
    return Mesh(given["t"] or 1, given["p"] or 1, given["d"] or 1)


def _wide_anywhere(size: int, per_node: int) -> set[str]:
    """The axes that can have several ranks: tp has none where every rank is alone on its machine."""
    return {axis for mesh in _meshes(size, per_node) for axis in _wide(mesh)}


def _best(size: int, per_node: int, missing: AbstractSet[str]) -> Mesh:
    """The mesh that has most axes wide, the missing ones first; then a pipeline, the largest t, and p and d alike."""
    return max(_meshes(size, per_node), key=lambda one: (len(_wide(one) & missing), *_quality(one)))


def _quality(mesh: Mesh) -> tuple[int, bool, int, int]:
    return len(_wide(mesh)), mesh.p > 1, mesh.t, -abs(mesh.p - mesh.d)


def _wide(mesh: Mesh) -> set[str]:
    return {axis for axis in MESH_AXES if mesh.degree(axis) > 1}


def _meshes(size: int, per_node: int) -> Iterator[Mesh]:
    """All meshes whose tp stays within a node, smaller p first."""
    for t in range(1, _divisor(size, per_node) + 1):
        if _divisor(size, per_node) % t == 0:
            rest = size // t
            yield from (Mesh(t, p, rest // p) for p in range(1, rest + 1) if rest % p == 0)


def _divisor(size: int, per_node: int) -> int:
    """The most ranks of a node over which tp can be laid so that all its groups stay within nodes."""
    return max(one for one in range(1, per_node + 1) if per_node % one == 0 and size % one == 0)


__all__ = ["asked_mesh", "meshes_for"]
