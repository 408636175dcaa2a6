"""Define one way to run a step, or an array of ways: the degrees and switches that the performance model compares.

In: degrees, the batch, switches. Out: a `Setting`; `checked` validates a single one.

    setting = Setting(t=8, p=12, d=4, microbatch=1, batch=1536, recompute="full")
    setting.num_microbatches      # 384
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoptd.errors import PlanError
from autoptd.ir.actions import check_schedule
from autoptd.ir.plan import nearest
from autoptd.wings.planner.cluster import ELEMENT_BYTES
from autoptd.wings.planner.search import ranks_in_a_domain
from autoptd.wings.planner.shape import Shape

# A whole number, or an array of one for each candidate.
Number = Any
# The share of each stage's layers that is recomputed in full; the others are kept.
MIXES = {"full:1/4": 0.25, "full:1/2": 0.5, "full:3/4": 0.75}
RECOMPUTE = ("none", "selective", *MIXES, "full")
DEGREES = ("t", "p", "d", "c", "v", "microbatch", "batch")
AXES = ("tp", "cp", "dp", "pp")


@dataclass(frozen=True)
class Setting:
    """Degrees t, p, d, c, v, `microbatch` and `batch` in sequences (each a number, or an array), and switches.

    `recompute` is "none", "selective" (the core of attention), "full" (every layer from its input) or a mix:
    "full:1/4" (or 1/2, 3/4) recomputes that share of each stage's layers, on average. `zero` 0 to 3 shards nothing,
    optimizer state, gradients too, parameters too over the d * c ranks. `placement`: how many ranks of each axis
    share a node; missing axes follow the order of ranks, tp fastest, then cp, dp, pp.
    """

    t: Number = 1
    p: Number = 1
    d: Number = 1
    c: Number = 1
    v: Number = 1
    microbatch: Number = 1
    batch: Number = 1
    schedule: str | None = None
    recompute: str = "none"
    sequence_parallel: bool = False
    zero: int = 0
    precision: str = "bf16"
    placement: Mapping[str, Number] | None = None

    @property
    def num_microbatches(self) -> Number:
        return self.batch // (self.d * self.microbatch)

    @property
    def gpus(self) -> Number:
        return self.t * self.c * self.p * self.d

    @property
    def full_share(self) -> float:
        """The share of the layers that is recomputed from their inputs."""
        return full_share(self.recompute)

    @property
    def replicas(self) -> Number:
        """Ranks that hold the same parameters: they sum gradients, and ZeRO shards over them."""
        return self.d * self.c

    @property
    def schedule_name(self) -> str:
        # An array has one name for all, as the formula of interleaved covers v = 1 too (`estimate._bubble`).
        return self.schedule or ("interleaved" if np.any(np.asarray(self.v) > 1) else "1f1b")

    def local(self, axis: str, gpus_per_node: int) -> Number:
        """Return how many ranks of a group along an axis share a node, in the group that is spread most."""
        if self.placement is not None and axis in self.placement:
            return self.placement[axis]
        degrees = {"tp": self.t, "cp": self.c, "dp": self.d, "pp": self.p}
        faster: Number = 1
        # Ranks of this axis are as far apart as all faster axes have ranks.
        for other in AXES[: AXES.index(axis)]:
            faster = faster * degrees[other]
        return ranks_in_a_domain(degrees[axis], faster, self.gpus, gpus_per_node, axis == AXES[-1])


def full_share(recompute: str) -> float:
    """Return the share of the layers that a mode of recomputation runs again from their inputs."""
    return 1 if recompute == "full" else MIXES.get(recompute, 0)


def checked(setting: Setting, shape: Shape, gpus_per_node: int) -> Setting:
    """Return the setting if the shape can be run with it on such nodes; else PlanError with legal values."""
    for name in DEGREES:
        check_count(name, getattr(setting, name))
    degrees: dict[str, Any] = {name: int(getattr(setting, name)) for name in DEGREES}
    # Plain ints from here on: they become names, JSON and list indices.
    setting = replace(setting, **degrees)
    for name, known in (
        ("recompute", RECOMPUTE),
        ("precision", tuple(ELEMENT_BYTES)),
        ("zero", (0, 1, 2, 3)),
    ):
        if getattr(setting, name) not in known:
            raise PlanError(
                f"{name}={getattr(setting, name)!r}", "no such choice", ", ".join(map(repr, known))
            )
    check_schedule(setting.schedule_name, setting.v)
    if setting.v > 1 and setting.p == 1:
        raise PlanError(f"v={setting.v}", "several chunks per pipeline rank need a pipeline", "v=1")
    rows = setting.d * setting.microbatch
    if setting.batch % rows:
        fact = f"does not divide into microbatches of {setting.microbatch} on {setting.d} replicas"
        raise PlanError(f"batch={setting.batch}", fact, f"a multiple of {rows}")
    if setting.p * setting.v > shape.layers:
        fact = f"{shape.layers} layers are not enough for {setting.p * setting.v} stages"
        raise PlanError(f"p={setting.p}, v={setting.v}", fact, f"p * v <= {shape.layers}")
    if setting.t > shape.heads:
        raise PlanError(f"t={setting.t}", f"the model has only {shape.heads} heads", f"t <= {shape.heads}")
    for name, size in (("heads", shape.heads), ("elements of the MLP's width", shape.ffn)):
        if size % setting.t:
            remedy = f"a divisor of {math.gcd(shape.heads, shape.ffn)}"
            raise PlanError(f"t={setting.t}", f"does not divide {size} {name}", remedy)
    if shape.seq % setting.c:
        raise PlanError(f"c={setting.c}", f"does not divide {shape.seq} tokens", f"a divisor of {shape.seq}")
    if setting.sequence_parallel and shape.seq % (setting.t * setting.c):
        fact = f"t * c does not divide {shape.seq} tokens"
        raise PlanError("sequence_parallel=True", fact, "another t or c")
    _check_placement(setting, gpus_per_node)
    return setting


def check_count(name: str, value: Any) -> None:
    """Raise PlanError unless a value is a positive integer, which may be numpy's."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise PlanError(f"{name}={value!r}", "is not a positive integer", f"for example {name}=1")


def _check_placement(setting: Setting, gpus_per_node: int) -> None:
    """Raise PlanError if more ranks share a node than an axis has, or together more than a node has GPUs."""
    degrees = {"tp": setting.t, "cp": setting.c, "dp": setting.d, "pp": setting.p}
    for axis, value in (setting.placement or {}).items():
        if axis not in AXES:
            raise PlanError("placement", f"no such axis: {axis!r}", nearest(axis, AXES))
        most = min(gpus_per_node, degrees[axis])
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 1 <= value <= most:
            fact = f"{axis}={value!r}: the axis has {degrees[axis]} ranks and a node {gpus_per_node} GPUs"
            raise PlanError("placement", fact, f"1 to {most}")
    # With the axes that are left out, which follow the order of ranks.
    inside = {axis: int(setting.local(axis, gpus_per_node)) for axis in AXES}
    if setting.placement and math.prod(inside.values()) > gpus_per_node:
        used = " * ".join(f"{axis} {count}" for axis, count in inside.items() if count > 1)
        remedy = "smaller numbers; axes that are left out follow the order of ranks"
        raise PlanError("placement", f"{used} exceeds the {gpus_per_node} GPUs of a node", remedy)
