"""The facts of a compiled graph as plain records: what `Program` stores, and what the files in `out/` say.

In: the LOCAL graph, what was captured, the options. Out: specs of parameters, inputs, crossings and stages, the list of
collectives with bytes and reasons, the plan, and the header of a stage file.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from autoptd import codegen, passes
from autoptd import trace as tracing
from autoptd.ir import markers
from autoptd.ir.actions import Orders, ranks_of_stages
from autoptd.ir.mesh import ORDER, Mesh
from autoptd.ir.notes import note, op_name, ops, placeholders, tensor
from autoptd.ir.types import I, ValueType, outer_size
from autoptd.options import PLANNED, Options
from autoptd.program.buckets import BucketPlan, plan_buckets
from autoptd.program.call_order import check_call_order
from autoptd.program.program import (
    GATHER,
    Collective,
    CrossingSpec,
    DropoutSpec,
    Fallback,
    InputSpec,
    ParamSpec,
    Parcel,
    Program,
    StageSpec,
)

WORTH_A_WARNING = 0.01
ABOUT_TYPES = (
    "Types over tp: I invariant, R replicated with a partial gradient, P partial sum, S sharded; p_to_i: P to I."
)
ABOUT_COLLECTIVES = (
    "AR all-reduce, AG all-gather, RS reduce-scatter, A2A all-to-all, fwd in forward, bwd in backward, with the",
    "bytes of the whole value. A sum with owned=True is made in place: nobody else reads what is summed.",
)
LOSSES = ("cross_entropy", "linear_cross_entropy")


@dataclass(frozen=True)
class Batch:
    """How a step's rows are divided: `rows` per microbatch, `num_microbatches` per replica, `traced_rows` seen by the trace."""

    batched: tuple[int, ...]  # leaves that carry the batch axis
    rows: int
    num_microbatches: int
    pieces: int
    traced_rows: int

    @property
    def whole_rows(self) -> int:
        """Rows of the second trace: those of a step, where they are more than the first one's."""
        step = self.rows * self.pieces
        return step if step > self.traced_rows else 2 * self.traced_rows


def about(options: Options, batch: Batch, ranks: Sequence[int], stage: int, wgrad: str) -> list[str]:
    """The header of a stage file; `ranks` are the pipeline ranks of all stages, `wgrad` what takes weight gradients."""
    b, m, rank = batch.rows, batch.num_microbatches, ranks[stage]
    return [
        f"Stage {stage} of {options.num_stages}: model chunk {ranks[:stage].count(rank)} of pipeline rank {rank}.",
        "Written by AutoPTD, to be read, stepped through and run again. All tensor and data ranks have the same file.",
        f"plan: {options.mesh}, v={options.v}, {m} microbatch{'es' if m > 1 else ''} of {b} row{'s'[: b > 1]} per replica, "
        f"schedule {options.schedule_name}.",
        "Shapes are a rank's, of one microbatch. `w`: parameters, `b`: buffers, `tp`: the tensor-parallel group.",
        *([ABOUT_TYPES] if options.t > 1 else []),
        *_about_hooks(options, wgrad),
    ]


def _about_hooks(options: Options, wgrad: str) -> list[str]:
    """What an `rt.linear` in the file means, where there are any."""
    said = []
    if options.async_tensor_model_parallel_allreduce:
        said.append("overlap=tp all-reduces the gradient of the input while the weight's is computed")
    if wgrad == "main_grads":
        said.append("wgrad=self.main_grads adds the weight's gradient to the sum from within the GEMM")
    if wgrad == "deferred":
        said.append("wgrad=self.deferred leaves the weight's gradient to action W")
    lines = [f"rt.linear is F.linear with hooks on its backward: {'; '.join(said)}."] if said else []
    if options.accumulate_allreduce_grads_in_fp32:
        lines.append("All gradients add up in float32 (float64 for float64): parameter.main_grad.")
    return lines


def param_specs(graph: Graph, captured: tracing.Captured, options: Options) -> tuple[ParamSpec, ...]:
    """Every parameter of the model once; those that the loss does not use live on stage 0, whole."""
    used = {note(node).name: node for node in placeholders(graph, "param")}
    specs = []
    for name, parameter in captured.parameters.items():
        node = used.get(name)
        record = note(node) if node is not None else None
        specs.append(
            ParamSpec(
                name=name,
                aliases=captured.aliases[name],
                shape=tuple(parameter.shape),
                dtype=str(parameter.dtype).removeprefix("torch."),
                requires_grad=record is not None and record.needs_grad,
                stages=record.stages if record else (0,),
                type=record.tp if record else I,
                dims=record.dims if record else tuple((size,) for size in parameter.shape),
                why=record.why if record else "not used by the loss",
                grad_dtype=_grad_dtype(parameter.dtype) if options.accumulate_allreduce_grads_in_fp32 else "",
                adds=tuple(passes.adds_to_gradient(node, stage) for stage in record.stages) if node and record else (),
            )
        )
    return tuple(specs)


def _grad_dtype(dtype: torch.dtype) -> str:
    return "float64" if dtype == torch.float64 else "float32"


def input_specs(graph: Graph, captured: tracing.Captured, batch: Batch) -> tuple[InputSpec, ...]:
    """The tensors of the call; batched ones with the rows of one microbatch."""
    leaf_of = dict(captured.inputs)
    specs = []
    for node in placeholders(graph, "input"):
        name = note(node).name
        size = tuple(tensor(node).shape)
        is_batched = leaf_of[name] in batch.batched
        size = (batch.rows, *size[1:]) if is_batched else size
        specs.append(InputSpec(name, leaf_of[name], is_batched, size, str(tensor(node).dtype).removeprefix("torch.")))
    return tuple(specs)


def crossing_spec(one: codegen.Crossing) -> CrossingSpec:
    record = note(one.node)
    shape, dtype = record.extra["local_shapes"][0], str(tensor(one.node).dtype).removeprefix("torch.")
    why = "; ".join(part for part in (codegen.origin_text(one.node), record.placement) if part)
    return CrossingSpec(one.name, one.source, one.targets, shape, dtype, record.needs_grad, record.tp.kind, why)


def stage_spec(index: int, file: codegen.StageFile) -> StageSpec:
    return StageSpec(index, file.crossings, file.inputs, file.outputs, file.params, file.buffers)


def dropout_specs(graph: Graph) -> tuple[DropoutSpec, ...]:
    """Every dropout of the model, in the order of its calls."""
    specs = []
    for node in ops(graph):
        if node.target is markers.dropout:
            record = note(node)
            rows, why = record.extra["rows"], record.extra.get("reason", "")
            batch = (rows.dim, outer_size(record.dims, rows)) if rows.kind == "S" else None
            specs.append(DropoutSpec(record.extra["site"], record.module, node.args[1], batch, why))  # type: ignore[arg-type]
    return tuple(sorted(specs, key=lambda one: one.site))


def collectives(
    graph: Graph, options: Options, parcels: Sequence[Parcel], params: tuple[ParamSpec, ...], orders: Orders
) -> list[Collective]:
    """Everything that is communicated, per microbatch and per step, with payload bytes and the reason."""
    found = []
    ranks = ranks_of_stages(orders)
    for node in ops(graph):
        for stage in note(node).stages:
            here = ranks[stage]
            if note(node).conversion:
                found += _conversion(node, stage, here, options.t)
            elif "swallowed" in note(node).extra:
                found.append(_swallowed(node, stage, here, options.t))
            elif op_name(node) in LOSSES and node.kwargs["vocab"]:
                found += _vocabulary_sums(node, stage, here, options.t)
    for one in parcels:
        found += _travel(one, ranks)
    buckets = [plan_buckets(params, orders, ranks, options.mesh, pp) for pp in range(options.p)]
    found += _step_collectives(graph, options, buckets, ranks)
    check_call_order(found, buckets, options.mesh)
    return found


def _conversion(node: Node, stage: int, rank: int, t: int) -> list[Collective]:
    record, (forward, backward) = note(node), codegen.conversion_work(node)
    site = f"{record.module} ({record.source})"
    nbytes = codegen.collective_bytes(node, t)
    made = Collective(site, stage, record.conversion, "tp", forward, backward, nbytes, t, record.why, pp_ranks=(rank,))
    if "readers" not in record.extra:
        return [made]
    why = "the weight's gradient needs the whole input, of which the shard was kept"
    return [
        made,
        dataclasses.replace(made, conversion="gathered again", forward="none", backward="all-gather", why=why),
    ]


def _swallowed(node: Node, stage: int, rank: int, t: int) -> Collective:
    """An f that is part of a linear layer: see passes/hook_gemms.py."""
    record, f = note(node), note(node).extra["swallowed"]
    site = f"{record.module} ({record.source})"
    return Collective(
        site, stage, f.conversion, "tp", "none", "all-reduce", f.payload_bytes, t, f.why, pp_ranks=(rank,)
    )


def _vocabulary_sums(node: Node, stage: int, rank: int, t: int) -> list[Collective]:
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
            axis="tp",
            forward="all-reduce",
            backward="none",
            payload_bytes=nbytes,
            group_size=t,
            why=why,
            pp_ranks=(rank,),
        )
        for name, nbytes, why in calls
    ]


def _travel(one: Parcel, ranks: Sequence[int]) -> list[Collective]:
    """The send of a parcel, and the gather of a scattered one on the other side."""
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
    found = [one for stage in range(options.num_stages) for one in _label_count(graph, stage, ranks[stage], options.d)]
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
        "count of labels", stage, "label count", "dp", "all-reduce", "none", 8 * count, d, why, "step", (rank,)
    )
    return [made] if count else []


def _bucket_sums(plan: BucketPlan, pp: int, ranks: Sequence[int], mesh: Mesh) -> list[Collective]:
    count, nbytes = len(plan.params), plan.nbytes(mesh.t)
    here = [stage for spec in plan.params for stage in spec.stages if ranks[stage] == pp]
    kinds = "/".join(sorted({spec.type.kind for spec in plan.params}))
    why, tied = f"gradients of {count} parameters of type {kinds}", f"used by stages {_listed(plan)}"

    def made(site: str, what: str, axis: str, size: int, why: str, ranks: tuple[int, ...]) -> Collective:
        return Collective(site, max(here), what, axis, "none", "all-reduce", nbytes, size, why, "step", ranks)

    found = [made(plan.site, "gradient sum", axis, mesh.degree(axis), why, (pp,)) for axis in plan.axes]
    if pp == plan.owners[0]:
        found.append(made(plan.tied_site, "tied sum", "pp", len(plan.owners), tied, plan.owners))
    return found


def _listed(plan: BucketPlan) -> str:
    return ", ".join(map(str, sorted({stage for spec in plan.params for stage in spec.stages})))


def plan_record(
    options: Options,
    batch: Batch,
    cut: dict[str, Any],
    params: tuple[ParamSpec, ...],
    fallbacks: list[Fallback],
    weighed: dict[str, Any] | None,
) -> dict[str, Any]:
    """What `plan.json` says: the decisions, by the model's own names."""
    layers: dict[str, set[ValueType]] = {}
    for one in params:
        layers.setdefault(_any_layer(one.name), set()).add(one.type)
    shard = {}  # layers that are sharded alike are one pattern
    for one in params:
        pattern = _any_layer(one.name) if len(layers[_any_layer(one.name)]) == 1 else one.name
        if one.type.kind == "S":
            shard[pattern] = {"pattern": pattern, "dim": one.type.dim, "axis": "tp"}
    order = {} if options.order == ORDER else {"order": options.order}
    return {
        "version": 1,
        "mesh": {"t": options.t, "p": options.p, "d": options.d, "v": options.v, **order},
        "num_microbatches": batch.num_microbatches,
        "schedule": str(options.schedule),
        "options": {name: getattr(options, name) for name in PLANNED},
        "cut": cut["after"],
        "shard": [*shard.values(), *(dict(one) for one in options.plan.shard if one.get("dim") is None)],
        "fallbacks": merged_fallbacks(fallbacks),
        **({"weighed": weighed} if weighed else {}),
    }


def merged_fallbacks(fallbacks: Sequence[Fallback]) -> list[dict[str, Any]]:
    """One record for all layers that have the same operator and the same fact, with the sum of their FLOPs."""
    merged: dict[Fallback, int] = {}
    for one in fallbacks:
        key = dataclasses.replace(one, site=_any_layer(one.site), flops=0)
        merged[key] = merged.get(key, 0) + one.flops
    return [{**dataclasses.asdict(one), "flops": flops} for one, flops in merged.items()]


def warn_of_checkpoints(modules: Sequence[str]) -> None:
    """Warn once that activation checkpoints in the model are not kept."""
    if modules:
        named = ", ".join(dict.fromkeys(map(_any_layer, modules)))
        message = f"activation checkpointing in the model ({named}) is not honoured: these activations are kept, "
        message += "and nothing is computed again. Numbers are the same, memory is that without it"
        warnings.warn(message, stacklevel=3)


def warn_of_fallbacks(program: Program) -> None:
    """Warn once if tensor ranks repeat each other's work to more than a hundredth of all FLOPs of matrix products."""
    found = [one for one in merged_fallbacks(program.fallbacks) if one["flops"]]
    share = sum(one["flops"] for one in found) / max(1, program.costs.get("total_flops", 0))
    if share > WORTH_A_WARNING:
        reasons: dict[tuple[str, str], list[str]] = {}
        for one in found:
            reasons.setdefault((one["fact"], one["remedy"]), []).append(one["site"] or "the model")
        told = "; ".join(
            f"{', '.join(dict.fromkeys(sites))}: {fact} ({remedy})" for (fact, remedy), sites in reasons.items()
        )
        message = f"{100 * share:.0f} % of the FLOPs of matrix products are done by every tensor rank in full. {told}. "
        warnings.warn(message + "See program.fallbacks", stacklevel=3)


def _any_layer(name: str) -> str:
    """`h.*.ln.weight` for `h.3.ln.weight`."""
    return re.sub(r"\b\d+\b", "*", name)
