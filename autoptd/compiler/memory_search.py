"""Run the passes until every rank fits into its memory, by sharding, recomputation and ZeRO, at the least
cost in time.

In: a TRACED graph and the context of a request. Out: the LOCAL graph with its context. If everything fits,
nothing changes. Otherwise the options that the request leaves open (`relief.py`) are used in this order:

- zero="auto": replicas and context ranks shard the optimizer state, which takes no longer.
- recompute="auto": every pipeline rank recomputes as much as it needs to fit (`passes/kept/keep.py`).
- the layout over tp, tokens included with sequence_parallel="auto", at a price for bytes
  (`passes/stages/memory_price.py`): the fastest of all layouts that fit, since splitting tokens may take less
  memory and less time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch.fx import Graph

from autoptd import passes
from autoptd.ir.layout import Layout
from autoptd.ir.notes import note
from autoptd.passes import Context, Form, Record, run_passes, up_to
from autoptd.passes.stages.held_bytes import TooFull, excess_bytes, too_full
from autoptd.passes.stages.memory_price import find_memory_price, prices_from
from autoptd.program.costs import Cut

# The number of cuts that are retried because more bytes are saved than estimated.
MORE_CUTS = 2
Placed = tuple[Graph, Context]


def place(traced: Graph, ctx: Context, record: Record) -> Placed | TooFull:
    """Run the passes so that every rank fits; the context returned has the chosen options.

    Return TooFull if that is impossible.
    """
    if ctx.options.zero.stage == "auto" and ctx.mesh.gradient_ranks > 1:
        placed = _Search(traced, _with_zero(ctx, 0), record).cheapest()
        if not isinstance(placed, TooFull) and not any(cut_of(placed[1]).again_seconds):
            return placed
        ctx = _with_zero(ctx, 1)
    elif ctx.options.zero.stage == "auto":
        ctx = _with_zero(ctx, 0)
    return _Search(traced, ctx, record).run()


def cut_of(ctx: Context) -> Cut:
    """Return the cut that the passes found, with saved bytes, and step seconds including recomputation."""
    cut = ctx.found.cut.with_kept(ctx.found.kept, ctx.live, ctx.ranks)
    if ctx.makespan is None:
        return replace(cut, makespan=max(cut.rank_seconds))
    stages = [own + links for own, links in zip(cut.seconds, cut.link_seconds, strict=True)]
    return replace(cut, makespan=ctx.makespan(stages, cut.again_seconds))


def _with_zero(ctx: Context, zero: int) -> Context:
    return replace(ctx, options=replace(ctx.options, zero=replace(ctx.options.zero, stage=zero)))


class _Search:
    """Search for the price of a byte."""

    def __init__(self, traced: Graph, ctx: Context, record: Record) -> None:
        self.traced, self.ctx, self.record = traced, ctx, record
        self.first = ctx.options.memory_price or 0.0
        self.unit = 1 / ctx.options.rank_machine.link_bandwidth

    def run(self) -> Placed | TooFull:
        """Return the plan of the lowest price that fits; if a memory bound leaves tokens open, the fastest
        that fits.

        A higher price may give a faster plan, since the layout is chosen operator by operator but the
        schedule is not. So every layout that some price gives is tried. A plan that pins its price has
        already chosen.
        """
        options = self.ctx.options
        # The bound of an evaluation is infinite, so there is nothing to search for.
        is_bound = options.memory is not None and math.isfinite(options.rank_machine.memory)
        is_open = is_bound and options.sequence_parallel == "auto"
        has_chosen = options.memory_price is not None or options.plan.rates
        if not is_open or has_chosen or self.ctx.mesh.value_ranks == 1:
            found = find_memory_price(self._solve, self.first, self.unit)
            return found if isinstance(found, TooFull) else found[0]
        return self._fastest(self._layout_prices())

    def _fastest(self, prices: Sequence[float]) -> Placed | TooFull:
        """Return the fastest plan of these prices, the first in case of a tie; TooFull if none fits."""
        seconds: dict[float, float] = {}
        for price in prices:
            placed = self._solve(price)
            if not isinstance(placed, TooFull):
                seconds[price] = cut_of(placed[1]).makespan
        # The record is that of the last run. If none fits, the highest price shows how much is missing.
        best = min(seconds, key=seconds.__getitem__, default=prices[-1])
        return placed if best == prices[-1] else self._solve(best)

    def _layout_prices(self) -> list[float]:
        """Return the lowest price of every layout: prices between two with the same layout have that layout
        too.

        A layout does not depend on the reserved bytes, so the search runs once.
        """
        known = self.ctx.layout_prices
        if (zero := self.ctx.options.zero.stage) not in known:
            known[zero] = self._find_layout_prices()
        return known[zero]

    def _find_layout_prices(self) -> list[float]:
        prices = prices_from(self.first, self.unit)
        layouts = {0: self._layout(prices[0]), len(prices) - 1: self._layout(prices[-1])}
        found = [prices[0]]
        # Ranges of prices between which the layout may change, the lowest last.
        left = [(0, len(prices) - 1)]
        while left:
            low, high = left.pop()
            if layouts[low] == layouts[high]:
                continue
            if high - low == 1:
                found.append(prices[high])
                continue
            middle = (low + high) // 2
            layouts[middle] = self._layout(prices[middle])
            left += [(middle, high), (low, middle)]
        return found

    def _layout(self, price: float) -> list[Layout]:
        """Return the layout of every value at a price."""
        priced = self._priced(price)
        annotating = up_to(Form.ANNOTATED, passes.passes_for(priced))
        graph = run_passes(annotating, self.traced, priced, self.record)
        return [note(node).layout for node in graph.nodes]

    def cheapest(self) -> Placed | TooFull:
        """Return the plan of the first price; TooFull if it does not fit."""
        return self._solve(self.first)

    def _solve(self, price: float) -> Placed | TooFull:
        priced = self._priced(price)
        for _ in range(1 + MORE_CUTS):
            try:
                graph = self._run_passes(priced)
            except TooFull as error:
                return error
            cut = cut_of(priced)
            excess = excess_bytes(cut, priced)
            if not excess:
                return graph, priced
            # The saved bytes are known exactly now; the cut had an estimate, and reserves the difference next
            # time.
            last, priced = priced, replace(priced, reserve=priced.reserve + excess)
        return too_full(max(last.needed_bytes(cut)), last, "the best cut found")

    def _priced(self, price: float) -> Context:
        """Return a context without findings, for an attempt from TRACED; price 0 is None, as in a plan."""
        options = replace(self.ctx.options, memory_price=price or None)
        return replace(self.ctx, options=options, price_range=prices_from(self.first, self.unit))

    def _run_passes(self, ctx: Context) -> Graph:
        return run_passes(passes.passes_for(ctx), self.traced, ctx, self.record)


__all__ = ["cut_of", "place"]
