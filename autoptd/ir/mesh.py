"""The device mesh: its named axes, the coordinates of ranks, and the groups that ranks form.

In: degrees and an order of axes. Out: coordinates, ranks and groups, which nothing else decides. By default tp is
fastest, then cp, dp, and pp slowest (Narayanan et al., SC'21, section 3: tensor-parallel ranks are neighbours,
pipeline ranks are far apart); `order` overrides it. A mesh has the axis cp only if c > 1.

    Mesh(t=2, p=2, d=2).coordinate(5) == Coordinate(pp=1, tp=1)
    Mesh(t=2, p=2, d=2, order="tp-pp-dp").coordinate(5) == Coordinate(dp=1, tp=1)

The `role` of an axis is the thing that its ranks divide. Code that needs "the ranks that hold other samples" asks for
a role (`mesh.batch_axes`, `mesh.replicas`, `mesh.pipeline_rank_of`), not for an axis by name.

A *sub-axis* is a factor of an axis. If 8 tensor ranks share 2 KV heads, 4 consecutive ranks work on one head: tp is a
grid of 2 x 4 ranks. `tp:(2)4` names the faster factor, 4 ranks with a factor of 2 before it, and `tp:(1)2` the slower
one: Shardy's notation, "axis":(pre-size)size. Values of one program may factor tp differently. A sub-axis can replace
a mesh axis anywhere: it has a degree, a stride and groups, and values have a type over it (`Layout`).

    Mesh(t=8).group(5, ("tp:(2)4",)) == (4, 5, 6, 7)
    str(SubAxis("tp", 2, 4)) == "tp:(2)4", base("tp:(2)4") == "tp", covers("tp", "tp:(2)4")

Several axes together have a joined name: the ranks of a group along `dp x cp` differ along either.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise, product
from typing import NamedTuple

from autoptd.errors import InternalError, PlanError


class Role(Enum):
    """The thing that the ranks along a mesh axis divide among themselves."""

    VALUES = "the values within a layer"
    TOKENS = "the tokens of every sample, and so the values within a layer"
    BATCH = "the samples of the global batch"
    STAGES = "the stages of the model"


# Roles of axes whose ranks compute one layer of the same samples together.
WITHIN_A_LAYER = (Role.VALUES, Role.TOKENS)


class MeshAxis(NamedTuple):
    """One kind of parallelism: `degree` is its keyword in `parallelize`, `word` its name in texts.

    `is_optional`: a mesh with one rank along this axis does not have the axis at all.
    """

    name: str
    degree: str
    role: Role
    word: str
    is_optional: bool = False


# In the default order, fastest first. A new kind of parallelism starts with a row here.
TABLE = (
    MeshAxis("tp", "t", Role.VALUES, "tensor"),
    MeshAxis("cp", "c", Role.TOKENS, "context", is_optional=True),
    MeshAxis("dp", "d", Role.BATCH, "data"),
    MeshAxis("pp", "p", Role.STAGES, "pipeline"),
)
AXES = {axis.name: axis for axis in TABLE}
MESH_AXES = tuple(AXES)
# The keywords of the axes, in their conventional order.
DEGREES = ("t", "p", "d", "c")
BY_DEGREE = {axis.degree: axis for axis in sorted(TABLE, key=lambda axis: DEGREES.index(axis.degree))}
# The degrees that every mesh has.
USUAL_DEGREES = tuple(degree for degree, axis in BY_DEGREE.items() if not axis.is_optional)
ORDER = "-".join(MESH_AXES)


def role_of(axis: str) -> Role:
    """Return the role of an axis or sub-axis."""
    return AXES[base(axis)].role


JOINT = " x "
SUB_AXIS = re.compile(r"(\w+):\((\d+)\)(\d+)")


class SubAxis(NamedTuple):
    """The factor of `size` of the ranks along `axis`, with `before` ranks in all slower factors."""

    axis: str
    before: int
    size: int

    def __str__(self) -> str:
        return f"{self.axis}:({self.before}){self.size}"

    @property
    def end(self) -> int:
        """The number of ranks in this factor and the slower ones."""
        return self.before * self.size


def is_sub_axis(axis: str) -> bool:
    """Tell whether a name is that of a sub-axis."""
    return ":" in axis


def parse_sub_axis(axis: str) -> SubAxis:
    """Return the sub-axis of a name; InternalError for any other name."""
    found = SUB_AXIS.fullmatch(axis)
    if found is None:
        raise InternalError(axis, "is not the name of a sub-axis")
    return SubAxis(found[1], int(found[2]), int(found[3]))


def joined(axes: Iterable[str]) -> str:
    """Name several axes together: `dp x cp`."""
    return JOINT.join(axes)


def parts_of(axes: str) -> tuple[str, ...]:
    """Return the axes or sub-axes in a joined name; () for ""."""
    return tuple(axes.split(JOINT)) if axes else ()


def base(axis: str) -> str:
    """Return the mesh axis of a sub-axis, or the mesh axis itself."""
    return axis.partition(":")[0]


def covers(axis: str, part: str) -> bool:
    """Tell whether `part` is `axis` or a factor of it."""
    if axis == part or base(axis) != base(part) or not is_sub_axis(part):
        return axis == part
    if not is_sub_axis(axis):
        return True
    # A factor of a factor: it starts and ends at boundaries of the larger one.
    whole, inner = parse_sub_axis(axis), parse_sub_axis(part)
    return inner.before % whole.before == 0 and whole.end % inner.end == 0


class Coordinate(Mapping[str, int]):
    """The position of a rank along every mesh axis, by name; an axis that is left out is at 0."""

    __slots__ = ("_places",)

    def __init__(self, **places: int) -> None:
        unknown = places.keys() - AXES.keys()
        if unknown:
            raise InternalError("Coordinate", f"there is no mesh axis {', '.join(sorted(unknown))}")
        self._places = {axis: places.get(axis, 0) for axis in AXES}

    def __getitem__(self, axis: str) -> int:
        return self._places[axis]

    def __getattr__(self, axis: str) -> int:
        if axis in AXES:
            return self._places[axis]
        raise AttributeError(axis)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __hash__(self) -> int:
        return hash(tuple(self._places.values()))

    def __reduce__(self) -> tuple[object, ...]:
        return _coordinate, (self._places,)

    def __repr__(self) -> str:
        places = [f"{axis}={place}" for axis, place in self._places.items()]
        return f"Coordinate({', '.join(places)})"


def _coordinate(places: Mapping[str, int]) -> Coordinate:
    return Coordinate(**places)


@dataclass(frozen=True)
class Mesh:
    """t x p x d x c ranks: `t` tensor, `p` pipeline, `d` data and `c` context parallel; `order` names the
    axes, fastest first.
    """

    t: int = 1
    p: int = 1
    d: int = 1
    order: str = ORDER
    c: int = 1

    @classmethod
    def of(cls, degrees: Mapping[str, int], order: str = ORDER) -> Mesh:
        """Return the mesh of some degrees, by keyword of `parallelize`; the others are 1."""
        return cls(**degrees, order=order)

    @property
    def size(self) -> int:
        return math.prod(map(self.degree, AXES))

    def degree(self, axis: str) -> int:
        """Return the number of ranks along one mesh axis or sub-axis, or along several (`dp x cp`)."""
        if known := AXES.get(axis):
            return int(getattr(self, known.degree))
        if len(axes := parts_of(axis)) > 1:
            return math.prod(map(self.degree, axes))
        return parse_sub_axis(axis).size

    def parts(self, axis: str, sub_axes: Iterable[str]) -> tuple[str, ...]:
        """Return the fewest sub-axes that make up `axis`, slowest first, such that each of `sub_axes`
        consists of some of them: `axis` itself if nothing else is named, none if they do not fit together.
        """
        factors = [parse_sub_axis(part) for part in sub_axes if part != axis]
        if not factors:
            return (axis,)
        # The boundaries between factors, as the number of ranks in all slower ones.
        bounds = {1, self.degree(axis)}
        for factor in factors:
            bounds |= {factor.before, factor.end}
        ends = sorted(bounds)
        if any(end % start for start, end in pairwise(ends)):
            return ()
        return tuple(str(SubAxis(axis, start, end // start)) for start, end in pairwise(ends))

    @property
    def degrees(self) -> dict[str, int]:
        """Ranks along every axis of the mesh, by keyword of `parallelize`."""
        return {name: int(getattr(self, name)) for name in DEGREES if self._has(BY_DEGREE[name])}

    def product_text(self, axes: Sequence[str]) -> str:
        """Format the number of ranks along some axes together: `d=2`, or `t*p=8` for several axes."""
        names = "*".join(AXES[axis].degree for axis in axes)
        return f"{names}={math.prod(map(self.degree, axes))}"

    def along(self, axes: Iterable[str]) -> Mesh:
        """Return the mesh of the ranks along some axes; all other axes have one rank."""
        return Mesh.of({AXES[axis].degree: self.degree(axis) for axis in axes}, self.order)

    @property
    def has_usual_order(self) -> bool:
        """Whether its ranks are in the default order."""
        return self.axes == Mesh.of(self.degrees).axes

    def _has(self, axis: MeshAxis) -> bool:
        return not axis.is_optional or int(getattr(self, axis.degree)) > 1

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """All axes that the mesh has, fastest first."""
        return tuple(axis for axis in self._every_axis if self._has(AXES[axis]))

    @cached_property
    def _every_axis(self) -> tuple[str, ...]:
        """All axes, fastest first; those left out of `order` have one rank, and are slowest."""
        named = read_order(self.order)
        left_out = tuple(axis for axis in AXES if axis not in named)
        wide = [axis for axis in left_out if self.degree(axis) > 1]
        if wide:
            raise PlanError(
                f"order={self.order!r}", f"leaves out {', '.join(wide)}", f"for example order={ORDER!r}"
            )
        return named + left_out

    @cached_property
    def strides(self) -> dict[str, int]:
        """The distance between the rank numbers of neighbours along each mesh axis."""
        strides, step = {}, 1
        for axis in self.axes:
            strides[axis] = step
            step *= self.degree(axis)
        return strides

    def stride(self, axis: str) -> int:
        """Return the distance between the rank numbers of neighbours along an axis or sub-axis."""
        if is_sub_axis(axis):
            # t=8, "tp:(2)4": its 4 ranks are neighbours (8 // 8 = 1); "tp:(1)2": 4 apart (8 // 2).
            return self.strides[base(axis)] * (self.degree(base(axis)) // parse_sub_axis(axis).end)
        # A rank has no neighbour along an axis that the mesh does not have.
        return self.strides.get(axis, self.size)

    def place(self, rank: int, axis: str) -> int:
        """Return the position of a rank along an axis or sub-axis."""
        return rank // self.stride(axis) % self.degree(axis)

    def coordinate(self, rank: int) -> Coordinate:
        """Return the coordinate of a rank."""
        return Coordinate(**{axis: rank // self.strides[axis] % self.degree(axis) for axis in self.axes})

    def rank(self, at: Mapping[str, int]) -> int:
        """Return the rank at a coordinate."""
        return sum(self.stride(axis) * place for axis, place in at.items())

    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only along `axes`, in ascending order, `rank` included."""
        along = [(self.stride(axis), self.degree(axis)) for axis in axes]
        # The member at 0 along all of `axes`, from which the others are counted.
        first = rank - sum(rank // stride % degree * stride for stride, degree in along)
        steps = [range(0, stride * degree, stride) for stride, degree in along]
        return tuple(sorted(first + sum(offsets) for offsets in product(*steps)))

    def groups(self, axes: Sequence[str]) -> list[tuple[int, ...]]:
        """Return all groups along `axes`, in a fixed order; together they contain every rank once."""
        # Every member of a group yields the same tuple.
        return sorted({self.group(rank, axes) for rank in range(self.size)})

    def axes_of(self, *roles: Role) -> tuple[str, ...]:
        """Return the axes of some roles, fastest first."""
        return tuple(axis for axis in self.axes if AXES[axis].role in roles)

    @property
    def value_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have different parts of values."""
        return self.axes_of(*WITHIN_A_LAYER)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Those value axes along which ranks have different tokens and the same parameters."""
        return self.axes_of(Role.TOKENS)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have different samples."""
        return self.axes_of(Role.BATCH)

    @property
    def gradient_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have different samples or tokens, and sum the gradients of equal
        parameters.
        """
        return self.axes_of(Role.BATCH, Role.TOKENS)

    @property
    def loss_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have parts of the loss, in the order in which these are added."""
        return (*self.batch_axes, *self.token_axes, *self.stage_axes)

    @property
    def stage_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have different stages."""
        return self.axes_of(Role.STAGES)

    @property
    def value_ranks(self) -> int:
        """How many ranks share the values of a layer."""
        return math.prod(map(self.degree, self.value_axes))

    @property
    def replicas(self) -> int:
        """How many parts the global batch is divided into."""
        return math.prod(map(self.degree, self.batch_axes))

    @property
    def gradient_ranks(self) -> int:
        """How many ranks sum the gradient of a parameter that all of them have."""
        return math.prod(map(self.degree, self.gradient_axes))

    @property
    def pipeline_ranks(self) -> int:
        """How many ranks a pipeline has."""
        return math.prod(map(self.degree, self.stage_axes))

    def replica_of(self, rank: int) -> int:
        """Return the part of the global batch that a rank has."""
        return self.group(rank, self.batch_axes).index(rank)

    def pipeline_rank_of(self, rank: int) -> int:
        """Return the position of a rank in its pipeline."""
        return self.group(rank, self.stage_axes).index(rank)

    def at_stage(self, rank: int, pipeline_rank: int) -> int:
        """Return the rank at another position in the pipeline of `rank`."""
        return self.group(rank, self.stage_axes)[pipeline_rank]

    def ranks_at(self, pipeline_rank: int) -> list[int]:
        """Return the ranks at one position of all pipelines, in corresponding order."""
        # Rank 0's group along the other axes contains one rank of every pipeline.
        others = [axis for axis in self.axes if axis not in self.stage_axes]
        return [self.at_stage(rank, pipeline_rank) for rank in self.group(0, others)]

    @property
    def value_text(self) -> str:
        """The axes along which ranks have different parts of values, as text: `tp`."""
        return ", ".join(self.value_axes)

    @property
    def words(self) -> str:
        """The degrees for a heading: `t=2 tensor x p=4 pipeline x d=1 data parallel`."""
        degrees = [f"{name}={degree} {BY_DEGREE[name].word}" for name, degree in self.degrees.items()]
        return f"{' x '.join(degrees)} parallel"

    def __str__(self) -> str:
        degrees = " ".join(f"{name}={degree}" for name, degree in self.degrees.items())
        return degrees if self.has_usual_order else f"{degrees} order={self.order}"


def read_order(order: str) -> tuple[str, ...]:
    """Return the axes in `"tp-cp-dp-pp"`, fastest first; PlanError for anything else."""
    named = tuple(order.split("-")) if isinstance(order, str) else ()
    if not named or set(named) - AXES.keys() or len(set(named)) != len(named):
        remedy = f"mesh axes, each once, fastest first, joined with dashes: order={ORDER!r}"
        raise PlanError(f"order={order!r}", "is not an order of mesh axes", remedy)
    return named
