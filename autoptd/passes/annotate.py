"""TRACED -> ANNOTATED: axes for every tensor, then a type for every value over the batch and over tp, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Graph

from autoptd.errors import PlanError
from autoptd.ir.machine import Machine
from autoptd.ir.mesh import Mesh
from autoptd.ir.notes import note, op_name, payload, placeholders, shape
from autoptd.passes.axes.axes import Axes
from autoptd.passes.axes.constants import Constants
from autoptd.passes.solve.assign import Assignment, assign_tensor, find_plan
from autoptd.passes.solve.batch import assign_batch, check_literals
from autoptd.passes.solve.dropout_rows import place_rows
from autoptd.passes.solve.fallbacks import note_fallbacks
from autoptd.passes.solve.shard_pins import find_pins, keep_layouts
from autoptd.passes.solve.strategies import KeptPlan, Splitter
from autoptd.passes.solve.symbols import name_axes


def annotate(
    graph: Graph,
    whole: Graph | None,
    buffers: Mapping[str, torch.Tensor],
    batched: set[str],
    pieces: int,
    mesh: Mesh,
    machine: Machine,
    *,
    sequence_parallel: bool | str = False,
    shard: Sequence[Mapping[str, Any]] = (),
    layouts: Mapping[str, tuple[Any, ...]] | None = None,
) -> tuple[Axes, Assignment]:
    """Fill the types of every node; `whole` is a second trace, with all rows of the batch (None when it is not split).

    With `sequence_parallel` tp may split values by tokens: with everything else free as well ("auto"), or (True: Korthikanti et
    al. 2022) what stands between the matrix products that are split without it, which stay as they are. `shard` are the
    entries of a plan that pin parameters; `layouts` are those of another program, which are kept instead.
    """
    axes, constants = Axes(graph), Constants(buffers)
    assign_batch(graph, axes, batched, pieces, constants)
    place_rows(graph, batched, pieces, buffers)
    if whole is not None:
        check_literals(graph, whole, constants)
    pins = find_pins(graph, shard) if layouts is None else keep_layouts(graph, layouts)
    (axis,) = mesh.value_axes
    if mesh.degree(axis) == 1:
        split = [pin for pin in pins.values() if pin.dim is not None]
        if split:
            raise PlanError("plan: shard", f"{split[0]}, but t=1 splits nothing", "t > 1, or leave it out")
        return axes, Assignment(axis, {}, {}, lambda *_: 0.0, lambda *_: 0.0)
    make_splitter = partial(Splitter, graph, axes, axis, mesh, machine, batched, pins=pins)
    splitter = make_splitter(tokens=bool(sequence_parallel))
    if sequence_parallel is True:
        check_tokens(graph, splitter)
        without = make_splitter(tokens=False)
        splitter.kept = KeptPlan(without, find_plan(graph, without))
    assignment = assign_tensor(graph, splitter)
    note_fallbacks(graph, assignment, splitter)
    assignment.letters = name_axes(graph, splitter)
    return axes, assignment


def check_tokens(graph: Graph, splitter: Splitter) -> None:
    """Refuse sequence parallelism that was asked for where t ranks cannot share the tokens."""
    places = [(node, dim) for node in placeholders(graph, "input") for dim in range(len(note(node).dims))]
    axes = [axis for node, dim in places for axis in splitter.axes.atoms(node, dim) if id(axis) in splitter.tokens]
    sizes = sorted({axis.size for axis in axes})
    if sizes and not all(size % splitter.degree for size in sizes):
        return
    fact, remedy = "no input has tokens beside its batch", "leave it out"
    if sizes:
        fact = f"{' and '.join(map(str, sizes))} tokens do not divide over t={splitter.degree}"
        remedy = f"a multiple of {splitter.degree} tokens, or sequence_parallel='auto'"
    raise PlanError("sequence_parallel=True", fact, remedy)


def describe(graph: Graph) -> str:
    """One line per node: module, operator, shape, type over tp, reason. The text of `passes/NN_name.txt`."""
    lines = []
    for node in graph.nodes:
        if node.op == "output":
            continue
        record = note(node)
        label = record.conversion or (record.kind if node.op == "placeholder" else op_name(node).removeprefix("aten."))
        name = record.name or record.module
        size = str(list(record.extra.get("local_shapes", [shape(node)])[0]))
        stages = ",".join(map(str, record.stages))
        batch = {"S": "per row", "P": "sum over rows"}.get(record.layout.batch.kind, "")
        kind = record.layout.text(record.dims) if record.dims or not record.layout.shards else ""
        said = (
            record.rule,
            record.why,
            record.extra.get("reason", ""),
            record.extra.get("fused", ""),
            record.placement,
        )
        why = "; ".join(part for part in said if part)
        lines.append(f"{name:36} {label:24} {size:18} {kind:30} {batch:14} {stages:4} {why}".rstrip())
    total = sum(payload(node) for node in graph.nodes if note(node).kind == "param")
    return "\n".join([*lines, "", f"{len(lines)} nodes, {total:,} bytes of parameters", ""])
