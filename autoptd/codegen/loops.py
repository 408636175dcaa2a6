"""Write a repeated layer once, as a method, and the loop that calls it.

In: a `Repeat` and the names of the values around it. Out: lines such as

    def layer(self, i, w, x, mask):
        ...
        x = rt.dropout(x, 0.1, self.draw(site=3 * i + 1))

    for i in range(0, 12):  # h.0 to h.11
        x = self.layer(i, w.h[i], x, (local_mask, full_mask)[i % 2])
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from autoptd.codegen.body import write_body
from autoptd.codegen.names import choose_names
from autoptd.codegen.repeats import Repeat, Weights, spelled
from autoptd.codegen.writer import WIDTH, Writer, weight_text
from autoptd.ir.names import RESERVED
from autoptd.ir.notes import note

LONGEST = 60  # letters of a list of values that stands within a line


@dataclass
class Layer:
    """The method of a repeat: its name, its arguments, and what the loop passes for them."""

    repeat: Repeat
    name: str
    weights: dict[Weights, str]  # what a layer calls its own parameters and buffers
    carried: dict[int, str]  # index in a period -> argument
    outer: dict[tuple[Node, ...], str]  # values that are not a layer's own -> argument
    lists: dict[tuple[Node, ...], str] = field(default_factory=dict)  # long lists -> their variable in forward

    @property
    def takes_i(self) -> bool:
        return bool(self.repeat.numbers)

    @property
    def arguments(self) -> list[str]:
        first = ["i"] if self.takes_i else []
        return [*first, *self.weights.values(), *self.carried.values(), *self.outer.values()]


def make_layer(repeat: Repeat, outside: Callable[[Node], str], taken: Collection[str]) -> Layer:
    """Name the method and its arguments; `outside` is what values are called in forward."""
    name, number = "layer", 1
    while name in taken:
        number += 1
        name = f"layer_{number}"
    weights: dict[Weights, str] = {}
    for kind, letter in (("param", "w"), ("buffer", "b")):
        same = [one for one in repeat.weights if one.kind == kind]
        weights |= {one: letter if len(same) == 1 else f"{letter}{k}" for k, one in enumerate(same)}
    carried = {j: f"x_{k}" if k else "x" for k, (j, _) in enumerate(repeat.carried)}
    operands = [one for slots in repeat.at.operands for one in slots if one.kind == "outer"]
    given = dict.fromkeys(one.nodes for one in operands if repeat.own(one.nodes) is None)
    outer: dict[tuple[Node, ...], str] = {}
    for nodes in sorted(given, key=lambda nodes: note(nodes[0]).kind in ("param", "buffer")):
        wanted = note(nodes[0]).name if note(nodes[0]).kind in ("param", "buffer") else outside(nodes[0])
        if len(set(nodes)) > 1:
            wanted = _role(repeat, nodes) or wanted
        outer[nodes] = _free(wanted, {*weights.values(), *carried.values(), *outer.values()})
    return Layer(repeat, name, weights, carried, outer)


def _role(repeat: Repeat, nodes: tuple[Node, ...]) -> str:
    """What an operator calls the operand that is another value in every period: `attn_mask`."""
    for node, slots in zip(repeat.operators, repeat.at.operands, strict=True):
        schema = getattr(node.target, "_schema", None)
        for arg, operand in zip(node.all_input_nodes, slots, strict=True):
            if operand.nodes == nodes and schema is not None:
                return next(
                    (one.name for one, given in zip(schema.arguments, node.args, strict=False) if given is arg), ""
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
    """The method: the operators of one period."""
    repeat, operators = layer.repeat, layer.repeat.operators
    at, steps = repeat.at, repeat.steps
    finals = [operators[j] for j in layer.carried]
    before = {repeat.at.start + j: name for j, name in layer.carried.items()}
    given = {arg: before[k] for arg, k in _carried_nodes(repeat) if k in before}
    reserved = {*layer.weights.values(), *layer.outer.values()}
    names = choose_names(list(operators), given, finals, reserved=reserved)
    lists: dict[str, list[str]] = {}

    def spell(j: int, node: Node, site: str) -> str:
        texts = {}
        for arg, operand in zip(node.all_input_nodes, at.operands[j], strict=True):
            own = repeat.own(operand.nodes) if operand.kind == "outer" and operand.nodes not in layer.outer else None
            if operand.kind == "inner":
                texts[arg] = names[operators[operand.index]]
            elif operand.kind == "carried":
                texts[arg] = layer.carried[operand.index]
            else:
                texts[arg] = weight_text(layer.weights[own[0]], own[1]) if own else layer.outer[operand.nodes]
        numbers = {}
        for (where, path), values in repeat.numbers.items():
            if where == j:
                text = steps.spell(values)
                if len(text) > LONGEST:
                    name = _free(str(path[-1]), {*layer.arguments, *names.values(), *lists})
                    lists[name] = [repr(one) for one in values]
                    text = f"{name}[{steps.count}]"
                numbers[path] = text
        return spelled(node, numbers, texts.__getitem__, site)

    body = Writer()
    write_body(body, operators, names, t, spell, _layers(layer))
    writer.add(1, f"def {layer.name}(self, {', '.join(layer.arguments)}):")
    writer.add(2, f'"""{_about(layer)}"""')
    writer.add(2, "tp = self.tp")
    for name, values in lists.items():
        _write_list(writer, name, values)
    writer.gap()
    writer.extend(body)
    writer.add(2, f"return {', '.join(names[node] for node in finals)}")
    writer.gap()


def _carried_nodes(repeat: Repeat) -> list[tuple[Node, int]]:
    """(value, index in the stage) of what the second period, which is written, reads of the first."""
    found = []
    for node, slots in zip(repeat.operators, repeat.at.operands, strict=True):
        for arg, operand in zip(node.all_input_nodes, slots, strict=True):
            if operand.kind == "carried":
                found.append((arg, repeat.at.start + operand.index))
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


def write_loop(writer: Writer, layer: Layer, names: dict[Node, str], outside: Callable[[Node], str]) -> None:
    """The loop in forward."""
    repeat, steps, count = layer.repeat, layer.repeat.steps, layer.repeat.at.count
    writer.gap()
    moved = [
        (names[final], outside(initial))
        for final, (_, initial) in zip(repeat.finals, repeat.carried, strict=True)
        if names[final] != outside(initial)
    ]
    if moved:
        writer.add(2, f"{', '.join(one for one, _ in moved)} = {', '.join(other for _, other in moved)}")
    passed = ["i"] if layer.takes_i else []
    for one, name in layer.weights.items():
        number = steps.spell([one.first + k * one.step for k in range(count)])
        passed.append(weight_text(name[0], one.prefix) + f"[{number}]" if one.prefix else f"{name[0]}[{number}]")
    results = ", ".join(names[node] for node in repeat.finals)
    passed += [names[node] for node in repeat.finals]
    for nodes, name in layer.outer.items():
        texts = [outside(node) for node in nodes]
        text = texts[0] if len(set(texts)) == 1 else steps.choose(texts)
        if len(text) > LONGEST and len(set(texts)) > 1:
            listed = _free(f"{name}_of", {*names.values(), *layer.lists.values()})
            layer.lists[nodes] = listed
            _write_list(writer, listed, texts)
            text = f"{listed}[{steps.count}]"
        passed.append(text)
    last = steps.first + steps.step * count
    bounds = f"{steps.first}, {last}" + (f", {steps.step}" if steps.step != 1 else "")
    paths = list(layer.weights)
    comment = f"{paths[0].path(0)} to {paths[-1].path(count - 1)}" if paths and paths[0].step else ""
    counter = "i" if any(re.search(r"\bi\b", one) for one in passed) else "_"
    writer.add(2, f"for {counter} in range({bounds}):", comment)
    writer.add(3, f"{results} = self.{layer.name}({', '.join(passed)})")
    writer.gap()


def _write_list(writer: Writer, name: str, values: Sequence[str]) -> None:
    """A list of one value per layer, wrapped."""
    writer.add(2, f"{name} = (")
    for line in textwrap.wrap(", ".join(values) + ",", WIDTH - 12, break_long_words=False, break_on_hyphens=False):
        writer.add(3, line)
    writer.add(2, ")")
