"""Define the second argument of every pass: inputs other than the graph, and a place for results.

In: the options, the sizes of the batch, the schedule, and the model's buffers. Out: a `Context` with
`Findings` that passes fill.

    ctx = Context(make_options(t=2), buffers=Buffers(captured.buffers))
    passes.annotate(graph, ctx)
    ctx.found.assignments["tp"]

A context made from another with `dataclasses.replace` starts without findings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from typing import Any

from torch.fx import Graph

from autoptd.errors import InternalError
from autoptd.ir.actions import Action, Kind, Orders, ranks_of_stages
from autoptd.ir.buffers import Buffers
from autoptd.ir.fusion import Fusion, Groups
from autoptd.ir.kept import Kept, KeptValue, SavedForBackward
from autoptd.ir.layout import Sizes
from autoptd.ir.machine import Machine
from autoptd.ir.mesh import Mesh
from autoptd.ir.notes import Fallback
from autoptd.options import Options
from autoptd.passes.axes.axes import Axes
from autoptd.passes.solve.assignment import Assignment, Joint
from autoptd.program.costs import Cut
from autoptd.program.program import Program

# The schedule when a pass is called directly, as in tests.
ONE_STAGE: Orders = [[Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)]]


@dataclass(eq=False, repr=False)
class Findings:
    """Hold the results of passes that are not in the graph's notes; reading one before it is set is an
    InternalError.

    - rewrites of TRACED: `whole`, the trace with all samples, rewritten like the graph (None: unchanged)
    - annotate: `axes`, which dims are split together; `assignments`, the solver's answer over every mesh axis;
      `fallbacks`, operators that are not split as expected; `joint`, the joint answer over tp and cp
    - find_fusions: `groups`, operators that a fused one may replace
    - cut: `cut`, where the model is cut, why, and its costs
    - substitute: `fusions`, which groups were fused, and which were not
    - keep: `kept`, the values that every stage saves of a microbatch for its backward, and those that it recomputes;
      `kept_values`, how every value is kept, for display
    """

    whole: Graph | None = field(init=False, default=None)
    axes: Axes = field(init=False)
    assignments: dict[str, Assignment] = field(init=False)
    fallbacks: tuple[Fallback, ...] = field(init=False)
    joint: Joint = field(init=False)
    groups: Groups = field(init=False)
    cut: Cut = field(init=False)
    fusions: tuple[Fusion, ...] = field(init=False)
    kept: Kept = field(init=False)
    kept_values: tuple[KeptValue, ...] = field(init=False)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dataclass_fields__:
            raise InternalError("Findings", f"{name} is read, and no pass has found it yet")
        raise AttributeError(name)

    def forget(self) -> None:
        """Clear all results at the start of a run of passes."""
        vars(self).clear()
        self.whole = None

    def has(self, name: str) -> bool:
        """Tell whether a pass has set this result."""
        return name in vars(self)


@dataclass(frozen=True)
class Context:
    """Hold the inputs of every pass other than its graph.

    - `traced_rows`, `rows`: samples in the trace, and in a microbatch; `pieces`: microbatches in a step, over
      all replicas.
    - `batched`: names of the inputs that carry the batch; `whole`: a second trace, with all samples of the
      batch (None where the batch is not split). `mixes`: each replica has one microbatch, and operators may
      read the rows of all replicas.
    - `buffers`: the values of the model's buffers, from which constants are evaluated.
    - `orders`: the schedule without its transfers.
    - `live`: microbatches in flight on every stage, at the fullest moment of each rank.
    - `makespan`: seconds of a step, as a function of the seconds per stage to compute and to recompute (None:
      the schedule is too long to simulate repeatedly).
    - `price_range`: the prices of memory at which a rank may choose what it keeps, ascending
      (`compiler/memory_search.py`).
    - `reserve`: bytes per rank that the cut leaves free, because an earlier cut was off by that much.
    - `working`: bytes that every pipeline rank needs in addition to those it holds; empty until they are
      known.
    - `checkpointed`: the modules that the model wraps in activation checkpoints.
    - `saved_by`: what every operator of a LOCAL graph saves for backward.
    - `like`: a program of the same model, whose parameter storage and cuts are followed.
    - `layout_prices`: by `zero`, the prices of memory at which layouts change, which do not depend on the
      bytes reserved; contexts derived from one another share them.
    """

    options: Options = field(default_factory=Options)
    traced_rows: int = 1
    rows: int = 1
    pieces: int = 1
    batched: frozenset[str] = frozenset()
    whole: Graph | None = None
    mixes: bool = False
    buffers: Buffers = field(default_factory=lambda: Buffers({}))
    orders: Orders = field(default_factory=lambda: ONE_STAGE)
    live: Sequence[Sequence[int]] = ()
    makespan: Callable[[Sequence[float], Sequence[float]], float] | None = None
    price_range: tuple[float, ...] = ()
    reserve: float = 0.0
    working: tuple[float, ...] = ()
    checkpointed: tuple[str, ...] = ()
    saved_by: Callable[[Graph], SavedForBackward] = lambda graph: SavedForBackward()
    like: Program | None = None
    layout_prices: dict[Any, list[float]] = field(default_factory=dict)
    found: Findings = field(init=False, default_factory=Findings)

    @property
    def mesh(self) -> Mesh:
        return self.options.mesh

    @property
    def second(self) -> Graph | None:
        """The trace with all samples, as this run has rewritten it."""
        return self.whole if self.found.whole is None else self.found.whole

    @cached_property
    def machine(self) -> Machine:
        """The speeds of a rank, with a price for the bytes that it holds (`memory_price`)."""
        # In units of the trace, as the solver counts saved bytes for all of its rows.
        in_flight = max(map(max, self.live), default=0) * self.rows / self.traced_rows
        # Relative to the dtype in which stages use parameters: bf16 with a precision, otherwise usually
        # float32.
        itemsize = 2 if self.options.precision else 4
        copies = self.options.state_bytes(itemsize).total / itemsize
        return self.options.rank_machine.with_memory_priced(
            self.options.memory_price or 0.0, in_flight, copies
        )

    def needed_bytes(self, cut: Cut) -> list[float]:
        """Return the bytes that every pipeline rank needs with a cut: those it holds, plus its working bytes."""
        working = self.working or (0.0,) * len(cut.rank_bytes)
        return [held + more for held, more in zip(cut.rank_bytes, working, strict=True)]

    def held_bytes(self, needed: Sequence[float]) -> tuple[float, ...]:
        """Return the bytes that pipeline ranks hold, given those they need."""
        working = self.working or (0.0,) * len(needed)
        return tuple(both - more for both, more in zip(needed, working, strict=True))

    def with_working(self, nbytes: Sequence[float]) -> Context:
        """Return this context without findings, with the larger of these and the current working bytes."""
        before = self.working or (0.0,) * len(nbytes)
        return replace(self, working=tuple(map(max, before, nbytes)))

    def with_less_working(self, nbytes: float) -> Context:
        """Return this context without findings and with `nbytes` fewer working bytes on every rank."""
        return replace(self, working=tuple(max(more - nbytes, 0.0) for more in self.working))

    @property
    def byte_price(self) -> float:
        """The price in seconds of a byte that is saved from a microbatch's forward to its backward."""
        return self._of_kept(self.options.memory_price or 0.0)

    @property
    def byte_prices(self) -> tuple[float, ...]:
        """The prices that a rank may pay to save one such byte less, ascending."""
        return tuple(map(self._of_kept, self.price_range)) or (self.byte_price,)

    def _of_kept(self, price: float) -> float:
        return price * max(map(max, self.live), default=0)

    @cached_property
    def sizes(self) -> Sizes:
        """The sizes that the local shape of a value depends on."""
        return Sizes(self.mesh, self.traced_rows, self.rows, self.pieces)

    @property
    def layouts_like(self) -> dict[str, tuple[object, ...]]:
        """The element layouts of the parameters of the program that this one follows (`like`), by first name."""
        assert self.like is not None
        return {spec.name: spec.element_layout(self.like.mesh) for spec in self.like.params}

    @property
    def traces_all(self) -> bool:
        """Whether the trace has all rows of a step."""
        return self.traced_rows == self.rows * self.pieces

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The pipeline rank of every stage."""
        return ranks_of_stages(self.orders)

    @property
    def wgrad_sink(self) -> str:
        """The attribute of a stage that takes the gradients of linear layers' weights; "" for autograd."""
        # W actions need the deferred weight gradients, whatever the other options are.
        if any(Kind.W in map(itemgetter(0), order) for order in self.orders):
            return "deferred"
        return "main_grads" if self.options.hooks.fp32_gradients else ""


__all__ = ["Context", "Findings"]
