"""Choose which values saved for backward are dropped after their forward, and computed again (LOCAL -> LOCAL).

In: LOCAL, what every operator saves (`ctx.saved_by`), and the keyword `recompute`. Out: marks that codegen writes out:
`extra["dropped"]` of a value that is not kept, with the words above its line, and `extra["again"]` of the operators that
backward runs again for such values. A value is dropped whoever saved it; nothing is computed again that no backward reads.

- *full*: of every layer, all but what the layer reads (Megatron's full recomputation); its last products, which no backward
  reads, are not made again.
- *selective*: the scores of attention and what is made of them, up to what multiplies the values (Korthikanti et al. 2022,
  section 5).

What is computed again reads values that are kept: a layer's inputs, parameters, and what is not dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from fractions import Fraction
from itertools import chain

import torch
from torch.fx import Graph, Node

from autoptd.ir.names import layer_of
from autoptd.ir.notes import is_tensor, note, op_name, ops, value
from autoptd.ir.operators.table import is_listed
from autoptd.ir.recompute import full_share
from autoptd.ir.saved import SavedForBackward, Storage
from autoptd.options import Options
from autoptd.passes.context import Context
from autoptd.passes.hook_gemms import gather_again
from autoptd.passes.ops.costs import flops
from autoptd.passes.runner import Form, graph_pass

SOFTMAX = ("aten.softmax", "masked_softmax")


@graph_pass(takes=Form.LOCAL, gives=Form.LOCAL, finds=("kept_bytes",))
def keep(graph: Graph, ctx: Context) -> None:
    """Mark what is dropped, and what is computed again; find the bytes that stages keep."""
    saved = ctx.saved_by(graph)
    if ctx.options.recompute:
        _choose(graph, ctx.options, saved)
    kept = kept_of(graph, saved)
    ctx.found.kept_bytes = tuple(
        sum(storage.nbytes for storage in kept.get(stage, ())) for stage in range(len(ctx.ranks))
    )


def _choose(graph: Graph, options: Options, saved: SavedForBackward) -> None:
    asked, layers = options.recompute, layers_of(graph)
    dropped: set[Storage] = set()
    # Read by what is computed again, and therefore kept.
    inputs: set[Storage] = set()
    if (share := full_share(asked)) is not None:
        for group in _groups_in_full(layers, share, options.recompute_num_layers):
            own = set(group)
            dropped |= _saved_of(group, saved) - _read_behind(group, saved)
            inputs |= {saved.storage(arg) for node in group for arg in _read(node) if arg not in own}
    elif asked == "selective":
        for layer in layers.values():
            dropped |= _saved_of(_scores(layer), saved)
    else:
        for nodes in _by_stage(graph).values():
            dropped |= _saved_of([node for node in nodes if _is_of(node, asked or ())], saved)
    for nodes in _by_stage(graph).values():
        _mark(nodes, dropped - inputs, saved, inputs)


def kept_of(graph: Graph, saved: SavedForBackward) -> dict[int, set[Storage]]:
    """Return what every stage holds of a microbatch from its forward to its backward.

    That is what operators save and is not dropped, what is computed again reads, and what arrives with a gradient.
    """
    dropped = {saved.storage(node) for node in ops(graph) if "dropped" in note(node).extra}
    # A value that is gathered again is held as its shard.
    shards = {saved.storage(node): saved.storage(_read(node)[0]) for node in ops(graph) if gather_again(node)}
    kept: dict[int, set[Storage]] = {}
    for node in ops(graph):
        held = set(saved.of.get(node, ()))
        if "again" in note(node).extra:
            held |= {saved.storage(arg) for arg in _read(node) if "again" not in note(arg).extra}
        held = {shards.get(storage, storage) for storage in held - dropped}
        held = {storage for storage in held if storage.node.op != "placeholder"}
        for stage in note(node).stages:
            kept.setdefault(stage, set()).update(held)
        if note(node).needs_grad:
            readers = {stage for user in node.users for stage in note(user).stages}
            for stage in readers - {*note(node).stages}:
                kept.setdefault(stage, set()).add(saved.storage(node))
    return kept


def layers_of(graph: Graph) -> dict[tuple[int, str], list[Node]]:
    """Return the operators of every numbered layer on every stage, in order."""
    layers: dict[tuple[int, str], list[Node]] = {}
    for stage, nodes in _by_stage(graph).items():
        for node in nodes:
            layer = layer_of(note(node).module)
            if layer.rpartition(".")[2].isdigit():
                layers.setdefault((stage, layer), []).append(node)
    return layers


def _by_stage(graph: Graph) -> dict[int, list[Node]]:
    """Return the operators of every stage; without those that several stages compute, which are kept."""
    stages: dict[int, list[Node]] = {}
    for node in ops(graph):
        if len(note(node).stages) == 1 and value(node) is not None:
            stages.setdefault(note(node).stages[0], []).append(node)
    return stages


def _groups_in_full(
    layers: dict[tuple[int, str], list[Node]], share: Fraction, together: int
) -> Iterator[list[Node]]:
    """Yield the operators of every layer that is computed again in full, or of several that share a kept input."""
    by_stage: dict[int, list[list[Node]]] = {}
    for (stage, _), nodes in layers.items():
        by_stage.setdefault(stage, []).append(nodes)
    for of_stage in by_stage.values():
        # The last layers are kept, whose backward comes first.
        again = of_stage[: math.ceil(share * len(of_stage))]
        for start in range(0, len(again), together):
            yield list(chain.from_iterable(again[start : start + together]))


def _saved_of(nodes: list[Node], saved: SavedForBackward) -> set[Storage]:
    """Return what is saved, by anyone, of what some operators make."""
    own = set(nodes)
    found: set[Storage] = set()
    for storages in saved.of.values():
        found |= {storage for storage in storages if storage.node in own and not storage.is_private}
    return found


def _read_behind(nodes: list[Node], saved: SavedForBackward) -> set[Storage]:
    own = set(nodes)
    found: set[Storage] = set()
    for node in nodes:
        if any(user not in own for user in node.users):
            found |= {each.storage for each in saved.values[node]}
    return found


def _read(node: Node) -> list[Node]:
    """Return the operands that operators make."""
    return [arg for arg in node.all_input_nodes if arg.op == "call_function" and value(arg) is not None]


def _scores(layer: list[Node]) -> list[Node]:
    """Return the scores of attention, and what is made of them up to what multiplies the values.

    They lie between two products without parameters, around a softmax.
    """
    found: set[Node] = set()
    own = set(layer)
    for node in layer:
        if op_name(node) not in SOFTMAX:
            continue
        before = _between(node, lambda at: at.all_input_nodes, own)
        behind = _between(node, lambda at: list(at.users), own)
        products = [at for at in before if _is_product(at)]
        if products and any(_is_product(at) for at in behind):
            # The second product is not one of them; the first makes the scores.
            found |= before | {at for at in behind if not _is_product(at)}
    return [node for node in layer if node in found]


def _between(node: Node, following: Callable[[Node], list[Node]], own: set[Node]) -> set[Node]:
    """Return the operators of a layer that are reached from one, up to products, these included."""
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
    return any(fnmatchcase(path, glob) for path in paths for glob in globs)


def _mark(nodes: list[Node], dropped: set[Storage], saved: SavedForBackward, inputs: set[Storage]) -> None:
    """Mark the operators of a stage that make dropped values, and those that these need and are not kept."""
    own = set(nodes)
    left = [_maker(storage, saved) for storage in dropped if storage.node in own]
    if not left:
        return
    kept = {storage for node in nodes for storage in saved.of[node]} - dropped | inputs
    # Of these the shard is kept. Where a recipe needs the whole value, its gather is the one for backward, too.
    gathered = {node for node in nodes if gather_again(node)} - set(left)
    kept |= {saved.storage(node.args[0]) for node in gathered}  # type: ignore[arg-type]
    for node in left:
        note(node).extra["dropped"] = _words(node, saved)
    while left:
        node = left.pop()
        if "again" in note(node).extra:
            continue
        note(node).extra["again"] = True
        if node in gathered:
            note(node).extra["dropped"] = _words(node, saved)
        for arg in _read(node):
            is_kept = is_tensor(arg) and saved.storage(arg) in kept and arg not in gathered
            if arg in own and not is_kept and _is_repeatable(arg):
                left.append(arg)


def _words(node: Node, saved: SavedForBackward) -> str:
    return f"not kept: {saved.storage(node).nbytes:,} B"


def _is_repeatable(node: Node) -> bool:
    """Tell whether an operator may run twice: one that is not listed may have effects, and keeps its result."""
    target = node.target
    return not isinstance(target, torch._ops.OpOverload) or target.namespace == "aten" or is_listed(target)


def _maker(storage: Storage, saved: SavedForBackward) -> Node:
    """Return the node whose value a storage is: the piece that is taken of several results."""
    node = storage.node
    if is_tensor(node):
        return node
    return next(user for user in node.users if saved.storage(user) == storage)


__all__ = ["keep", "layers_of"]
