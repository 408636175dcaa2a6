"""Write operators that are written once and called, as methods: repeated layers, and operators that several stages compute.

In: a `Repeat` and its `Run`s, or a `Block`, and the names of the surrounding values. Out: lines such as

    def layer(self, i, w, x, mask):
        ...
        x = rt.dropout(x, 0.1, self.draw(site=3 * i + 1))

    mask = self.make_mask()                 # a block: cheaper to compute than to send
    for i in range(12):  # h.0 to h.11
        x = self.layer(i, w.h[i], x, (local_mask, full_mask)[i % 2])
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from torch.fx import Node

from autoptd.codegen.again import Express, Recipe, call_text, recipe_of, write_recipe
from autoptd.codegen.body import numbers_text, site_text, write_body
from autoptd.codegen.expressions import bound_axes, expression
from autoptd.codegen.names import choose_names, operand_text
from autoptd.codegen.parts import Block
from autoptd.codegen.repeats import Path, Repeat, Run, Weights, carried_name, expression_with
from autoptd.codegen.writer import Writer, weight_text
from autoptd.ir.mesh import Mesh
from autoptd.ir.names import RESERVED, free_method, free_name, identifier, layer_of
from autoptd.ir.notes import note

# A list of values with more characters becomes a variable.
MAX_INLINE_CHARS = 60
# A method with at most this many results is named after them.
MAX_NAMED_RESULTS = 2


@dataclass(frozen=True)
class Layer:
    """The method of a repeat: its name and the names of its arguments.

    `weights` are the parameters and buffers of a layer, `carried` the values passed from round to round (by
    index in a round), `outer` all other values (one node per round).
    """

    repeat: Repeat
    name: str
    weights: dict[Weights, str]
    carried: dict[int, str]
    outer: dict[tuple[Node, ...], str]

    @property
    def takes_i(self) -> bool:
        return bool(self.repeat.numbers)

    @property
    def recipe(self) -> Recipe | None:
        return recipe_of(self.name, self.repeat.operators)

    @property
    def arguments(self) -> list[str]:
        first = ["i"] if self.takes_i else []
        return [*first, *self.weights.values(), *self.carried.values(), *self.outer.values()]


@dataclass(frozen=True)
class Method:
    """The method of a block: its name and the names of its arguments."""

    block: Block
    name: str
    arguments: dict[Node, str]

    @property
    def recipe(self) -> Recipe | None:
        return recipe_of(self.name, self.block.nodes)


def make_layer(run: Run, outside: Callable[[Node], str], taken: Collection[str]) -> Layer:
    """Name the method and its arguments; `outside` gives the names of values at `run`, its first call."""
    repeat = run.repeat
    weights = _weight_names(repeat)
    carried: dict[int, str] = {}
    for j in repeat.carried:
        carried[j] = _free(carried_name(repeat, j), {*weights.values(), *carried.values()})
    outer: dict[tuple[Node, ...], str] = {}
    for nodes in outer_operands(repeat):
        here = nodes[run.first]
        wanted = note(here).name if note(here).kind in ("param", "buffer") else outside(here)
        # `attn_mask` if layers get different masks: the name of the first, `local_mask`, would be wrong for
        # others.
        if len(set(nodes)) > 1:
            wanted = _role(repeat, nodes) or wanted
        outer[nodes] = _free(wanted, {*weights.values(), *carried.values(), *outer.values()})
    return Layer(repeat, _method_name(taken), weights, carried, outer)


def make_method(block: Block, outside: Callable[[Node], str], taken: Collection[str]) -> Method:
    """Name the method; `outside` gives the names of values in the first stage that calls it."""
    base = _base_name(block)
    name, number = base, 1
    while name in taken:
        number += 1
        name = f"{base}_{number}"
    arguments = {node: free_name(outside(node)) for node in block.read}
    return Method(block, name, arguments)


def write_layer(writer: Writer, layer: Layer, mesh: Mesh) -> None:
    """Write the method with the operators of the second round (see `Repeat.operators`), and its recipe."""
    operators, recipe = layer.repeat.operators, layer.recipe
    names = _layer_names(layer)
    numbers = _Numbers(layer, names.values())
    body = Writer()
    express = _expressions(layer, numbers)(names)
    write_body(body, operators, names, mesh, express, _layers(layer), kept=recipe)
    writer.add(1, f"def {layer.name}(self, {', '.join(layer.arguments)}):")
    writer.docstring(_about_layer(layer))
    writer.bind(bound_axes(operators))
    for name, values in numbers.lists.items():
        writer.add_list(name, values)
    writer.gap()
    writer.extend(body)
    writer.add(2, f"return {', '.join(names[node] for node in layer.repeat.leaving(1))}")
    writer.gap()
    if recipe is not None:
        given = _given_names(layer)
        express_in = _expressions(layer, numbers)
        write_recipe(
            writer, recipe, mesh, layer.arguments, given, names, express_in, _layers(layer), numbers.lists
        )


def write_method(writer: Writer, method: Method, mesh: Mesh) -> None:
    """Write the method, which computes the operators of the block and returns their results, and its recipe."""
    block, recipe, arguments = method.block, method.recipe, method.arguments
    names = choose_names(list(block.nodes), arguments, list(block.results))

    def express_in(names: dict[Node, str]) -> Callable[[int, Node], str]:
        return lambda _, node: expression(node, lambda arg: operand_text(arg, names), site_text(node))

    kinds = {note(arg).kind for node in block.nodes for arg in node.all_input_nodes}
    bound = {"w": "self.weights"} | ({"b": "self.buffers"} if "buffer" in kinds else {})
    writer.add(1, f"def {method.name}({', '.join(['self', *arguments.values()])}):")
    writer.docstring(_about_block(block))
    writer.bind(bound_axes(block.nodes) | bound)
    is_shared = len(block.stages) > 1
    write_body(writer, block.nodes, names, mesh, express_in(names), is_shared=is_shared, kept=recipe)
    writer.add(2, f"return {', '.join(names[node] for node in block.results)}")
    writer.gap()
    if recipe is not None:
        passed = list(arguments.values())
        write_recipe(writer, recipe, mesh, passed, arguments, names, express_in, bound=bound)


def write_run(
    writer: Writer,
    layer: Layer,
    run: Run,
    names: dict[Node, str],
    outside: Callable[[Node], str],
    gathered: Mapping[str, str],
) -> None:
    """Write the calls of a layer in forward: a loop, or one call. `gathered` says of layers how their parameters arrive."""
    writer.gap()
    first = [weights.path(run.first) for weights in layer.weights if weights.kind == "param"]
    text = gathered.get(first[0], "") if first else ""
    if run.count == 1:
        _write_call(writer, layer, run, names, outside, text)
    else:
        _write_loop(writer, layer, run, names, outside, text)
    writer.gap()


def _write_call(
    writer: Writer,
    layer: Layer,
    run: Run,
    names: dict[Node, str],
    outside: Callable[[Node], str],
    gathered: str,
) -> None:
    # In the order of `Layer.arguments`.
    passed = [str(run.steps.first)] if layer.takes_i else []
    for weights, name in layer.weights.items():
        passed.append(_weights_at(weights, name, weights.first + run.first * weights.step))
    passed += [outside(node) for node in run.initials]
    passed += [outside(nodes[run.first]) for nodes in layer.outer]
    paths = [weights.path(run.first) for weights in layer.weights]
    if paths:
        # A round of several layers shows its first and its last.
        ends = dict.fromkeys([paths[0], paths[-1]])
        writer.comment(2, " and ".join(ends))
    if gathered:
        writer.comment(2, gathered)
    results = [names[node] for node in run.finals]
    writer.add(2, f"{', '.join(results)} = {call_text(layer.name, layer.recipe, passed)}")


def _write_loop(
    writer: Writer,
    layer: Layer,
    run: Run,
    names: dict[Node, str],
    outside: Callable[[Node], str],
    gathered: str,
) -> None:
    steps = run.steps
    results = [names[node] for node in run.finals]
    # The loop overwrites its results: before it, they must be the initial values.
    moved = {}
    for name, node in zip(results, run.initials, strict=True):
        if name != outside(node):
            moved[name] = outside(node)
    if moved:
        # In one statement, so that `a, b = b, a` is right.
        writer.add(2, f"{', '.join(moved)} = {', '.join(moved.values())}")
    passed = ["i"] if layer.takes_i else []
    for weights, name in layer.weights.items():
        number = steps.express([weights.first + k * weights.step for k in run.rounds])
        passed.append(_weights_at(weights, name, number))
    passed += results
    passed += _outer_texts(writer, layer, run, names, outside)
    # `i` is the number of the layer in the model, as in its weights' names: 6 to 8, or 1, 3, 5.
    stop = steps.first + steps.step * run.count
    bounds = f"{steps.first}, {stop}" if steps.first or steps.step != 1 else str(stop)
    if steps.step != 1:
        bounds += f", {steps.step}"
    modules = list(layer.weights)
    comment = ""
    if modules and modules[0].step:
        comment = f"{modules[0].path(run.first)} to {modules[-1].path(run.stop - 1)}"
    counter = "i" if any(re.search(r"\bi\b", text) for text in passed) else "_"
    writer.add(2, f"for {counter} in range({bounds}):", comment)
    if gathered:
        writer.comment(3, gathered)
    writer.add(3, f"{', '.join(results)} = {call_text(layer.name, layer.recipe, passed)}")


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


def _weight_names(repeat: Repeat) -> dict[Weights, str]:
    """Return `w` and `b` for a layer's parameters and buffers; `w0`, `w1` for several modules a round."""
    names: dict[Weights, str] = {}
    for kind, letter in (("param", "w"), ("buffer", "b")):
        same = [weights for weights in repeat.weights if weights.kind == kind]
        for k, weights in enumerate(same):
            names[weights] = letter if len(same) == 1 else f"{letter}{k}"
    return names


def outer_operands(repeat: Repeat) -> list[tuple[Node, ...]]:
    """Return the operands of a round that are neither its weights nor results of the previous round.

    Each is one node per round. Values come in order of first use, parameters and buffers last.
    """
    given: dict[tuple[Node, ...], None] = {}
    for slots in repeat.at.operands:
        for operand in slots:
            if operand.kind == "outer" and repeat.own(operand.nodes) is None:
                given[operand.nodes] = None
    return sorted(given, key=lambda nodes: note(nodes[0]).kind in ("param", "buffer"))


def _method_name(taken: Collection[str]) -> str:
    name, number = "layer", 1
    while name in taken:
        number += 1
        name = f"layer_{number}"
    return name


def _role(repeat: Repeat, nodes: tuple[Node, ...]) -> str:
    """Return an operator's name, or "", for the operand with the values `nodes`, one per period: `attn_mask`."""
    for node, slots in zip(repeat.operators, repeat.at.operands, strict=True):
        schema = getattr(node.target, "_schema", None)
        for arg, operand in zip(node.all_input_nodes, slots, strict=True):
            if operand.nodes == nodes and schema is not None:
                pairs = zip(schema.arguments, node.args, strict=False)
                return next((argument.name for argument, given in pairs if given is arg), "")
    return ""


def _free(wanted: str, taken: Collection[str]) -> str:
    name = identifier(wanted)
    base, count = name, 1
    while name in taken or name in RESERVED:
        count += 1
        name = f"{base}_{count}"
    return name


def _expressions(layer: Layer, numbers: _Numbers) -> Express:
    paths = {weights.path(1): name for weights, name in layer.weights.items() if weights.step}

    def with_names(names: dict[Node, str]) -> Callable[[int, Node], str]:
        def express(j: int, node: Node) -> str:
            texts = _operand_texts(layer, j, names)
            return expression_with(node, numbers.texts(j), texts.__getitem__, site_text(node, paths))

        return express

    return with_names


def _operand_texts(layer: Layer, j: int, names: dict[Node, str]) -> dict[Node, str]:
    """Return the operand texts of operator j of a round; `names` has the values of the written round."""
    operators, slots = layer.repeat.operators, layer.repeat.at.operands[j]
    texts = {}
    # By the kind of operand, not by the node: one node can be an outer value and a carried one.
    for arg, operand in zip(operators[j].all_input_nodes, slots, strict=True):
        if operand.kind == "inner":
            texts[arg] = names[operators[operand.index]]
        elif operand.kind == "carried":
            texts[arg] = layer.carried[operand.index]
        elif operand.nodes in layer.outer:
            texts[arg] = layer.outer[operand.nodes]
        else:
            own = layer.repeat.own(operand.nodes)
            assert own is not None, f"{arg} is not an argument of {layer.name}"
            weights, name = own
            texts[arg] = weight_text(layer.weights[weights], name)
    return texts


def _given_names(layer: Layer) -> dict[Node, str]:
    """Return the names of the values passed to a layer that are one argument each in the written round."""
    given = {arg: layer.carried[j] for arg, j in _carried_nodes(layer.repeat)}
    uses = Counter(nodes[1] for nodes in layer.outer)
    outer = {}
    for nodes, name in layer.outer.items():
        if uses[nodes[1]] == 1 and nodes[1] not in given:
            outer[nodes[1]] = name
    return given | outer


def _layer_names(layer: Layer) -> dict[Node, str]:
    """Choose the names of all values in the method of a layer."""
    repeat, given = layer.repeat, _given_names(layer)
    # A value that is two arguments in the written round has no single name, so reserve both names.
    reserved = {*layer.weights.values(), *layer.outer.values()} - {*given.values()}
    return choose_names(list(repeat.operators), given, repeat.leaving(1), reserved=reserved)


class _Numbers:
    """Express the numbers that differ from layer to layer; long lists become variables in `lists`."""

    def __init__(self, layer: Layer, names: Collection[str]) -> None:
        self.repeat, self.taken = layer.repeat, {*layer.arguments, *names}
        self.lists: dict[str, list[str]] = {}

    def texts(self, j: int) -> dict[Path, str]:
        """Return the expressions for operator j, by position among its arguments."""
        texts = {}
        for (operator, path), values in self.repeat.numbers.items():
            if operator != j:
                continue
            texts[path] = self.repeat.steps.express(values)
            if len(texts[path]) > MAX_INLINE_CHARS:
                name = _free(str(path[-1]), {*self.taken, *self.lists})
                self.lists[name] = [repr(number) for number in values]
                texts[path] = f"{name}[{self.repeat.steps.count}]"
        return texts


def _carried_nodes(repeat: Repeat) -> list[tuple[Node, int]]:
    """Return (value, index in a round) for the values that the second, written round reads from the first."""
    found = []
    for node, slots in zip(repeat.operators, repeat.at.operands, strict=True):
        for arg, operand in zip(node.all_input_nodes, slots, strict=True):
            if operand.kind == "carried":
                found.append((arg, operand.index))
    return found


def _layers(layer: Layer) -> dict[str, str]:
    """Map module paths in the written round to their names in comments: "" if there is only one module."""
    paths = dict.fromkeys(weights.path(1) for weights in layer.weights)
    # "h.1.attn" is shown as `attn`; with two modules per round, as `h[i].attn` and `h[i + 1].attn`.
    if len(paths) == 1:
        return dict.fromkeys(paths, "")
    shown = {}
    for weights in layer.weights:
        numbers = [weights.first + k * weights.step for k in range(layer.repeat.at.count)]
        shown[weights.path(1)] = f"{weights.prefix.split('.')[-1]}[{layer.repeat.steps.express(numbers)}]"
    return shown


def _about_layer(layer: Layer) -> str:
    """Return the docstring of the method."""
    count = layer.repeat.at.count
    paths = {weights.path(0): weights.path(count - 1) for weights in layer.weights}
    called = " and ".join(f"`{name}`" for name in layer.weights.values())
    if not paths:
        return f"One of {count} equal rounds."
    if len(paths) == 1 and paths.keys() == set(paths.values()):
        return f"One of {count} uses of {next(iter(paths))}: {called} holds its parameters."
    if len(paths) == 1:
        return f"One of {next(iter(paths))} to {next(iter(paths.values()))}: {called} holds its parameters."
    first, names = list(paths), list(layer.weights.values())
    return f"One of {count} rounds: `{names[0]}` to `{names[-1]}` hold the parameters of {first[0]} to {first[-1]}, and so on."


def _outer_texts(
    writer: Writer, layer: Layer, run: Run, names: dict[Node, str], outside: Callable[[Node], str]
) -> list[str]:
    """Return the loop's expressions for outer arguments; write the long lists among them before the loop."""
    passed: list[str] = []
    lists: set[str] = set()
    for nodes, name in layer.outer.items():
        texts = [outside(node) for node in run.outer(nodes)]
        is_one = len(set(texts)) == 1
        text = texts[0] if is_one else run.steps.choose(texts)
        if len(text) > MAX_INLINE_CHARS and not is_one:
            listed = _free(f"{name}_of", {*names.values(), *lists})
            lists.add(listed)
            writer.add_list(listed, texts)
            text = f"{listed}[{run.steps.count}]"
        passed.append(text)
    return passed


def _weights_at(weights: Weights, name: str, number: int | str) -> str:
    """Return `w.transformer.h[3]`; `name` is the layer's argument for it: `w` or `w0`, `b` or `b1`."""
    # Outside of the layer, `w` and `b` are all weights of the stage: `w0` is an item of its `w`.
    return f"{weight_text(name[0], weights.prefix)}[{number}]"


def _base_name(block: Block) -> str:
    if len(block.stages) == 1:
        # "transformer.h.3" -> "h_3"
        layer = layer_of(note(block.nodes[0]).module)
        return free_method("_".join(re.findall(r"\w+", layer)[-2:]))
    results = list(block.result_names.values())
    # `make_mask`, `make_cos_sin`; a longer list of results says nothing.
    what = "_".join(results) if len(results) <= MAX_NAMED_RESULTS else "shared"
    return free_method(f"make_{what}")


def _about_block(block: Block) -> str:
    if len(block.stages) > 1:
        return f"Computed on stages {numbers_text(block.stages)}: cheaper than sent."
    return f"This stage's part of {layer_of(note(block.nodes[0]).module)}."


def _is_read(node: Node, block: Block, stage: int) -> bool:
    """Tell whether a stage needs a result; the first stage may have to send it."""
    if stage == block.stages[0]:
        return True
    return any(stage in note(user).stages and user not in block.nodes for user in node.users)
