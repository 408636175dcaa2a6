"""Find the fastest plan whose step fits into the memory of every rank, and write its program.

In: a TRACED graph, the context of a request and its passes, and a function that writes the program of a LOCAL graph.
Out: the program with its graph and context. If everything fits, nothing changes. Otherwise the options that the request
leaves open are used in this order:

- zero="auto": replicas and context ranks shard the optimizer state, which takes no longer; if nothing below makes the
  program fit, gradients and parameters as well (zero=2, zero=3).
- recompute="auto": every pipeline rank recomputes as much as it needs to fit (`passes/kept/keep.py`).
- the layout over tp, tokens included with sequence_parallel="auto", at a price for bytes: the fastest of all
  layouts that fit, since splitting tokens may take less memory and less time.

The price is in seconds per microbatch for each byte of a rank, added to its usual cost (`ir/machine.py`). A
parameter counts four times (gradient and two moments), a saved byte once for every microbatch in flight.

The bytes that a rank holds between operators (parameters with their state, saved activations) are counted while
the model is placed. At its peak it also needs working bytes: gradients in flight, recomputed values, messages,
logits. They are known once the program is written and every rank's step is rehearsed (`peak_memory.py`). If a
step does not fit, the passes run again, with these bytes reserved on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from torch.fx import Graph

from autoptd.compiler.peak_memory import Peak, peak_memory
from autoptd.ir.layout import Layout
from autoptd.ir.notes import note
from autoptd.ir.scopes import paused_collection
from autoptd.passes.context import Context
from autoptd.passes.plan_cost import weigh_known
from autoptd.passes.runner import Form, Pass, Record, run_passes, up_to
from autoptd.passes.stages.held_bytes import TooFull, cut_of, excess_bytes, too_full
from autoptd.program.program import Program

# How often working bytes are reserved again, as they change with the plan.
MAX_REHEARSALS = 5
# Without `memory=`, a rank that holds less than this share of its memory is not rehearsed, to save compile time.
SAFE_SHARE = 0.75
# How often the model is cut again because more bytes are saved than estimated.
MORE_CUTS = 2
# Prices are powers of two, times the time of a byte on a link: from a sixteenth of that to 16384 times.
MIN_POWER, MAX_POWER = -4, 14

# Run the passes for a context, up to a form.
RunPasses = Callable[[Context, Form], Graph]
Placed = tuple[Graph, Context]
T = TypeVar("T")


class Written(NamedTuple):
    """A program, its graph, and the context with the chosen options."""

    program: Program
    graph: Graph
    ctx: Context


def fit(
    traced: Graph,
    ctx: Context,
    passes: Sequence[Pass],
    record: Record,
    write: Callable[[Graph, Context], Program],
) -> Written | TooFull:
    """Return a program whose step fits on every rank; TooFull if none was found."""

    def run(ctx: Context, form: Form) -> Graph:
        return run_passes(up_to(form, passes), traced, ctx, record)

    refused: TooFull | None = None
    for _ in range(MAX_REHEARSALS):
        with paused_collection():
            placed = place(run, ctx)
            written = placed if isinstance(placed, TooFull) else Written(write(*placed), *placed)
        if isinstance(written, TooFull):
            # The reserved bytes are those of a plan that holds more: one that holds less may need fewer.
            if not any(ctx.working):
                return written
            refused, ctx = refused or written, ctx.with_less_working(written.excess)
            continue
        if not _may_be_full(written):
            return _compared(written, traced, passes, record)
        written = written._replace(program=_with_peaks(written.program, peak_memory(written.program)))
        cut = written.program.costs.cut
        if max(cut.peak_bytes) <= ctx.machine.memory:
            return _compared(written, traced, passes, record)
        closest, ctx = written.ctx, ctx.with_working(cut.working_bytes)
    return refused or too_full(max(cut.peak_bytes), closest, "the plan that came closest")


def _compared(written: Written, traced: Graph, passes: Sequence[Pass], record: Record) -> Written:
    """Compare a plan that sequence_parallel="auto" found with those of Megatron and Korthikanti et al."""
    program, _, ctx = written
    # Two more runs of the passes, up to CONNECTED.
    with paused_collection():
        weighed = weigh_known(traced, record.graphs["CONNECTED"], ctx, up_to(Form.CONNECTED, passes))
    if weighed is None:
        return written
    # For people: `ir/plan.py` does not read it.
    return written._replace(program=replace(program, plan={**program.plan, "weighed": weighed}))


def _may_be_full(written: Written) -> bool:
    memory = written.ctx.machine.memory
    is_bound = written.ctx.options.memory is not None
    fullest = max(written.program.costs.cut.rank_bytes, default=0.0)
    return math.isfinite(memory) and (is_bound or fullest > SAFE_SHARE * memory)


def _with_peaks(program: Program, peaks: tuple[Peak, ...]) -> Program:
    """Record the peaks in a program's costs, and the largest of them in the plan."""
    nbytes = tuple(float(peak.nbytes) for peak in peaks)
    plan = program.plan
    if "relief" in plan:
        plan = {**plan, "relief": {**plan["relief"], "peak_bytes": max(nbytes)}}
    cut = replace(program.costs.cut, peak_bytes=nbytes)
    return replace(program, plan=plan, costs=replace(program.costs, cut=cut))


def place(run: RunPasses, ctx: Context) -> Placed | TooFull:
    """Run the passes so that every rank fits, working bytes as in `ctx`; TooFull if that is impossible.

    The context returned has the chosen options.
    """
    if ctx.options.zero.stage == "auto" and ctx.mesh.gradient_ranks > 1:
        search = _Search(run, _with_zero(ctx, 0))
        placed = search.solve(search.first)
        if not isinstance(placed, TooFull) and not any(cut_of(placed[1]).again_seconds):
            return placed
        return _least_zero(run, ctx)
    if ctx.options.zero.stage == "auto":
        ctx = _with_zero(ctx, 0)
    return _Search(run, ctx).best()


def _least_zero(run: RunPasses, ctx: Context) -> Placed | TooFull:
    """Run the passes with the lowest of ZeRO's stages that fits: 2 and 3 communicate more than 1."""
    for stage in (1, 2, 3):
        found = _Search(run, _with_zero(ctx, stage)).best()
        if not isinstance(found, TooFull):
            break
    return found


def _with_zero(ctx: Context, zero: int) -> Context:
    return replace(ctx, options=replace(ctx.options, zero=replace(ctx.options.zero, stage=zero)))


class _Search:
    """Search for the price of a byte."""

    def __init__(self, run: RunPasses, ctx: Context) -> None:
        self.run, self.ctx = run, ctx
        self.first = ctx.options.memory_price or 0.0
        self.unit = 1 / ctx.options.rank_machine.link_bandwidth

    def best(self) -> Placed | TooFull:
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
            found = find_memory_price(self.solve, self.first, self.unit)
            return found if isinstance(found, TooFull) else found[0]
        return self._fastest(self._layout_prices())

    def solve(self, price: float) -> Placed | TooFull:
        """Return the plan of a price; TooFull if it does not fit."""
        priced = self._priced(price)
        for _ in range(1 + MORE_CUTS):
            try:
                graph = self.run(priced, Form.LOCAL)
            except TooFull as error:
                return error
            cut = cut_of(priced)
            excess = excess_bytes(cut, priced)
            if not excess:
                return graph, priced
            # The cut estimated the saved bytes, which are known exactly now: reserve the difference next time.
            last, priced = priced, replace(priced, reserve=priced.reserve + excess)
        return too_full(max(last.needed_bytes(cut)), last, "the best cut found")

    def _fastest(self, prices: Sequence[float]) -> Placed | TooFull:
        """Return the fastest plan of these prices, the first in case of a tie; TooFull if none fits."""
        seconds: dict[float, float] = {}
        for price in prices:
            placed = self.solve(price)
            if not isinstance(placed, TooFull):
                seconds[price] = cut_of(placed[1]).makespan
        # The recorded graphs are those of the last run. If none fits, the highest price shows how much is missing.
        best = min(seconds, key=seconds.__getitem__, default=prices[-1])
        return placed if best == prices[-1] else self.solve(best)

    def _layout_prices(self) -> list[float]:
        """Return the lowest price of every layout.

        Prices between two with the same layout have that layout too. A layout does not depend on the reserved
        bytes, so the search runs once.
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
        graph = self.run(self._priced(price), Form.ANNOTATED)
        return [note(node).layout for node in graph.nodes]

    def _priced(self, price: float) -> Context:
        """Return a context without findings, for an attempt from TRACED; price 0 is None, as in a plan."""
        options = replace(self.ctx.options, memory_price=price or None)
        return replace(self.ctx, options=options, price_range=prices_from(self.first, self.unit))


def find_memory_price(
    solve: Callable[[float], T | TooFull], first: float, unit: float
) -> tuple[T, float] | TooFull:
    """Return the plan of the lowest price that fits, and the price; the TooFull of the highest if none fits.

    First comes the price `first`. If its plan does not fit, a price so high that seconds hardly count is tried:
    if even that plan does not fit, the model is refused. Between the two the price is bisected, in powers of two
    of `unit`, the time of a byte on a link.
    """
    plan = solve(first)
    if not isinstance(plan, TooFull):
        return plan, first
    plan = solve(unit * 2**MAX_POWER)
    if isinstance(plan, TooFull):
        return plan
    too_low, fits, last = MIN_POWER - 1, MAX_POWER, MAX_POWER
    while fits - too_low > 1:
        last = (too_low + fits) // 2
        tried = solve(unit * 2**last)
        if isinstance(tried, TooFull):
            too_low = last
        else:
            plan, fits = tried, last
    # `solve` records its last call, which must be the one whose plan is returned.
    if last != fits:
        solve(unit * 2**fits)
    return plan, unit * 2**fits


def prices_from(first: float, unit: float) -> tuple[float, ...]:
    """Return the prices at which a rank may choose what it keeps: `first`, and all higher ones that are tried."""
    ladder = (unit * 2**power for power in range(MIN_POWER, MAX_POWER + 1))
    return (first, *(price for price in ladder if price > first))
