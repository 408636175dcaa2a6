"""TRACED -> ANNOTATED: axes for every tensor, then a type for every value over the batch and over tp, each with its reason."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Graph

from autoptd.errors import PlanError
from autoptd.ir.machine import Machine
from autoptd.ir.notes import note, op_name, payload, shape
from autoptd.ir.types import type_text
from autoptd.passes.assign import Assignment, Splitter, assign_tensor
from autoptd.passes.axes import Axes
from autoptd.passes.batch import assign_batch, check_literals
from autoptd.passes.constants import Constants
from autoptd.passes.fallbacks import explain
from autoptd.passes.rows import place_rows

EAGER = 10  # how much dearer a saved byte is where sequence parallelism was asked for


def annotate(
    graph: Graph,
    whole: Graph | None,
    buffers: dict[str, torch.Tensor],
    batched: set[str],
    pieces: int,
    t: int,
    machine: Machine,
    *,
    sequence_parallel: bool | str = False,
) -> tuple[Axes, Assignment]:
    """Fill the types of every node; `whole` is a second trace, with all rows of the batch (None when it is not split).

    With `sequence_parallel` tp may split values by tokens: wherever that is cheapest ("auto"), or, with bytes saved for
    backward priced ten times higher, nearly wherever it can (True).
    """
    axes, constants = Axes(graph), Constants(buffers)
    assign_batch(graph, axes, batched, pieces, constants)
    place_rows(graph, batched, pieces, buffers)
    if whole is not None:
        check_literals(graph, whole, constants)
    if t == 1:
        return axes, Assignment({}, {}, lambda node, source, target: 0.0)
    if sequence_parallel is True:
        machine = replace(machine, per_saved_byte=EAGER * machine.per_saved_byte)
    splitter = Splitter(graph, axes, t, machine, batched, by_tokens=bool(sequence_parallel))
    assignment = assign_tensor(graph, splitter)
    if sequence_parallel is True:
        check_tokens_are_split(graph, splitter)
    explain(graph, assignment, splitter)
    return axes, assignment


def check_tokens_are_split(graph: Graph, splitter: Splitter) -> None:
    """Refuse sequence parallelism that was asked for where no value could be sharded along its tokens."""
    nodes = [node for node in graph.nodes if note(node).of_params and note(node).dims and node.op == "call_function"]
    if any(splitter.is_by_tokens(node, note(node).tp) for node in nodes):
        return
    inputs = [node for node in graph.nodes if note(node).kind == "input"]
    sizes = {
        axis.size
        for node in inputs
        for dim in range(len(note(node).dims))
        for axis in splitter.axes.atoms(node, dim)
        if id(axis) in splitter.tokens
    }
    if not sizes:
        fact, remedy = "no input has tokens beside its batch", "sequence_parallel=False"
    elif all(size % splitter.t for size in sizes):
        told = " and ".join(map(str, sorted(sizes)))
        fact, remedy = f"{told} tokens do not divide over t={splitter.t}", f"a multiple of {splitter.t} tokens"
    else:
        fact, remedy = "nothing that depends on parameters can be sharded by tokens", "sequence_parallel=False"
    raise PlanError("sequence_parallel=True", fact, f"{remedy}, or sequence_parallel='auto'")


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
        batch = {"S": "per row", "P": "sum over rows"}.get(record.batch.kind, "")
        kind = type_text(record.tp, record.dims, "tp") if record.dims or record.tp.kind != "S" else ""
        why = "; ".join(part for part in (record.why, record.extra.get("reason", ""), record.placement) if part)
        lines.append(f"{name:36} {label:24} {size:18} {kind:30} {batch:14} {stages:4} {why}".rstrip())
    total = sum(payload(node) for node in graph.nodes if note(node).kind == "param")
    return "\n".join([*lines, "", f"{len(lines)} nodes, {total:,} bytes of parameters", ""])
