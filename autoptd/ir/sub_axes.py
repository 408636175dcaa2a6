"""Sub-axes: a mesh axis seen as a grid, by name.

In: names. Out: degrees and positions. Of 8 tensor ranks with 2 KV heads, 4 consecutive ranks work on one
head: tp is a grid of 2 x 4 ranks. `tp:(2)4` is the part of 4 ranks with a factor of 2 before it, `tp:(1)2`
the slower part: Shardy's notation, "axis":(pre-size)size. Values of one program may factor tp differently. A
sub-axis can replace a mesh axis anywhere: it has a degree, a stride and groups (`Mesh`), and values have a
type over it (`Layout`).

    str(SubAxis("tp", 2, 4))                # "tp:(2)4"
    base("tp:(2)4")                         # "tp"
    covers("tp", "tp:(2)4")                 # True

Several axes together are joined: ranks along `dp x cp` differ along either.
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
        """The number of ranks in this factor and the slower ones."""
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
    whole, inner = parse(axis), parse(part)
    return inner.before % whole.before == 0 and whole.end % inner.end == 0
