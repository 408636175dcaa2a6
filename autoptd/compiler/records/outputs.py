"""Describe what an evaluation returns besides the loss.

In: the LOCAL graph, and the division of the batch. Out: the records of `program/specs.py`.
"""

from __future__ import annotations

from typing import Literal

from torch.fx import Graph

from autoptd.compiler.batch import Batch
from autoptd.ir import markers
from autoptd.ir.notes import note, op_name, ops, tensor
from autoptd.ir.outputs import OUTPUT
from autoptd.program.specs import OutputSpec

OVER_THE_BATCH: dict[str, Literal["rows", "sum"]] = {"S": "rows", "P": "sum"}


def output_specs(graph: Graph, batch: Batch) -> tuple[OutputSpec, ...]:
    """Describe the outputs, as a microbatch has them."""
    specs = []
    for node in ops(graph):
        if op_name(node) == OUTPUT:
            x = markers.unconverted(node.args[1])
            how: Literal["rows", "sum", "same"] = OVER_THE_BATCH.get(note(x).layout.batch.kind, "same")
            shape, dtype = tuple(tensor(x).shape), str(tensor(x).dtype).removeprefix("torch.")
            if how == "rows":
                # A trace may have other rows.
                shape = (shape[0] * batch.rows // batch.traced_rows, *shape[1:])
            specs.append(OutputSpec(str(node.args[2]), how, shape, dtype))
    return tuple(specs)


__all__ = ["output_specs"]
