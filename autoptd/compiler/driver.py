"""The driver: one stage a line. In: an unmodified model and a request. Out: a `Program`.

    program = compile(model, t=2, p=2, d=2, v=2, example_inputs=(ids, targets))
    program.save("out/")

No process group, no GPU and no weights in memory are needed: meta parameters compile as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autoptd import codegen, passes, schedule
from autoptd import trace as tracing
from autoptd.compiler.batch import (
    Batch,
    FewRows,
    Traces,
    groups_of,
    plan_batch,
    trace_rows,
)
from autoptd.compiler.compiled import Compiled, Draw
from autoptd.compiler.fit import Written, fit
from autoptd.compiler.memory_search import cut_of, place
from autoptd.compiler.program_cache import ProgramCache
from autoptd.compiler.records.collectives import collectives
from autoptd.compiler.records.fallbacks import warn_of_mixing, warn_of_recompute
from autoptd.compiler.records.header import about_stages
from autoptd.compiler.records.plan import plan_record
from autoptd.compiler.records.specs import (
    crossing_links,
    crossing_spec,
    dropout_specs,
    input_specs,
    param_specs,
    stage_spec,
    update_parts,
)
from autoptd.compiler.saved import FindSaved
from autoptd.compiler.updates import constant_buffers, without_updates
from autoptd.errors import AutoptdError, PlanError
from autoptd.ir.activity import activity
from autoptd.ir.buffers import Buffers
from autoptd.ir.default_device import on_cpu
from autoptd.ir.garbage import paused_collection
from autoptd.ir.mesh import Mesh
from autoptd.ir.sizes import local_shape
from autoptd.options import Options
from autoptd.passes import Context, Form, Record, up_to
from autoptd.program.program import Program
from autoptd.program.transfers import plan_transfers
from autoptd.program.weighed import found_text
from autoptd.runtime.world.devices import default_fusion


def compile_program(
    model: nn.Module,
    options: Options,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    replicas: int,
    check: bool = True,
    like: Program | None = None,
    record: Record | None = None,
    counts: tuple[int, ...] = (),
    draw: Draw | None = None,
) -> Program:
    """Compile for the batch in `(args, kwargs)`: the rows of `replicas` replicas (1 under torchrun, else all).

    With `like`, a program of the same model, parameters are stored and the model is cut as there. `record`
    gets the graph in all its forms, and the seconds of every pass. `counts`: see `plan_batch`; `draw`: see `Compiled`.
    """
    tracing.check_module(model)
    tracing.check_device(model, args, kwargs)
    handed = {name: parameter.dtype for name, parameter in model.named_parameters()}
    cast = like.cast_buffers if like is not None else ()
    with tracing.computing_in(model, options.precision, cast) as narrowing:
        record = record or Record()
        return _compile(
            model, options, args, kwargs, handed, replicas, check, like, record, narrowing, counts, draw
        )


def _compile(
    model: nn.Module,
    options: Options,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    handed: Mapping[str, torch.dtype],
    replicas: int,
    check: bool,
    like: Program | None,
    record: Record,
    narrowing: tracing.Narrowing,
    counts: tuple[int, ...],
    draw: Draw | None,
) -> Program:
    options = settle(model, options)
    batch = plan_batch(options, args, kwargs, replicas, like=like, counts=counts)
    known: dict[tuple[int, int, bool], Traces] = {}

    def written(batch: Batch, check: bool = check) -> tuple[Written, Traces]:
        # One trace serves all ranks and ways of dividing its rows: of one device's model, that is split afterwards.
        rows = batch.traced_rows, batch.whole_rows, batch.pieces > 1
        traces = known.get(rows) or trace_rows(model, options, args, kwargs, batch, narrowing, check)
        known[rows] = traces
        with on_cpu():
            return written_for(batch, without_updates(traces, make_context(options, traces, batch, like)))

    def written_for(batch: Batch, traces: Traces) -> tuple[Written, Traces]:
        write = partial(_place_and_write, traces, batch, handed, record)
        ctx = make_context(options, traces, batch, like)
        # The first program is held to by others, by its graphs, which are not written.
        if options.program_cache is None or like is None:
            return fit(write, ctx), traces
        cache = ProgramCache(options.program_cache)
        key, graph = cache.key(traces, batch, ctx, handed), traces.captured.graph
        if (kept := cache.load(key, traces.captured.buffers)) is not None:
            return Written(replace(kept, follows=like), graph, ctx), traces
        found = fit(write, ctx)
        cache.store(key, found.program)
        return found, traces

    grouped = partial(groups_of, model, options, args, kwargs)
    try:
        (program, graph, ctx), traces = _write_with_groups(written, batch, grouped)
    except passes.RowGroups as groups:
        fewer = plan_batch(options, args, kwargs, replicas, groups.group, like, counts)
        # A number that the user, or a schedule of theirs, gave.
        if counts or fewer.rows == batch.rows:
            raise PlanError(groups.site, groups.fact, groups.remedy) from None
        (program, graph, ctx), traces = _write_with_groups(written, fewer, grouped)
    except passes.MixedSamples as error:
        if counts:
            raise PlanError(error.site, error.fact, f"a multiple of {len(counts)} rows") from None
        if not _may_mix(options):
            raise error.refused() from None
        # The model has been compared with a trace of fewer rows; all of them may be more than one device takes.
        (program, graph, ctx), traces = _write_mixed(partial(written, check=False), batch, error)
    if program.graphs:
        warn_of_recompute(graph, ctx.options, traces.captured.checkpointed)
    program = replace(program, cast_buffers=narrowing.cast, traced=traces.traced)
    return replace(program, draw=draw) if isinstance(program, Compiled) else program


def _write_with_groups(
    write: Callable[[Batch], tuple[Written, Traces]],
    batch: Batch,
    grouped: Callable[[Batch], Batch | None],
) -> tuple[Written, Traces]:
    """Compile; with more rows in the trace where rows are mixed, or too few for the model: they may belong together.

    That shows only where a trace has several groups of them. Where they are mixed again, the first error is the one.
    `grouped` finds how many rows make two groups.
    """
    first: AutoptdError
    try:
        return write(batch)
    except passes.MixedSamples as error:
        first, more = error, batch.with_more_rows
    except FewRows as error:
        first, more = error, grouped(batch)
    if more is None:
        raise first
    try:
        return write(more)
    except passes.RowGroups:
        raise
    except AutoptdError:
        raise first from None


def _may_mix(options: Options) -> bool:
    """Tell whether replicas may have one microbatch each: no other number was asked for, and the schedule has one."""
    if options.num_microbatches is not None:
        return options.num_microbatches == 1
    try:
        schedule.requested_orders(options, 1)
    except PlanError:
        return False
    return True


def _write_mixed(
    write: Callable[[Batch], tuple[Written, Traces]], batch: Batch, mixed: passes.MixedSamples
) -> tuple[Written, Traces]:
    """Compile in one microbatch a replica, whose operators may read the rows of all replicas; PlanError where they cannot."""
    try:
        found = write(batch.in_one_microbatch)
    except passes.RepeatedLayer as layer:
        mixed.fact += f", and every replica would repeat for all rows what follows: {layer.site}"
        raise mixed.refused(in_one=True) from None
    except passes.MixedSamples as error:
        raise error.refused(in_one=True) from None
    warn_of_mixing(mixed, batch, found[0].program)
    return found


@paused_collection()
def _place_and_write(
    traces: Traces, batch: Batch, handed: Mapping[str, torch.dtype], record: Record, ctx: Context
) -> Written:
    """Run the passes and write the program."""
    captured, traced = traces.captured, traces.captured.graph
    # The passes, as often as it takes to find a plan that fits in memory.
    graph, ctx = place(traced, ctx, record)
    # "auto" beside the plans of Megatron and Korthikanti: two more runs, up to CONNECTED.
    connecting = up_to(Form.CONNECTED, passes.passes_for(ctx))
    weighed = passes.weigh_known(traced, record.graphs["CONNECTED"], ctx, connecting)
    options, found = ctx.options, ctx.found

    # What the runtime runs: crossings first, as orders and transfers follow from them.
    crossing = codegen.crossings(graph)
    crossings = tuple(map(crossing_spec, crossing))
    # The cut was balanced on orders without sends and receives: what is sent was not known yet.
    orders = schedule.connect_orders(ctx.orders, crossing_links(crossings))
    params = param_specs(graph, captured, options, handed)
    transfers = plan_transfers(crossings, ctx.ranks, options.mesh, options.p2p, options.rank_machine)
    parts = update_parts(traces.updates)
    about = about_stages(options, batch, params, orders, ctx.wgrad_sink)
    with activity("write stage files", is_brief=True):
        files = codegen.write_program(graph, options.mesh, crossing, about, traces.updates)
    # Shapes of nodes, for counts of FLOPs: of a microbatch on one device, and on a rank.
    of_one_device = partial(local_shape, sizes=replace(ctx.sizes, mesh=Mesh()))
    of_a_rank = partial(local_shape, sizes=replace(ctx.sizes, mesh=options.mesh))
    program = Compiled(
        mesh=options.mesh,
        v=options.v,
        num_microbatches=batch.num_microbatches,
        schedule_name=options.schedule_name,
        tree=captured.tree,
        constants=captured.constants,
        inputs=input_specs(graph, captured, batch),
        params=params,
        crossings=crossings,
        transfers=transfers,
        stages=tuple(stage_spec(k, file) for k, file in enumerate(files.stages)),
        orders=orders,
        sources=files.sources,
        collectives=tuple(collectives(graph, options, transfers, params, orders, parts)),
        lines=files.lines,
        seed=options.seed,
        dropouts=dropout_specs(record.graphs["CUT"]),
        fallbacks=found.fallbacks,
        fusions=found.fusions,
        fuse=options.fuse or False,
        unlisted=tuple(passes.unlisted_operators(graph)),
        weighted=any(file.counts for file in files.stages),
        updated=traces.updates.buffers if traces.updates is not None else (),
        updated_by_batch=traces.updates.of_batch if traces.updates is not None else (),
        update_parts=parts,
        plan=plan_record(
            options, batch, cut_of(ctx), params, found.fallbacks, weighed, found.kept.rates, ctx.ranks
        ),
        costs=replace(passes.count_work(graph, options.mesh, of_one_device, of_a_rank), cut=cut_of(ctx)),
        buffers={name: value.detach() for name, value in captured.buffers.items()},
        looked_at=ctx.buffers.looked_at(),
        graphs=record.graphs,
        found=found,
        remark=found_text(weighed),
        sizes=replace(ctx.sizes, mesh=options.mesh),
    )
    return Written(program, graph, ctx)


def settle(model: nn.Module, options: Options) -> Options:
    """Complete the options by what the model, its device and a schedule of the user's own decide."""
    written = schedule.written_orders(options)
    # A file with a schedule fixes m: it names every microbatch.
    if written is not None:
        options = replace(options, num_microbatches=schedule.num_microbatches(written))
    return replace(options, fuse=default_fusion(model.parameters(), options))


def make_context(options: Options, traces: Traces, batch: Batch, like: Program | None) -> Context:
    """Gather what passes read beside their graph."""
    orders = schedule.requested_orders(options, batch.num_microbatches)
    return Context(
        options=options,
        traced_rows=batch.traced_rows,
        rows=batch.rows,
        pieces=batch.pieces,
        batched=frozenset(name for name, leaf in traces.captured.inputs if leaf in batch.batched),
        whole=traces.whole,
        mixes=batch.mixes,
        buffers=Buffers(constant_buffers(traces)),
        orders=orders,
        live=schedule.in_flight_moments(orders),
        makespan=schedule.makespan_of(orders),
        checkpointed=traces.captured.checkpointed if options.recompute is None else (),
        saved_by=FindSaved(options.mesh, batch.rows),
        like=like,
    )
