"""What the runtime needs to know of a compiled graph: parameters, inputs, crossings, stages and dropouts.

In: the LOCAL graph (of dropouts, that which is CUT), what was captured, the options. Out: the records of
`program/program.py`, plain data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Graph

from autoptd import codegen, passes
from autoptd import trace as tracing
from autoptd.batch import Batch
from autoptd.ir.layout import Layout
from autoptd.ir.notes import note, op_name, ops, placeholders, tensor
from autoptd.ir.placement import placements
from autoptd.ir.types import outer_size
from autoptd.options import Options
from autoptd.program.specs import CrossingSpec, DropoutSpec, InputSpec, ParamSpec, StageSpec


def param_specs(graph: Graph, captured: tracing.Captured, options: Options) -> tuple[ParamSpec, ...]:
    """Every parameter of the model once; those that the loss does not use live on stage 0, whole."""
    used = {note(node).name: node for node in placeholders(graph, "param")}
    specs = []
    for name, parameter in captured.parameters.items():
        node = used.get(name)
        record = note(node) if node is not None else None
        stages = record.stages if record else (0,)
        storage, use = placements(
            record.layout if record else Layout(),
            str(parameter.dtype).removeprefix("torch."),
            stages,
            _grad_dtype(parameter.dtype) if options.accumulate_allreduce_grads_in_fp32 else "",
        )
        specs.append(
            ParamSpec(
                name=name,
                aliases=captured.aliases[name],
                shape=tuple(parameter.shape),
                dims=record.dims if record else tuple((size,) for size in parameter.shape),
                requires_grad=record is not None and record.needs_grad,
                stages=stages,
                storage=storage,
                use=use,
                why=record.why if record else "not used by the loss",
                adds=tuple(passes.adds_to_gradient(node, stage) for stage in record.stages)
                if node and record
                else (),
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
        specs.append(
            InputSpec(name, leaf_of[name], is_batched, size, str(tensor(node).dtype).removeprefix("torch."))
        )
    return tuple(specs)


def crossing_spec(one: codegen.Crossing) -> CrossingSpec:
    record = note(one.node)
    shape, dtype = record.extra["local_shapes"][0], str(tensor(one.node).dtype).removeprefix("torch.")
    why = "; ".join(part for part in (codegen.origin_text(one.node), record.placement) if part)
    kind = record.layout.letter
    return CrossingSpec(one.name, one.source, one.targets, shape, dtype, record.needs_grad, kind, why)


def crossing_links(crossings: Sequence[CrossingSpec]) -> list[tuple[int, int, bool]]:
    """(source, target, whether a gradient comes back) of every two stages between which something crosses."""
    merged: dict[tuple[int, int], bool] = {}
    for crossing in crossings:
        for target in crossing.targets:
            has_grad = merged.get((crossing.source, target), False)
            merged[crossing.source, target] = has_grad or crossing.has_grad
    return [(*pair, has_grad) for pair, has_grad in sorted(merged.items())]


def stage_spec(index: int, file: codegen.StageFile) -> StageSpec:
    return StageSpec(index, file.crossings, file.inputs, file.outputs, file.params, file.buffers)


def dropout_specs(graph: Graph) -> tuple[DropoutSpec, ...]:
    """Every dropout of the model, in the order of its calls; a graph after CUT may have them fused with
    other operators.
    """
    specs = []
    for node in ops(graph):
        if op_name(node) == "aten.dropout":
            record = note(node)
            rows, why = record.extra["rows"], record.extra.get("reason", "")
            batch = (rows.dim, outer_size(record.dims, rows)) if rows.kind == "S" else None
            specs.append(DropoutSpec(record.extra["site"], record.module, node.args[1], batch, why))  # type: ignore[arg-type]
    return tuple(sorted(specs, key=lambda one: one.site))
