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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from autoptd.compiler.compiler import Compiler
from autoptd.errors import PlanError
from autoptd.ir.machine import Machine
from autoptd.ir.shapes import EXACT, Buckets
from autoptd.model.parallel_model import ParallelModel
from autoptd.options import make_options
from autoptd.program.program import Program
from autoptd.runtime.checkpoint.weights import open_weights
from autoptd.runtime.step.launch import is_first_process, is_launched
from autoptd.runtime.world.devices import check_device
from autoptd.runtime.world.leaving import tell_at_exit
from autoptd.subject.call import split_call
from autoptd.subject.subject import Subject
from autoptd.trace import check_precision
from autoptd.verify.verify import verify
from autoptd.wings.planner.auto import planned
from autoptd.wings.reports.excepthook import print_errors_once
from autoptd.wings.reports.pictures import draw_program
from autoptd.wings.viz import graph_picture


def parallelize(
    model: nn.Module,
    t: int | str | None = None,
    p: int | str | None = None,
    d: int | str | None = None,
    *,
    c: int | None = None,
    v: int | str | None = None,
    order: str | None = None,
    sequence_parallel: bool | str | None = None,
    context: str | None = None,
    token_order: str | None = None,
    example_inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    num_microbatches: int | str | None = None,
    gpus: int | None = None,
    schedule: str | os.PathLike[str] | None = None,
    seed: int | None = None,
    device: str | None = None,
    backend: str | None = None,
    timeout: float = 300.0,
    nan: str = "raise",
    check_every: int | None = None,
    shapes: str | Buckets | None = None,
    max_programs: int | None = None,
    program_cache: str | os.PathLike[str] | None = None,
    p2p: str | None = None,
    fuse: str | bool | None = None,
    fuse_only: Sequence[str] | None = None,
    async_tensor_model_parallel_allreduce: bool | None = None,
    accumulate_allreduce_grads_in_fp32: bool | None = None,
    delay_wgrad_compute: str | None = None,
    precision: str | None = None,
    loss_scale: float | None = None,
    initial_loss_scale: float | None = None,
    loss_scale_window: int | None = None,
    hysteresis: int | None = None,
    min_loss_scale: float | None = None,
    zero: int | str | None = None,
    dp_shard: int | None = None,
    reduce_dtype: str | None = None,
    recompute: str | Sequence[str] | bool | None = None,
    recompute_num_layers: int | None = None,
    memory: float | None = None,
    machine: str | Machine | Mapping[str, Any] | None = None,
    plan: dict[str, Any] | str | Path | None = None,
    weights: str | os.PathLike[str] | None = None,
    **later: Any,
) -> ParallelModel:
    """Return `model` running on t*p*d*c ranks: t tensor, p pipeline, d data parallel (Narayanan et al., SC'21), c context
    parallel.

    The model is not changed; its weights are copied. What is left out is the plan's, else the default of
    `Options`.

    c: divides the tokens of every sequence, and so its activations (DeepSpeed-Ulysses, Jacobs et al. 2023).
    v: model chunks per pipeline rank.
    order: the mesh axes, fastest first ("tp-cp-dp-pp": tensor-parallel ranks are neighbours).
    sequence_parallel: True splits norms, dropouts and residuals by tokens over tp; "auto" splits whatever is
        cheapest.
    context: with c > 1, how attention sees all tokens: "ulysses", "all_gather" or "auto", see `Options`.
    token_order: which tokens a rank has, "contiguous", "zigzag" or "auto", see `Options`.
    example_inputs: the global batch of a step, on every backend: a tuple of positional arguments of the model,
        or a mapping of keyword arguments. d divides its rows. Without it, the model is compiled at the first
        `step`, for what that gets.
    loss_fn: `loss_fn(output, targets)`, where the model returns no loss.
    num_microbatches: per replica and step (default: the largest divisor of the replica's rows that is at most
        4p, a multiple of p preferred; 1 for a model that mixes the rows of a batch, as a contrastive loss).
    schedule: one of `autoptd.options.SCHEDULES`, or the path of a text file with your own.
    seed: draws the dropout masks.
    device, backend: "local" (ranks are threads of this process, on `device`), "gloo" or "nccl".
    timeout: in seconds.
    nan: "ignore" lets a NaN loss pass.
    check_every: every so many steps the ranks of a replica compare their batches, and copies of parameters
        (default 100; 0: never).
    shapes: what a batch of another length or number of rows than `example_inputs` is: an error (None); "exact": it
        runs a program for these sizes, compiled when they first come, on the same parameters and optimizer; at most
        `max_programs` of them (default 16); "bucket", or `autoptd.Buckets`: it is padded to one of few lengths, where
        the model is seen to pass over padding.
    program_cache: a folder in which programs for other sizes are kept, for the next run. It holds Python that is run: one
        that nobody else can write to.
    p2p: how stages send where t > 1: "direct", "scatter_gather" or "auto".
    fuse, fuse_only: the backend of fused operators, "eager", "triton", "inductor" or False (default: by
        device), and those to use.
    async_tensor_model_parallel_allreduce, accumulate_allreduce_grads_in_fp32, delay_wgrad_compute: hooks on
        the backward of linear layers, see `Options`.
    precision: "bf16" or "fp16" computes in that, "bf16-mixed" or "fp16-mixed" as under `torch.autocast`, from float32
        parameters that the optimizer steps.
    loss_scale: of fp16; by default dynamic, by `initial_loss_scale`, `loss_scale_window`, `hysteresis` and
        `min_loss_scale`, see `Options`.
    zero: 1 divides the optimizer's state over the d*c ranks that sum a gradient (ZeRO stage 1), over groups of `dp_shard` of
        them if given; "auto": where it takes that to fit into `memory`.
    reduce_dtype: "bf16": with zero=1, gradients travel in 16 bits to the replica that adds them up in float32.
    recompute, recompute_num_layers: which activations backward computes again: "full" (all but the inputs of layers, or of
        so many of them), "full:1/2", "selective" (attention's scores), globs of modules, or "auto" (the cheapest values,
        until a rank fits into `memory`); by default what the model wraps in `torch.utils.checkpoint`.
    memory: what a rank may hold, in bytes.
    machine: what the plan is weighed for: a name as `plan(cluster=)` takes it, such as "h100"
        (autoptd/machines), or a `Machine` (ir/machine.py).
    plan: a plan.json (its path, or a dict) whose decisions are taken (`ir/plan.py`).
    weights: a folder with model.safetensors, or several files and their index, as `save_pretrained` of
        transformers writes it; or a checkpoint, of `save` or of torch.distributed.checkpoint. Each rank reads
        its own part; the values of the model, which may be on meta, do not matter.
    later: catches keywords of features that do not exist yet.

    `t="auto"` (p, d, v, num_microbatches likewise) lets the planner choose it, and whatever else of these
    is not given, for `gpus` ranks (under torchrun: all), the model's config and `machine` (by default the
    device's).

    Raises TraceError when the model cannot be captured faithfully and PlanError when the request cannot be
    met, before any rank starts.
    """
    # The signature is the list of keywords: every argument is a request, but for these four.
    requested = dict(locals())
    for name in ("model", "example_inputs", "weights", "later"):
        del requested[name]
    requested |= later
    print_errors_once()
    subject = Subject.of(model, None if weights is None else open_weights(weights))
    subject.check_values()
    options = make_options(**planned(model, example_inputs, requested))
    check_device(options.device)
    check_precision(model, options.precision)
    if is_launched(options.mesh, options.backend):
        tell_at_exit()
    if example_inputs is None and options.shapes not in (None, EXACT):
        fact = "buckets are for lengths up to that of example_inputs, and there are none"
        raise PlanError(
            f"shapes={options.shapes!r}", fact, "example_inputs=, a global batch of the largest length"
        )
    compiler = Compiler(subject, options, checks=is_first_process(), draw=graph_picture)
    pm = ParallelModel.lazy(compiler, draw=draw_program)
    if example_inputs is not None:
        pm.compile_now(*split_call(example_inputs))
    return pm


def compile(model: nn.Module, *, example_inputs: Any, **keywords: Any) -> Program:
    """Compile `model` for t*p*d ranks; keywords are those of `parallelize`.

    `example_inputs` is the global batch: a tuple of positional or a dict of keyword arguments of the model.
    Raises TraceError or PlanError, naming site, fact and remedy. Warns when tensor ranks repeat each
    other's work because t does not divide.
    """
    subject = Subject.of(model)
    options = make_options(**planned(model, example_inputs, keywords))
    check_precision(model, options.precision)
    compiler = Compiler(subject, options, draw=graph_picture)
    return compiler.for_training(split_call(example_inputs), options.mesh.replicas)


__all__ = ["Buckets", "Machine", "ParallelModel", "Program", "compile", "parallelize", "verify"]
