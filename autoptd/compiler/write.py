"""Write the program of a placed model: what the runtime reads, and what people read.

In: the traces, the LOCAL graph with its context, and the graph in all its forms. Out: a `Compiled`, filled by the
records of `compiler/records`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import Graph

from autoptd import codegen, schedule
from autoptd.compiler.batch import Batch
from autoptd.compiler.compiled import Compiled
from autoptd.compiler.records import (
    about_stages,
    buckets_of_ranks,
    collectives,
    costs_of,
    crossing_links,
    crossing_spec,
    dropout_specs,
    input_specs,
    output_specs,
    param_specs,
    plan_record,
    stage_spec,
    update_parts,
)
from autoptd.compiler.request import Traces
from autoptd.ir.scopes import activity
from autoptd.passes.context import Context
from autoptd.passes.runner import Record
from autoptd.passes.solve.fallbacks import unlisted_operators
from autoptd.program.transfers import plan_transfers


@dataclass(frozen=True)
class Writer:
    """Write the program of traces, given a plan for them; `record` has the graph of the plan in all its forms."""

    traces: Traces
    batch: Batch
    handed: Mapping[str, torch.dtype]
    record: Record

    def write(self, graph: Graph, ctx: Context) -> Compiled:
        """Return the program of a LOCAL graph."""
        captured, updates, options, found = self.traces.captured, self.traces.updates, ctx.options, ctx.found
        # Crossings first, as orders and transfers depend on them.
        crossing = codegen.crossings(graph)
        crossings = tuple(map(crossing_spec, crossing))
        # The cut was balanced on orders without sends and receives, which were not known yet.
        orders = schedule.connect_orders(ctx.orders, crossing_links(crossings))
        transfers = plan_transfers(
            crossings, ctx.ranks, options.mesh, options.ranks.p2p, options.rank_machine
        )
        layers = codegen.own_layers(graph, crossing, len(ctx.ranks)) if "use" in options.scopes else {}
        params = param_specs(graph, captured, options, self.handed, layers)
        parts = update_parts(updates)
        buckets = buckets_of_ranks(params, orders, ctx.ranks, options.mesh)
        about = about_stages(options, self.batch, buckets, ctx.ranks, ctx.wgrad_sink)
        with activity("write stage files", is_brief=True):
            files = codegen.write_program(graph, options.mesh, crossing, about, updates)
        return Compiled(
            mesh=options.mesh,
            v=options.v,
            num_microbatches=self.batch.num_microbatches,
            schedule_name=options.schedule_name,
            tree=captured.tree,
            constants=captured.constants,
            inputs=input_specs(graph, captured, self.batch),
            params=params,
            crossings=crossings,
            transfers=transfers,
            stages=tuple(stage_spec(k, file) for k, file in enumerate(files.stages)),
            orders=orders,
            sources=files.sources,
            collectives=tuple(collectives(graph, options, transfers, buckets, orders, ctx.ranks, parts)),
            lines=files.lines,
            seed=options.seed,
            dropouts=dropout_specs(self.record.graphs["CUT"]),
            fallbacks=found.fallbacks,
            fusions=found.fusions,
            fuse=options.fuse.backend or False,
            unlisted=tuple(unlisted_operators(graph)),
            weighted=any(file.counts for file in files.stages),
            updated=updates.buffers if updates is not None else (),
            updated_by_batch=updates.of_batch if updates is not None else (),
            update_parts=parts,
            outputs=output_specs(graph, self.batch),
            plan=plan_record(ctx, self.batch, params),
            costs=costs_of(graph, ctx),
            buffers={name: value.detach() for name, value in captured.buffers.items()},
            looked_at=ctx.buffers.looked_at(),
            graphs=self.record.graphs,
            found=found,
            sizes=ctx.sizes,
        )
