"""TRACED -> ANNOTATED: axes for every tensor, then a type for every value over the batch and over tp, each with its reason."""

from __future__ import annotations

import math

import torch
from torch.fx import Graph, Node

from autoptd.errors import PlanError
from autoptd.ir.machine import Machine
from autoptd.ir.notes import note, op_name, ops, payload, shape, site
from autoptd.ir.types import type_text
from autoptd.passes.assign import Assignment, Splitter, assign_tensor
from autoptd.passes.axes import Axes
from autoptd.passes.batch import assign_batch, check_literals
from autoptd.passes.constants import Constants
from autoptd.passes.costs import flops
from autoptd.passes.rows import place_rows


def annotate(
    graph: Graph,
    whole: Graph | None,
    buffers: dict[str, torch.Tensor],
    batched: set[str],
    pieces: int,
    t: int,
    machine: Machine,
) -> tuple[Axes, Assignment]:
    """Fill the types of every node; `whole` is a second trace, with all rows of the batch (None when it is not split)."""
    axes, constants = Axes(graph), Constants(buffers)
    assign_batch(graph, axes, batched, pieces, constants)
    place_rows(graph, batched, pieces, buffers)
    if whole is not None:
        check_literals(graph, whole, constants)
    if t == 1:
        return axes, Assignment({}, {}, lambda node, source, target: 0.0)
    _check_divisible(graph, axes, t, machine)
    return axes, assign_tensor(graph, axes, t, machine)


def _check_divisible(graph: Graph, axes: Axes, t: int, machine: Machine) -> None:
    """Every matrix product that depends on parameters must have something that t divides; all that have not are named."""
    splitter = Splitter(graph, axes, t, machine)
    every = Splitter(graph, axes, 1, machine)
    bad: dict[str, tuple[Node, set[int]]] = {}
    for node in ops(graph):
        if not flops(node) or not note(node).of_params:
            continue
        names = [one.name for one in splitter.letters(node)]
        sizes = {one.size for one in every.letters(node) if one.name not in ("e", "k")}
        if sizes and not set(names) - ({"e"} if op_name(node).endswith("attention") else set()):
            bad.setdefault(note(node).module, (node, sizes))
    if bad:
        node, sizes = next(iter(bad.values()))
        common = math.gcd(*sizes) if len(sizes) > 1 else max(sizes)
        fits = [k for k in range(1, common + 1) if common % k == 0]
        what = f"{max(sizes)} heads do" if "attention" in op_name(node) else f"sizes {sorted(sizes)} do"
        more = f" (and {len(bad) - 1} more modules like it)" if len(bad) > 1 else ""
        raise PlanError(site(node), f"{what} not divide over t={t}{more}", f"t in {{{', '.join(map(str, fits))}}}")


def unknown_ops(graph: Graph, axes: Axes) -> list[tuple[str, str]]:
    """(operator, module) of what no rule knows: computed whole over tp."""
    return [
        (op_name(node), note(node).module) for node in ops(graph) if note(node).of_params and not axes.is_known(node)
    ]


def redundant_flops(graph: Graph) -> int:
    """Forward FLOPs of matrix products that every tensor rank computes in full."""
    return sum(flops(node) for node in ops(graph) if note(node).why == "whole on every rank")


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
        why = "; ".join(part for part in (record.why, record.extra.get("reason", "")) if part)
        lines.append(f"{name:36} {label:24} {size:18} {kind:30} {batch:14} {stages:4} {why}".rstrip())
    total = sum(payload(node) for node in graph.nodes if note(node).kind == "param")
    return "\n".join([*lines, "", f"{len(lines)} nodes, {total:,} bytes of parameters", ""])
