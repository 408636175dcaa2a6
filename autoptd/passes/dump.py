"""Write graphs as numbered text files: after every pass with AUTOPTD_DUMP, in every form for a report.

In: graphs and their names. Out: a folder of text files.

    dump = Dump("out/")
    dump.begin("trace", traced)
    dump.add("annotate", graph)         # out/passes/01_annotate.txt

Each file lists the nodes with their types and reasons, and ends with the change in operator counts, so that
diffing two files shows the effect of a pass.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from torch.fx import Graph

from autoptd.ir.notes import note, op_name, ops, payload, shape


class Dump:
    """Write `passes/NN_name.txt` files to a folder in order; a new run overwrites those of the previous one."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder) / "passes"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._number, self._before = 0, Counter[str]()

    def begin(self, name: str, graph: Graph) -> None:
        """Write the first graph of a run."""
        self._number, self._before = 0, Counter()
        self.add(name, graph)

    def add(self, name: str, graph: Graph) -> None:
        """Write the next graph."""
        counts = Counter(note(node).conversion or op_name(node) for node in ops(graph))
        change = []
        for operator in sorted({*counts, *self._before}):
            if counts[operator] != self._before[operator]:
                change.append(f"{counts[operator] - self._before[operator]:+d} {operator}")
        text = "\n".join([describe(graph), "change in operators:", *change, ""])
        path = self._folder / f"{self._number:02d}_{name}.txt"
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
        self._number, self._before = self._number + 1, counts


def describe(graph: Graph) -> str:
    """Return the text of a dump, one line per node: module, operator, shape, type over tp, reason."""
    lines = []
    for node in graph.nodes:
        if node.op == "output":
            continue
        record = note(node)
        label = record.conversion or op_name(node).removeprefix("aten.")
        if node.op == "placeholder":
            label = record.kind
        name = record.name or record.module
        size = str(list((record.local.shapes or [shape(node)])[0]))
        stages = ",".join(map(str, record.stages))
        batch = {"S": "per row", "P": "sum over rows"}.get(record.layout.batch.kind, "")
        kind = record.layout.text(record.dims) if record.dims or not record.layout.shards else ""
        reason, fused = record.reason, record.fused.what
        why = "; ".join(filter(None, (record.rule, record.why, reason, fused, record.stages_why)))
        lines.append(f"{name:36} {label:24} {size:18} {kind:30} {batch:14} {stages:4} {why}".rstrip())
    total = sum(payload(node) for node in graph.nodes if note(node).kind == "param")
    return "\n".join([*lines, "", f"{len(lines)} nodes, {total:,} bytes of parameters", ""])
