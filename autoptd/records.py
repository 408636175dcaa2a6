"""The facts of a compiled graph as plain records: what `Program` stores, and what the files in `out/` say.

In: the LOCAL graph, what was captured, the options. Out: specs of parameters, inputs, crossings and stages, the list of
collectives with bytes and reasons, the plan, and the header of a stage file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph

from autoptd import codegen, passes
from autoptd import trace as tracing
from autoptd.ir.notes import note, op_name, ops, placeholders, tensor
from autoptd.ir.program import Collective, CrossingSpec, InputSpec, ParamSpec, StageSpec
from autoptd.ir.types import I, ValueType
from autoptd.options import Options


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
        """Rows of the second trace: a multiple of the first one's, and not less than the rows of a step."""
        return self.traced_rows * max(2, -(-self.rows * self.pieces // self.traced_rows))


def about(options: Options, batch: Batch, stage: int) -> list[str]:
    """The header of a stage file."""
    b, m = batch.rows, batch.num_microbatches
    return [
        f"Stage {stage} of {options.num_stages}: model chunk {stage // options.p} of pipeline rank {stage % options.p}.",
        "Written by AutoPTD. It reads top to bottom, can be stepped through, and is the same for all tensor and data ranks.",
        f"plan: {options.mesh}, v={options.v}, {m} microbatches of {b} rows per replica, schedule {options.schedule}.",
        "Shapes in comments are a rank's, of one microbatch. `w`: parameters, `b`: buffers, `tp`: the tensor-parallel group.",
        "Types over tp: I invariant, R replicated with a partial gradient, P partial sum, S sharded; rt.p_to_i turns P into I.",
    ]


def param_specs(graph: Graph, captured: tracing.Captured) -> tuple[ParamSpec, ...]:
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
            )
        )
    return tuple(specs)


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
    dtype = str(tensor(one.node).dtype).removeprefix("torch.")
    return CrossingSpec(one.name, one.source, one.targets, record.extra["local_shapes"][0], dtype, record.needs_grad)


def stage_spec(index: int, file: codegen.StageFile) -> StageSpec:
    return StageSpec(index, file.crossings, file.inputs, file.outputs, file.params, file.buffers)


def collectives(
    graph: Graph, options: Options, crossing: list[codegen.Crossing], params: tuple[ParamSpec, ...]
) -> list[Collective]:
    """Everything that is communicated, per microbatch and per step, with payload bytes and the reason."""
    found = []
    for node in ops(graph):
        record = note(node)
        for stage in record.stages:
            site = f"{record.module} ({record.source})"
            if record.conversion:
                row = passes.conversion_row(record.conversion)
                nbytes = codegen.collective_bytes(node, options.t)
                found.append(
                    Collective(
                        site, stage, record.conversion, "tp", row.forward, row.backward, nbytes, options.t, record.why
                    )
                )
            elif op_name(node) == "cross_entropy" and node.kwargs["vocab"]:
                tokens = node.args[1].meta["autoptd"].extra["local_shapes"][0]  # type: ignore[union-attr]
                nbytes = 3 * torch.Size(tokens).numel() * tensor(node).element_size()
                why = "maximum, then sum of exponentials and picked logit, of every token"
                name = "vocab_parallel_cross_entropy"
                found.append(Collective(site, stage, name, "tp", "all-reduce", "none", nbytes, options.t, why))
    for one in crossing:
        nbytes = torch.Size(note(one.node).extra["local_shapes"][0]).numel() * tensor(one.node).element_size()
        for target in one.targets:
            back = "send" if note(one.node).needs_grad else "none"
            why = f"{one.name} is read by stage {target}"
            site = f"stage {one.source} to {target}"
            found.append(Collective(site, one.source, "send/receive", "pp", "send", back, nbytes, 2, why))
    return found + _step_collectives(options, params)


def _step_collectives(options: Options, params: tuple[ParamSpec, ...]) -> list[Collective]:
    found = []
    for stage in range(options.num_stages):
        for kind, group in (("I", options.d), ("S", options.d), ("R", options.d * options.t)):
            mine = [one for one in params if min(one.stages) == stage and one.type.kind == kind and one.requires_grad]
            nbytes = sum(_bytes(one, options.t) for one in mine)
            axis = "dp x tp" if kind == "R" else "dp"
            if nbytes and group > 1:
                why = f"gradients of {len(mine)} parameters of type {kind}"
                found.append(
                    Collective(
                        f"stage {stage}", stage, "gradient sum", axis, "none", "all-reduce", nbytes, group, why, "step"
                    )
                )
    for one in params:
        owners = sorted({stage % options.p for stage in one.stages})
        if len(owners) > 1:
            why = f"{one.name} is used by stages {', '.join(map(str, one.stages))}"
            nbytes = _bytes(one, options.t)
            found.append(
                Collective(
                    one.name, one.stages[0], "tied sum", "pp", "none", "all-reduce", nbytes, len(owners), why, "step"
                )
            )
    return found


def _bytes(spec: ParamSpec, t: int) -> int:
    return torch.Size(spec.local_shape(t)).numel() * getattr(torch, spec.dtype).itemsize


def plan_record(options: Options, batch: Batch, cut: dict[str, Any], params: tuple[ParamSpec, ...]) -> dict[str, Any]:
    """What `plan.json` says: the decisions, by the model's own names."""
    layers: dict[str, set[ValueType]] = {}
    for one in params:
        layers.setdefault(_any_layer(one.name), set()).add(one.type)
    shard = {}  # layers that are sharded alike are one pattern
    for one in params:
        pattern = _any_layer(one.name) if len(layers[_any_layer(one.name)]) == 1 else one.name
        if one.type.kind == "S":
            shard[pattern] = {"pattern": pattern, "dim": one.type.dim, "axis": "tp"}
    return {
        "version": 1,
        "mesh": {"t": options.t, "p": options.p, "d": options.d, "v": options.v},
        "num_microbatches": batch.num_microbatches,
        "schedule": options.schedule,
        "options": {"seed": options.seed},
        "cut": cut["after"],
        "shard": list(shard.values()),
    }


def _any_layer(name: str) -> str:
    """`h.*.ln.weight` for `h.3.ln.weight`."""
    return re.sub(r"\b\d+\b", "*", name)
