"""Describe a compiled graph to the runtime: parameters, inputs, crossings, stages and dropouts.

In: the LOCAL graph (the CUT one for dropouts), the captured model, the options. Out: the records of
`program/specs.py`, plain data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.fx import Graph, Node

from autoptd import trace as tracing
from autoptd.codegen.body import origin_text
from autoptd.codegen.files import StageFile
from autoptd.codegen.parts import Crossing
from autoptd.compiler.batch import Batch
from autoptd.ir.layout import Layout
from autoptd.ir.noise import NAMES, is_draw
from autoptd.ir.notes import note, op_name, ops, placeholders, row_blocks, shape, tensor
from autoptd.ir.placement import EVERY_REPLICA, Scope, placements
from autoptd.ir.types import Dims, outer_size
from autoptd.ir.updates import Updates
from autoptd.options import Options
from autoptd.passes.hook_gemms import adds_to_gradient
from autoptd.program.specs import CrossingSpec, DropoutSpec, InputSpec, ParamSpec, StageSpec, UpdatePart


def param_specs(
    graph: Graph,
    captured: tracing.Captured,
    options: Options,
    handed: Mapping[str, torch.dtype],
    layers: Mapping[str, str],
) -> tuple[ParamSpec, ...]:
    """Describe every parameter of the model once; those that the loss does not use live on stage 0, whole.

    `handed` has the dtypes of the user's model, `layers` the layers within which parameters are read.
    """
    # A parameter that the loss does not use has no node in the graph any more.
    used = {note(node).name: node for node in placeholders(graph, "param")}
    specs = []
    for name, parameter in captured.parameters.items():
        spec = _param_spec(captured.aliases[name], parameter, used.get(name), options)
        unit = layers.get(name, "") if "use" in (spec.scope, spec.sum_scope) else ""
        specs.append(replace(spec, dtype=_dtype_name(handed[name]), unit=unit))
    return tuple(specs)


def _param_spec(
    aliases: tuple[str, ...], parameter: torch.Tensor, node: Node | None, options: Options
) -> ParamSpec:
    """Describe one parameter; `node` is None if the loss does not use it."""
    layout, why = Layout(), "not used by the loss"
    stages: tuple[int, ...] = (0,)
    dims: Dims = tuple((size,) for size in parameter.shape)
    model_dims: Dims = ()
    requires_grad = False
    adds: tuple[int, ...] = ()
    used = parameter.dtype
    if node is not None:
        record, used = note(node), tensor(node).dtype
        layout, stages, why = record.layout, record.stages, record.why
        # A parameter without entries has nothing to train, and no optimizer state to write to files.
        dims, requires_grad = record.dims, record.needs_grad and parameter.numel() > 0
        of_model = dims if record.tokens.model_dims is None else record.tokens.model_dims
        model_dims = of_model if of_model != dims else ()
        adds = tuple(adds_to_gradient(node, stage) for stage in stages)
    # With `precision`, the model is held in the dtype that it computes in while it is compiled; under
    # autocast it is the graph that reads parameters in 16 bits.
    stored = _wide(parameter.dtype) if options.precision else parameter.dtype
    has_master = bool(options.precision) and parameter.is_floating_point()
    if options.is_mixed and stored == torch.float32:
        has_master = used != stored
    sums_wide = options.hooks.fp32_gradients or options.precision
    grad_dtype = _dtype_name(_wide(parameter.dtype)) if sums_wide else ""
    # Frozen parameters have no state to share, but themselves.
    is_shared = requires_grad or options.zero.stage == 3
    sharing = options.sharing if is_shared and parameter.numel() else EVERY_REPLICA
    storage, use = placements(layout, _dtype_name(stored), stages, grad_dtype, sharing)
    scope: Scope = "update"
    sum_scope: Scope = "step"
    if any(kind.is_flat for _, kind in storage.layout.over_mesh):
        scope, sum_scope = options.scopes
    return ParamSpec(
        # The model's first name.
        name=aliases[0],
        aliases=aliases,
        shape=tuple(parameter.shape),
        dims=dims,
        requires_grad=requires_grad,
        stages=stages,
        storage=storage,
        use=replace(use, dtype=_dtype_name(used)),
        scope=scope,
        sum_scope=sum_scope,
        why=why,
        adds=adds,
        has_master=has_master,
        # A float64 sum stays exact.
        wire_dtype="bfloat16"
        if options.zero.reduce_dtype == "bf16" and storage.sum_dtype == "float32"
        else "",
        model_dims=model_dims,
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for floating-point numbers of fewer bits."""
    is_narrow = dtype.is_floating_point and dtype.itemsize < 4
    return torch.float32 if is_narrow else dtype


def input_specs(graph: Graph, captured: tracing.Captured, batch: Batch) -> tuple[InputSpec, ...]:
    """Describe the tensors of the call; batched ones with the rows of one microbatch."""
    leaf_of = dict(captured.inputs)
    specs = []
    for node in placeholders(graph, "input"):
        leaf = leaf_of[note(node).name]
        is_batched = leaf in batch.batched
        size = tuple(tensor(node).shape)
        if is_batched:
            size = (batch.rows, *size[1:])
        dtype, blocks = _dtype_name(tensor(node).dtype), row_blocks(node)
        specs.append(InputSpec(note(node).name, leaf, is_batched, size, dtype, blocks))
    return tuple(specs)


def crossing_spec(crossing: Crossing) -> CrossingSpec:
    """Describe a value that one stage computes and others read."""
    node, record = crossing.node, note(crossing.node)
    reasons = (origin_text(node), record.stages_why)
    return CrossingSpec(
        crossing.name,
        crossing.source,
        crossing.targets,
        record.local.shapes[0],
        _dtype_name(tensor(node).dtype),
        record.needs_grad,
        record.layout.letter,
        "; ".join(reason for reason in reasons if reason),
    )


def crossing_links(crossings: Sequence[CrossingSpec]) -> list[tuple[int, int, bool]]:
    """Return (source, target, whether a gradient comes back) of every two stages between which something
    crosses.
    """
    # One message carries all crossings between two stages; another comes back if any of them has a gradient.
    merged: dict[tuple[int, int], bool] = {}
    for crossing in crossings:
        for target in crossing.targets:
            has_grad = merged.get((crossing.source, target), False)
            merged[crossing.source, target] = has_grad or crossing.has_grad
    return [(*pair, has_grad) for pair, has_grad in sorted(merged.items())]


def stage_spec(index: int, file: StageFile) -> StageSpec:
    """Describe a stage: the names that its file reads and returns."""
    return StageSpec(index, file.crossings, file.inputs, file.outputs, file.params, file.buffers)


def dropout_specs(graph: Graph) -> tuple[DropoutSpec, ...]:
    """Describe every dropout of the model, and other noise, in the order of the calls."""
    specs = []
    # On the CUT graph: in later ones, dropouts may be fused with other operators.
    for node in ops(graph):
        if is_draw(node):
            record = note(node)
            rows, why = record.draw.rows, record.reason
            batch = (rows.dim, outer_size(record.dims, rows)) if rows.kind == "S" else None
            kind = NAMES.get(op_name(node), "")
            rate = 0.0 if kind else node.args[1]
            specs.append(DropoutSpec(record.draw.site, record.module, rate, batch, why, kind))  # type: ignore[arg-type]
    return tuple(sorted(specs, key=lambda spec: spec.site))


def update_parts(updates: Updates | None) -> tuple[UpdatePart, ...]:
    """Describe the parts that microbatches keep for buffer updates."""
    if updates is None:
        return ()
    pairs = zip(updates.parts, updates.sums, strict=True)
    return tuple(UpdatePart(shape(part), is_sum) for part, is_sum in pairs)
