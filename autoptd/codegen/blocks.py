"""Write operators that several stages compute, instead of sending a value, once: as a method that each of them calls.

In: a `Block` and the names of the values around it. Out: lines such as

    def make_mask(self):
        position_ids = torch.arange(8, dtype=torch.int64, device=self.device)  # [8]
        ...
        return mask

    mask = self.make_mask()
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch.fx import Node

from autoptd.codegen.body import write_body
from autoptd.codegen.comments import numbers_text, site_text
from autoptd.codegen.expressions import bound_axes, expression
from autoptd.codegen.names import choose_names, operand_text
from autoptd.codegen.parts import Block
from autoptd.codegen.writer import Writer
from autoptd.ir.mesh import Mesh
from autoptd.ir.names import free_name
from autoptd.ir.notes import note

# A method with at most so many results is named after them.
MAX_NAMED_RESULTS = 2


@dataclass(frozen=True)
class Method:
    """The method of a block: its name, and those of its arguments."""

    block: Block
    name: str
    arguments: dict[Node, str]


def make_method(block: Block, outside: Callable[[Node], str], taken: Collection[str]) -> Method:
    """Name the method; `outside` gives the names of values in the first stage that calls it."""
    results = list(block.result_names.values())
    # `make_mask`, `make_cos_sin`; a longer list of results says nothing.
    what = "_".join(results) if len(results) <= MAX_NAMED_RESULTS else "shared"
    base = f"make_{what}"
    name, number = base, 1
    while name in taken:
        number += 1
        name = f"{base}_{number}"
    arguments = {node: free_name(outside(node)) for node in block.read}
    return Method(block, name, arguments)


def write_method(writer: Writer, method: Method, mesh: Mesh) -> None:
    """Write the method: the operators of the block, and what it returns."""
    block = method.block
    names = choose_names(list(block.nodes), method.arguments, list(block.results))

    def express(_: int, node: Node) -> str:
        return expression(node, lambda arg: operand_text(arg, names), site_text(node))

    kinds = {note(arg).kind for node in block.nodes for arg in node.all_input_nodes}
    writer.add(1, f"def {method.name}({', '.join(['self', *method.arguments.values()])}):")
    writer.add(2, f'"""Computed on stages {numbers_text(block.stages)}: cheaper than sent."""')
    writer.bind(bound_axes(block.nodes) | {"w": "self.weights"})
    if "buffer" in kinds:
        writer.bind({"b": "self.buffers"})
    write_body(writer, block.nodes, names, mesh, express, is_shared=True)
    writer.add(2, f"return {', '.join(names[node] for node in block.results)}")
    writer.gap()


def write_method_call(
    writer: Writer, method: Method, stage: int, names: dict[Node, str], outside: Callable[[Node], str]
) -> None:
    """Write the call in the forward of a stage, which may not need all of the results."""
    results = []
    for node in method.block.results:
        # Another stage reads it: `mask, _ = self.make_mask_positions()`
        results.append(names[node] if _is_read(node, method.block, stage) else "_")
    writer.gap()
    writer.add(2, f"{', '.join(results)} = self.{method.name}({', '.join(map(outside, method.arguments))})")
    writer.gap()


def _is_read(node: Node, block: Block, stage: int) -> bool:
    """Tell whether a stage needs a result; the first stage may have to send it."""
    if stage == block.stages[0]:
        return True
    return any(stage in note(user).stages and user not in block.nodes for user in node.users)
