"""Keywords of `parallelize`: their defaults, choices and checks.

In: keywords, and a plan. Out: `Options`. Each field of `Options` is a keyword; its metadata define the command-line
flag and the entry in plan.json. The signature of `parallelize` is written by hand, and a test compares the two.

    Options(t=2, p=2, d=2, v=2).mesh.size == 8
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from autoptd.elsewhere import remedy_for
from autoptd.errors import PlanError
from autoptd.ir.fusion import FUSED
from autoptd.ir.keyword import (
    CONTEXT,
    FOR_TRAINING,
    FUSED_BY,
    IN_PLAN,
    ON_DEVICE,
    SPLIT_TOKENS,
    TOKEN_ORDER,
    Keyword,
    about,
    check_degrees,
    hook,
    without_missing,
)
from autoptd.ir.machine import Machine, find_machine, machine_record
from autoptd.ir.machine_files import machine_names
from autoptd.ir.mesh import DEGREES, ORDER, Mesh
from autoptd.ir.placement import Sharing, check_sharing, sharing_of
from autoptd.ir.plan import Plan, nearest, read_plan
from autoptd.ir.quantities import check_degree, check_memory, check_seconds, check_steps
from autoptd.ir.recompute import check_recompute
from autoptd.ir.relief import relieved
from autoptd.ir.schedules import SCHEDULES, ZERO_BUBBLE, check_schedule, is_path
from autoptd.ir.shapes import Buckets, check_shapes
from autoptd.ir.state_bytes import StateBytes, state_bytes

P2P = ("auto", "scatter_gather", "direct")
DELAYS = ("after_b", "before_reduce")
BACKENDS = ("local", "gloo", "nccl")
# Of float32, with all bits.
MIN_SCALE, MAX_SCALE = 2.0**-126, (2 - 2.0**-23) * 2.0**127
LOSS_SCALE = ("loss_scale", "initial_loss_scale", "loss_scale_window", "hysteresis", "min_loss_scale")
# What stages compute in, by the keyword `precision`.
PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "bf16-mixed": "bfloat16", "fp16-mixed": "float16"}
ZERO = (0, 1, "auto")
REDUCE_DTYPES = ("fp32", "bf16")


@dataclass(frozen=True)
class Options:
    """One request: t, p, d, c degrees, v model chunks per pipeline rank, and how to run.

    order: which ranks are neighbours: the mesh axes, fastest first.
    num_microbatches: per replica and step; None takes the largest divisor of the replica's rows that is at
        most 4p, a multiple of p preferred; 1 for a model that mixes the rows of a batch.
    schedule: one of `SCHEDULES`, or the path of a text file with a schedule of your own
        (schedule/written.py), which gives m as well; None takes 1f1b for v=1, else interleaved.
    seed: draws the dropout masks.
    sequence_parallel: lets tp split values by tokens as well, which must divide over t. True is
        Korthikanti's plan (Korthikanti et al. 2022): all matrices stay split as without; norms, dropouts
        and residuals are a t-th (values of some KB stay whole: starting a second collective would cost
        more); all-gathers and reduce-scatters replace the all-reduces, at the same bytes. "auto" may split
        anything by tokens, where that is cheapest; reports compare its plan with the known ones.
    context: with c > 1, how attention sees all tokens: "ulysses", by all-to-alls, after which a rank has all tokens of
        some heads (Jacobs et al. 2023), which c must divide; "all_gather", by keys and values that are gathered for a
        rank's own queries (Dubey et al. 2024), whatever the heads; "auto", the cheaper one for each attention.
    token_order: which tokens a rank has: "contiguous", a run of them; "zigzag", two, as far from either end: of a causal
        triangle the same area on every rank. "auto": zigzag where a rank's queries are causal and 2c divides the tokens.
    p2p: how a value that is equal on all tensor ranks travels between stages: "direct", each rank sends all
        of it; "scatter_gather", each sends 1/t and the receivers gather (SC'21, section 4.1); "auto",
        whichever is faster on the described machine (ir/machine.py; the rule: program/transfers.py).
    fuse: by what patterns of operators are replaced (passes/fusion): "eager", operators of torch; "triton",
        kernels for CUDA devices; "inductor", every distinct layer compiled by torch's compiler, at the
        start of a run; False, nothing is replaced. None takes "triton" where the ranks are on CUDA devices
        and Triton is installed, else "eager".
    fuse_only: the fused operators that may be used, if not all: those of `program.fusions`.
    memory: what a rank may hold, in bytes: parameters with gradients and AdamW's two moments, and the
        activations of the microbatches in flight; None: the machine's (the default has no bound). With it,
        sequence_parallel, recompute and zero are "auto" unless given.
    memory_price: seconds per microbatch that each byte of a rank costs more. Where the fastest plan over tp
        does not fit, it is raised until one does (`memory_price.py`); a saved plan has it, and so gives the
        same program again.
    precision: "bf16" computes as `model.bfloat16()` does, from a float32 copy of the parameters, which the optimizer
        steps ("master weights"); gradients add up in float32. State dicts have the model's own dtypes. "fp16" likewise,
        with `model.half()` and a loss scale. "bf16-mixed", "fp16-mixed": as under `torch.autocast`, on the device of the
        ranks; parameters that are only read in 16 bits are cast once a step. None: the model as it is.
    loss_scale: what backward starts from in place of 1, with precision="fp16" or "fp16-mixed"; None: a dynamic
        scale, by the four keywords behind it (Megatron's). It starts as `initial_loss_scale`. An update is skipped,
        on all ranks, where a gradient is not finite. From the `hysteresis`-th such update on each halves the scale,
        down to `min_loss_scale`; `loss_scale_window` updates in a row without one double it, up to 2**127.
    zero: 1 divides the optimizer's state over replicas, and over c (Rajbhandari et al. 2020, stage 1): each updates a
        range of the parameters, which are gathered behind the update. The numbers are those of zero=0. "auto": where
        it takes that to fit.
    dp_shard: neighbours that share one copy of that state, a divisor of d*c; None: all. The others hold copies
        (torch's hybrid sharding).
    reduce_dtype: "bf16" sends gradients to the replicas that sum them in 16 bits, with zero=1; they add up in float32.
        Sums over copies of a shard, over tp and over the owners of tied parameters stay in float32, as they are small.
    recompute: what backward computes again (passes/kept/requested.py): "full", of every layer all but its input; "full:1/2",
        in half of each stage's layers; "selective", attention's scores and what is made of them; a list of globs, what
        these modules make; None, what the model itself wraps in `torch.utils.checkpoint`; False, nothing.
    recompute_num_layers: with "full", the layers that share one kept input (Megatron's "uniform" method).
    machine: what plans are weighed for: a name as `plan(cluster=)` takes it, such as "h100"
        (autoptd/machines), or a `Machine` (ir/machine.py).
    timeout: in seconds. nan: "ignore" lets a NaN loss pass; CUDA sees one a step late.
    check_every: 100 compares, in every 100th step, the batches of the ranks that must read the same (in the
        first three steps too), and the copies of parameters that must be equal (before the second step
        too); 0 never does.
    shapes: None: all batches have the shapes of example_inputs; "exact": a batch of another length or number of rows runs a
        program for that, compiled when it first comes, of which there are at most `max_programs` (None: 16); "bucket" or
        `Buckets`: batches are padded to a few lengths. Those behind the first are kept in the folder `program_cache`, if given.
    plan: pinned decisions (`ir/plan.py`).

    Three keywords, all off by default, are hooks on the backward of linear layers (runtime/ops/linear.py), under Megatron's
    names. A layer with a hook is a Python autograd function: about 10% slower at h=64, not at all from h=256 (benchmarks).

    async_tensor_model_parallel_allreduce: the all-reduce of the input's gradient of a column-split layer
        runs beside the GEMM of the weight's gradient. An input that several layers share (separate q, k, v) keeps
        its own, which is not hidden. On GPUs up to Hopper it wants CUDA_DEVICE_MAX_CONNECTIONS=1, so that the
        all-reduce starts before that GEMM.
    accumulate_allreduce_grads_in_fp32: gradients add up over microbatches, and over ranks, in float32
        (float64 for float64), whatever the parameters' dtype: `parameter.main_grad`. `parameter.grad` is
        its copy in the parameter's dtype. Costs 4 bytes a parameter and twice the reduced bytes where that
        dtype is bf16. Linear layers add to the sum from within the GEMM (Megatron's
        gradient_accumulation_fusion), with float32 parameters too.
    delay_wgrad_compute: B leaves the GEMMs of the weights' gradients to actions W, so that an earlier stage
        need not wait for them: "after_b" runs W right behind its B; "before_reduce" all W of a stage before its
        gradients are reduced, which keeps every microbatch's inputs and output gradients of these layers until then.
    """

    t: int = field(default=1, metadata=about("count", "tensor-parallel degree"))
    p: int = field(default=1, metadata=about("count", "pipeline-parallel degree"))
    d: int = field(default=1, metadata=about("count", "data-parallel degree"))
    c: int = field(default=1, metadata=about("count", "context-parallel degree: splits the sequence"))
    v: int = field(default=1, metadata=about("count", "model chunks per pipeline rank"))
    order: str = field(
        default=ORDER,
        metadata=about("text", f"rank order: mesh axes, fastest first (default {ORDER})", metavar="AXES"),
    )
    loss_fn: Callable[..., Any] | None = field(default=None, metadata=about(kind="function"))
    num_microbatches: int | None = field(default=None, metadata=about("count", "microbatches per replica"))
    schedule: str | os.PathLike[str] | None = field(  # a Path, once checked, where it is a file
        default=None,
        metadata=about("text", f"pipeline schedule: {', '.join(SCHEDULES)}, or a file", kind="path"),
    )
    seed: int = field(default=0, metadata=about("number", "seed for dropout", **IN_PLAN))
    sequence_parallel: bool | str = field(default=False, metadata=SPLIT_TOKENS)
    context: str = field(default="auto", metadata=CONTEXT)
    token_order: str = field(default="auto", metadata=TOKEN_ORDER)
    p2p: str = field(
        default="auto",
        metadata=about("choice", "how stages exchange activations when t > 1", choices=P2P, **IN_PLAN),
    )
    fuse: str | bool | None = field(default=None, metadata=FUSED_BY)
    fuse_only: Sequence[str] | None = field(
        default=None,
        metadata=about("list", f"use only these of {', '.join(FUSED)}", metavar="A,B", **IN_PLAN),
    )
    precision: str | None = field(
        default=None,
        metadata=about(
            "choice", "compute dtype; parameters and sums stay float32", choices=tuple(PRECISIONS), **IN_PLAN
        ),
    )
    loss_scale: float | None = field(
        default=None, metadata=about("float", "fixed loss scale for fp16 (default: dynamic)", **FOR_TRAINING)
    )
    initial_loss_scale: float = field(
        default=2.0**16, metadata=about("float", "first dynamic loss scale (default 2**16)", **FOR_TRAINING)
    )
    loss_scale_window: int = field(
        default=1000,
        metadata=about("count", "finite updates before the scale doubles (default 1000)", **FOR_TRAINING),
    )
    hysteresis: int = field(
        default=2, metadata=about("count", "overflows before the scale is halved (default 2)", **FOR_TRAINING)
    )
    min_loss_scale: float = field(
        default=1.0,
        metadata=about("float", "lower bound of the dynamic loss scale (default 1)", **FOR_TRAINING),
    )
    zero: int | str = field(
        default=0,
        metadata=about("stage", "ZeRO stage: 0, 1 (optimizer state) or auto", choices=ZERO, **IN_PLAN),
    )
    dp_shard: int | None = field(
        default=None,
        metadata=about("count", "ranks that share one copy of the ZeRO state (default: all)", **IN_PLAN),
    )
    reduce_dtype: str = field(
        default="fp32",
        metadata=about("choice", "dtype of reduced gradients (zero=1)", choices=REDUCE_DTYPES, **IN_PLAN),
    )
    recompute: str | Sequence[str] | bool | None = field(
        default=None,
        metadata=about("text", "activation recomputation: auto, full, selective or full:1/2", **IN_PLAN),
    )
    recompute_num_layers: int = field(
        default=1, metadata=about("count", "layers per checkpointed block with --recompute full", **IN_PLAN)
    )
    memory: float | str | None = field(  # a float, once checked
        default=None, metadata=about("bytes", "memory budget per rank: 80e9, 80GB or 80GiB", **IN_PLAN)
    )
    memory_price: float | None = field(default=None, metadata=about(kind="float", **IN_PLAN))
    machine: str | Machine | Mapping[str, Any] | None = field(  # once checked, as a plan spells it
        default=None,
        metadata=about("text", f"machine to plan for: {', '.join(machine_names())}", **IN_PLAN),
    )
    async_tensor_model_parallel_allreduce: bool = field(
        default=False, metadata=hook("overlap the input-gradient all-reduce with the wgrad GEMM")
    )
    accumulate_allreduce_grads_in_fp32: bool = field(
        default=False, metadata=hook("accumulate and reduce gradients in float32")
    )
    delay_wgrad_compute: str | None = field(
        default=None, metadata=about("choice", "when to compute wgrads", choices=DELAYS, **IN_PLAN)
    )
    device: str | None = field(default=None, metadata=ON_DEVICE)
    backend: str | None = field(
        default=None,
        metadata=about(
            "choice", "communication backend; local: ranks are threads", choices=BACKENDS, **FOR_TRAINING
        ),
    )
    timeout: float = field(default=300.0, metadata=about(kind="float"))
    nan: str = field(default="raise", metadata=about(choices=("raise", "ignore")))
    check_every: int = field(default=100, metadata=about())
    shapes: str | Buckets | None = field(default=None, metadata=about())
    max_programs: int | None = field(default=None, metadata=about())
    program_cache: str | os.PathLike[str] | None = field(default=None, metadata=about(kind="path"))
    plan: Plan = field(default_factory=Plan, metadata=about("text", "plan.json to reproduce", metavar="FILE"))

    def __post_init__(self) -> None:
        for item in fields(self):
            keyword, value = item.metadata["keyword"], getattr(self, item.name)
            # Defaults need no check, and None stands for one in several fields.
            if value is item.default:
                continue
            keyword.check_kind(item.name, value)
            if keyword.flag == "count":
                check_degree(item.name, value)
            if not keyword.allows(value):
                remedy = ", ".join(map(repr, keyword.choices)) + " or None" * (item.default is None)
                raise PlanError(f"{item.name}={value!r}", "no such choice", remedy)
        _ = self.mesh.axes  # PlanError where the order is none of its axes
        if self.schedule is None:
            object.__setattr__(self, "schedule", "interleaved" if self.v > 1 else "1f1b")
        if is_path(self.schedule):
            object.__setattr__(self, "schedule", Path(str(self.schedule)))
        # As plan.json spells it, to compare the two.
        object.__setattr__(self, "machine", machine_record(self.machine))
        object.__setattr__(self, "memory", check_memory(self.memory))
        self._check_schedule()
        self._check_storage()
        again = check_recompute(self.recompute, self.recompute_num_layers, self.fuse, self.plan.keep)
        object.__setattr__(self, "recompute", again)
        self._check_loss_scale()
        self._check_numbers()

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
        check_degrees(self)
        if self.v > 1 and self.p == 1:
            fact = "several model chunks per pipeline rank gain nothing without a pipeline (p=1)"
            raise PlanError(f"v={self.v}", fact, "v=1, or p >= 2")
        places_wgrads = self.schedule in ZERO_BUBBLE or isinstance(self.schedule, Path)
        if self.delay_wgrad_compute is not None and places_wgrads:
            fact = f"schedule={str(self.schedule)!r} places the weight gradients itself"
            raise PlanError(f"delay_wgrad_compute={self.delay_wgrad_compute!r}", fact, "one of the two")

    def _check_storage(self) -> None:
        """Check that equal groups of replicas can share the optimizer's state, and how gradients add up."""
        if self.precision and self.accumulate_allreduce_grads_in_fp32:
            fact = f"with precision={self.precision!r} gradients add up in float32 as it is"
            raise PlanError("accumulate_allreduce_grads_in_fp32=True", fact, "leave it out")
        if self.reduce_dtype != "fp32" and not self.zero:
            fact = "without zero=1 an all-reduce sums gradients, which would add up in 16 bits"
            raise PlanError(f"reduce_dtype={self.reduce_dtype!r}", fact, "zero=1, or leave it out")
        if self.dp_shard is not None and not self.zero:
            remedy = "zero=1, or leave dp_shard out"
            raise PlanError(f"dp_shard={self.dp_shard}", "replicas share nothing without zero=1", remedy)
        check_sharing(self.mesh, self.sharing_ranks)

    def _check_loss_scale(self) -> None:
        """Check that a loss scale is asked for where there is one, and that its numbers make one."""
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name not in LOSS_SCALE or value == item.default:
                continue
            if not self.is_fp16:
                fact = f"there is no loss scale with precision={self.precision!r}"
                raise PlanError(f"{item.name}={value!r}", fact, 'leave it out, or precision="fp16"')
            if self.loss_scale is not None and item.name != "loss_scale":
                fact = f"loss_scale={self.loss_scale!r} is a fixed scale"
                raise PlanError(f"{item.name}={value!r}", fact, "one of the two")
            if not (isinstance(value, (int, float)) and MIN_SCALE <= value <= MAX_SCALE):
                raise PlanError(f"{item.name}={value!r}", "no positive number of float32", "a power of two")
        if (least := self.min_loss_scale) > (first := self.initial_loss_scale):
            raise PlanError(f"min_loss_scale={least!r}", f"is above initial_loss_scale={first!r}", "less")

    def _check_numbers(self) -> None:
        """Check seconds, bytes and steps, and that the fused operators exist."""
        check_steps("check_every", self.check_every)
        if set(self.fuse_only or ()) - set(FUSED):
            remedy = f"a list of: {', '.join(FUSED)}"
            raise PlanError(f"fuse_only={self.fuse_only!r}", "names no fused operators", remedy)
        if self.memory_price is not None and not 0 <= self.memory_price < math.inf:
            price = f"memory_price={self.memory_price}"
            raise PlanError(price, "not a price in seconds per byte", "leave it out")
        check_seconds("timeout", self.timeout)
        check_shapes(self.shapes, self.max_programs)

    @property
    def mesh(self) -> Mesh:
        return Mesh.of({name: getattr(self, name) for name in DEGREES}, self.order)

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
        return (self.dp_shard or self.d * self.c) if self.zero else 1

    @property
    def sharing(self) -> Sharing:
        """How ranks share the storage of parameters."""
        return sharing_of(self.mesh, self.sharing_ranks)

    def state_bytes(self, itemsize: int) -> StateBytes:
        """Return what an element of a trained parameter costs that stages use in a dtype of so many bytes."""
        wide = max(itemsize, 4)
        if self.precision:
            # Under autocast, what is read in float32 has no copy.
            has_master = not self.is_mixed or itemsize < wide
            return state_bytes(itemsize, wide, wide, has_master=has_master, parts=self.sharing_ranks)
        # The sum of a float32 parameter is its gradient; float64 ones have no float32 gradient.
        has_main_grad = self.accumulate_allreduce_grads_in_fp32 and itemsize < 4
        sums = wide if has_main_grad else itemsize
        return state_bytes(itemsize, itemsize, sums, has_main_grad=has_main_grad, parts=self.sharing_ranks)

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
    def num_stages(self) -> int:
        return self.p * self.v


KEYWORDS: dict[str, Keyword] = {item.name: item.metadata["keyword"] for item in fields(Options)}


def make_options(*, plan: Any = None, **keywords: Any) -> Options:
    """Return Options from the keywords of `parallelize`, `compile` or `verify`; refuse what does not exist yet.

    `plan` is a dict or the path of a plan.json; a keyword may not contradict it. A keyword that is None is
    left out.
    """
    # Before unknown keywords: `summa=True` is known here, and refused by its feature's name.
    keywords = without_missing(keywords, KEYWORDS)
    for name in keywords:
        if name not in KEYWORDS:
            remedy = remedy_for(name) or nearest(name, sorted(KEYWORDS))
            raise PlanError(f"{name}=", "no such keyword", remedy)
    keywords = {name: value for name, value in keywords.items() if value is not None}
    if plan is None:
        return Options(**relieved(keywords))
    # These two as a plan has them, so that the two can be compared.
    if isinstance(keywords.get("schedule"), os.PathLike):
        keywords["schedule"] = os.fspath(keywords["schedule"])
    if "machine" in keywords:
        keywords["machine"] = machine_record(keywords["machine"])
    in_plan = frozenset(name for name, keyword in KEYWORDS.items() if keyword.is_planned)
    planned, pinned = read_plan(plan, keywords, in_plan)
    planned = {name: value for name, value in planned.items() if value is not None}
    # Keywords win, and can only repeat the plan: `read_plan` refused those that contradict it.
    return Options(**relieved({**planned, **keywords}), plan=pinned)
