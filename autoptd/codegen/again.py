"""Write the recipe of a method, which recomputes in backward the values that the method does not keep.

In: the operators of a method, marked by `passes/kept/keep.py` as `keep.again` (recomputed) or `keep.dropped`
(not kept). Out: the calls around values in the method, and a second method with the recomputed operators:

    gelu = self.dropped(F.gelu(self.kept(c_fc)))

    def layer_again(self, c_fc):
        gelu = F.gelu(c_fc)
        return (gelu,)

Its arguments are the arguments of the method that it needs, under the same names, then the values kept for
it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from torch.fx import Node

from autoptd.codegen.body import conversion_work, write_body
from autoptd.codegen.expressions import bound_axes
from autoptd.codegen.names import choose_names
from autoptd.codegen.writer import Writer, check_source
from autoptd.ir import markers
from autoptd.ir.mesh import Mesh
from autoptd.ir.names import RESERVED
from autoptd.ir.notes import note, op_name
from autoptd.ir.operators.table import operator_of
from autoptd.ir.quantities import microseconds_text

Listed = TypeVar("Listed")
# (names of values in the recipe) -> how to express operator i of the method in it.
Express = Callable[[dict[Node, str]], Callable[[int, Node], str]]


@dataclass(frozen=True)
class Recipe:
    """The operators of the method `name` and the subset that is recomputed."""

    name: str
    body: tuple[Node, ...]

    @cached_property
    def operators(self) -> list[Node]:
        """The operators that the recipe recomputes to obtain its results."""
        needed = set(self.dropped)
        for node in reversed(self.body):
            if node in needed and note(node).keep.again is not None:
                needed.update(node.all_input_nodes)
        return [node for node in self.body if node in needed and note(node).keep.again is not None]

    @property
    def dropped(self) -> list[Node]:
        """The results of the recipe, in the order in which the method drops them."""
        return [node for node in self.body if note(node).keep.dropped]

    @cached_property
    def kept(self) -> list[Node]:
        """The values of other operators of the method that the recipe reads."""
        read = {arg for node in self.operators for arg in node.all_input_nodes}
        return [node for node in self.body if node in read and note(node).keep.again is None]

    def wrapped(self, node: Node, text: str) -> str:
        """Return the expression of a value of the method, wrapped if it is kept or dropped."""
        if note(node).keep.dropped:
            return f"self.dropped({text})"
        return f"self.kept({text})" if node in self.kept else text

    def call(self, passed: Sequence[str]) -> str:
        """Return the call of the method."""
        return f"self.again({', '.join([f'self.{self.name}', f'self.{self.name}_again', *passed])})"


def recipe_of(name: str, body: Sequence[Node]) -> Recipe | None:
    """Return the recipe of a method; None if it keeps everything.

    A sum in the memory of an argument is kept: the recipe would read the sum instead of the argument.
    """
    again = {node for node in body if note(node).keep.again is not None}
    for node in body:
        if node in again and note(node).is_owned and not again.issuperset(summed_in_place(node)):
            note(node).keep = replace(note(node).keep, again=None, dropped="")
    recipe = Recipe(name, tuple(body))
    return recipe if recipe.dropped else None


def summed_in_place(node: Node) -> Iterator[Node]:
    """Yield the operators that produced the memory in which `node` sums: the allocating one, and views."""
    if note(node).conversion == "p_to_i":
        at = node.args[0]
        while isinstance(at, Node) and at.op == "call_function":
            yield at
            if operator_of(at).is_fresh:
                return
            at = at.args[0]


def call_text(name: str, recipe: Recipe | None, passed: Sequence[str]) -> str:
    """Return the call of a method, through its recipe where it has one."""
    return recipe.call(passed) if recipe is not None else f"self.{name}({', '.join(passed)})"


def write_recipe(
    writer: Writer,
    recipe: Recipe,
    mesh: Mesh,
    arguments: Sequence[str],
    given: dict[Node, str],
    names: dict[Node, str],
    express: Express,
    layers: dict[str, str] | None = None,
    lists: Mapping[str, Sequence[str]] | None = None,
    bound: Mapping[str, str] | None = None,
) -> None:
    """Write the recipe after its method.

    `arguments` are the method's; `given` are the values among them; `names` has the names of all values in
    the method; `lists` and `bound` are the variables defined at its start.
    """
    taken = {*arguments, *RESERVED}
    kept: dict[Node, str] = {}
    for node in recipe.kept:
        kept[node] = _free(names[node], taken | {*kept.values()})
    known = given | kept
    computed, same = _computing(recipe.operators, known)
    # A value read through an idle conversion has no reader here, so keep its name from being reused.
    held = dict.fromkeys(same.values(), len(computed))
    reserved = (taken | {*(lists or ())}) - {*known.values()}
    own = choose_names(computed, known, recipe.dropped, held=held, reserved=reserved)
    own |= {node: own[source] for node, source in same.items()}
    position = {node: i for i, node in enumerate(recipe.body)}
    expression = express(own)
    masks = {node: mask for node in computed if (mask := learned_mask(node)) is not None}
    names_of_masks = {mask: f"rt.as_in_forward({({**known, **own})[mask]})" for mask in masks.values()}
    of_attention = express(own | names_of_masks)

    def text(i: int, node: Node) -> str:
        return (of_attention if node in masks else expression)(position[node], node)

    body = Writer()
    write_body(body, computed, own, mesh, text, layers)
    results = ", ".join(own[node] for node in recipe.dropped)
    body.add(2, f"return ({results},)" if len(recipe.dropped) == 1 else f"return {results}")
    read = names_in(body)
    needed = [name for name in arguments if name in read]
    writer.add(1, f"def {recipe.name}_again({', '.join(['self', *needed, *kept.values()])}):")
    seconds = microseconds_text(sum(note(node).keep.again for node in recipe.operators))
    writer.docstring(f"Recompute for backward what `{recipe.name}` dropped: {seconds}.")
    axes = bound_axes(computed)
    writer.bind(axes | _needed(bound or {}, read))
    for name, values in _needed(lists or {}, read).items():
        writer.add_list(name, values)
    writer.gap()
    writer.extend(body)
    writer.gap()


def learned_mask(node: Node) -> Node | None:
    """Return the mask of an attention if it has a gradient: a recipe could then choose another kernel."""
    is_attention = op_name(node) == "aten.scaled_dot_product_attention"
    mask = node.args[3] if is_attention and len(node.args) > 3 else None
    return mask if isinstance(mask, Node) and note(mask).needs_grad else None


def _computing(operators: Sequence[Node], known: Mapping[Node, str]) -> tuple[list[Node], dict[Node, Node]]:
    """Split operators into computing ones, and conversions idle in forward, mapped to their operands."""
    computing: list[Node] = []
    same: dict[Node, Node] = {}
    for node in operators:
        source = node.args[0] if node.target is markers.convert else None
        is_idle = source is not None and conversion_work(node)[0] == "none" and not note(node).keep.dropped
        if is_idle and (source in known or source in same or source in computing):
            same[node] = same.get(source, source)  # type: ignore[arg-type]
        else:
            computing.append(node)
    return computing, same


def names_in(body: Writer) -> set[str]:
    """Return the variables used in the body of a method."""
    source = "\n".join(["def body():", *body.lines])
    check_source("recipe", source)
    return {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}


def _needed(values: Mapping[str, Listed], read: Collection[str]) -> dict[str, Listed]:
    """Select the variables that are read."""
    return {name: what for name, what in values.items() if name in read}


def _free(wanted: str, taken: Collection[str]) -> str:
    name, count = wanted, 1
    while name in taken:
        count += 1
        name = f"{wanted}_{count}"
    return name
