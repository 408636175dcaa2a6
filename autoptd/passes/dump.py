"""Write the graph in its forms as numbered texts.

In: the graph in every form that a run has kept. Out: a folder of texts.

    write_forms(record.graphs, "out/")   # out/passes/02_connected.txt, ...

Every text lists the nodes with their types and reasons, and ends with the change in operator counts: diff two of them first,
debug second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from torch.fx import Graph

from autoptd.ir.notes import note, op_name, ops, payload, shape


def write_forms(graphs: Mapping[str, Graph], folder: str | Path) -> None:
    """Write `passes/NN_name.txt` below `folder` for every form."""
    target = Path(folder) / "passes"
    target.mkdir(parents=True, exist_ok=True)
    before: Counter[str] = Counter()
    for number, (form, graph) in enumerate(graphs.items()):
        counts = Counter(note(node).conversion or op_name(node) for node in ops(graph))
        change = []
        for operator in sorted({*counts, *before}):
            if counts[operator] != before[operator]:
                change.append(f"{counts[operator] - before[operator]:+d} {operator}")
        text = "\n".join([describe(graph), "change in operators:", *change, ""])
        (target / f"{number:02d}_{form.lower()}.txt").write_text(
            text, encoding="utf-8", errors="backslashreplace"
        )
        before = counts


def describe(graph: Graph) -> str:
    """Write one line per node: module, operator, shape, type over tp, reason. This is the text of `passes/NN_name.txt`."""
    lines = []
    for node in graph.nodes:
        if node.op == "output":
            continue
        record = note(node)
        label = record.conversion or op_name(node).removeprefix("aten.")
        if node.op == "placeholder":
            label = record.kind
        name = record.name or record.module
        size = str(list(record.extra.get("local_shapes", [shape(node)])[0]))
        stages = ",".join(map(str, record.stages))
        batch = {"S": "per row", "P": "sum over rows"}.get(record.layout.batch.kind, "")
        kind = record.layout.text(record.dims) if record.dims or not record.layout.shards else ""
        reason, fused = record.extra.get("reason", ""), record.extra.get("fused", "")
        why = "; ".join(filter(None, (record.rule, record.why, reason, fused, record.stages_why)))
        lines.append(f"{name:36} {label:24} {size:18} {kind:30} {batch:14} {stages:4} {why}".rstrip())
    total = sum(payload(node) for node in graph.nodes if note(node).kind == "param")
    return "\n".join([*lines, "", f"{len(lines)} nodes, {total:,} bytes of parameters", ""])
