"""The record of a compiled program, filled from what all stages of the compiler left.

In: the LOCAL graph with its context, the emitted files, orders and parameters. Out: a `Compiled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch.fx import Graph

from autoptd import codegen, passes
from autoptd.compiler.batch import Batch, Traces
from autoptd.compiler.compiled import Compiled
from autoptd.compiler.memory_search import cut_of
from autoptd.compiler.records.collectives import collectives
from autoptd.compiler.records.plan import plan_record
from autoptd.compiler.records.specs import (
    crossing_spec,
    dropout_specs,
    input_specs,
    stage_spec,
    update_parts,
)
from autoptd.ir.actions import Orders
from autoptd.ir.mesh import Mesh
from autoptd.ir.sizes import local_shape
from autoptd.passes import Context, Record
from autoptd.program.specs import ParamSpec
from autoptd.program.transfers import plan_transfers
from autoptd.program.weighed import found_text


def program_of(
    traces: Traces,
    batch: Batch,
    graph: Graph,
    ctx: Context,
    record: Record,
    crossing: Sequence[codegen.Crossing],
    orders: Orders,
    params: tuple[ParamSpec, ...],
    files: codegen.ProgramFiles,
    weighed: dict[str, Any] | None,
) -> Compiled:
    """Return the program; `record` has the graph in all its forms."""
    captured, options, found = traces.captured, ctx.options, ctx.found
    crossings, parts = tuple(map(crossing_spec, crossing)), update_parts(traces.updates)
    transfers = plan_transfers(crossings, ctx.ranks, options.mesh, options.ranks.p2p, options.rank_machine)
    # Shapes of nodes, for counts of FLOPs: of a microbatch on one device, and on a rank.
    sizes = replace(ctx.sizes, mesh=options.mesh)
    of_one_device = partial(local_shape, sizes=replace(sizes, mesh=Mesh()))
    of_a_rank = partial(local_shape, sizes=sizes)
    return Compiled(
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
        fuse=options.fuse.backend or False,
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
        sizes=sizes,
    )


__all__ = ["program_of"]
