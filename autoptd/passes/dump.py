"""The graph in its forms, one after the other: kept for pictures, and written as numbered texts.

    forms = Forms()
    forms.add("CONNECTED", graph)       # with AUTOPTD_DUMP=out/ in the environment: out/passes/02_connected.txt, at once
    write_forms(forms.graphs, "out/")   # the same texts, later

Every text lists the nodes with their types and reasons, and ends with the change in operator counts: diff two of them first,
debug second.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from torch.fx import Graph

from autoptd import passes
from autoptd.ir.notes import copy_graph, note, op_name, ops


class Forms:
    """Copies of the graph by form; writes each as it comes when AUTOPTD_DUMP names a folder."""

    def __init__(self) -> None:
        self.graphs: dict[str, Graph] = {}
        self._folder = os.environ.get("AUTOPTD_DUMP")

    def add(self, form: str, graph: Graph) -> None:
        """Keep a copy of `graph`, which later passes change."""
        self._keep(form, copy_graph(graph))

    def end(self, form: str, graph: Graph) -> None:
        """Keep `graph` itself: no pass follows."""
        self._keep(form, graph)

    def _keep(self, form: str, graph: Graph) -> None:
        self.graphs[form] = graph
        if self._folder:
            write_forms(self.graphs, self._folder)


def write_forms(graphs: Mapping[str, Graph], folder: str | Path) -> None:
    """Write `passes/NN_name.txt` below `folder` for every form."""
    target = Path(folder) / "passes"
    target.mkdir(parents=True, exist_ok=True)
    before: Counter[str] = Counter()
    for number, (form, graph) in enumerate(graphs.items()):
        counts = Counter(note(node).conversion or op_name(node) for node in ops(graph))
        change = [
            f"{counts[key] - before[key]:+d} {key}" for key in sorted({*counts, *before}) if counts[key] != before[key]
        ]
        text = "\n".join([passes.describe(graph), "change in operators:", *change, ""])
        (target / f"{number:02d}_{form.lower()}.txt").write_text(text)
        before = counts
