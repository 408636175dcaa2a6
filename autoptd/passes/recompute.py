"""Choose the values that backward computes again, from what the keyword `recompute` asks for.

In: a LOCAL graph, and what every operator saves. Out: a `Wish`: the storages that are dropped, and those that recipes read.

- *full*: of every layer, all but what the layer reads (Chen et al. 2016; Megatron's full recomputation); of "full:1/2" in the
  first half of each stage's layers: the last ones are kept, whose backward comes first.
- *selective*: the scores of attention and what is made of them, up to what multiplies the values (Korthikanti et al. 2022,
  section 5).
- globs: all that is saved of what these modules make.
- "auto": by value, at a price per byte (`by_value.py`).
- None: the modules that the model wraps in `torch.utils.checkpoint`, each in full.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from fractions import Fraction
from itertools import chain, product
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from autoptd.ir.names import is_within, layer_of
from autoptd.ir.notes import note, op_name, ops, value
from autoptd.ir.operators.table import is_listed, operator_of
from autoptd.ir.recompute import full_share
from autoptd.ir.saved import SavedForBackward, Storage
from autoptd.options import Options
from autoptd.passes.ops.costs import flops

SOFTMAX = ("aten.softmax", "masked_softmax")


class Wish(NamedTuple):
    """What is dropped, and what is kept because recipes begin with it."""

    dropped: set[Storage]
    kept: set[Storage]


def choose(graph: Graph, options: Options, checkpointed: Sequence[str], saved: SavedForBackward) -> Wish:
    """Return what `options.recompute` asks for; None, what the modules in `checkpointed` do."""
    asked, made = options.recompute, _saved_by_maker(saved)
    wish = Wish(set(), set())
    share = full_share(asked)
    if share is not None or asked is None:
        groups = (
            _within(graph, checkpointed)
            if share is None
            else groups_of_layers(graph, share, options.recompute_num_layers)
        )
        for layers in groups:
            _add_in_full(layers, saved, made, wish)
        wish.dropped.difference_update(wish.kept)
        return wish
    for nodes in by_stage(graph).values():
        chosen = _scores(nodes) if asked == "selective" else [node for node in nodes if _is_of(node, asked)]
        wish.dropped.update(*(made.get(node, ()) for node in chosen))
    return wish


def by_stage(graph: Graph) -> dict[int, list[Node]]:
    """Return the operators of every stage; without those that several stages compute, which are kept."""
    stages: dict[int, list[Node]] = {}
    for node in ops(graph):
        if len(note(node).stages) == 1 and value(node) is not None:
            stages.setdefault(note(node).stages[0], []).append(node)
    return stages


def operands_of(node: Node) -> list[Node]:
    """Return the operands that operators make."""
    return [arg for arg in node.all_input_nodes if arg.op == "call_function" and value(arg) is not None]


def is_repeatable(node: Node) -> bool:
    """Tell whether an operator gives the same once more; one that is not listed may have effects, and keeps its result."""
    if node.target is operator.getitem:
        return is_repeatable(node.args[0])  # type: ignore[arg-type]
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    # The masks of dropout are a marker's, and drawn by their place.
    is_known = node.target.namespace == "aten" or is_listed(node.target)
    return is_known and not operator_of(node).is_random


def _saved_by_maker(saved: SavedForBackward) -> dict[Node, set[Storage]]:
    """Return what is saved, by anyone, of what every operator makes; without what is an operator's own."""
    made: dict[Node, set[Storage]] = {}
    for storages in saved.of.values():
        for storage in storages:
            if not storage.is_private:
                made.setdefault(storage.node, set()).add(storage)
    return made


def _within(graph: Graph, modules: Sequence[str]) -> Iterator[list[Node]]:
    """Yield the operators of every module, on every stage."""
    for nodes in by_stage(graph).values():
        for module in modules:
            yield [node for node in nodes if is_within(note(node).module, module)]


def groups_of_layers(graph: Graph, share: Fraction, together: int) -> Iterator[list[Node]]:
    """Yield the operators of every layer that is computed again in full, or of several that share a kept input."""
    for nodes in by_stage(graph).values():
        layers: dict[str, list[Node]] = {}
        for node in nodes:
            layer = layer_of(note(node).module)
            if layer.rpartition(".")[2].isdigit():
                layers.setdefault(layer, []).append(node)
        again = list(layers.values())[: math.ceil(share * len(layers))]
        for start in range(0, len(again), together):
            yield list(chain.from_iterable(again[start : start + together]))


def _add_in_full(
    layer: list[Node], saved: SavedForBackward, made: dict[Node, set[Storage]], wish: Wish
) -> None:
    own = set(layer)
    read_behind: set[Storage] = set()
    dropped: set[Storage] = set()
    for node in layer:
        dropped |= made.get(node, set())
        if any(user not in own for user in node.users):
            read_behind |= {each.storage for each in saved.values[node]}
        wish.kept.update(saved.storage(arg) for arg in operands_of(node) if arg not in own)
    wish.dropped.update(dropped - read_behind)


def _scores(nodes: list[Node]) -> list[Node]:
    """Return the scores of attention, and what is made of them up to what multiplies the values.

    They lie between two products without parameters, around a softmax.
    """
    found: set[Node] = set()
    own = set(nodes)
    for node in nodes:
        if op_name(node) not in SOFTMAX:
            continue
        before = _reached(node, lambda at: at.all_input_nodes, own)
        behind = _reached(node, lambda at: list(at.users), own)
        if any(map(_is_product, before)) and any(map(_is_product, behind)):
            # The first product makes the scores; the second is not one of them.
            found |= before | {at for at in behind if not _is_product(at)}
    return [node for node in nodes if node in found]


def _reached(node: Node, following: Callable[[Node], list[Node]], own: set[Node]) -> set[Node]:
    """Return the operators that are reached from one, up to products, these included."""
    reached: set[Node] = set()
    left = [node]
    while left:
        at = left.pop()
        if at in own and at not in reached:
            reached.add(at)
            # A mask has no gradient, and is no score.
            if not flops(at):
                left += [each for each in following(at) if note(each).needs_grad]
    return reached


def _is_product(node: Node) -> bool:
    """Tell whether a node multiplies two computed values."""
    return bool(flops(node)) and not any(note(arg).kind == "param" for arg in node.all_input_nodes)


def _is_of(node: Node, globs: Sequence[str]) -> bool:
    """Tell whether a glob names the module of a node, or one around that."""
    parts = note(node).module.split(".")
    paths = [".".join(parts[:k]) for k in range(1, len(parts) + 1)]
    return any(fnmatchcase(path, glob) for path, glob in product(paths, globs))


__all__ = ["Wish", "by_stage", "choose", "groups_of_layers", "is_repeatable", "operands_of"]
