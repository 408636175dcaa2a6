"""The driver: one stage a line. An unmodified model and a request in, a `Program` out.

    program = compile(model, t=2, p=2, d=2, v=2, example_inputs=(ids, targets))
    program.save("out/")

No process group, no GPU and no weights in memory are needed: meta parameters compile as well.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from autoptd import codegen, passes, schedule
from autoptd import trace as tracing
from autoptd.auto import planned
from autoptd.batch import Batch, divided_remedy, plan_batch, resize, split_call
from autoptd.compat import tree_flatten
from autoptd.errors import AutoptdError, TraceError
from autoptd.ir.actions import Orders, ranks_of_stages
from autoptd.ir.buffers import Buffers
from autoptd.ir.mesh import Mesh
from autoptd.ir.notes import note
from autoptd.ir.sizes import local_shape
from autoptd.kernels.forms import has_triton
from autoptd.options import Options, make_options
from autoptd.passes.dump import Forms
from autoptd.passes.stages.memory_price import fit
from autoptd.placing import Traced, has_weight_gradients, place, weigh_known
from autoptd.program.buckets import plan_buckets
from autoptd.program.program import Program
from autoptd.program.stage_sums import stage_sums
from autoptd.program.transfers import plan_parcels
from autoptd.program.weighed import found_text
from autoptd.records.collectives import collectives
from autoptd.records.fallbacks import warn_of_checkpoints, warn_of_fallbacks
from autoptd.records.header import ABOUT_COLLECTIVES, about
from autoptd.records.plan import plan_record
from autoptd.records.specs import crossing_spec, dropout_specs, input_specs, param_specs, stage_spec
from autoptd.reports.pictures import painter
from autoptd.runtime.devices import device_of_ranks


def compile(model: nn.Module, *, example_inputs: Any, **keywords: Any) -> Program:
    """Compile `model` for t*p*d ranks; keywords are those of `parallelize`.

    `example_inputs` is the global batch: a tuple of positional or a dict of keyword arguments of the model. Raises TraceError
    or PlanError, naming site, fact and remedy. Warns when tensor ranks repeat each other's work because t does not divide.
    """
    options = make_options(**planned(model, example_inputs, keywords))
    args, kwargs = split_call(example_inputs)
    program = compile_program(model, options, args, kwargs, replicas=options.d)
    warn_of_fallbacks(program)
    return program


def compile_program(
    model: nn.Module,
    options: Options,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    replicas: int,
    check: bool = True,
    like: Program | None = None,
) -> Program:
    """Compile for the batch in `(args, kwargs)`, which holds the rows of `replicas` replicas (1 under torchrun, else d).

    With `like`, a program of the same model, parameters are stored and the model is cut as there.
    """
    tracing.check_module(model)
    tracing.check_device(model, args, kwargs)
    written = read_schedule(options)
    if written is not None:
        options = replace(options, num_microbatches=schedule.num_microbatches(written))
    options = replace(options, fuse=default_fusion(model, options))
    batch = plan_batch(options, args, kwargs, replicas)
    forms = Forms()

    call = resize(args, kwargs, batch, batch.traced_rows)
    captured = capture_rows(model, options, args, kwargs, batch)
    warn_of_checkpoints(captured.checkpointed)
    if check and tracing.has_values(model):
        compare_rows(model, options, captured, call, batch)
    whole = None
    if batch.pieces > 1:
        whole = tracing.capture(model, *resize(args, kwargs, batch, batch.whole_rows), options.loss_fn).graph
    forms.add("TRACED", captured.graph)

    orders = written or make_orders(options, batch.num_microbatches)
    known = Buffers(captured.buffers)
    batched = {name for name, leaf in captured.inputs if leaf in batch.batched}
    traced = Traced(captured.graph, whole, known, batched, batch, orders, like)
    solve = partial(place, traced, options, forms.add)
    machine = options.rank_machine
    placed, price = fit(solve, first=options.memory_price or 0.0, unit=1 / machine.link_bandwidth)
    options = replace(options, memory_price=price or None)
    graph, (assignment, fallbacks, groups, sizes), cut = placed
    weighed = weigh_known(traced, forms.graphs["CONNECTED"], options, sizes)
    ranks = ranks_of_stages(orders)

    passes.localize(graph, sizes)
    dropouts = dropout_specs(graph)

    wgrad = taker_of_weight_gradients(options, orders)
    graph, fusions = passes.substitute(graph, groups)
    passes.hook_gemms(graph, overlap=options.async_tensor_model_parallel_allreduce, wgrad=wgrad)
    passes.mark_owned(graph)
    forms.end("LOCAL", graph)
    of_one_device, of_a_rank = (
        partial(local_shape, sizes=replace(sizes, mesh=mesh)) for mesh in (Mesh(), options.mesh)
    )
    costs = replace(passes.count_work(graph, options.t, of_one_device, of_a_rank), cut=cut)

    crossing = codegen.crossings(graph)
    orders = connect_orders(orders, crossing)
    params = param_specs(graph, captured, options)
    buckets = [plan_buckets(params, orders, ranks, options.mesh, pp) for pp in range(options.p)]
    told = []
    for k, rank in enumerate(ranks):
        sums = stage_sums(buckets[rank], k, options.mesh)
        told.append(codegen.About(about(options, batch, ranks, k, wgrad), ABOUT_COLLECTIVES, ranks, sums))
    files = codegen.write_program(graph, options.t, crossing, told)
    crossed = tuple(crossing_spec(one) for one in crossing)
    parcels = plan_parcels(crossed, ranks, options.mesh, options.p2p, machine)
    plan = plan_record(options, batch, cut, params, fallbacks, weighed)
    return Program(
        mesh=options.mesh,
        v=options.v,
        num_microbatches=batch.num_microbatches,
        schedule_name=options.schedule_name,
        tree=captured.tree,
        constants=captured.constants,
        inputs=input_specs(graph, captured, batch),
        params=params,
        crossings=crossed,
        parcels=parcels,
        stages=tuple(stage_spec(k, file) for k, file in enumerate(files.stages)),
        orders=orders,
        sources=files.sources,
        collectives=tuple(collectives(graph, options, parcels, params, orders)),
        lines=files.lines,
        seed=options.seed,
        dropouts=dropouts,
        fallbacks=tuple(fallbacks),
        fusions=tuple(fusions),
        fuse=options.fuse or False,
        unlisted=tuple(passes.unlisted_operators(graph)),
        weighted=any(file.counts for file in files.stages),
        plan=plan,
        costs=costs,
        buffers={name: value.detach() for name, value in captured.buffers.items()},
        looked_at=known.looked_at(),
        graphs=forms.graphs,
        explainer=partial(passes.explain_split, assignment, remark=found_text(weighed)),
        painter=painter(of_a_rank),
    )


def default_fusion(model: nn.Module, options: Options) -> str | bool:
    """The backend of fused operators: what was asked for, or the fastest for the device of the ranks."""
    if options.fuse is not None:
        return options.fuse
    device = device_of_ranks(model.parameters(), options.device, options.backend)
    return "triton" if device.type == "cuda" and has_triton() else "eager"


def capture_rows(
    model: nn.Module, options: Options, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Batch
) -> tracing.Captured:
    """Trace with the rows of a microbatch; an argument that is as long as the batch by chance is the usual failure."""
    try:
        return tracing.capture(model, *resize(args, kwargs, batch, batch.traced_rows), options.loss_fn)
    except TraceError as error:
        rows = tree_flatten((args, kwargs))[0][batch.batched[0]].shape[0]
        if batch.traced_rows == rows or not _can_trace(model, options, args, kwargs):
            raise
        fact = f"with {batch.traced_rows} of {rows} rows it {error.fact}"
        raise TraceError(error.site, fact, divided_remedy(batch, rows)) from error


def compare_rows(
    model: nn.Module, options: Options, captured: tracing.Captured, call: tuple[Any, Any], batch: Batch
) -> None:
    """Hold the trace against the model; it may fail on fewer rows (a table that was divided by chance, and is indexed)."""
    try:
        tracing.compare(model, options.loss_fn, captured.graph, captured.buffers, *call)
    except AutoptdError:
        raise
    except Exception as error:
        fact = f"with {batch.traced_rows} rows it cannot be run: {type(error).__name__}: {error}"
        raise TraceError("model", fact, divided_remedy(batch, batch.rows * batch.pieces)) from error


def _can_trace(model: nn.Module, options: Options, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        tracing.capture(model, args, kwargs, options.loss_fn)
    except TraceError:
        return False
    return True


def read_schedule(options: Options) -> Orders | None:
    """The user's own schedule, where the request names a file."""
    if not isinstance(options.schedule, Path):
        return None
    return schedule.read_schedule(options.schedule, options.p, options.v, options.num_microbatches)


def make_orders(options: Options, m: int) -> Orders:
    """The schedule: what every pipeline rank computes, and so which stages it holds."""
    orders = schedule.build_orders(str(options.schedule), options.p, options.v, m)
    if options.delay_wgrad_compute is not None:
        orders = schedule.delay_weight_gradients(orders, options.delay_wgrad_compute)
    return orders


def taker_of_weight_gradients(options: Options, orders: Orders) -> str:
    """The attribute of a stage that takes the gradients of linear layers' weights; "" for autograd."""
    if has_weight_gradients(orders):
        return "deferred"
    return "main_grads" if options.accumulate_allreduce_grads_in_fp32 else ""


def connect_orders(orders: Orders, crossing: list[codegen.Crossing]) -> Orders:
    """The schedule with its transfers (a user's own may have them), simulated to the end before anything runs."""
    merged: dict[tuple[int, int], bool] = {}
    for one in crossing:
        for target in one.targets:
            merged[one.source, target] = merged.get((one.source, target), False) or note(one.node).needs_grad
    links = [(*pair, has_grad) for pair, has_grad in sorted(merged.items())]
    if not schedule.has_transfers(orders):
        orders = schedule.add_transfers(orders, links)
    elif not schedule.has_reduces(orders):
        orders = schedule.add_reduces(orders)
    schedule.simulate(orders, links=links)
    return orders
