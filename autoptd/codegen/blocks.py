"""Write operators that several stages compute, rather than send, as one method that each of them calls.

In: a `Block` and the names of the surrounding values. Out: lines such as

    def make_mask(self):
        position_ids = torch.arange(8, dtype=torch.int64, device=self.device)  # [8]
        ...
        return mask

    mask = self.make_mask()
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch.fx import Node

from autoptd.codegen.again import Recipe, call_text, recipe_of, write_recipe
from autoptd.codegen.body import write_body
from autoptd.codegen.comments import numbers_text, site_text
from autoptd.codegen.expressions import bound_axes, expression
from autoptd.codegen.names import choose_names, operand_text
from autoptd.codegen.parts import Block
from autoptd.codegen.writer import Writer
from autoptd.ir.mesh import Mesh
from autoptd.ir.names import free_method, free_name, layer_of
from autoptd.ir.notes import note

# A method with at most this many results is named after them.
MAX_NAMED_RESULTS = 2


@dataclass(frozen=True)
class Method:
    """The method of a block: its name and the names of its arguments."""

    block: Block
    name: str
    arguments: dict[Node, str]

    @property
    def recipe(self) -> Recipe | None:
        return recipe_of(self.name, self.block.nodes)


def make_method(block: Block, outside: Callable[[Node], str], taken: Collection[str]) -> Method:
    """Name the method; `outside` gives the names of values in the first stage that calls it."""
    base = _base_name(block)
    name, number = base, 1
    while name in taken:
        number += 1
        name = f"{base}_{number}"
    arguments = {node: free_name(outside(node)) for node in block.read}
    return Method(block, name, arguments)


def _base_name(block: Block) -> str:
    if len(block.stages) == 1:
        # "transformer.h.3" -> "h_3"
        layer = layer_of(note(block.nodes[0]).module)
        return free_method("_".join(re.findall(r"\w+", layer)[-2:]))
    results = list(block.result_names.values())
    # `make_mask`, `make_cos_sin`; a longer list of results says nothing.
    what = "_".join(results) if len(results) <= MAX_NAMED_RESULTS else "shared"
    return free_method(f"make_{what}")


def write_method(writer: Writer, method: Method, mesh: Mesh) -> None:
    """Write the method, which computes the operators of the block and returns their results, and its recipe."""
    block, recipe, arguments = method.block, method.recipe, method.arguments
    names = choose_names(list(block.nodes), arguments, list(block.results))

    def express_in(names: dict[Node, str]) -> Callable[[int, Node], str]:
        return lambda _, node: expression(node, lambda arg: operand_text(arg, names), site_text(node))

    kinds = {note(arg).kind for node in block.nodes for arg in node.all_input_nodes}
    bound = {"w": "self.weights"} | ({"b": "self.buffers"} if "buffer" in kinds else {})
    writer.add(1, f"def {method.name}({', '.join(['self', *arguments.values()])}):")
    writer.docstring(_about(block))
    writer.bind(bound_axes(block.nodes) | bound)
    is_shared = len(block.stages) > 1
    write_body(writer, block.nodes, names, mesh, express_in(names), is_shared=is_shared, kept=recipe)
    writer.add(2, f"return {', '.join(names[node] for node in block.results)}")
    writer.gap()
    if recipe is not None:
        passed = list(arguments.values())
        write_recipe(writer, recipe, mesh, passed, arguments, names, express_in, bound=bound)


def _about(block: Block) -> str:
    if len(block.stages) > 1:
        return f"Computed on stages {numbers_text(block.stages)}: cheaper than sent."
    return f"This stage's part of {layer_of(note(block.nodes[0]).module)}."


def write_method_call(
    writer: Writer, method: Method, stage: int, names: dict[Node, str], outside: Callable[[Node], str]
) -> None:
    """Write the call in the forward of a stage, which may not need all of the results."""
    results = []
    for node in method.block.results:
        # Another stage reads it: `mask, _ = self.make_mask_positions()`
        results.append(names[node] if _is_read(node, method.block, stage) else "_")
    writer.gap()
    passed = [outside(node) for node in method.arguments]
    writer.add(2, f"{', '.join(results)} = {call_text(method.name, method.recipe, passed)}")
    writer.gap()


def _is_read(node: Node, block: Block, stage: int) -> bool:
    """Tell whether a stage needs a result; the first stage may have to send it."""
    if stage == block.stages[0]:
        return True
    return any(stage in note(user).stages and user not in block.nodes for user in node.users)
