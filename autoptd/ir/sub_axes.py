"""Sub-axes: a mesh axis seen as a grid, by name.

In: names. Out: degrees and places. Of 8 tensor ranks with 2 KV heads, 4 consecutive ranks work on one head:
tp is a grid of 2 x 4 ranks. `tp:(2)4` is the part of 4 ranks that has a factor of 2 before it, `tp:(1)2`
the slower part: Shardy's notation, "axis":(pre-size)size. Values of one program may factor tp differently.
Wherever a mesh axis is named, a sub-axis can be: it has a degree, a stride and groups (`Mesh`), and values
have a type over it (`Layout`).

    str(SubAxis("tp", 2, 4))                # "tp:(2)4"
    base("tp:(2)4")                         # "tp"
    covers("tp", "tp:(2)4")                 # True

Several axes together are named one after the other: ranks along `dp x cp` differ along either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from autoptd.errors import InternalError

JOINT = " x "
PATTERN = re.compile(r"(\w+):\((\d+)\)(\d+)")


class SubAxis(NamedTuple):
    """The factor of `size` of the ranks along `axis`, with `before` ranks in all slower factors."""

    axis: str
    before: int
    size: int

    def __str__(self) -> str:
        return f"{self.axis}:({self.before}){self.size}"

    @property
    def end(self) -> int:
        """How many ranks this factor and the slower one make."""
        return self.before * self.size


def is_sub_axis(axis: str) -> bool:
    """Tell whether a name is that of a sub-axis."""
    return ":" in axis


def parse(axis: str) -> SubAxis:
    """Return the sub-axis of a name; InternalError for any other name."""
    found = PATTERN.fullmatch(axis)
    if found is None:
        raise InternalError(axis, "is not the name of a sub-axis")
    return SubAxis(found[1], int(found[2]), int(found[3]))


def joined(axes: Iterable[str]) -> str:
    """Name several axes together: `dp x cp`."""
    return JOINT.join(axes)


def parts_of(axes: str) -> tuple[str, ...]:
    """Return the axes or sub-axes that a name stands for; of "" none."""
    return tuple(axes.split(JOINT)) if axes else ()


def base(axis: str) -> str:
    """Return the mesh axis of a sub-axis; a mesh axis is its own."""
    return axis.partition(":")[0]


def covers(axis: str, part: str) -> bool:
    """Tell whether `part` is `axis` or a factor of it."""
    if axis == part or base(axis) != base(part) or not is_sub_axis(part):
        return axis == part
    if not is_sub_axis(axis):
        return True
    # A factor of a factor: it begins and ends where the larger one has a boundary.
    whole, inner = parse(axis), parse(part)
    return inner.before % whole.before == 0 and whole.end % inner.end == 0
