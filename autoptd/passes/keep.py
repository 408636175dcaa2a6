"""Mark the values saved for backward that are dropped after their forward, and what computes them again (LOCAL -> LOCAL).

In: LOCAL, what every operator saves (`ctx.saved_by`), and the keyword `recompute` (`recompute.py`). Out: marks that codegen
writes out: `extra["dropped"]` of a value that is not kept, with the words above its line, and `extra["again"]` of the
operators that backward runs again for such values, their seconds. And the bytes that every stage keeps.

A value is dropped whoever saved it. Nothing is computed again that no backward reads: a recipe has the operators between what
is kept, and what is dropped.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from autoptd.ir.notes import is_tensor, note, ops
from autoptd.ir.quantities import microseconds_text
from autoptd.ir.saved import SavedForBackward, Storage
from autoptd.passes.by_value import choose_by_value
from autoptd.passes.context import Context
from autoptd.passes.hook_gemms import gather_again
from autoptd.passes.ops.costs import forward_seconds
from autoptd.passes.recompute import Wish, by_stage, choose, is_repeatable, operands_of
from autoptd.passes.runner import Form, graph_pass


@graph_pass(takes=Form.LOCAL, gives=Form.LOCAL, finds=("kept_bytes",))
def keep(graph: Graph, ctx: Context) -> None:
    """Mark what is dropped, and what is computed again; find the bytes that stages keep."""
    kept = kept_by_stage(graph, ctx)
    ctx.found.kept_bytes = tuple(_bytes_of(kept.get(stage, set())) for stage in range(len(ctx.ranks)))


def _bytes_of(held: set[Storage]) -> int:
    return sum(storage.nbytes for storage in held)


def kept_by_stage(graph: Graph, ctx: Context) -> dict[int, set[Storage]]:
    """Mark a LOCAL graph; return what every stage holds of a microbatch from its forward to its backward."""
    saved = ctx.saved_by(graph)
    if not saved.values:
        # A pass that is called by itself has no runtime to measure with.
        return {}
    # Under torch's compiler a layer's operators have no lines of their own.
    if ctx.options.recompute or (ctx.checkpointed and ctx.options.fuse != "inductor"):
        if ctx.options.recompute == "auto":
            wish = choose_by_value(graph, ctx, saved)
        else:
            wish = choose(graph, ctx.options, ctx.checkpointed, saved)
        for nodes in by_stage(graph).values():
            _mark(nodes, wish, saved, ctx)
    return _kept(graph, saved)


def _kept(graph: Graph, saved: SavedForBackward) -> dict[int, set[Storage]]:
    """Return what operators save and is not dropped, what is computed again reads, and what arrives with a gradient."""
    dropped = {saved.storage(node) for node in ops(graph) if "dropped" in note(node).extra}
    # A value that is gathered again is held as its shard.
    shards: dict[Storage, Storage] = {}
    for node in ops(graph):
        if gather_again(node):
            shards[saved.storage(node)] = saved.storage(operands_of(node)[0])
    kept: dict[int, set[Storage]] = {}
    for node in ops(graph):
        held = set(saved.of.get(node, ()))
        if "again" in note(node).extra:
            read = [arg for arg in operands_of(node) if "again" not in note(arg).extra]
            held |= set(map(saved.storage, read))
        held = {shards.get(storage, storage) for storage in held - dropped}
        held = {storage for storage in held if storage.node.op != "placeholder"}
        for stage in note(node).stages:
            kept.setdefault(stage, set()).update(held)
        for stage in _arrives_at(node):
            kept.setdefault(stage, set()).add(saved.storage(node))
    return kept


def _arrives_at(node: Node) -> set[int]:
    """Return the stages that receive a value, and hold it for its gradient."""
    if not note(node).needs_grad:
        return set()
    readers: set[int] = set()
    for user in node.users:
        readers.update(note(user).stages)
    return readers - {*note(node).stages}


def _mark(nodes: list[Node], wish: Wish, saved: SavedForBackward, ctx: Context) -> None:
    """Mark the operators of a stage that make dropped values, and those that these need and are not kept."""
    own = set(nodes)
    left: list[Node] = []
    for storage in wish.dropped:
        if storage.node in own and is_repeatable(storage.node):
            left += _maker(storage, saved)
    if not left:
        return
    held = set().union(*(saved.of[node] for node in nodes))
    kept = held - set(map(saved.storage, left)) | wish.kept
    # Of these the shard is kept. Where a recipe needs the whole value, its gather is the one for backward, too.
    gathered = {node for node in nodes if gather_again(node)} - set(left)
    kept -= {saved.storage(node) for node in gathered}
    kept |= {saved.storage(node.args[0]) for node in gathered}  # type: ignore[arg-type]
    dropped = set(left)
    while left:
        node = left.pop()
        if "again" in note(node).extra:
            continue
        seconds = note(node).extra["again"] = forward_seconds(node, ctx.mesh, ctx.machine)
        if node in dropped or node in gathered:
            words = f"not kept: {saved.storage(node).nbytes:,} B, again in {microseconds_text(seconds)}"
            note(node).extra["dropped"] = words
        for arg in operands_of(node):
            is_kept = is_tensor(arg) and saved.storage(arg) in kept
            if arg in own and not is_kept and is_repeatable(arg):
                left.append(arg)


def _maker(storage: Storage, saved: SavedForBackward) -> list[Node]:
    """Return the node whose value a storage is: of several results the piece that is taken; none that nobody takes."""
    if is_tensor(storage.node):
        return [storage.node]
    return [user for user in storage.node.users if saved.storage(user) == storage][:1]


__all__ = ["keep", "kept_by_stage"]
