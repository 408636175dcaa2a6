"""Mark the saved values that are dropped after their forward, and the operators that recompute them (LOCAL -> LOCAL).

In: a LOCAL graph, what every operator saves (`ctx.saved_by`), the keyword `recompute` and the pins of a plan
(`requested.py`, `by_value.py`). Out: the marks of `Keep`, which codegen writes out, and `Kept`, the bytes that every
stage keeps:

- `dropped`, of a value that is not kept: the comment above its line;
- `again`, of an operator that backward runs again for such values: its seconds;
- `whole`, of a gather that backward does not repeat.

A value is dropped whichever operator saved it. Only values that some backward reads are recomputed: a recipe has
the operators between kept values and dropped ones. `explain_kept` lists the values of a module:

    values for backward, of a microbatch       bytes  now                              recomputation
    c_fc: aten.linear                     33,554,432  kept, of at most 4 microbatches        41.9 us
    gelu: aten.gelu                       33,554,432  recomputed                             12.3 us
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch.fx import Graph, Node

from autoptd.errors import PlanError
from autoptd.ir.kept import Kept, KeptValue, Rate, SavedForBackward, Storage
from autoptd.ir.names import is_within
from autoptd.ir.notes import is_tensor, note, op_name, ops
from autoptd.ir.quantities import microseconds_text
from autoptd.passes.context import Context
from autoptd.passes.kept.requested import (
    Wish,
    by_stage,
    choose,
    find_gathered,
    find_pinned,
    gather_again,
    is_repeatable,
    operands_of,
)
from autoptd.passes.ops.costs import forward_seconds
from autoptd.passes.runner import Form, graph_pass

MAX_ROWS = 24
HEADER = ("values for backward, of a microbatch", "bytes", "now", "recomputation")
# The storages that a stage holds, each with the first operator that needs it held.
Holders = dict[Storage, Node]


@graph_pass(takes=Form.LOCAL, gives=Form.LOCAL, changes=("keep",), finds=("kept", "kept_values"))
def keep(graph: Graph, ctx: Context) -> None:
    """Mark the values to drop and to recompute; find the bytes that stages save."""
    keeper = Keeper(graph, ctx)
    if keeper.pinned.error is not None:
        raise keeper.pinned.error
    rates = _pinned(ctx) or (keeper.find_rates() if keeper.is_by_value else ())
    keeper.mark(rates)
    ctx.found.kept = keeper.kept(rates)
    ctx.found.kept_values = tuple(keeper.values())


def _pinned(ctx: Context) -> tuple[Rate, ...]:
    """Return the rates that the plan pins, if any."""
    pinned, asked = ctx.options.plan.rates, ctx.options.recompute.what
    # An evaluation (False) keeps nothing.
    if not pinned or asked is False:
        return ()
    if asked != "auto":
        fact = f"goes with recompute='auto', not {asked!r}"
        raise PlanError("plan: keep", fact, "leave one of the two out")
    if len(pinned) != (count := max(ctx.ranks) + 1):
        fact = f"has rates for {len(pinned)} pipeline ranks, there are {count}"
        raise PlanError("plan: keep", fact, "one for each, or leave it out")
    return pinned


class Keeper:
    """Choose the values to keep in a LOCAL graph, and mark them, repeatedly if needed."""

    def __init__(self, graph: Graph, ctx: Context) -> None:
        self.graph, self.ctx = graph, ctx
        self._saved = ctx.saved_by(graph)
        self._stages = by_stage(graph)
        asked, options = ctx.options.recompute.what, ctx.options
        pins = options.plan.keep
        # Saved values are unknown when a pass is called by itself. With torch's compiler, the operators of a layer
        # have no lines to mark.
        self._is_asked = bool(
            self._saved.values
            and (asked or pins or (ctx.checkpointed and options.fuse.backend != "inductor"))
            and asked is not False
        )
        self.pinned = find_pinned(graph, self._saved, pins if self._is_asked else ())
        for node in self.pinned.gathers:
            note(node).keep = replace(note(node).keep, whole=True)
        self.is_by_value = self._is_asked and asked == "auto"
        self._by_value = None
        if self.is_by_value:
            # Imported here: it loads networkx, a tenth of a second.
            from autoptd.passes.kept.by_value import ByValue

            self._by_value = ByValue(graph, self._saved, self.pinned, ctx.mesh, ctx.machine)

    def mark(self, rates: Sequence[Rate] = ()) -> None:
        """Mark the graph again; by value at the rates of the pipeline ranks."""
        if not self._is_asked:
            return
        ctx = self.ctx
        for node in self.graph.nodes:
            note(node).keep = replace(note(node).keep, again=None, dropped="")
        if self._by_value is not None:
            wish = self._by_value.choose(lambda stage: rates[ctx.ranks[stage]])
        else:
            wish = choose(self.graph, ctx.options, ctx.checkpointed, self._saved)
        wish = self.pinned.of(wish)
        for nodes in self._stages.values():
            _mark(nodes, wish, self._saved, ctx)

    def held(self) -> dict[int, Holders]:
        """Return what every stage holds of a microbatch from its forward to its backward, as the graph is marked."""
        return _held(self.graph, self._saved) if self._saved.values else {}

    def kept(self, rates: Sequence[Rate] = ()) -> Kept:
        """Return the bytes and seconds of every stage, as the graph is marked."""
        held, again = self.held(), dict.fromkeys(range(len(self.ctx.ranks)), 0.0)
        for node in ops(self.graph):
            again[note(node).stages[0]] += note(node).keep.again or 0.0
        nbytes = tuple(_bytes_of(held.get(stage, {})) for stage in again)
        return Kept(nbytes, tuple(again.values()), tuple(rates))

    def values(self) -> Iterator[KeptValue]:
        """Yield every value that an operator saves, and how it is kept, as the graph is marked."""
        ctx = self.ctx
        for stage, holders in sorted(self.held().items()):
            in_flight = max((moment[stage] for moment in ctx.live), default=1)
            dropped = [
                self._saved.storage(node) for node in self._stages.get(stage, ()) if note(node).keep.dropped
            ]
            for storage in [*holders, *dropped]:
                maker = storage.node
                can_be = maker.op == "call_function" and is_repeatable(maker)
                seconds = forward_seconds(maker, ctx.mesh, ctx.machine) if can_be else math.inf
                name, operator = note(maker).module, op_name(maker)
                if storage.is_private:
                    operator += ", for its own backward"
                yield KeptValue(name, operator, storage.nbytes, storage not in holders, seconds, in_flight)

    def find_rates(self) -> tuple[Rate, ...]:
        """Return the lowest rate of every pipeline rank at which its bytes fit, exactly; the highest if none does."""
        ctx, prices = self.ctx, self.ctx.byte_prices
        # A rank steps from one price to the next layer by layer.
        steps_per_price = self._by_value.most_layers if self._by_value is not None else 1
        last = (len(prices) - 1) * steps_per_price

        def rate(step: int) -> Rate:
            low, layers = divmod(step, steps_per_price)
            return Rate(prices[low], prices[min(low + 1, len(prices) - 1)], layers / steps_per_price)

        def fits(steps: list[int]) -> list[bool]:
            self.mark([rate(step) for step in steps])
            cut = ctx.found.cut.with_kept(self.kept(), ctx.live, ctx.ranks)
            return [nbytes <= ctx.machine.memory for nbytes in ctx.needed_bytes(cut)]

        return tuple(map(rate, _least(fits, last, count=max(ctx.ranks) + 1)))


def _least(fits: Callable[[list[int]], list[bool]], last: int, count: int) -> list[int]:
    """Return the fewest steps of `count` ranks that fit, each from 0 to `last`; `last` if none does."""
    too_low, enough = [-1] * count, [last] * count
    tried = [0] * count
    while any(low < high - 1 for low, high in zip(too_low, enough, strict=True)):
        for rank, is_enough in enumerate(fits(tried)):
            if is_enough:
                enough[rank] = min(tried[rank], enough[rank])
            else:
                too_low[rank] = min(max(tried[rank], too_low[rank]), enough[rank] - 1)
        tried = [
            (low + high) // 2 if low < high - 1 else high for low, high in zip(too_low, enough, strict=True)
        ]
    return enough


def _bytes_of(held: Holders) -> int:
    return sum(storage.nbytes for storage in held)


def _held(graph: Graph, saved: SavedForBackward) -> dict[int, Holders]:
    """Return the storages that stages hold: what operators save and is not dropped, what recomputation reads,
    and values that arrive with a gradient.
    """
    dropped = {saved.storage(node) for node in ops(graph) if note(node).keep.dropped}
    # A value that is gathered again is held as its shard.
    shards = {pair.whole: pair.shard for pair in find_gathered(graph, saved)}
    kept: dict[int, Holders] = {}
    for node in ops(graph):
        held = set(saved.of.get(node, ()))
        if note(node).keep.again is not None:
            read = [arg for arg in operands_of(node) if note(arg).keep.again is None]
            held |= set(map(saved.storage, read))
        held = {shards.get(storage, storage) for storage in held - dropped}
        held = {storage for storage in held if storage.node.op != "placeholder"}
        for stage in note(node).stages:
            of_stage = kept.setdefault(stage, {})
            for storage in held:
                of_stage.setdefault(storage, node)
        for stage in _arrives_at(node):
            kept.setdefault(stage, {}).setdefault(saved.storage(node), node)
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
    """Mark the operators of a stage that make dropped values, and those that make the operands that are not kept."""
    own = set(nodes)
    left: list[Node] = []
    for storage in wish.dropped:
        if storage.node in own and is_repeatable(storage.node):
            left += _maker(storage, saved)
    if not left:
        return
    held = set().union(*(saved.of[node] for node in nodes))
    kept = held - set(map(saved.storage, left)) | wish.kept
    # A gathered value is kept as its shard. If a recipe needs the whole value, it is gathered once for both.
    gathered = {node for node in nodes if gather_again(node)} - set(left)
    kept -= {saved.storage(node) for node in gathered}
    kept |= {saved.storage(node.args[0]) for node in gathered}  # type: ignore[arg-type]
    dropped = set(left)
    while left:
        node = left.pop()
        if note(node).keep.again is not None:
            continue
        seconds, words = forward_seconds(node, ctx.mesh, ctx.machine), ""
        if node in dropped or node in gathered:
            words = f"dropped: {saved.storage(node).nbytes:,} B, recomputed in {microseconds_text(seconds)}"
        note(node).keep = replace(note(node).keep, again=seconds, dropped=words)
        for arg in operands_of(node):
            is_kept = is_tensor(arg) and saved.storage(arg) in kept
            if arg in own and not is_kept and is_repeatable(arg):
                left.append(arg)


def _maker(storage: Storage, saved: SavedForBackward) -> list[Node]:
    """Return the node whose value a storage is: the piece of an operator with several results; [] if none reads it."""
    if is_tensor(storage.node):
        return [storage.node]
    return [user for user in storage.node.users if saved.storage(user) == storage][:1]


def explain_kept(values: Sequence[KeptValue], path: str) -> str:
    """Return a table of the saved values of the module at `path`, and how they are kept; "" if there are none."""
    mine = [value for value in values if not path or is_within(value.module, path)]
    if not mine:
        return ""
    rows = [HEADER]
    for value in mine[:MAX_ROWS]:
        name = ": ".join(filter(None, (_relative(value.module, path), value.operator)))
        plural = "es" if value.in_flight > 1 else ""
        now = "recomputed" if value.is_dropped else f"kept, of at most {value.in_flight} microbatch{plural}"
        seconds = microseconds_text(value.seconds) if math.isfinite(value.seconds) else "impossible"
        rows.append((name, f"{value.nbytes:,}", now, seconds))
    name, nbytes, now, seconds = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = [f"{a:{name}}  {b:>{nbytes}}  {c:{now}}  {d:>{seconds}}" for a, b, c, d in rows]
    if len(mine) > MAX_ROWS:
        lines.append(f"and {len(mine) - MAX_ROWS} more; name a smaller module")
    return "\n".join(lines) + "\n"


def _relative(module: str, path: str) -> str:
    """Return a module's name within the module at `path`; the last part for that module itself."""
    if not path:
        return module
    return module.removeprefix(f"{path}.") if module != path else path.rpartition(".")[2]
