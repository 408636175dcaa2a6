"""Golden texts: a small graph after every pass, and every kind of emitted text. Their diff shows what a change does.

`texts()` makes them, `tests/golden/passes` and `tests/golden/emitted` have them as they were when last looked at, and
`tests/test_golden.py` compares. After a change that is meant to show:

    python -m tests.golden        # writes them anew; then read `git diff tests/golden`
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.fx import Graph

from autoptd.compiler.driver import compile_program
from autoptd.ir.machine import Machine
from autoptd.ir.notes import note, op_name, ops
from autoptd.options import make_options
from autoptd.passes import Record, describe
from autoptd.passes.fusion import losses
from autoptd.program.program import Program
from autoptd.wings.reports.collectives import collectives_markdown
from tests.golden.model import Small

FOLDER = Path(__file__).parent
LENGTH, ROWS = 4, 4
# Collectives start at once: models as small as these are split in many ways.
MACHINE = Machine(latency=1e-9)
HOOKS = {"async_tensor_model_parallel_allreduce": True, "accumulate_allreduce_grads_in_fp32": True}
# As Megatron splits it: vocabulary in shards, f and g around the MLP.
SHARD = [{"pattern": "embed.weight", "dim": 0, "axis": "tp"}]
# Passes that leave `one_block` as it is: it has no attention, rows that are mixed, or experts, and its loss is one sum.
IDLE = (
    "raise_attention",
    "read_causal",
    "take_whole_numbers",
    "read_batch_sums",
    "take_whole_rows",
    "divide_addends",
)
IDLE += ("group_rows",)
# Name -> layers, keywords. `one_block` has every other pass do something; `deep` has first, middle and last stages with layers
# that repeat; `again` layers of which half are computed again; `alone` is one rank.
PROGRAMS: dict[str, tuple[int, dict[str, Any]]] = {
    "one_block": (
        1,
        {"t": 2, "p": 2, "num_microbatches": 2, "recompute": "full", "plan": {"shard": SHARD}, **HOOKS},
    ),
    "again": (6, {"t": 2, "p": 2, "num_microbatches": 2, "recompute": "full:1/2"}),
    "deep": (6, {"t": 2, "p": 3, "num_microbatches": 2, "plan": {"cut": [2, 2, 2]}}),
    "alone": (1, {}),
}


def build(name: str, record: Record | None = None) -> Program:
    """Compile one of `PROGRAMS`."""
    layers, keywords = PROGRAMS[name]
    torch.manual_seed(0)
    ids, options = torch.zeros(ROWS, LENGTH, dtype=torch.long), make_options(machine=MACHINE, **keywords)
    with mock.patch.object(losses, "MIN_LOGITS_BYTES", 0):
        return compile_program(
            Small(layers), options, (ids, ids.clone()), {}, replicas=options.d, record=record
        )


class Snapshot(NamedTuple):
    """A graph as text: its nodes as dumps show them, and its calls with their arguments."""

    nodes: str
    calls: tuple[str, ...]

    @staticmethod
    def of(graph: Graph) -> Snapshot:
        """The text of a graph as it is."""
        return Snapshot(describe(graph), calls(graph))

    def since(self, before: tuple[str, ...]) -> str:
        """The text of this graph, with those calls that were not there before."""
        new = [call for call in self.calls if call not in before] or ["none"]
        return "\n".join([self.nodes, "calls that are new or different:", *new, ""])


def calls(graph: Graph) -> tuple[str, ...]:
    """`add = aten.add(embed, linear_2)`, a line per operator."""
    lines = []
    for node in ops(graph):
        given = [*map(str, node.args), *(f"{name}={value}" for name, value in node.kwargs.items())]
        record = note(node)
        kept = {
            "owned": record.is_owned,
            "again": record.keep.again is not None,
            "dropped": record.keep.dropped,
        }
        marks = [name for name, is_marked in kept.items() if is_marked]
        mark = f"  # {', '.join(marks)}" if marks else ""
        lines.append(f"{node} = {op_name(node)}({', '.join(given)}){mark}")
    return tuple(lines)


def texts() -> dict[str, str]:
    """Every golden text, by its path below this folder."""
    record = Record(every_pass=True)
    program = build("one_block", record)
    texts: dict[str, str] = {}
    before: tuple[str, ...] = ()
    for number, (name, graph) in enumerate([("trace", record.graphs["TRACED"]), *record.after.items()]):
        snapshot = Snapshot.of(graph)
        if name not in IDLE:
            texts[f"passes/{number:02}_{name}.txt"] = snapshot.since(before)
        before = snapshot.calls
    for name in PROGRAMS:
        program = program if name == "one_block" else build(name)
        files = {**program.sources, "plan.json": json.dumps(program.plan, indent=1) + "\n"}
        if name == "one_block":
            files |= {"schedule.txt": program.schedule, "collectives.md": collectives_markdown(program)}
        texts |= {f"emitted/{name}/{golden_name(file)}": text for file, text in files.items()}
    return texts


def golden_name(file: str) -> str:
    """`stage_0.py.txt`: not a Python file, which would be linted and formatted."""
    return f"{file}.txt" if file.endswith(".py") else file


def read() -> dict[str, str]:
    """The golden texts as they were written, by their path below this folder."""
    files = (file for folder in ("passes", "emitted") for file in sorted((FOLDER / folder).rglob("*.*")))
    return {str(file.relative_to(FOLDER)): file.read_text() for file in files}


__all__ = ["FOLDER", "read", "texts"]
