"""Define `Options`, a checked request.

In: degrees and parts (parts.py), as `make_options` reads them from keywords and a plan. Out: one frozen
request. Each field is a keyword, or a part with several: its metadata make the flag of the command line and
the entry in plan.json. The signature of `parallelize` is written by hand, and a test compares the two.

    make_options(t=2, p=2, d=2, v=2).mesh.size == 8
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autoptd.errors import PlanError
from autoptd.ir.actions import SCHEDULES, ZERO_BUBBLE, check_schedule
from autoptd.ir.machine import Machine, find_machine, machine_names
from autoptd.ir.mesh import DEGREES, Mesh
from autoptd.ir.placement import Scope, Sharing, StateBytes, bytes_per_element, check_sharing, sharing_of
from autoptd.ir.plan import Plan
from autoptd.ir.types import ZIGZAG
from autoptd.options.keyword import FOR_TRAINING, IN_PLAN, check_kinds, keyword, settings_of
from autoptd.options.parts import (
    ContextParallel,
    Fuse,
    LinearHooks,
    LossScale,
    RankOptions,
    Recompute,
    Shapes,
    Zero,
)

# A million: more can only be a typo.
MAX_RANKS = 2**20
BACKENDS = ("local", "gloo", "nccl")
# What stages compute in, by the keyword `precision`.
PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "bf16-mixed": "bfloat16", "fp16-mixed": "float16"}


@dataclass(frozen=True)
class Options:
    """One request: t, p, d, c degrees, v model chunks per pipeline rank, and how to run; see `parallelize`.

    `schedule` is a name or the file with the user's own, `memory` in bytes, `machine` as plan.json spells it.
    `memory_price`: seconds per microbatch that each byte of a rank costs more. Where the fastest plan over tp
    does not fit, it is raised until one does (compiler/memory_search.py); a saved plan has it, and so gives
    the same program again. `plan`: pinned decisions.
    """

    t: int = keyword(1, "count", "tensor-parallel degree")
    p: int = keyword(1, "count", "pipeline-parallel degree")
    d: int = keyword(1, "count", "data-parallel degree")
    c: int = keyword(1, "count", "context-parallel degree: splits the sequence")
    v: int = keyword(1, "count", "model chunks per pipeline rank")
    loss_fn: Callable[..., Any] | None = keyword(None, kind="function")
    num_microbatches: int | None = keyword(None, "count", "microbatches per replica")
    schedule: str | Path = keyword(
        "1f1b", "text", f"pipeline schedule: {', '.join(SCHEDULES)}, or a file", kind="path"
    )
    seed: int = keyword(0, "number", "seed for dropout", **IN_PLAN)
    sequence_parallel: bool | str = keyword(
        False,
        "switch",
        "shard activations by tokens between matrix products (Korthikanti et al.)",
        metavar="auto",
        choices=(True, False, "auto"),
        **IN_PLAN,
    )
    context: ContextParallel = field(default=ContextParallel())
    ranks: RankOptions = field(default=RankOptions())
    fuse: Fuse = field(default=Fuse())
    precision: str | None = keyword(
        None,
        "choice",
        "compute dtype; parameters and sums stay float32",
        choices=tuple(PRECISIONS),
        **IN_PLAN,
    )
    loss_scale: LossScale = field(default=LossScale())
    zero: Zero = field(default=Zero(stage=0))
    recompute: Recompute = field(default=Recompute())
    memory: float | None = keyword(None, "bytes", "memory budget per rank: 80e9, 80GB or 80GiB", **IN_PLAN)
    memory_price: float | None = keyword(None, kind="float", **IN_PLAN)
    machine: str | Mapping[str, Any] | None = keyword(
        None, "text", f"machine to plan for: {', '.join(machine_names())}", **IN_PLAN
    )
    hooks: LinearHooks = field(default=LinearHooks())
    device: str | None = keyword(
        None, "text", "device of the ranks with --backend local", kind="device", **FOR_TRAINING
    )
    backend: str | None = keyword(
        None, "choice", "communication backend; local: ranks are threads", choices=BACKENDS, **FOR_TRAINING
    )
    shapes: Shapes = field(default=Shapes())
    plan: Plan = keyword(Plan(), "text", "plan.json to reproduce", metavar="FILE")

    def __post_init__(self) -> None:
        check_kinds(self)
        _ = self.mesh.axes  # PlanError where the order is not one of its axes
        self._check_schedule()
        self._check_storage()
        self._check_precision()
        self._check_recompute()
        if self.memory_price is not None and not 0 <= self.memory_price < math.inf:
            price = f"memory_price={self.memory_price}"
            raise PlanError(price, "not a price in seconds per byte", "leave it out")

    def _check_schedule(self) -> None:
        """Check that the schedule runs v chunks on p ranks, and either places the weight gradients itself
        or leaves them to a keyword.
        """
        chunks = SCHEDULES.get(str(self.schedule), 0)
        if chunks > 1 and self.p == 1:
            fact = f"runs {chunks} model chunks per pipeline rank, and there is no pipeline (p=1)"
            remedy = f"schedule='1f1b' with v=1, or p >= 2 with v={chunks}"
            raise PlanError(f"schedule={self.schedule!r}", fact, remedy)
        if not isinstance(self.schedule, Path):
            check_schedule(str(self.schedule), self.v)
        self._check_degrees()
        if self.v > 1 and self.p == 1:
            fact = "several model chunks per pipeline rank gain nothing without a pipeline (p=1)"
            raise PlanError(f"v={self.v}", fact, "v=1, or p >= 2")
        places_wgrads = self.schedule in ZERO_BUBBLE or isinstance(self.schedule, Path)
        if self.hooks.delay_wgrad is not None and places_wgrads:
            fact = f"schedule={str(self.schedule)!r} places the weight gradients itself"
            raise PlanError(f"delay_wgrad_compute={self.hooks.delay_wgrad!r}", fact, "one of the two")

    def _check_degrees(self) -> None:
        """Check the number of ranks, and that context parallelism is set up only with c > 1."""
        if (count := max(self.mesh.size, self.num_stages)) > MAX_RANKS:
            raise PlanError("mesh", f"would have {count:,} ranks or stages", f"at most {MAX_RANKS:,}")
        for setting in settings_of(self.context):
            degree, value = setting.keyword.only_with, getattr(self.context, setting.field)
            if value != setting.default and getattr(self, degree) == 1:
                fact = f"with {degree}=1 every rank has all tokens"
                raise PlanError(f"{setting.name}={value!r}", fact, f"{degree} > 1, or leave it out")

    def _check_storage(self) -> None:
        """Check that equal groups of replicas can share the optimizer's state, and how gradients add up."""
        if self.precision and self.hooks.fp32_gradients:
            fact = f"with precision={self.precision!r} gradients already add up in float32"
            raise PlanError("accumulate_allreduce_grads_in_fp32=True", fact, "leave it out")
        check_sharing(self.mesh, self.sharing_ranks)
        if self.zero.reshard_after_forward is True and self.fuse.backend == "inductor":
            fact = "torch's compiler reads the parameters of a layer where no gather can be waited for"
            remedy = "reshard_after_forward=False, or fuse='triton' or 'eager'"
            raise PlanError("reshard_after_forward=True, and fuse='inductor'", fact, remedy)

    def _check_precision(self) -> None:
        """Check that a loss scale is asked for only where there is one."""
        for name, value in self.loss_scale.asked.items():
            if not self.is_fp16:
                fact = f"there is no loss scale with precision={self.precision!r}"
                raise PlanError(f"{name}={value!r}", fact, 'leave it out, or precision="fp16"')

    def _check_recompute(self) -> None:
        """Check that what backward computes again is not compiled by torch, and that the plan agrees."""
        what, is_compiled = self.recompute.what, self.fuse.backend == "inductor"
        if what and is_compiled:
            fact = "torch's compiler decides itself what to save within a layer"
            remedy = "fuse='triton' or 'eager', or leave recompute out"
            raise PlanError(f"recompute={what!r}", fact, remedy)
        for pin in self.plan.keep:
            if pin.way == "again" and (what is False or is_compiled):
                other = "recompute=False" if what is False else "fuse='inductor'"
                raise PlanError(f"plan: keep, and {other}", f"the plan has {pin}", "leave one of them out")

    @property
    def mesh(self) -> Mesh:
        return Mesh.of({name: getattr(self, name) for name in DEGREES}, self.ranks.order)

    @property
    def is_fp16(self) -> bool:
        """Whether anything is computed in float16, and the loss scaled."""
        return str(self.precision).startswith("fp16")

    @property
    def is_mixed(self) -> bool:
        """Whether the model computes as under autocast."""
        return str(self.precision).endswith("-mixed")

    @property
    def sharing_ranks(self) -> int:
        """How many ranks share one copy of what the optimizer steps."""
        return (self.zero.shard or self.d * self.c) if self.zero.stage else 1

    @property
    def scopes(self) -> tuple[Scope, Scope]:
        """How often divided parameters are gathered, and how often their gradients are reduced."""
        # Torch's compiler reads parameters where no gather can be waited for.
        is_run = self.p > 1 or self.fuse.backend == "inductor"
        of_choice: dict[bool | str, Scope] = {True: "use", False: "step", "auto": "run" if is_run else "use"}
        scope = of_choice[self.zero.reshard_after_forward]
        return (scope if self.zero.stage == 3 else "update"), (scope if self.zero.stage in (2, 3) else "step")

    @property
    def sharing(self) -> Sharing:
        """How ranks share the storage of parameters."""
        return sharing_of(self.mesh, self.sharing_ranks)

    def state_bytes(self, itemsize: int) -> StateBytes:
        """Return the bytes per element of a trained parameter that stages use in a dtype of `itemsize` bytes."""
        wide, ranks = max(itemsize, 4), self.sharing_ranks
        # With other scopes a rank has whole ones at some time in a step.
        divided = [ranks if scope == "use" else 1 for scope in self.scopes]
        parts: dict[str, Any] = {"parts": ranks, "parameter_parts": divided[0], "gradient_parts": divided[1]}
        if self.precision:
            # Under autocast, parameters that are read in float32 have no copy.
            has_master = not self.is_mixed or itemsize < wide
            return bytes_per_element(itemsize, wide, wide, has_master=has_master, **parts)
        # The sum of a float32 parameter is its gradient; float64 ones have no float32 gradient.
        has_main_grad = self.hooks.fp32_gradients and itemsize < 4
        sums = wide if has_main_grad else itemsize
        return bytes_per_element(itemsize, itemsize, sums, has_main_grad=has_main_grad, **parts)

    @property
    def rank_machine(self) -> Machine:
        """The machine, with the memory that a rank may hold."""
        machine = find_machine(self.machine)
        return machine if self.memory is None else replace(machine, memory=float(self.memory))

    @property
    def schedule_name(self) -> str:
        """The schedule's name; of a file, its own without the folder, which may differ from rank to rank."""
        return self.schedule.name if isinstance(self.schedule, Path) else str(self.schedule)

    @property
    def token_unit(self) -> int:
        """Return what padded sequence lengths are a multiple of: ranks that split tokens need equal parts."""
        parts = math.prod(map(self.mesh.degree, self.mesh.token_axes))
        unit = parts * (self.mesh.value_ranks if self.sequence_parallel is True else 1)
        return math.lcm(unit, 2 * parts) if self.context.tokens == ZIGZAG else unit

    @property
    def num_stages(self) -> int:
        return self.p * self.v


__all__ = ["MAX_RANKS", "PRECISIONS", "Options"]
