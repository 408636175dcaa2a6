"""Run the passes until every rank fits into its memory: by what is split, kept and shared among replicas, at least seconds.

In: a TRACED graph and the context of a request. Out: the LOCAL graph with its context. Nothing gives way where everything fits;
else, of what the request leaves open (`relief.py`), in this order:

- zero="auto": the replicas share the optimizer's state, which takes no longer.
- recompute="auto": every pipeline rank pays for keeping less what it takes to fit (`passes/keep.py`).
- the layout over tp, tokens included with sequence_parallel="auto", at a price for bytes (`passes/stages/memory_price.py`).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from torch.fx import Graph

from autoptd import passes
from autoptd.passes import Context, Record, run_passes
from autoptd.passes.cut import TooFull
from autoptd.passes.stages.memory_price import (
    check_fits,
    check_rates,
    excess_bytes,
    find_memory_price,
    outbids,
    prices_from,
)
from autoptd.program.costs import Cut

PASSES = (
    passes.annotate,
    passes.communicate,
    passes.find_fusions,
    passes.cut,
    passes.localize,
    passes.substitute,
    passes.keep,
    passes.hook_gemms,
    passes.mark_owned,
)
# Cuts that are tried again because more bytes are kept than they foresaw.
MORE_CUTS = 2
Placed = tuple[Graph, Context]


def place(traced: Graph, ctx: Context, record: Record) -> Placed:
    """Run the passes so that every rank fits; the context returned has the options that were chosen.

    TooFull where that is impossible.
    """
    if ctx.options.zero == "auto" and ctx.mesh.replicas > 1:
        with suppress(TooFull):
            graph, found = _Search(traced, _with_zero(ctx, 0), record).cheapest()
            if not any(cut_of(found).again_seconds):
                return graph, found
        ctx = _with_zero(ctx, 1)
    elif ctx.options.zero == "auto":
        ctx = _with_zero(ctx, 0)
    return _Search(traced, ctx, record).run()


def cut_of(ctx: Context) -> Cut:
    """Return the cut that the passes found, with the bytes that are kept, and the seconds of a step by what that takes."""
    cut = ctx.found.cut.with_kept(ctx.found.kept, ctx.live, ctx.ranks)
    if ctx.makespan is None:
        return replace(cut, makespan=max(cut.rank_seconds))
    stages = [own + links for own, links in zip(cut.seconds, cut.link_seconds, strict=True)]
    return replace(cut, makespan=ctx.makespan(stages, cut.again_seconds))


def _with_zero(ctx: Context, zero: int) -> Context:
    return replace(ctx, options=replace(ctx.options, zero=zero))


class _Search:
    """The search for the price of a byte."""

    def __init__(self, traced: Graph, ctx: Context, record: Record) -> None:
        self.traced, self.ctx, self.record = traced, ctx, record
        self.first = ctx.options.memory_price or 0.0
        self.unit = 1 / ctx.options.rank_machine.link_bandwidth

    def run(self) -> Placed:
        """Return the plan of the lowest price that fits.

        Where ranks pay to keep less and tokens may be split, splitting them may be cheaper: the lowest price that no rank
        outbids is tried as well, and the faster plan is taken.
        """
        (graph, found), price = find_memory_price(self._solve, self.first, self.unit)
        if outbids(found) and found.options.sequence_parallel == "auto":
            # Where that does not fit, there is one that does.
            with suppress(TooFull):
                (other_graph, other), _ = find_memory_price(
                    self._solve_without_outbidding, self.first, self.unit
                )
                if cut_of(other).makespan < cut_of(found).makespan:
                    return other_graph, other
            # The record is that of the last run.
            graph, found = self._solve(price)
        return graph, found

    def cheapest(self) -> Placed:
        """Return the plan of the first price; TooFull where that does not fit."""
        return self._solve(self.first)

    def _solve(self, price: float) -> Placed:
        # A context without findings, so that each attempt starts from TRACED; 0 is None, as in a plan.
        options = replace(self.ctx.options, memory_price=price or None)
        priced = replace(self.ctx, options=options, price_range=prices_from(self.first, self.unit))
        graph = self._run_passes(priced)
        for _ in range(MORE_CUTS):
            # What is kept is known exactly now; the cut had an estimate, and leaves room for the rest next time.
            excess = excess_bytes(cut_of(priced), priced)
            if not excess:
                break
            priced = replace(priced, reserve=priced.reserve + excess)
            graph = self._run_passes(priced)
        check_fits(cut_of(priced), priced)
        return graph, priced

    def _solve_without_outbidding(self, price: float) -> Placed:
        graph, priced = self._solve(price)
        check_rates(priced)
        return graph, priced

    def _run_passes(self, ctx: Context) -> Graph:
        return run_passes(PASSES, self.traced, ctx, self.record)


__all__ = ["PASSES", "cut_of", "place"]
