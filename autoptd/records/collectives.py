"""What is communicated, with bytes and reasons: per microbatch by stages, per step by buckets and losses.

In: the LOCAL graph, what stages send each other, parameters and the schedule. Out: `Collective`s, which the runtime's calls are
counted against (`program/calls.py`), and the proof that all ranks make theirs in one order (`program/call_order.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from autoptd import codegen
from autoptd.ir.actions import Orders, ranks_of_stages
from autoptd.ir.mesh import Mesh
from autoptd.ir.notes import note, op_name, ops, tensor
from autoptd.ir.placement import AxisConversion
from autoptd.options import Options
from autoptd.program.buckets import BucketPlan, plan_buckets
from autoptd.program.call_order import check_call_order
from autoptd.program.specs import GATHER, Collective, ParamSpec, TransferBuffer

LOSSES = ("cross_entropy", "linear_cross_entropy")


def collectives(
    graph: Graph,
    options: Options,
    buffers: Sequence[TransferBuffer],
    params: tuple[ParamSpec, ...],
    orders: Orders,
) -> list[Collective]:
    """Everything that is communicated, per microbatch and per step, with payload bytes and the reason."""
    found = []
    ranks = ranks_of_stages(orders)
    for node in ops(graph):
        for stage in note(node).stages:
            here = ranks[stage]
            if note(node).conversion:
                found += _conversion(node, stage, here, options.mesh)
            elif "absorbed" in note(node).extra:
                found.append(_absorbed(node, stage, here, options.mesh))
            elif op_name(node) in LOSSES and node.kwargs["vocab"]:
                found += _vocabulary_sums(node, stage, here, options.mesh)
    for one in buffers:
        found += _travel(one, ranks)
    buckets = [plan_buckets(params, orders, ranks, options.mesh, pp) for pp in range(options.p)]
    found += _step_collectives(graph, options, buckets, ranks)
    check_call_order(found, buckets, options.mesh)
    return found


def _conversion(node: Node, stage: int, rank: int, mesh: Mesh) -> list[Collective]:
    record, (forward, backward) = note(node), codegen.conversion_work(node)
    site = f"{record.module} ({record.source})"
    nbytes, degree, here = codegen.collective_bytes(node, mesh.t), mesh.degree(record.axis), (rank,)
    made = Collective(
        site,
        stage,
        record.conversion,
        record.axis,
        forward,
        backward,
        nbytes,
        degree,
        record.why,
        pp_ranks=here,
    )
    if "uses" not in record.extra:
        return [made]
    why = "the weight's gradient needs the whole input, of which the shard was kept"
    return [
        made,
        dataclasses.replace(
            made, conversion="gathered again", forward="none", backward="all-gather", why=why
        ),
    ]


def _absorbed(node: Node, stage: int, rank: int, mesh: Mesh) -> Collective:
    """An f that is part of a linear layer: see passes/hook_gemms.py."""
    record, f = note(node), note(node).extra["absorbed"]
    site = f"{record.module} ({record.source})"
    degree = mesh.degree(record.axis)
    return Collective(
        site,
        stage,
        f.conversion,
        record.axis,
        "none",
        "all-reduce",
        f.payload_bytes,
        degree,
        f.why,
        pp_ranks=(rank,),
    )


def _vocabulary_sums(node: Node, stage: int, rank: int, mesh: Mesh) -> list[Collective]:
    """The reductions inside a vocabulary-parallel cross-entropy: a number per token each, the sums in one call."""
    record, size = note(node), torch.Size(note(node.args[1]).extra["local_shapes"][0]).numel()  # type: ignore[arg-type]
    itemsize = max(tensor(node).element_size(), 4)  # narrower logits are computed in float32
    sums = ["sum of exponentials", "picked logit"]
    sums += ["class weight"] if op_name(node) == "cross_entropy" and node.args[2] is not None else []
    sums += ["sum of logits", "sum of weights"] if node.kwargs["label_smoothing"] else []
    chunk: int = node.kwargs.get("chunk", size)  # type: ignore[assignment]
    calls = [
        (name, itemsize * count * min(chunk, size - start), f"{what} of every token")
        for start in range(0, size, chunk)
        for name, count, what in (("maximum", 1, "maximum"), ("sums", len(sums), ", ".join(sums)))
    ]
    return [
        Collective(
            site=f"{record.module or 'model'} {name} ({record.source})",
            stage=stage,
            conversion=f"vocab_parallel_{op_name(node)}",
            axis=record.axis,
            forward="all-reduce",
            backward="none",
            payload_bytes=nbytes,
            group_size=mesh.degree(record.axis),
            why=why,
            pp_ranks=(rank,),
        )
        for name, nbytes, why in calls
    ]


def _travel(one: TransferBuffer, ranks: Sequence[int]) -> list[Collective]:
    """The send of a buffer, and the gather of a scattered one on the other side."""
    names = ", ".join(one.names)
    what = f"gradient of {names}" if one.is_gradient else f"stage {one.target} reads {names}"

    def made(stage: int, kind: str, what_for: str, axis: str, nbytes: int, size: int, why: str) -> Collective:
        forward, backward = ("none", kind) if one.is_gradient else (kind, "none")
        at, why = (ranks[stage],), f"{what}; {why}"
        return Collective(one.site, stage, what_for, axis, forward, backward, nbytes, size, why, pp_ranks=at)

    found = [made(one.source, "send", "send", "pp", one.sent_bytes, 2, one.why)]
    if one.parts > 1:
        why = f"stage {one.source} sends 1/{one.parts} from each tensor rank"
        found.append(made(one.target, "all-gather", GATHER, "tp", one.parts * one.sent_bytes, one.parts, why))
    return found


def _step_collectives(
    graph: Graph, options: Options, buckets: Sequence[Sequence[BucketPlan]], ranks: Sequence[int]
) -> list[Collective]:
    mesh = options.mesh
    losses = [
        Collective(
            site="loss",
            stage=options.num_stages - 1,
            conversion="loss sum",
            axis=axis,
            forward="all-reduce",
            backward="none",
            payload_bytes=8,
            group_size=mesh.degree(axis),
            why="every rank returns the loss of the global batch, summed in float64",
            scope="step",
            pp_ranks=tuple(range(mesh.p)),
        )
        for axis in ("dp", "pp")  # tensor ranks have it all
    ]
    found = [
        one
        for stage in range(options.num_stages)
        for one in _label_count(graph, stage, ranks[stage], options.d)
    ]
    for pp, plans in enumerate(buckets):
        for plan in plans:
            found += _bucket_sums(plan, pp, ranks, mesh)
    return [one for one in [*found, *losses] if one.group_size > 1]


def _label_count(graph: Graph, stage: int, rank: int, d: int) -> list[Collective]:
    """What weighted means divide by, counted before the first forward."""
    losses = [node for node in ops(graph) if op_name(node) in LOSSES and node.kwargs["total"] >= 0]  # type: ignore[operator]
    count = sum(1 for node in losses if stage in note(node).stages)
    why = "valid labels of the global batch, which the mean divides by"
    made = Collective(
        "count of labels",
        stage,
        "label count",
        "dp",
        "all-reduce",
        "none",
        8 * count,
        d,
        why,
        "step",
        (rank,),
    )
    return [made] if count else []


def _bucket_sums(plan: BucketPlan, pp: int, ranks: Sequence[int], mesh: Mesh) -> list[Collective]:
    count, nbytes = len(plan.params), plan.nbytes(mesh)
    here = [stage for spec in plan.params for stage in spec.stages if ranks[stage] == pp]
    kinds = "/".join(sorted({spec.kind for spec in plan.params}))
    why, tied = f"gradients of {count} parameters of type {kinds}", f"used by stages {_listed(plan)}"

    def made(
        step: AxisConversion, site: str, what: str, size: int, why: str, ranks: tuple[int, ...]
    ) -> Collective:
        backward = step.row.backward
        return Collective(
            site, max(here), what, step.axis, "none", backward, nbytes, size, why, "step", ranks
        )

    over_mesh = (*plan.early, *plan.late)
    found = [made(step, plan.site, "gradient sum", mesh.degree(step.axis), why, (pp,)) for step in over_mesh]
    if pp == plan.owners[0]:
        found += [
            made(step, plan.tied_site, "tied sum", len(plan.owners), tied, plan.owners) for step in plan.tied
        ]
    return found


def _listed(plan: BucketPlan) -> str:
    return ", ".join(map(str, sorted({stage for spec in plan.params for stage in spec.stages})))
