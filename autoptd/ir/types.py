"""The value types over a mesh axis, and the table of conversions between them.

| type | value on the ranks | cotangent on the ranks |
|------|--------------------|------------------------|
| `I`  invariant          | equal       | equal       |
| `R`  replicated         | equal       | partial sum |
| `P`  partial            | partial sum | equal       |
| `S(dim, atom)` sharded  | sharded     | sharded     |
| `E`  by expert          | own rows    | own rows    |

`E` is a shard whose size depends on the data: a rank has the rows that have chosen one of its experts,
however many these are (`passes/group_rows.py`). In a whole value, the rows of other ranks are
zeros.

A tensor dim is an ordered product of *atoms* (`heads x head_dim`); `S(2, 1)` means that atom 1 of dim 2 is
split over the ranks. Megatron's f (Shoeybi et al. 2019, section 3) is I -> R, its g is P -> I.

Ranks hold equal shards. A vocabulary that does not divide over the ranks is *padded*: 61 rows over 4 ranks
are shards of 16, with the last 3 rows of the last one zero (operators that may hold such shards:
`passes/solve/splits.py`). Large shards are multiples of 64: 50,257 rows over 8 ranks are shards of 6,336,
because odd sizes keep matrix products off a GPU's fast kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autoptd.errors import InternalError

# The atom sizes of every dim of a tensor; a dim of size 1 has no atoms.
Dims = tuple[tuple[int, ...], ...]


class Segmented(int):
    """The size of an atom that is a sum of segments, `128 = 64 + 32 + 32`: a shard has one contiguous chunk
    of each.
    """

    blocks: tuple[int, ...]

    def __new__(cls, blocks: Sequence[int]) -> Segmented:
        size = super().__new__(cls, sum(blocks))
        size.blocks = tuple(blocks)
        return size


@dataclass(frozen=True)
class ValueType:
    """One of I, R, P, S, E; an S splits `atom` of `dim`, in chunks or in another `order` (`ZIGZAG`)."""

    kind: str
    # -1 unless the kind is S.
    dim: int = -1
    atom: int = -1
    order: str = ""

    def __str__(self) -> str:
        if self.is_flat:
            return "S(flat)"
        order = f", {self.order}" if self.order else ""
        return f"S({self.dim}, {self.atom}{order})" if self.kind == "S" else self.kind

    @property
    def is_whole(self) -> bool:
        return self.kind in "IR"

    @property
    def is_flat(self) -> bool:
        """Whether it cuts, instead of a dim, a flat buffer of several parameters: see `FLAT`."""
        return self.kind == "S" and self.dim < 0


I = ValueType("I")  # noqa: E741 - the name of the type in DESIGN and papers
R = ValueType("R")
P = ValueType("P")
# Rows along dim 0, of the experts that a rank has.
E = ValueType("E")
# The storage of a parameter under ZeRO: every rank has an equal range of a flat buffer, which may cut
# parameters anywhere.
FLAT = ValueType("S")


# With 2n pieces over n ranks, rank i has the i-th piece from the front and the i-th from the back: equal
# areas of a causal triangle of scores.
ZIGZAG = "zigzag"


def S(dim: int, atom: int, order: str = "") -> ValueType:
    """Return the type of a value with one atom of one dim split over the ranks, in chunks or in another
    order.
    """
    return ValueType("S", dim, atom, order)


@dataclass(frozen=True)
class Conversion:
    """A conversion between two types: `name` is also that of the runtime function."""

    name: str
    forward: str
    backward: str


# What a conversion does without communication.
ONE_RANK = "one rank keeps it"
LOCAL_WORK = (ONE_RANK, "slice", "zero-pad")
LOCAL_KINDS = ("none", *LOCAL_WORK)


# (from, to) -> communication of the value in forward, and of the cotangent in backward.
CONVERSIONS: dict[tuple[str, str], Conversion] = {
    ("I", "R"): Conversion("i_to_r", "none", "all-reduce"),
    ("P", "I"): Conversion("p_to_i", "all-reduce", "none"),
    ("P", "R"): Conversion("p_to_r", "all-reduce", "all-reduce"),
    ("P", "S"): Conversion("p_to_s", "reduce-scatter", "all-gather"),
    ("I", "P"): Conversion("i_to_p", ONE_RANK, "none"),
    ("R", "I"): Conversion("r_to_i", "none", ONE_RANK),
    ("R", "P"): Conversion("r_to_p", ONE_RANK, ONE_RANK),
    ("S", "R"): Conversion("s_to_r", "all-gather", "reduce-scatter"),
    ("S", "I"): Conversion("s_to_i", "all-gather", "slice"),
    ("I", "S"): Conversion("i_to_s", "slice", "all-gather"),
    ("R", "S"): Conversion("r_to_s", "slice", "zero-pad"),
    ("S", "P"): Conversion("s_to_p", "zero-pad", "slice"),
    ("S", "S"): Conversion("s_to_s", "all-to-all", "all-to-all"),
    ("E", "P"): Conversion("e_to_p", "zero-pad", "slice"),
}


# How often the payload goes around the ring.
RING_PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}


def wire_bytes(kind: str, payload: Any, group_size: Any) -> Any:
    """Return the bytes that one rank of n sends for one collective over a ring; 0 for local work.

    All-reduce 2 (n-1)/n of the payload (reduce-scatter, then all-gather), all-gather and reduce-scatter
    (n-1)/n: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    All-to-all: (n-1)/n of the rank's own n-th, the part that is not for itself. A send, or a broadcast passed
    along the ring: all of it. Payload and size may be numbers or numpy arrays.
    """
    if kind in LOCAL_KINDS or kind == "objects":
        return 0.0
    if kind in ("send", "broadcast"):
        return float(payload)
    # 2 ranks send half of the payload, 8 ranks 7/8 of it: the bytes hardly grow with the group.
    others = payload * (group_size - 1) / group_size
    return others / group_size if kind == "all-to-all" else RING_PASSES[kind] * others


# Padded shards of at least MIN_ALIGNED entries are multiples of ALIGNED.
ALIGNED, MIN_ALIGNED = 64, 1024


@dataclass(frozen=True)
class Zigzag:
    """Shards in the order `ZIGZAG` of each of `blocks` equal blocks."""

    blocks: int = 1

    def __repr__(self) -> str:
        return f"rt.Zigzag({self.blocks if self.blocks > 1 else ''})"


# The number of equal blocks, the sizes of unequal ones, or `Zigzag` for equal ones whose shards are not
# chunks.
Outer = int | tuple[int, ...] | Zigzag


def outer_size(dims: Sequence[Sequence[int]], kind: ValueType) -> Outer:
    """Return the number of blocks in a dim, where a shard has one contiguous chunk of each block: the elements of the
    dim before the sharded atom.

    For a `Segmented` atom, return the sizes of the blocks; for shards in zigzag order, a `Zigzag`.
    """
    atoms = dims[kind.dim]
    # S over heads of [3 x 12 x 64]: a shard has one chunk of each of the 3 blocks q, k, v.
    count = math.prod(atoms[: kind.atom])
    if kind.order:
        if isinstance(atoms[kind.atom], Segmented):
            raise InternalError(str(kind), "unequal blocks are not stored in zigzag order")
        return Zigzag(count)
    if not atoms or not isinstance(sharded := atoms[kind.atom], Segmented):
        return count
    behind = math.prod(atoms[kind.atom + 1 :])
    return tuple(block * behind for block in sharded.blocks) * count


def type_text(kind: ValueType, dims: Dims, axis: str) -> str:
    """Format a type for people: `I`, `R`, `P`, or `S(tp, dim 0: 3 x [12] x 64)` with the sharded atom in
    brackets.
    """
    if kind.kind != "S" or kind.is_flat:
        return str(kind)
    sizes = [str(atom) for atom in dims[kind.dim]]
    for i, atom in enumerate(dims[kind.dim]):
        if isinstance(atom, Segmented):
            sizes[i] = "+".join(map(str, atom.blocks))
    sizes[kind.atom] = f"[{sizes[kind.atom]}]"
    order = f", {kind.order}" if kind.order else ""
    return f"S({axis}, dim {kind.dim}: {' x '.join(sizes)}{order})"


def shard_size(size: int, degree: int) -> int:
    """Return the entries of one shard of `size` entries; the last shards of a padded dim are filled up with
    zeros.

    Large padded shards are multiples of `ALIGNED`.
    """
    # Rounded up.
    each = -(-size // degree)
    return each if each * degree == size else aligned(each)


def aligned(size: int) -> int:
    """Round a large size up to one with aligned GPU kernels for matrix products."""
    return -(-size // ALIGNED) * ALIGNED if size >= MIN_ALIGNED else size


def padded_size(dims: Dims, kind: ValueType, degree: int) -> int:
    """Return the size of the dim that `kind` pads to make `degree` equal shards; 0 if it divides, or nothing
    is sharded.
    """
    size = dims[kind.dim][kind.atom] if kind.kind == "S" else 0
    return size if size % degree else 0


def division_text(size: int, degree: int) -> str:
    """Format a division: `256 = 2 x 128`; for a padded dim, `61 = 4 x 16 - 3`."""
    each = shard_size(size, degree)
    padding = each * degree - size
    return f"{size} = {degree} x {each}" + (f" - {padding}" if padding else "")
