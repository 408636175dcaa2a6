"""Define a request to the planner: a model, GPUs, a batch, and the values to try for every choice.

In: the keywords of `plan`. Out: a `Request`. Features that the runtime does not have yet (`options.NOT_YET`) are
tried only on request.

    make_request({"layers": 24, "hidden": 2304, "heads": 24, "seq": 2048}, gpus=32, cluster="dgx-a100",
                 batch=512, t=8)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from autoptd.errors import PlanError
from autoptd.ir.actions import SCHEDULES
from autoptd.wings.planner.cluster import ELEMENT_BYTES, PRECISIONS, Cluster, find_cluster
from autoptd.wings.planner.search import Columns, divisors
from autoptd.wings.planner.setting import RECOMPUTE, check_count
from autoptd.wings.planner.shape import Shape, find_shape

# Keyword -> column.
DEGREES = {"t": "t", "p": "p", "d": "d", "c": "c", "v": "v", "microbatch": "b"}
ANY = "any"
ZERO = (0, 1, 2, 3)
# What "any" means. Left out: gpipe takes 1f1b's time with more memory; zbv's closed form is only a bound.
ANY_SCHEDULE = ("1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_2p")
# The only values to try unless more are asked for.
USUAL = {"zero": (0,)}


@dataclass(frozen=True)
class Request:
    """One request to the planner.

    `pinned`: columns of the search ("t", "p", "d", "c", "v", "b") with their allowed values; the others are free.
    `recompute`, `sequence_parallel`, `zero`, `schedules`: the values to try; the schedule None is 1f1b, or
    interleaved if v > 1. `placement`: "ranks" follows the order of ranks (tp fastest), "any" tries every one.
    `memory_bytes`: memory per GPU.
    """

    shape: Shape
    cluster: Cluster
    gpus: int
    batch: int
    pinned: Mapping[str, tuple[int, ...]]
    recompute: tuple[str, ...] = ("none",)
    sequence_parallel: tuple[bool, ...] = (False, True)
    zero: tuple[int, ...] = (0,)
    precision: str = "fp32"
    schedules: tuple[str | None, ...] = (None,)
    placement: str = "ranks"
    memory_bytes: float = 0.0

    def wants(self, column: str, value: int) -> bool:
        """Tell whether a degree may have a value.

        c > 1 must be requested: whether a model's tokens can be divided is not known here.
        """
        if column == "c" and "c" not in self.pinned:
            return value == 1
        return column not in self.pinned or value in self.pinned[column]

    def only(self, configs: Columns) -> np.ndarray:
        """Tell which configurations have allowed values."""
        wanted = np.ones(len(configs["p"]), dtype=bool)
        for column, values in self.pinned.items():
            if column in configs:
                wanted &= np.isin(configs[column], values)
        return wanted

    def but(self, **changes: Any) -> Request:
        """Return the request with some fields changed."""
        return replace(self, **changes)


def make_request(
    shape: Shape | Mapping[str, Any],
    *,
    gpus: int,
    cluster: Cluster | str | Path,
    batch: int,
    recompute: Any = None,
    sequence_parallel: Any = None,
    zero: Any = None,
    precision: str | None = None,
    schedule: Any = None,
    placement: str = "ranks",
    memory: float | None = None,
    software: str | None = None,
    **degrees: Any,
) -> Request:
    """Return the Request of `plan`'s keywords; PlanError names a wrong keyword and its legal values."""
    found = find_cluster(cluster).with_software(software)
    check_count("gpus", gpus)
    check_count("batch", batch)
    pinned: dict[str, tuple[int, ...]] = {}
    for name, value in degrees.items():
        if name not in DEGREES:
            raise PlanError(f"{name}=", "no such keyword", ", ".join(DEGREES))
        if value == ANY:
            # Degrees are free by default, except c.
            if name == "c":
                pinned["c"] = tuple(divisors(gpus))
        elif value is not None:
            pinned[DEGREES[name]] = values = _several(value)
            for degree in values:
                check_count(name, degree)
    # torch's names are accepted too.
    precision = PRECISIONS.get(str(precision), precision)
    if precision is not None and precision not in ELEMENT_BYTES:
        raise PlanError(f"precision={precision!r}", "no such precision", ", ".join(map(repr, ELEMENT_BYTES)))
    if placement not in ("ranks", ANY):
        raise PlanError(f"placement={placement!r}", "no such choice", "'ranks' or 'any'")
    if memory is not None and not memory > 0:
        raise PlanError(f"memory={memory}", "is not a positive number of bytes", "for example memory=80e9")
    return Request(
        shape=find_shape(shape),
        cluster=found,
        gpus=gpus,
        batch=batch,
        pinned=pinned,
        recompute=_values("recompute", recompute, RECOMPUTE),
        sequence_parallel=_values("sequence_parallel", sequence_parallel, (False, True)),
        zero=_values("zero", zero, ZERO),
        # The default training precision of `parallelize`.
        precision=precision or "fp32",
        schedules=(None,) if schedule is None else _schedules(schedule),
        placement=placement,
        memory_bytes=memory or found.gpu.memory_bytes,
    )


def _values(name: str, given: Any, known: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the values to try: those given, all for "any", and for None the usual ones."""
    if given is None:
        return USUAL.get(name, known)
    if given == ANY:
        return known
    values = _several(given)
    for value in values:
        if value not in known:
            raise PlanError(
                f"{name}={value!r}", "no such choice", f"{', '.join(map(repr, known))}, or {ANY!r}"
            )
    # The known values instead of the given ones: 1 equals True, and is printed as True.
    return tuple(known[known.index(value)] for value in dict.fromkeys(values))


def _schedules(given: Any) -> tuple[str, ...]:
    """Return the schedules to try: those given, and for "any" all whose time has a closed form."""
    if given == ANY:
        return ANY_SCHEDULE
    values = _several(given)
    for value in values:
        if value not in SCHEDULES:
            raise PlanError(f"schedule={value!r}", "no such schedule", f"{', '.join(SCHEDULES)}, or {ANY!r}")
    return tuple(dict.fromkeys(values))


def _several(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, tuple | list) else (given,)
