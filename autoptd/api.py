"""The calls that users make: `parallelize`, `compile`, `verify`.

In: an unmodified model, degrees, a batch. Out: a `ParallelModel` that trains like the model.

pm = autoptd.parallelize(model, t=2, p=2, d=2, example_inputs=(x, y))
opt = pm.optimizer(torch.optim.AdamW, lr=3e-4)
for x, y in loader:
    loss = pm.step(*pm.local_batch(x, y))
    opt.step(); opt.zero_grad()
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from torch import nn

from autoptd.compiler.compiler import Compiler
from autoptd.ir.machine import Machine
from autoptd.model import parallel_model
from autoptd.options import (
    Buckets,
    ContextParallel,
    Fuse,
    LinearHooks,
    LossScale,
    RankOptions,
    Recompute,
    Shapes,
    Zero,
    flat,
    make_options,
)
from autoptd.program.program import Program
from autoptd.runtime.checkpoint.read import open_weights
from autoptd.runtime.step.launch import enter_world, is_first_process, join_launch
from autoptd.subject.call import split_call
from autoptd.subject.subject import Subject
from autoptd.trace import check_precision
from autoptd.verify.verify import Report, compare
from autoptd.wings.planner.auto import planned
from autoptd.wings.reports.excepthook import print_errors_once
from autoptd.wings.reports.pictures import draw_program, graph_picture


class ParallelModel(parallel_model.ParallelModel):
    # The model itself does not depend on pictures.
    __doc__ = parallel_model.ParallelModel.__doc__

    @wraps(parallel_model.ParallelModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, draw: parallel_model.Draw | None = draw_program, **kwargs: Any) -> None:
        super().__init__(*args, draw=draw, **kwargs)


def parallelize(
    model: nn.Module,
    t: int | str | None = None,
    p: int | str | None = None,
    d: int | str | None = None,
    *,
    c: int | None = None,
    v: int | str | None = None,
    example_inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    num_microbatches: int | str | None = None,
    schedule: str | os.PathLike[str] | None = None,
    sequence_parallel: bool | str | None = None,
    context: str | ContextParallel | None = None,
    precision: str | None = None,
    loss_scale: float | LossScale | None = None,
    zero: int | str | Zero | None = None,
    recompute: str | Sequence[str] | bool | Recompute | None = None,
    memory: float | str | None = None,
    fuse: str | bool | Fuse | None = None,
    hooks: LinearHooks | None = None,
    shapes: str | Buckets | Shapes | None = None,
    ranks: RankOptions | None = None,
    backend: str | None = None,
    device: str | None = None,
    seed: int | None = None,
    machine: str | Machine | Mapping[str, Any] | None = None,
    gpus: int | None = None,
    plan: dict[str, Any] | str | Path | None = None,
    weights: str | os.PathLike[str] | None = None,
    **others: Any,
) -> ParallelModel:
    """Return `model` running on t*p*d*c ranks: t tensor, p pipeline, d data parallel (Narayanan et al., SC'21), c context
    parallel.

    The model is not changed; its weights are copied. An argument that is not given comes from the plan, or is a
    default. Settings that are rarely needed are in records: `zero=Zero(1, shard=8)` where `zero=1` does not say
    enough.

    c: divides the tokens of every sequence, and so its activations (DeepSpeed-Ulysses, Jacobs et al. 2023).
    v: model chunks per pipeline rank.
    example_inputs: the global batch of a step, on every backend: a tuple of positional arguments of the model,
        or a mapping of keyword arguments. d divides its rows. Without it, the model is compiled at the first
        `step`, for what that gets.
    loss_fn: `loss_fn(output, targets)`, where the model returns no loss.
    num_microbatches: per replica and step (default: the largest divisor of the replica's rows that is at most
        4p, a multiple of p preferred; 1 for a model that mixes the rows of a batch, as a contrastive loss).
    schedule: "gpipe", "1f1b" (the default for v=1), "interleaved" (for v > 1), "looped_bfs", "zb_h1", "zb_2p", "zbv", or the
        path of a text file with your own (schedule/requested.py), which gives num_microbatches as well.
    sequence_parallel: lets tp split values by tokens as well, which must divide over t. True is Korthikanti's plan
        (Korthikanti et al. 2022): all matrices stay split as without; norms, dropouts and residuals are 1/t per rank
        (values of a few KB stay whole: starting a second collective would cost more); all-gathers and reduce-scatters replace
        the all-reduces, at the same bytes. "auto" may split anything by tokens, where that is cheapest; reports compare its
        plan with the known ones.
    context: with c > 1, how attention sees all tokens: "ulysses", "all_gather" or "auto"; `ContextParallel` says which
        tokens a rank has, too.
    precision: "bf16" computes as `model.bfloat16()` does, from a float32 copy of the parameters, which the optimizer steps
        ("master weights"); gradients add up in float32. State dicts have the model's own dtypes. "fp16" likewise, with
        `model.half()` and a loss scale. "bf16-mixed", "fp16-mixed": as under `torch.autocast`, on the device of the ranks;
        parameters that are only read in 16 bits are cast once a step.
    loss_scale: a fixed one for fp16; by default it is dynamic, by the numbers of `LossScale`.
    zero: the ZeRO stage: 1 divides the optimizer's state over the d*c ranks that sum a gradient, 2 gradients as well, and 3
        parameters; "auto" takes the lowest stage that fits into `memory`. `Zero` has groups of replicas, how long gathered
        parameters stay, and the dtype in which gradients travel.
    recompute: which activations backward computes again: "full", "full:1/2", "selective" (attention's scores), globs of
        modules, "auto" (the cheapest values, until a rank fits into `memory`), False, or a `Recompute`; by default what the
        model wraps in `torch.utils.checkpoint`.
    memory: what a rank may hold, in bytes or as "80GB": parameters with gradients and AdamW's two moments, and the
        activations of the microbatches in flight. With it, those of sequence_parallel, recompute and zero that are not given
        are "auto".
    fuse: the backend of fused operators: "eager", "triton", "inductor" or False (default: by device); `Fuse` has those to use.
    hooks: `LinearHooks` on the backward of linear layers: overlap, float32 gradients, delayed weight gradients.
    shapes: how to handle a batch of another length or number of rows than `example_inputs`: None raises; "exact" runs a
        program for these sizes; "bucket", or `Buckets`, pads to one of few lengths. `Shapes` bounds the number of programs,
        and keeps them in a folder.
    ranks: `RankOptions`: their order, how stages send, timeout, checks.
    backend, device: "local" (ranks are threads of this process, on `device`), "gloo" or "nccl".
    seed: draws the dropout masks.
    machine: what to plan for: a name as `plan(cluster=)` takes it, such as "h100" (autoptd/machines), or a `Machine`.
    gpus: the number of ranks, by default that of the launch, if a degree is "auto". `d="auto"` alone is this number divided by
        the other degrees: the replicas of an elastic launch, which share the same global batch. `t="auto"` (p, v,
        num_microbatches likewise) lets the planner choose that, and the others that are not given, for the model's config
        and `machine` (by default the device's).
    plan: a plan.json (its path, or a dict) whose decisions are taken (`ir/plan.py`).
    weights: a folder with model.safetensors, or several files and their index, as `save_pretrained` of
        transformers writes it; or a checkpoint, of `save` or of torch.distributed.checkpoint. Each rank reads
        its own part; the values of the model, which may be on meta, do not matter.
    others: settings that have a record by now, by their flat names (with a warning); all else is refused with a remedy.

    Raises TraceError when the model cannot be captured faithfully and PlanError when the request cannot be
    met, before any rank starts.
    """
    # The signature is the list of keywords: every argument is a request, but for these.
    requested = {**locals(), **others}
    for name in ("model", "example_inputs", "weights", "others"):
        del requested[name]
    join_launch(backend)
    print_errors_once()
    subject = Subject.of(model, None if weights is None else open_weights(weights))
    options = make_options(**planned(model, example_inputs, flat(requested)))
    enter_world(options.mesh, options.backend, options.device)
    check_precision(subject.model, options.precision)
    compiler = Compiler(subject, options, checks=is_first_process(), draw=graph_picture)
    pm = ParallelModel.lazy(compiler, draw=draw_program)
    if example_inputs is None:
        options.shapes.check_lazy()
    else:
        pm.compile_now(*split_call(example_inputs))
    return pm


def compile(model: nn.Module, *, example_inputs: Any, **keywords: Any) -> Program:
    """Compile `model` for t*p*d ranks; keywords are those of `parallelize`.

    `example_inputs` is the global batch: a tuple of positional or a dict of keyword arguments of the model.
    Raises TraceError or PlanError, naming site, fact and remedy. Warns when tensor ranks repeat each
    other's work because t does not divide.
    """
    join_launch(keywords.get("backend"))
    options = make_options(**planned(model, example_inputs, flat(keywords)))
    subject = Subject.of(model)
    check_precision(subject.model, options.precision)
    compiler = Compiler(subject, options, draw=graph_picture)
    return compiler.for_training(split_call(example_inputs), options.mesh.replicas)


def verify(
    model: nn.Module,
    *,
    example_inputs: Any,
    batches: Iterable[Any] | None = None,
    steps: int = 5,
    lr: float = 1e-3,
    **keywords: Any,
) -> Report:
    """Run `model` and its partitioned form side by side; raise InternalError with the report if they differ.

    `example_inputs` is a global batch. Steps use the first ones of `batches`, each like `example_inputs`;
    without it, the example, then variations of it with its tokens, labels and rows permuted. Keywords are
    those of `parallelize`. The model itself is not changed: it trains one step, and is restored. If it cannot
    be evaluated, the report says why. Raises PlanError if the model has no weights (meta) or trains no
    parameter, and TraceError if its float64 copy trains differently (weights tied by storage).
    """
    options = make_options(**{**planned(model, example_inputs, flat(keywords)), "backend": "local"})
    return compare(model, options, split_call(example_inputs), batches, steps, lr)


__all__ = ["Buckets", "Machine", "ParallelModel", "Program", "compile", "parallelize", "verify"]
