"""List all communication of a program, with bytes and reasons: per microbatch by stages, per step by buckets
and losses.

In: the LOCAL graph, the transfers between stages, parameters and the schedule. Out: `Collective`s, which the
runtime's calls are checked against (`program/calls.py`), and the proof that all ranks make them in the same
order (`program/calls.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from autoptd.codegen.body import collective_bytes, conversion_work
from autoptd.codegen.counts import COUNT_SITE, batch_sums, count_conversions, counted_losses
from autoptd.ir.actions import Action, Kind, Orders
from autoptd.ir.mesh import Mesh, joined
from autoptd.ir.notes import note, op_name, ops, ops_of_stages, tensor
from autoptd.ir.placement import AxisConversion, slowest_first
from autoptd.ir.types import LOCAL_KINDS
from autoptd.options import Options
from autoptd.program.buckets import BucketPlan, busy_axes, plan_each, units_of
from autoptd.program.calls import AGAIN, check_call_order, joint_axis
from autoptd.program.gathers import Unit, gathers_of, sums_of
from autoptd.program.specs import GATHER, Collective, ParamSpec, TransferBuffer, UpdatePart

# The site of `runtime/step/per_step.py`.
UPDATE_SITE = "buffer updates"
LOSSES = ("cross_entropy", "linear_cross_entropy")
# What operators over split classes reduce (`runtime/ops/classes.py`): the word in the site, whether it is in
# backward, and why.
MAXIMUM = ("maximum", False, "the largest score of every row")
SUMS = (MAXIMUM, ("sum", False, "the sum of exponentials of every row"))
GRADIENTS = ("gradients", True, "the sum of gradients of every row")
CLASS_REDUCTIONS = {
    "classes_log_softmax": (*SUMS, GRADIENTS),
    "classes_softmax": (*SUMS, GRADIENTS),
    "classes_logsumexp": SUMS,
    "classes_argmax": (MAXIMUM, ("position", False, "the first class with the largest score")),
}


def buckets_of_ranks(
    params: Sequence[ParamSpec], orders: Orders, ranks: Sequence[int], mesh: Mesh
) -> list[list[BucketPlan]]:
    """Return the buckets of every pipeline rank."""
    return plan_each(params, orders, ranks, mesh, range(mesh.pipeline_ranks))


def collectives(
    graph: Graph,
    options: Options,
    buffers: Sequence[TransferBuffer],
    plans: Sequence[Sequence[BucketPlan]],
    orders: Orders,
    ranks: Sequence[int],
    update_parts: Sequence[UpdatePart] = (),
) -> list[Collective]:
    """List everything that is communicated, per microbatch and per step, with payload bytes and the reason.

    `plans` are the buckets of every pipeline rank, `orders` its actions, `ranks` the pipeline rank of every stage.
    InternalError where two ranks of a group would make their calls in different orders.
    """
    calls, mesh = [], options.mesh
    for node in ops(graph):
        # A node that several stages compute communicates on each of them.
        for stage in note(node).stages:
            rank = ranks[stage]
            if note(node).conversion:
                calls += _conversion(node, stage, rank, mesh)
            elif note(node).gemm.absorbed is not None:
                calls.append(_absorbed(node, stage, rank, mesh))
            elif op_name(node) in LOSSES and node.kwargs["vocab"]:
                calls += _vocabulary_sums(node, stage, rank, mesh)
            elif op_name(node) in CLASS_REDUCTIONS:
                calls += _class_reductions(node, stage, rank, mesh)
    for buffer in buffers:
        calls += _transfer(buffer, ranks, mesh)
    # The runtime derives the same plans from the program, so that this list matches the calls that run.
    busy = frozenset(busy_axes(calls))
    buckets = []
    for row in plans:
        buckets.append([dataclasses.replace(plan, busy=busy) for plan in row])
    calls += _step_collectives(graph, options, buckets, orders, ranks)
    calls += _update_sums(update_parts, options)
    check_call_order(calls, buckets, mesh)
    return calls


def _conversion(node: Node, stage: int, rank: int, mesh: Mesh) -> list[Collective]:
    """Return the collective of a conversion, and that of gathering its input again in backward, if it
    does.
    """
    record, (forward, backward) = note(node), conversion_work(node)
    call = Collective(
        site=f"{record.module} ({record.source})",
        stage=stage,
        conversion=record.conversion,
        axis=record.axis,
        forward=forward,
        backward=backward,
        payload_bytes=collective_bytes(node, mesh),
        group_size=mesh.degree(record.axis),
        why=record.why,
        pp_ranks=(rank,),
    )
    if record.keep.again is not None and forward not in LOCAL_KINDS:
        why = "values that were not kept are computed again"
        return [call, dataclasses.replace(call, conversion=AGAIN, forward="none", backward=forward, why=why)]
    # Linear layers that read a gathered value keep the shard, and gather it again for the weight's gradient.
    if record.gemm.uses is None:
        return [call]
    why = "the weight gradient needs the full input; only its shard was saved"
    again = dataclasses.replace(
        call, conversion="gathered again", forward="none", backward="all-gather", why=why
    )
    return [call, again]


def _absorbed(node: Node, stage: int, rank: int, mesh: Mesh) -> Collective:
    """Return the all-reduce of an f that is part of a linear layer: see passes/hook_gemms.py."""
    record, f = note(node), note(node).gemm.absorbed
    assert f is not None
    return Collective(
        site=f"{record.module} ({record.source})",
        stage=stage,
        conversion=f.conversion,
        axis=record.axis,
        forward="none",
        backward="all-reduce",
        payload_bytes=f.payload_bytes,
        group_size=mesh.degree(record.axis),
        why=f.why,
        pp_ranks=(rank,),
    )


def _vocabulary_sums(node: Node, stage: int, rank: int, mesh: Mesh) -> list[Collective]:
    """Return the reductions inside a vocabulary-parallel cross-entropy: a number per token each, the sums
    in one call.
    """
    record = note(node)
    tokens = torch.Size(note(node.args[1]).local.shapes[0]).numel()  # type: ignore[arg-type]
    # Narrower logits are computed in float32.
    itemsize = max(tensor(node).element_size(), 4)
    # The values that every token adds to one call, besides the maximum.
    sums = ["sum of exponentials", "picked logit"]
    if op_name(node) == "cross_entropy" and node.args[2] is not None:
        sums.append("class weight")
    if node.kwargs["label_smoothing"]:
        sums += ["sum of logits", "sum of weights"]
    # The maximum by itself and first: exponentials are taken relative to it, so that none overflows.
    reductions = (("maximum", 1, "maximum"), ("sums", len(sums), ", ".join(sums)))
    chunk: int = node.kwargs.get("chunk", tokens)  # type: ignore[assignment]
    calls = []
    # The fused head reduces once per chunk of tokens; a plain loss has one chunk of all of them.
    for start in range(0, tokens, chunk):
        for name, count, what in reductions:
            call = Collective(
                site=f"{record.module or 'model'} {name} ({record.source})",
                stage=stage,
                conversion=f"vocab_parallel_{op_name(node)}",
                axis=record.axis,
                forward="all-reduce",
                backward="none",
                payload_bytes=itemsize * count * min(chunk, tokens - start),
                group_size=mesh.degree(record.axis),
                why=f"{what} of every token",
                pp_ranks=(rank,),
            )
            calls.append(call)
    return calls


def _class_reductions(node: Node, stage: int, rank: int, mesh: Mesh) -> list[Collective]:
    """Return the reductions inside an operator over split classes: a number for every row each."""
    record, x = note(node), node.args[0]
    dims = list(note(x).local.shapes[0])  # type: ignore[arg-type]
    del dims[node.kwargs["dim"]]  # type: ignore[arg-type]
    calls = []
    for name, is_backward, why in CLASS_REDUCTIONS[op_name(node)]:
        if is_backward and not record.needs_grad:
            continue
        # Narrower scores are reduced in float32, positions as whole numbers.
        itemsize = 8 if name == "position" else max(tensor(x).element_size(), 4)  # type: ignore[arg-type]
        call = Collective(
            site=f"{record.module or 'model'} {name} ({record.source})",
            stage=stage,
            conversion=op_name(node),
            axis=record.axis,
            forward="none" if is_backward else "all-reduce",
            backward="all-reduce" if is_backward else "none",
            payload_bytes=itemsize * math.prod(dims),
            group_size=mesh.degree(record.axis),
            why=why,
            pp_ranks=(rank,),
        )
        calls.append(call)
    return calls


def _transfer(buffer: TransferBuffer, ranks: Sequence[int], mesh: Mesh) -> list[Collective]:
    """Return the send of a buffer, and the gather of a scattered one on the other side."""
    names = ", ".join(buffer.names)
    what = f"gradient of {names}" if buffer.is_gradient else f"stage {buffer.target} reads {names}"

    def call(
        stage: int, kind: str, conversion: str, axes: Sequence[str], nbytes: int, size: int, why: str
    ) -> Collective:
        return Collective(
            site=buffer.site,
            stage=stage,
            conversion=conversion,
            axis=joint_axis(mesh, axes),
            forward="none" if buffer.is_gradient else kind,
            backward=kind if buffer.is_gradient else "none",
            payload_bytes=nbytes,
            group_size=size,
            why=f"{what}; {why}",
            pp_ranks=(ranks[stage],),
        )

    calls = [call(buffer.source, "send", "send", mesh.stage_axes, buffer.sent_bytes, 2, buffer.why)]
    if buffer.parts > 1:
        why = f"stage {buffer.source} sends 1/{buffer.parts} from each tensor rank"
        nbytes = buffer.parts * buffer.sent_bytes
        calls.append(call(buffer.target, "all-gather", GATHER, mesh.value_axes, nbytes, buffer.parts, why))
    return calls


def _step_collectives(
    graph: Graph,
    options: Options,
    buckets: Sequence[Sequence[BucketPlan]],
    orders: Orders,
    ranks: Sequence[int],
) -> list[Collective]:
    """Return the collectives once per step: sums over inputs, label counts, gradient sums, the loss."""
    mesh, of_stage = options.mesh, ops_of_stages(graph)
    calls = []
    for stage, rank in enumerate(ranks):
        calls += _batch_sums(of_stage[stage], stage, rank, mesh)
        calls += _label_count(of_stage[stage], stage, rank, mesh)
    for rank, (plans, order) in enumerate(zip(buckets, orders, strict=True)):
        forward = [action for action in order if action.kind is Kind.F]
        units = units_of(plans)
        gathers = gathers_of(units, order), gathers_of(units, forward)
        for plan in plans:
            calls += _bucket_sums(plan, rank, ranks, mesh, order, gathers)
    # Not over the others: tensor ranks all have the whole loss.
    why = "every rank returns the loss of the global batch, summed in float64"
    calls += _sums_of_all("loss", "loss sum", 1, why, options, mesh.loss_axes)
    return [call for call in calls if call.group_size > 1]


def _label_count(nodes: list[Node], stage: int, rank: int, mesh: Mesh) -> list[Collective]:
    """Return the counts of labels that weighted means divide by."""
    counted = counted_losses(nodes)
    if not counted:
        return []
    calls = []
    for node in count_conversions(counted):
        (call,) = _conversion(node, stage, rank, mesh)
        why = "labels of all rows, to be counted"
        once = dataclasses.replace(call, site=COUNT_SITE, backward="none", why=why, scope="step")
        calls.append(once)
    why = "valid labels of the global batch, which the mean divides by"
    return calls + _known_before(COUNT_SITE, "label count", len(counted), why, stage, rank, mesh)


def _batch_sums(nodes: list[Node], stage: int, rank: int, mesh: Mesh) -> list[Collective]:
    """Return the sums over the batch, and the largest entries, of values that depend on inputs only; one call
    per round.
    """
    calls = []
    for sums in batch_sums(nodes):
        for conversion, what in (("batch sums", "sums over"), ("batch maxima", "largest entries of")):
            own = [node for node in sums if (note(node).rows.is_largest) == (conversion == "batch maxima")]
            # A largest entry travels with a flag for NaN.
            count = sum(tensor(node).numel() for node in own) * (2 if conversion == "batch maxima" else 1)
            why = f"{what} inputs of the global batch, needed before the first forward"
            if own:
                calls += _known_before("sums over the batch", conversion, count, why, stage, rank, mesh)
    return calls


def _update_sums(parts: Sequence[UpdatePart], options: Options) -> list[Collective]:
    """Return the sum of the parts that microbatches keep for buffer updates, in which every rank takes part."""
    if not parts:
        return []
    mesh, count = options.mesh, sum(math.prod(part.shape) for part in parts)
    why = "the operands of buffer updates, from the loss stage to every rank, summed over the batch"
    axes = (*mesh.batch_axes, *mesh.stage_axes)
    calls = _sums_of_all(UPDATE_SITE, "buffer updates", count, why, options, axes)
    return [call for call in calls if call.group_size > 1]


def _sums_of_all(
    site: str, what: str, count: int, why: str, options: Options, axes: Sequence[str]
) -> list[Collective]:
    """Return the sum of `count` numbers of the last stage along some axes, in which every rank takes part."""
    mesh = options.mesh
    ranks = tuple(range(mesh.pipeline_ranks))
    return [_sum(site, what, count, why, options.num_stages - 1, ranks, axis, mesh) for axis in axes]


def _known_before(
    site: str, what: str, count: int, why: str, stage: int, rank: int, mesh: Mesh
) -> list[Collective]:
    """Return the sum of `count` numbers over all replicas, before the first forward of a step."""
    return [_sum(site, what, count, why, stage, (rank,), axis, mesh) for axis in mesh.batch_axes]


def _sum(
    site: str, what: str, count: int, why: str, stage: int, pp_ranks: tuple[int, ...], axis: str, mesh: Mesh
) -> Collective:
    return Collective(
        site=site,
        stage=stage,
        conversion=what,
        axis=axis,
        forward="all-reduce",
        backward="none",
        # An int64 or float64 each.
        payload_bytes=8 * count,
        group_size=mesh.degree(axis),
        why=why,
        scope="step",
        pp_ranks=pp_ranks,
    )


def _bucket_sums(
    plan: BucketPlan,
    rank: int,
    ranks: Sequence[int],
    mesh: Mesh,
    order: Sequence[Action],
    gathers: tuple[Counter[Unit], Counter[Unit]],
) -> list[Collective]:
    """Return the gradient sums of a bucket of pipeline rank `rank`, with its `order`: over the mesh, and over the owners of a
    tied one; and the gathers of its parameters.
    """
    # The last stage of this rank that uses the bucket, whose gradients are complete after that stage's
    # backward.
    stage = max(stage for spec in plan.params for stage in spec.stages if ranks[stage] == rank)

    def call(
        step: AxisConversion, site: str, conversion: str, size: int, why: str, pp_ranks: tuple[int, ...]
    ) -> Collective:
        # With storage in ranges, later sums are of a range.
        payload = plan.summed_bytes(mesh)[plan.sums.index(step)]
        return Collective(
            site=site,
            stage=stage,
            conversion=conversion,
            axis=step.axis,
            forward="none",
            backward=step.row.backward,
            payload_bytes=payload,
            group_size=size,
            why=why,
            scope="step",
            pp_ranks=pp_ranks,
        )

    kinds = "/".join(sorted({spec.kind for spec in plan.params}))
    why = f"gradients of {len(plan.params)} parameters of type {kinds}"
    calls = []
    for step in (*plan.early, *plan.late):
        found = call(step, plan.site, "gradient sum", mesh.degree(step.axis), why, (rank,))
        is_first = step.row.backward == "reduce-scatter"
        times = sums_of(plan.params[0].stages, plan.sum_scope, order) if is_first else 1
        calls.append(dataclasses.replace(found, times=times))
    if plan.is_apart:
        calls.append(_gathered(plan, gathers, stage, rank, mesh))
    elif plan.sharing_axes:
        calls.append(_update(plan, stage, rank, mesh))
    # Listed once, by the first owner.
    if rank == plan.owners[0]:
        stages = sorted({stage for spec in plan.params for stage in spec.stages})
        why = f"used by stages {', '.join(map(str, stages))}"
        for step in plan.tied:
            calls.append(call(step, plan.tied_site, "tied sum", len(plan.owners), why, plan.owners))
    return calls


def _gathered(
    plan: BucketPlan, gathers: tuple[Counter[Unit], Counter[Unit]], stage: int, rank: int, mesh: Mesh
) -> Collective:
    """Return the gathers of parameters that ranks divide; `gathers`: how often, in a step and in an evaluation."""
    training, evaluation = (times[plan.unit] for times in gathers)
    axis = joined(slowest_first(plan.sharing_axes, mesh))
    return dataclasses.replace(
        _update(plan, stage, rank, mesh),
        conversion="gathered parameters",
        why=f"{len(plan.params)} parameters; every rank of {axis} stores a range of them",
        scope="step",
        times=training,
        evaluation_times=evaluation,
    )


def _update(plan: BucketPlan, stage: int, rank: int, mesh: Mesh) -> Collective:
    """Return the gather of the ranges that ranks have updated, which the next forward needs whole."""
    axis = joined(slowest_first(plan.sharing_axes, mesh))
    return Collective(
        site=plan.gather_site,
        stage=stage,
        conversion="updated parameters",
        axis=axis,
        forward="all-gather",
        backward="none",
        payload_bytes=plan.gathered_bytes(mesh),
        group_size=plan.parts(mesh),
        why=f"{len(plan.params)} parameters; every rank of {axis} updates a range of them",
        scope="update",
        pp_ranks=(rank,),
    )
