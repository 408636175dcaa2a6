"""Keywords that are rarely needed, in records next to the flat ones that everybody knows.

In: `zero=1`, or `zero=Zero(shard=8)`. Out: the part of `Options` that the compiler reads, checked by itself.

    autoptd.parallelize(model, d=16, zero=Zero(shard=8, reduce_dtype="bf16"), ranks=RankOptions(timeout=60.0))

The command line and plan.json have every one of these settings under a flat name: `dp_shard` for
`Zero.shard`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from autoptd.errors import PlanError
from autoptd.ir.fusion import FUSED
from autoptd.ir.mesh import ORDER
from autoptd.ir.quantities import check_seconds, check_steps
from autoptd.options.buckets import BUCKET, EXACT, Buckets
from autoptd.options.keyword import FOR_TRAINING, IN_PLAN, check_kinds, keyword, settings_of

P2P = ("auto", "scatter_gather", "direct")
DELAYS = ("after_b", "before_reduce")
REDUCE_DTYPES = ("fp32", "bf16")
# Of float32, with all bits.
MIN_SCALE, MAX_SCALE = 2.0**-126, (2 - 2.0**-23) * 2.0**127


@dataclass(frozen=True)
class ContextParallel:
    """How sequences are divided over c ranks.

    attention: how attention sees all tokens: "ulysses", by all-to-alls, after which a rank has all tokens of some heads
        (Jacobs et al. 2023), which c must divide; "all_gather", by keys and values that are gathered for a rank's own
        queries (Dubey et al. 2024), whatever the heads; "auto", the cheaper one for each attention.
    tokens: which tokens a rank has (`token_order`): "contiguous", a run of them; "zigzag", two, equally far from either end:
        of a causal triangle the same area on every rank. "auto": zigzag where a rank's queries are causal and 2c divides the
        tokens.
    """

    attention: str = keyword(
        "auto",
        "choice",
        "how attention gathers the sequence, with --c > 1",
        choices=("auto", "ulysses", "all_gather"),
        only_with="c",
        name="context",
        **IN_PLAN,
    )
    tokens: str = keyword(
        "auto",
        "choice",
        "token layout over ranks, with --c > 1",
        choices=("auto", "zigzag", "contiguous"),
        only_with="c",
        name="token_order",
        **IN_PLAN,
    )

    def __post_init__(self) -> None:
        check_kinds(self)


@dataclass(frozen=True)
class RankOptions:
    """How ranks are numbered, reach each other and are checked.

    order: the mesh axes, fastest first: "tp-cp-dp-pp" makes tensor-parallel ranks neighbors.
    p2p: how a value that is equal on all tensor ranks travels between stages: "direct", each rank sends all of it;
        "scatter_gather", each sends 1/t and the receivers gather (SC'21, section 4.1); "auto", whichever is faster on the
        described machine (ir/machine.py; the rule: program/transfers.py).
    timeout: seconds after which a collective that does not finish is a fault.
    nan: "ignore" lets a NaN loss pass; CUDA sees one a step late.
    check_every: 100 compares, in every 100th step, the batches of ranks that must read the same (in the first three steps
        too), and the copies of parameters that must be equal (before the second step too); 0 never does.
    """

    order: str = keyword(
        ORDER, "text", f"rank order: mesh axes, fastest first (default {ORDER})", metavar="AXES"
    )
    p2p: str = keyword("auto", "choice", "how stages exchange activations when t > 1", choices=P2P, **IN_PLAN)
    timeout: float = keyword(300.0, kind="float")
    nan: str = keyword("raise", choices=("raise", "ignore"))
    check_every: int = keyword(100)

    def __post_init__(self) -> None:
        check_kinds(self)
        check_steps("check_every", self.check_every)
        check_seconds("timeout", self.timeout)


@dataclass(frozen=True)
class Fuse:
    """The backend of fused operators, and which of them may be used.

    backend: by what patterns of operators are replaced (passes/fusion): "eager", operators of torch; "triton", kernels for
        CUDA devices; "inductor", every distinct layer compiled by torch's compiler, at the start of a run; False, nothing is
        replaced. None takes "triton" where the ranks are on CUDA devices and Triton is installed, else "eager".
    only: the fused operators that may be used (`fuse_only`), if not all: those of `program.fusions`.
    """

    backend: str | bool | None = keyword(
        None,
        "choice",
        "operator fusion: eager, triton, inductor, or false",
        metavar="BACKEND",
        choices=("eager", "triton", "inductor", False),
        name="fuse",
        **IN_PLAN,
    )
    only: Sequence[str] | None = keyword(
        None, "list", f"use only these of {', '.join(FUSED)}", metavar="A,B", name="fuse_only", **IN_PLAN
    )

    def __post_init__(self) -> None:
        check_kinds(self)
        if set(self.only or ()) - set(FUSED):
            remedy = f"a list of: {', '.join(FUSED)}"
            raise PlanError(f"fuse_only={self.only!r}", "names no fused operators", remedy)


@dataclass(frozen=True)
class LossScale:
    """What backward starts from in place of 1 with fp16: a dynamic scale by Megatron's rule, unless it is
    `fixed`.

    It starts as `initial`. An update is skipped, on all ranks, where a gradient is not finite. From the
    `hysteresis`-th such update on each halves the scale, down to `minimum`; `window` updates in a row without
    one double it, up to 2**127.
    """

    fixed: float | None = keyword(
        None, "float", "fixed loss scale for fp16 (default: dynamic)", name="loss_scale", **FOR_TRAINING
    )
    initial: float = keyword(
        2.0**16,
        "float",
        "first dynamic loss scale (default 2**16)",
        name="initial_loss_scale",
        **FOR_TRAINING,
    )
    window: int = keyword(
        1000,
        "count",
        "finite updates before the scale doubles (default 1000)",
        name="loss_scale_window",
        **FOR_TRAINING,
    )
    hysteresis: int = keyword(2, "count", "overflows before the scale is halved (default 2)", **FOR_TRAINING)
    minimum: float = keyword(
        1.0,
        "float",
        "lower bound of the dynamic loss scale (default 1)",
        name="min_loss_scale",
        **FOR_TRAINING,
    )

    def __post_init__(self) -> None:
        check_kinds(self)
        for name, value in self.asked.items():
            if self.fixed is not None and name != "loss_scale":
                fact = f"loss_scale={self.fixed!r} is a fixed scale"
                raise PlanError(f"{name}={value!r}", fact, "one of the two")
            if not MIN_SCALE <= value <= MAX_SCALE:
                raise PlanError(f"{name}={value!r}", "not a positive number of float32", "a power of two")
        if self.minimum > self.initial:
            fact = f"is above initial_loss_scale={self.initial!r}"
            raise PlanError(f"min_loss_scale={self.minimum!r}", fact, "less")

    @property
    def asked(self) -> dict[str, float]:
        """What differs from the defaults, by the settings' names."""
        values = {
            setting.name: (getattr(self, setting.field), setting.default) for setting in settings_of(self)
        }
        return {name: value for name, (value, default) in values.items() if value != default}


@dataclass(frozen=True)
class Zero:
    """How replicas share the storage of parameters (Rajbhandari et al. 2020).

    stage: 1 divides the optimizer's state over replicas, and over c: each updates a range of the parameters, which are
        gathered after the update. 2 divides gradients too, which are reduced whenever they would take room. 3 divides the
        parameters as well, frozen ones included, which are gathered for their uses. The numbers are those of stage 0. "auto":
        the lowest that fits into `memory`.
    shard: neighbors that share one copy of that state (`dp_shard`), a divisor of d*c; None: all. The others hold copies
        (torch's hybrid sharding).
    reduce_dtype: "bf16" sends gradients to the replicas that sum them in 16 bits; they add up in float32. Sums over copies of
        a shard, over tp and over the owners of tied parameters stay in float32, since they are small.
    reshard_after_forward: with stage 3, when gathered parameters are freed (FSDP2's name). True: a layer's after
        each forward and backward, so that a rank has about two layers at a time; False: after the step, so that each is
        gathered once; "auto": with a pipeline when a rank turns to another of its stages, else as True.
    """

    stage: int | str = keyword(
        1,
        "stage",
        "ZeRO stage: 0, 1 (optimizer state), 2 (gradients), 3 (parameters) or auto",
        choices=(0, 1, 2, 3, "auto"),
        name="zero",
        **IN_PLAN,
    )
    shard: int | None = keyword(
        None,
        "count",
        "ranks that share one copy of the ZeRO state (default: all)",
        name="dp_shard",
        **IN_PLAN,
    )
    reduce_dtype: str = keyword(
        "fp32", "choice", "dtype of reduced gradients (zero=1)", choices=REDUCE_DTYPES, **IN_PLAN
    )
    reshard_after_forward: bool | str = keyword(
        "auto",
        "choice",
        "when gathered parameters are freed (zero=3): true, after every use; false, after the step",
        choices=(True, False, "auto"),
        **IN_PLAN,
    )

    def __post_init__(self) -> None:
        check_kinds(self)
        if self.reduce_dtype != "fp32" and not self.stage:
            fact = "without zero=1 an all-reduce sums gradients, which would add up in 16 bits"
            raise PlanError(f"reduce_dtype={self.reduce_dtype!r}", fact, "zero=1, or leave it out")
        if self.reshard_after_forward != "auto" and self.stage != 3:
            fact = "parameters are divided with zero=3 only"
            raise PlanError(
                f"reshard_after_forward={self.reshard_after_forward!r}", fact, "zero=3, or leave it out"
            )
        if self.shard is not None and not self.stage:
            remedy = "zero=1, or leave dp_shard out"
            raise PlanError(f"dp_shard={self.shard}", "replicas share nothing without zero=1", remedy)


@dataclass(frozen=True)
class Recompute:
    """Which saved activations are dropped after forward and computed again in backward
    (passes/kept/requested.py).

    what: "full", of every layer all but its input; "full:1/2", in half of each stage's layers; "selective", attention's
        scores and values computed from them; a list of globs, the values that these modules compute; "auto", the
        cheapest values, until a rank fits into `memory`; None, the values that the model itself wraps in
        `torch.utils.checkpoint`; False, nothing.
    num_layers: with "full", the layers that share one kept input (`recompute_num_layers`; Megatron's "uniform" method).
    """

    what: str | Sequence[str] | bool | None = keyword(
        None,
        "text",
        "activation recomputation: auto, full, selective or full:1/2",
        name="recompute",
        **IN_PLAN,
    )
    num_layers: int = keyword(
        1,
        "count",
        "layers per checkpointed block with --recompute full",
        name="recompute_num_layers",
        **IN_PLAN,
    )

    def __post_init__(self) -> None:
        check_kinds(self)
        what, site = self.what, f"recompute={self.what!r}"
        ways = "'auto', 'full', 'selective', 'full:1/2', or a list of globs"
        if isinstance(what, str):
            if what not in ("auto", "selective") and self.full_share is None:
                raise PlanError(site, "no such choice", f"{ways} of modules: ['*.mlp']")
        elif what is True:
            remedy = "'auto', 'full', 'selective' or 'full:1/2'"
            raise PlanError(site, "does not select anything to recompute", remedy)
        elif what is not None and what is not False and not _are_globs(what):
            raise PlanError(site, "does not select anything to recompute", f"{ways}: ['*.mlp']")
        if self.num_layers > 1 and what != "full":
            fact = f"layers share a kept input with recompute='full' only, not {what!r}"
            raise PlanError(f"recompute_num_layers={self.num_layers}", fact, "leave it out")

    @property
    def full_share(self) -> Fraction | None:
        """The share of layers that are computed again in full: 1 of "full", 1/2 of "full:1/2"; None of all
        else.
        """
        found = re.fullmatch(r"full(?::(\d+)/(\d+))?", self.what) if isinstance(self.what, str) else None
        if found is None:
            return None
        above, below = int(found[1] or 1), int(found[2] or 1)
        return Fraction(above, below) if 0 < above <= below else None


def _are_globs(what: Any) -> bool:
    return isinstance(what, Sequence) and len(what) > 0 and all(isinstance(glob, str) for glob in what)


@dataclass(frozen=True)
class LinearHooks:
    """Hooks on the backward of linear layers (runtime/ops/linear.py), all off by default.

    A layer with a hook is a Python autograd function: about 10% slower at h=64, not at all from h=256
    (benchmarks). The settings have Megatron's names.

    async_allreduce: the all-reduce of the input's gradient of a column-split layer overlaps the GEMM of the weight's gradient
        (`async_tensor_model_parallel_allreduce`). An input that several layers share (separate q, k, v) keeps its own, which
        is not hidden. On GPUs up to Hopper it wants CUDA_DEVICE_MAX_CONNECTIONS=1, so that the all-reduce starts before that
        GEMM.
    fp32_gradients: gradients add up over microbatches, and over ranks, in float32 (float64 for float64), whatever the
        parameters' dtype (`accumulate_allreduce_grads_in_fp32`): `parameter.main_grad`. `parameter.grad` is its copy in the
        parameter's dtype. Costs 4 bytes a parameter and twice the reduced bytes where that dtype is bf16. Linear layers add
        to the sum from within the GEMM (Megatron's gradient_accumulation_fusion), with float32 parameters too.
    delay_wgrad: B leaves the GEMMs of the weights' gradients to actions W, so that an earlier stage need not wait for them
        (`delay_wgrad_compute`): "after_b" runs W right after its B; "before_reduce" all W of a stage before its gradients are
        reduced, which keeps every microbatch's inputs and output gradients of these layers until then.
    """

    async_allreduce: bool = keyword(
        False,
        "on",
        "overlap the input-gradient all-reduce with the wgrad GEMM",
        choices=(False, True),
        name="async_tensor_model_parallel_allreduce",
        **IN_PLAN,
    )
    fp32_gradients: bool = keyword(
        False,
        "on",
        "accumulate and reduce gradients in float32",
        choices=(False, True),
        name="accumulate_allreduce_grads_in_fp32",
        **IN_PLAN,
    )
    delay_wgrad: str | None = keyword(
        None, "choice", "when to compute wgrads", choices=DELAYS, name="delay_wgrad_compute", **IN_PLAN
    )

    def __post_init__(self) -> None:
        check_kinds(self)


@dataclass(frozen=True)
class Shapes:
    """What a run does with batches of other lengths or numbers of rows than `example_inputs`.

    how: None, all batches are like it; "exact", a batch of other sizes runs a program for these, compiled when they first
        come, on the same parameters and optimizer; "bucket" or `Buckets`: batches are padded to a few lengths, where the
        model is seen to pass over padding.
    max_programs: how many programs there may be (None: 16).
    cache: a folder in which programs after the first are kept for the next run (`program_cache`). It holds Python that is
        run: use one that only you can write to.
    """

    how: str | Buckets | None = keyword(None, name="shapes")
    max_programs: int | None = keyword(None)
    cache: str | os.PathLike[str] | None = keyword(None, kind="path", name="program_cache")

    def __post_init__(self) -> None:
        check_kinds(self)
        if self.how is not None and self.how not in (EXACT, BUCKET) and not isinstance(self.how, Buckets):
            remedy = "None: all batches are like example_inputs; 'exact': one program per shape; "
            remedy += "'bucket' or autoptd.Buckets((512, 1024)): batches are padded"
            raise PlanError(f"shapes={self.how!r}", "no such choice", remedy)
        count = self.max_programs
        if count is None:
            return
        if self.how is None:
            fact = "has no effect without shapes="
            raise PlanError(f"max_programs={count!r}", fact, "leave it out, or shapes='exact'")
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise PlanError(f"max_programs={count!r}", "must be a positive integer", "for example 16")

    def check_lazy(self) -> None:
        """Raise PlanError for buckets whose lengths come from example inputs: there are none."""
        if self.how not in (None, EXACT):
            fact = "buckets are for lengths up to that of example_inputs, and there are none"
            remedy = "example_inputs=, a global batch of the largest length"
            raise PlanError(f"shapes={self.how!r}", fact, remedy)


__all__ = [
    "DELAYS",
    "MAX_SCALE",
    "ContextParallel",
    "Fuse",
    "LinearHooks",
    "LossScale",
    "RankOptions",
    "Recompute",
    "Shapes",
    "Zero",
]
