"""Write a repeated layer once, as a method, and the loop that calls it.

In: a `Repeat`, its `Run`s, and the names of the values around them. Out: lines such as

    def layer(self, i, w, x, mask):
        ...
        x = rt.dropout(x, 0.1, self.draw(site=3 * i + 1))

    for i in range(0, 12):  # h.0 to h.11
        x = self.layer(i, w.h[i], x, (local_mask, full_mask)[i % 2])
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch.fx import Node

from autoptd.codegen.body import write_body
from autoptd.codegen.comments import site_text
from autoptd.codegen.expressions import bound_axes
from autoptd.codegen.names import assigned_name, choose_names
from autoptd.codegen.repeats import Path, Repeat, Weights, spelled
from autoptd.codegen.runs import Run
from autoptd.codegen.writer import WIDTH, Writer, weight_text
from autoptd.ir.names import RESERVED
from autoptd.ir.notes import note

LONGEST = 60  # letters of a list of values that stands within a line


@dataclass(frozen=True)
class Layer:
    """The method of a repeat: its name, and those of its arguments."""

    repeat: Repeat
    name: str
    weights: dict[Weights, str]  # what a layer calls its own parameters and buffers
    carried: dict[int, str]  # index in a round -> argument
    outer: dict[tuple[Node, ...], str]  # values that are not a layer's own -> argument

    @property
    def takes_i(self) -> bool:
        return bool(self.repeat.numbers)

    @property
    def arguments(self) -> list[str]:
        first = ["i"] if self.takes_i else []
        return [*first, *self.weights.values(), *self.carried.values(), *self.outer.values()]


def make_layer(run: Run, outside: Callable[[Node], str], taken: Collection[str]) -> Layer:
    """Name the method and its arguments; `outside` is what values are called where `run` is, its first call."""
    repeat = run.repeat
    weights: dict[Weights, str] = {}
    for kind, letter in (("param", "w"), ("buffer", "b")):
        same = [one for one in repeat.weights if one.kind == kind]
        weights |= {one: letter if len(same) == 1 else f"{letter}{k}" for k, one in enumerate(same)}
    carried: dict[int, str] = {}
    for j in repeat.carried:
        carried[j] = _free(carried_name(repeat, j), {*weights.values(), *carried.values()})
    operands = [one for slots in repeat.at.operands for one in slots if one.kind == "outer"]
    given = dict.fromkeys(one.nodes for one in operands if repeat.own(one.nodes) is None)
    outer: dict[tuple[Node, ...], str] = {}
    for nodes in sorted(given, key=lambda nodes: note(nodes[0]).kind in ("param", "buffer")):
        here = nodes[run.first]
        wanted = note(here).name if note(here).kind in ("param", "buffer") else outside(here)
        if len(set(nodes)) > 1:
            wanted = _role(repeat, nodes) or wanted
        outer[nodes] = _free(wanted, {*weights.values(), *carried.values(), *outer.values()})
    return Layer(repeat, _method_name(taken), weights, carried, outer)


def _method_name(taken: Collection[str]) -> str:
    name, number = "layer", 1
    while name in taken:
        number += 1
        name = f"layer_{number}"
    return name


def carried_name(repeat: Repeat, j: int) -> str:
    """What the model's own code calls the value that goes from round to round: `hidden_states`."""
    return assigned_name(list(repeat.operators), j) or "x"


def _role(repeat: Repeat, nodes: tuple[Node, ...]) -> str:
    """What an operator calls the operand that is another value in every period: `attn_mask`."""
    for node, slots in zip(repeat.operators, repeat.at.operands, strict=True):
        schema = getattr(node.target, "_schema", None)
        for arg, operand in zip(node.all_input_nodes, slots, strict=True):
            if operand.nodes == nodes and schema is not None:
                return next(
                    (
                        one.name
                        for one, given in zip(schema.arguments, node.args, strict=False)
                        if given is arg
                    ),
                    "",
                )
    return ""


def _free(wanted: str, taken: Collection[str]) -> str:
    name = re.sub(r"\W", "_", wanted)
    name = name if name.isidentifier() else f"p_{name}"
    base, count = name, 1
    while name in taken or name in RESERVED:
        count += 1
        name = f"{base}_{count}"
    return name


def write_layer(writer: Writer, layer: Layer, t: int) -> None:
    """The method: the operators of one round."""
    repeat, operators = layer.repeat, layer.repeat.operators
    at = repeat.at
    carried = {arg: layer.carried[j] for arg, j in _carried_nodes(repeat)}
    # In the round that is written, one value may be two arguments: then their names are kept for them.
    often = Counter(nodes[1] for nodes in layer.outer)
    once = {
        nodes[1]: name
        for nodes, name in layer.outer.items()
        if often[nodes[1]] == 1 and nodes[1] not in carried
    }
    given = carried | once
    reserved = {*layer.weights.values(), *layer.outer.values()} - {*once.values()}
    names = choose_names(list(operators), given, repeat.leaving(1), reserved=reserved)
    numbers = _Numbers(layer, names.values())

    paths = {one.path(1): name for one, name in layer.weights.items() if one.step}

    def spell(j: int, node: Node) -> str:
        texts = {}
        for arg, operand in zip(node.all_input_nodes, at.operands[j], strict=True):
            own = (
                repeat.own(operand.nodes)
                if operand.kind == "outer" and operand.nodes not in layer.outer
                else None
            )
            if operand.kind == "inner":
                texts[arg] = names[operators[operand.index]]
            elif operand.kind == "carried":
                texts[arg] = layer.carried[operand.index]
            else:
                texts[arg] = weight_text(layer.weights[own[0]], own[1]) if own else layer.outer[operand.nodes]
        return spelled(node, numbers.texts(j), texts.__getitem__, site_text(node, paths))

    body = Writer()
    write_body(body, operators, names, t, spell, _layers(layer))
    writer.add(1, f"def {layer.name}(self, {', '.join(layer.arguments)}):")
    writer.add(2, f'"""{_about(layer)}"""')
    writer.bind(bound_axes(operators))
    for name, values in numbers.lists.items():
        _write_list(writer, name, values)
    writer.gap()
    writer.extend(body)
    writer.add(2, f"return {', '.join(names[node] for node in repeat.leaving(1))}")
    writer.gap()


class _Numbers:
    """How the numbers that differ from layer to layer are written; long lists of them have a variable, in `lists`."""

    def __init__(self, layer: Layer, names: Collection[str]) -> None:
        self.repeat, self.taken = layer.repeat, {*layer.arguments, *names}
        self.lists: dict[str, list[str]] = {}

    def texts(self, j: int) -> dict[Path, str]:
        """Those of operator j, by where they stand among its arguments."""
        found = {}
        for (where, path), values in self.repeat.numbers.items():
            if where != j:
                continue
            found[path] = self.repeat.steps.spell(values)
            if len(found[path]) > LONGEST:
                name = _free(str(path[-1]), {*self.taken, *self.lists})
                self.lists[name] = [repr(number) for number in values]
                found[path] = f"{name}[{self.repeat.steps.count}]"
        return found


def _carried_nodes(repeat: Repeat) -> list[tuple[Node, int]]:
    """(value, index in a round) of what the second round, which is written, reads of the first."""
    found = []
    for node, slots in zip(repeat.operators, repeat.at.operands, strict=True):
        for arg, operand in zip(node.all_input_nodes, slots, strict=True):
            if operand.kind == "carried":
                found.append((arg, operand.index))
    return found


def _layers(layer: Layer) -> dict[str, str]:
    """Paths of the modules in the period that is written, and how comments show them: "" where there is one."""
    paths = dict.fromkeys(one.path(1) for one in layer.weights)
    if len(paths) == 1:
        return dict.fromkeys(paths, "")
    shown = {}
    for one in layer.weights:
        numbers = [one.first + k * one.step for k in range(layer.repeat.at.count)]
        shown[one.path(1)] = f"{one.prefix.split('.')[-1]}[{layer.repeat.steps.spell(numbers)}]"
    return shown


def _about(layer: Layer) -> str:
    count = layer.repeat.at.count
    paths = {one.path(0): one.path(count - 1) for one in layer.weights}
    called = " and ".join(f"`{name}`" for name in layer.weights.values())
    if not paths:
        return f"One of {count} equal rounds."
    if len(paths) == 1 and paths.keys() == set(paths.values()):
        return f"One of {count} uses of {next(iter(paths))}: {called} holds its parameters."
    if len(paths) == 1:
        return f"One of {next(iter(paths))} to {next(iter(paths.values()))}: {called} holds its parameters."
    first, names = list(paths), list(layer.weights.values())
    return f"One of {count} rounds: `{names[0]}` to `{names[-1]}` hold the parameters of {first[0]} to {first[-1]}, and so on."


def write_run(
    writer: Writer, layer: Layer, run: Run, names: dict[Node, str], outside: Callable[[Node], str]
) -> None:
    """The calls of a layer in forward: a loop, or one call."""
    writer.gap()
    if run.count == 1:
        _write_call(writer, layer, run, names, outside)
    else:
        _write_loop(writer, layer, run, names, outside)
    writer.gap()


def _write_call(
    writer: Writer, layer: Layer, run: Run, names: dict[Node, str], outside: Callable[[Node], str]
) -> None:
    passed = [str(run.steps.first)] if layer.takes_i else []
    passed += [
        _weights_at(weights, name, weights.first + run.first * weights.step)
        for weights, name in layer.weights.items()
    ]
    passed += [outside(node) for node in run.initials]
    passed += [outside(nodes[run.first]) for nodes in layer.outer]
    if paths := [weights.path(run.first) for weights in layer.weights]:
        writer.add(2, f"# {' and '.join(dict.fromkeys([paths[0], paths[-1]]))}")
    writer.add(2, f"{', '.join(names[node] for node in run.finals)} = self.{layer.name}({', '.join(passed)})")


def _write_loop(
    writer: Writer, layer: Layer, run: Run, names: dict[Node, str], outside: Callable[[Node], str]
) -> None:
    steps, count = run.steps, run.count
    results = [names[node] for node in run.finals]
    moved = [
        (name, outside(node))
        for name, node in zip(results, run.initials, strict=True)
        if name != outside(node)
    ]
    if moved:
        writer.add(2, f"{', '.join(name for name, _ in moved)} = {', '.join(source for _, source in moved)}")
    passed = ["i"] if layer.takes_i else []
    for weights, name in layer.weights.items():
        number = steps.spell([weights.first + k * weights.step for k in run.rounds])
        passed.append(_weights_at(weights, name, number))
    passed += results
    lists: set[str] = set()
    for nodes, name in layer.outer.items():
        texts = [outside(node) for node in run.outer(nodes)]
        text = texts[0] if len(set(texts)) == 1 else steps.choose(texts)
        if len(text) > LONGEST and len(set(texts)) > 1:
            listed = _free(f"{name}_of", {*names.values(), *lists})
            lists.add(listed)
            _write_list(writer, listed, texts)
            text = f"{listed}[{steps.count}]"
        passed.append(text)
    last = steps.first + steps.step * count
    bounds = f"{steps.first}, {last}" + (f", {steps.step}" if steps.step != 1 else "")
    every = list(layer.weights)
    comment = (
        f"{every[0].path(run.first)} to {every[-1].path(run.stop - 1)}" if every and every[0].step else ""
    )
    counter = "i" if any(re.search(r"\bi\b", text) for text in passed) else "_"
    writer.add(2, f"for {counter} in range({bounds}):", comment)
    writer.add(3, f"{', '.join(results)} = self.{layer.name}({', '.join(passed)})")


def _weights_at(weights: Weights, name: str, number: int | str) -> str:
    """`w.transformer.h[3]`; `name` is what the layer calls them, `w` or `w0`, `b` or `b1`."""
    return f"{weight_text(name[0], weights.prefix)}[{number}]"


def _write_list(writer: Writer, name: str, values: Sequence[str]) -> None:
    """A list of one value per layer, wrapped."""
    writer.add(2, f"{name} = (")
    for line in textwrap.wrap(
        ", ".join(values) + ",", WIDTH - 12, break_long_words=False, break_on_hyphens=False
    ):
        writer.add(3, line)
    writer.add(2, ")")
