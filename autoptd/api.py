"""The calls that users make: `parallelize`, `compile`, `verify`.

In: an unmodified model, degrees, a batch. Out: a `ParallelModel` that trains like the model.

pm = autoptd.parallelize(model, t=2, p=2, d=2, example_inputs=(x, y))
opt = pm.optimizer(torch.optim.AdamW, lr=3e-4)
for x, y in loader:
    loss = pm.step(*pm.local_batch(x, y))
    opt.step(); opt.zero_grad()
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoptd.compat import tree_leaves, tree_map
from autoptd.compiler.batch import split_call
from autoptd.compiler.driver import compile_evaluation, compile_program, compile_sizes
from autoptd.compiler.records.fallbacks import warn_of_fallbacks
from autoptd.errors import PlanError
from autoptd.ir.buffers import same_entries
from autoptd.ir.machine import Machine
from autoptd.ir.shapes import EXACT, Buckets
from autoptd.model.adapters import Adapters
from autoptd.model.loop_changes import LoopChanges
from autoptd.model.loop_watch import LoopWatch
from autoptd.model.match_folder import fitting, format_of, open_weights, with_values
from autoptd.model.optimizer_request import OwnParameters
from autoptd.model.parallel_model import ParallelModel
from autoptd.model.sizes import EVALUATION
from autoptd.model.started_model import is_local
from autoptd.options import Options, make_options
from autoptd.program.program import Program
from autoptd.runtime.world.devices import check_device
from autoptd.runtime.world.leaving import tell_at_exit
from autoptd.subject.initial.deferred import is_deferred, traceable
from autoptd.subject.initial.sources import Source
from autoptd.subject.storage import shared_buffers
from autoptd.trace import (
    check_module,
    check_precision,
    computing_in,
    evaluating,
    has_values,
    in_modes,
    modes_of,
)
from autoptd.trace.padding import Call, compare_padded
from autoptd.verify.verify import verify
from autoptd.wings.planner.auto import planned
from autoptd.wings.reports.excepthook import print_errors_once
from autoptd.wings.reports.pictures import draw_program


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
    check_module(model)
    options = make_options(**planned(model, example_inputs, requested))
    if not is_local(options):
        tell_at_exit()
    check_device(options.device)
    check_precision(model, options.precision)
    given = model
    model, source = with_source(model, weights)
    remade, speaks = (lambda: with_source(given, weights)[0]), is_first_process()
    changes = LoopChanges(given, remade, options.loss_fn, speaks=speaks)
    modes: dict[nn.Module, bool] = {}
    cast: set[str] = set()

    def compile_for(args: tuple[Any, ...], kwargs: dict[str, Any], replicas: int, check: bool) -> Program:
        # Later evaluations are compared with training in these modes.
        modes.update(modes_of(model))
        program = compile_program(
            model, options, args, kwargs, replicas=replicas, check=check and is_first_process()
        )
        cast.update(program.cast_buffers)
        # Compiled again for other buffers (check=False), it has warned already.
        if check and is_first_process():
            warn_of_fallbacks(program)
        return changes.follow(program)

    def compile_other(args: tuple[Any, ...], kwargs: dict[str, Any], trained: Program) -> Program:
        replicas = options.mesh.replicas if is_local(options) else 1
        args, kwargs = beside(model, (args, kwargs))
        program = compile_sizes(
            model, options, args, kwargs, trained, modes, replicas=replicas, check=is_first_process()
        )
        if is_first_process():
            warn_of_fallbacks(program)
        return changes.follow(program)

    def compile_eval(
        args: tuple[Any, ...], kwargs: dict[str, Any], trained: Program, counts: tuple[int, ...] = ()
    ) -> Program:
        # What `eval_step` gets: the global batch for threads, this replica's rows for a process.
        replicas = options.mesh.replicas if is_local(options) else 1
        if options.shapes is not None:
            args, kwargs = beside(model, (args, kwargs))
        program = compile_evaluation(
            model, options, args, kwargs, trained, modes, replicas=replicas, counts=counts
        )
        return changes.follow(program, evaluates=True)

    def prove(call: str, calls: Sequence[Call], what: str, is_made_up: bool) -> None:
        # One process is enough: all have the same model.
        if is_first_process():
            with evaluating(model) if call == EVALUATION else in_modes(modes):
                short, padded, others = (beside(model, one) for one in calls)
                check_passed_over(model, options, cast, (short, padded, others), what, is_made_up)

    keywords: dict[str, Any] = {
        "weights": source,
        "arguments": argument_names(model),
        "format": format_of(model),
        "adapters": Adapters(model),
        "compile_eval": compile_eval,
        "compile_sizes": compile_other,
        "prove": prove,
        "draw": draw_program,
        "shared": shared_buffers(model),
        "holding": partial(with_buffers, model),
        "loop": LoopWatch(speaks=is_first_process()),
        "changes": changes,
        "own": OwnParameters(given),
    }
    pm = ParallelModel.lazy(compile_for, options, model.state_dict(), **keywords)
    keywords["loop"].guard(given)
    if example_inputs is None and options.shapes not in (None, EXACT):
        fact = "buckets are for lengths up to that of example_inputs, and there are none"
        raise PlanError(
            f"shapes={options.shapes!r}", fact, "example_inputs=, a global batch of the largest length"
        )
    if example_inputs is not None:
        args, kwargs = split_call(example_inputs)
        pm.compile_now(args, kwargs)
    return pm


def compile(model: nn.Module, *, example_inputs: Any, **keywords: Any) -> Program:
    """Compile `model` for t*p*d ranks; keywords are those of `parallelize`.

    `example_inputs` is the global batch: a tuple of positional or a dict of keyword arguments of the model.
    Raises TraceError or PlanError, naming site, fact and remedy. Warns when tensor ranks repeat each
    other's work because t does not divide.
    """
    options = make_options(**planned(model, example_inputs, keywords))
    check_precision(model, options.precision)
    if is_deferred(model):
        model, _ = traceable(model)
    args, kwargs = split_call(example_inputs)
    program = compile_program(model, options, args, kwargs, replicas=options.mesh.replicas)
    warn_of_fallbacks(program)
    return program


def beside(model: nn.Module, call: Call) -> Call:
    """Return a call on the model's device: a step takes its tensors from anywhere, tracing does not."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or any(device.type == "meta" for device in devices):
        return call
    (home,) = devices
    return tree_map(lambda leaf: leaf.to(home) if isinstance(leaf, torch.Tensor) else leaf, call)  # type: ignore[no-any-return]


def check_passed_over(
    model: nn.Module,
    options: Options,
    cast: Collection[str],
    calls: tuple[Call, Call, Call],
    what: str,
    is_made_up: bool,
) -> None:
    """Raise PlanError unless the loss and all gradients of a call stay the same with padding.

    `cast` are the program's `cast_buffers`.
    """
    if not has_values(model):
        fact = "the model has no values yet, so that it cannot be run to check that it passes over padding"
        remedy = (
            "autoptd.Buckets((512, 1024), check=False) where you know that it does, or a model with values"
        )
        raise PlanError("shapes=", fact, remedy)
    # The model's own dtype shows more than a narrower one, which inputs may be in.
    tensors = [x for x in tree_leaves(calls[0]) if isinstance(x, torch.Tensor)]
    is_narrow = options.precision and any(x.is_floating_point() for x in tensors)
    with computing_in(model, options.precision if is_narrow else None, cast):
        compare_padded(model, options.loss_fn, *calls, what, is_made_up=is_made_up)


def with_source(model: nn.Module, weights: str | os.PathLike[str] | None) -> tuple[nn.Module, Source | None]:
    """Return the model as it is traced, and where its ranks take their parameters from; None for its own values.

    PlanError where they have none.
    """
    source: Source | None = None
    if is_deferred(model):
        model, source = traceable(model)
    # Names and shapes are checked before anything is traced: a wrong folder costs seconds, not minutes.
    if weights is not None:
        source = folder = fitting(model, open_weights(weights))
        return with_values(model, folder), source
    if any(parameter.is_meta for parameter in model.parameters()):
        remedy = "build it in `with autoptd.deferred():`, or pass weights='a folder with its safetensors'"
        raise PlanError("model", "its weights are on meta: there is nothing to train", remedy)
    return model, source


@contextmanager
def with_buffers(model: nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Set the model's buffers to these values for a while, in tensors of their own.

    Names that are no buffers are ignored.
    """
    before: list[tuple[nn.Module, str, torch.Tensor]] = []
    # By identity: modules may share a buffer.
    copies: dict[int, torch.Tensor] = {}
    for path, module in model.named_modules():
        for name, own in module._buffers.items():
            value = values.get(f"{path}.{name}" if path else name)
            # A buffer with these values already stays the very tensor, which the user may have views of.
            if own is None or value is None or own.is_meta or same_entries(own, value.to(own.device)):
                continue
            before.append((module, name, own))
            copies.setdefault(id(own), value.to(own, copy=True))
    for module, name, own in before:
        module._buffers[name] = copies[id(own)]
    try:
        yield
    finally:
        for module, name, own in before:
            module._buffers[name] = own


def argument_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments that the model's forward takes by position; () without a
    signature.
    """
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(item.name for item in parameters if item.kind is item.POSITIONAL_OR_KEYWORD)


def is_first_process() -> bool:
    """Tell whether this process compares model and trace for its torchrun world: the answer is the same in
    all.
    """
    return os.environ.get("RANK", "0") == "0"


__all__ = ["Buckets", "Machine", "ParallelModel", "Program", "compile", "parallelize", "verify"]
