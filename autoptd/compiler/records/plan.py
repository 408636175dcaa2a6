"""Record the decisions of a program and their costs, by the model's own names.

In: the context with its findings, batch, parameters. Out: the dict of `plan.json`, which `ir/plan.py` reads again
(equal layers are one pattern), and `Costs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from torch.fx import Graph

from autoptd.compiler.batch import Batch
from autoptd.ir.kept import rows_of
from autoptd.ir.mesh import Mesh, base
from autoptd.ir.names import any_layer
from autoptd.ir.notes import Fallback, local_shape
from autoptd.ir.types import ValueType
from autoptd.options import KEYWORDS, Options, settings
from autoptd.passes.context import Context
from autoptd.passes.ops.costs import count_work
from autoptd.passes.stages.held_bytes import cut_of
from autoptd.program.costs import Costs, Cut
from autoptd.program.specs import ParamSpec


def plan_record(ctx: Context, batch: Batch, params: tuple[ParamSpec, ...]) -> dict[str, Any]:
    """Return the record of `plan.json`: the decisions, and reports for people (fallbacks, and how it was made to fit)."""
    options, kept = ctx.options, ctx.found.kept
    cut = cut_of(ctx)
    mesh: dict[str, Any] = {**options.mesh.degrees, "v": options.v}
    if not options.mesh.has_usual_order:
        mesh["order"] = options.ranks.order
    asked = settings(options)
    record = {
        "version": 1,
        "mesh": mesh,
        "num_microbatches": batch.num_microbatches,
        "schedule": str(options.schedule),
        "options": {name: asked[name] for name in _planned(options)},
        "cut": list(cut.after),
        "shard": _shard_pins(options, params),
        "fallbacks": merged_fallbacks(ctx.found.fallbacks),
    }
    if kept.rates or options.plan.keep:
        record["keep"] = rows_of(kept.rates, options.plan.keep)
    if options.memory is not None:
        record["relief"] = _relief(options, cut, ctx.ranks)
    return record


def costs_of(graph: Graph, ctx: Context) -> Costs:
    """Return the FLOPs of a microbatch, on one device and on a rank, and the costs of the cut."""
    of_one_device = partial(local_shape, sizes=replace(ctx.sizes, mesh=Mesh()))
    of_a_rank = partial(local_shape, sizes=ctx.sizes)
    return replace(count_work(graph, ctx.mesh, of_one_device, of_a_rank), cut=cut_of(ctx))


def merged_fallbacks(fallbacks: Sequence[Fallback]) -> list[dict[str, Any]]:
    """Merge the records of layers that have the same operator and the same fact into one, with the sum of
    their FLOPs.
    """
    flops_of: dict[Fallback, int] = {}
    for fallback in fallbacks:
        key = replace(fallback, site=any_layer(fallback.site), flops=0)
        flops_of[key] = flops_of.get(key, 0) + fallback.flops
    return [{**asdict(key), "flops": flops} for key, flops in flops_of.items()]


def _planned(options: Options) -> list[str]:
    """Return the names of the keywords that a plan has under "options"."""
    planned = {name: keyword for name, keyword in KEYWORDS.items() if keyword.is_planned}
    return [
        name
        for name, keyword in planned.items()
        if not keyword.only_with or getattr(options, keyword.only_with) > 1
    ]


def _relief(options: Options, cut: Cut, ranks: Sequence[int]) -> dict[str, Any]:
    """Return the measures that made it fit into `memory=`; seconds per microbatch, by pipeline rank."""
    again = [0.0] * (max(ranks) + 1)
    for rank, seconds in zip(ranks, cut.again_seconds, strict=True):
        again[rank] += seconds
    return {
        "fullest_rank_bytes": max(cut.rank_bytes),
        "zero": options.zero.stage,
        "byte_price": options.memory_price or 0.0,
        "again_seconds": again,
    }


def _shard_pins(options: Options, params: tuple[ParamSpec, ...]) -> list[dict[str, Any]]:
    """Return a pin for every sharded parameter, and the pins of the request that keep a parameter whole."""
    # {"h.*.mlp.c_fc.weight": the ways in which it is cut in any layer}
    shards: dict[str, set[tuple[tuple[str, ValueType], ...]]] = {}
    for spec in params:
        shards.setdefault(any_layer(spec.name), set()).add(spec.use.layout.shards)
    pins = {}
    for spec in params:
        # 12 layers that are sharded alike are one pattern, and one entry.
        pattern = any_layer(spec.name) if len(shards[any_layer(spec.name)]) == 1 else spec.name
        if spec.use.layout.shards:
            # Sub-axes of one axis cut neighboring atoms of one dim: the pin names the axis.
            axis, kind = spec.use.layout.shards[0]
            pins[pattern] = {"pattern": pattern, "dim": kind.dim, "axis": base(axis)}
    return [*pins.values(), *(dict(pin) for pin in options.plan.shard if pin.get("dim") is None)]
