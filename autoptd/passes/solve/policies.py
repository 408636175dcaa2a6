"""What the ranks along an axis may split, and how that is decided: one policy per axis.

In: a TRACED graph, the named axes of its dims, the context. Out: the types of every value over the policy's
axis, with reasons; what was solved, in `ctx.found.assignments`.

- The batch follows by rule from the inputs that carry it (`batch_types.py`): samples are never mixed.
- An axis of the mesh that divides values is solved: whatever is cheapest of what it may split (`assign.py`).

A new mesh axis is a row of `policies`. That of context parallelism is solved behind the conversions over tp, by a pass of its
own (`passes/tokens/split_tokens.py`).

    for policy in policies(ctx):
        policy.assign(graph, axes, ctx)
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from torch.fx import Graph

from autoptd.errors import PlanError
from autoptd.ir.layout import BATCH
from autoptd.ir.mesh import AXES, Role
from autoptd.ir.notes import note, placeholders
from autoptd.options import Options
from autoptd.passes.axes.axes import Axes
from autoptd.passes.axes.constants import Constants
from autoptd.passes.context import Context
from autoptd.passes.solve.assign import Assignment, assign_tensor, find_plan, write_solved
from autoptd.passes.solve.batch_types import assign_batch
from autoptd.passes.solve.dropout_rows import place_rows
from autoptd.passes.solve.eliminate import TableTooLarge
from autoptd.passes.solve.fallbacks import note_fallbacks
from autoptd.passes.solve.literals import check_literals
from autoptd.passes.solve.row_groups import place_batch
from autoptd.passes.solve.shard_pins import Pin, Pins, find_pins, keep_layouts, read_shard
from autoptd.passes.solve.strategies import KeptPlan, Part, Splitter
from autoptd.passes.solve.symbols import name_axes
from autoptd.passes.solve.tokens import TokenSplitter
from autoptd.passes.solve.two_axes import solve_pairs
from autoptd.program.follow import layouts_of

# The axis that splits parameters, which pins of a plan are about.
WEIGHT_AXIS = "tp"


class Policy(Protocol):
    """The way in which one axis gets its types."""

    @property
    def axis(self) -> str: ...

    def assign(self, graph: Graph, axes: Axes, ctx: Context) -> None:
        """Fill the type over the axis of every node; PlanError for what cannot be."""


@dataclass(frozen=True)
class ByRule:
    """The batch: microbatches and replicas hold different samples; operators keep them apart, or read those of all replicas."""

    axis: str = BATCH

    def assign(self, graph: Graph, axes: Axes, ctx: Context) -> None:
        constants = Constants(ctx.buffers)
        atom = place_batch(graph, ctx)
        assign_batch(graph, axes, set(ctx.batched), ctx.pieces, constants, atom, mixes=ctx.mixes)
        place_rows(graph, set(ctx.batched), ctx.pieces, ctx.buffers, atom)
        if ctx.second is not None:
            check_literals(graph, ctx.second, constants, traces_all=ctx.traces_all)


@dataclass(frozen=True)
class Solved:
    """An axis whose ranks hold parts of values: the cheapest plan that splits only what it `may_split`.

    With `keeps_products`, matrix products and parameters stay split as they would be without tokens; the operators between
    them are split by tokens wherever they can be (Korthikanti et al. 2022).
    """

    axis: str
    may_split: frozenset[Part]
    keeps_products: bool = False

    def assign(self, graph: Graph, axes: Axes, ctx: Context) -> None:
        pins, degree = _pins(graph, ctx, self.axis), ctx.mesh.degree(self.axis)
        # Later passes ask for the assignment of every axis, also where nothing is split.
        if degree == 1:
            _refuse_pins(pins, self.axis)
            ctx.found.assignments[self.axis] = Assignment(self.axis, {}, {}, lambda *_: 0.0, lambda *_: 0.0)
            return

        def make_splitter(may_split: frozenset[Part]) -> Splitter:
            made = Splitter(
                graph, axes, self.axis, ctx.mesh, ctx.machine, ctx.batched, pins=pins, may_split=may_split
            )
            made.has_whole_tokens = not (Part.TOKENS in self.may_split or ctx.mesh.token_axes)
            # Batches of other lengths read the same parameters: none is split by the tokens of this one.
            if ctx.options.shapes.how is not None:
                made.pins = {**_whole_in_tokens(graph, made), **pins}
            return made

        splitter = make_splitter(may_split=self.may_split)
        if self.keeps_products:
            _check_tokens(graph, splitter)
            # The plan without tokens comes first; it is what the plan with tokens must keep.
            without = make_splitter(may_split=self.may_split - {Part.TOKENS})
            splitter.kept = KeptPlan(without, find_plan(graph, without))
        assignment = _assign(graph, axes, splitter, ctx)
        note_fallbacks(graph, assignment, splitter)
        assignment.letters = name_axes(graph, splitter)
        ctx.found.assignments[self.axis] = assignment


def _assign(graph: Graph, axes: Axes, splitter: Splitter, ctx: Context) -> Assignment:
    """Solve an axis; together with that of tokens, where there is one."""
    for axis in ctx.mesh.token_axes:
        with suppress(TableTooLarge):
            ctx.found.joint = solve_pairs(graph, splitter, TokenSplitter(graph, axes, axis, ctx))
            return write_solved(ctx.found.joint.of_weights, splitter)
    return assign_tensor(graph, splitter)


def policies(ctx: Context) -> tuple[Policy, ...]:
    """Return the policies of the axes whose types are found in a TRACED graph, in the order in which they assign them."""
    # By axis. A new one of Role.VALUES raises KeyError here until it has a policy.
    solved = {WEIGHT_AXIS: _tensor_policy(ctx.options)}
    return (ByRule(), *(solved[axis] for axis in ctx.mesh.axes_of(Role.VALUES)))


def _tensor_policy(options: Options) -> Solved:
    """Return the policy of tp: it splits weights and their products, and tokens if sequence parallelism is asked for."""
    plain = Solved(WEIGHT_AXIS, frozenset({Part.WEIGHTS}))
    if not options.sequence_parallel:
        return plain
    keeps = options.sequence_parallel is True
    return replace(plain, may_split=plain.may_split | {Part.TOKENS}, keeps_products=keeps)


def _pins(graph: Graph, ctx: Context, axis: str) -> Pins:
    """Return the parameters pinned over an axis: by the plan, or all of the program whose layout this one must match."""
    # An evaluation reads parameters where training stored them: its own plan would move them.
    if ctx.like is None:
        pinned = read_shard(ctx.options.plan.shard, [WEIGHT_AXIS], WEIGHT_AXIS)
        return find_pins(graph, pinned[axis])
    return keep_layouts(graph, layouts_of(ctx.like))


def _whole_in_tokens(graph: Graph, splitter: Splitter) -> Pins:
    """Pin whole the parameters that have a dim of tokens: learned positions."""
    pins: Pins = {}
    for node in placeholders(graph, "param"):
        if splitter.axes.has(node) and any(map(splitter.tokens.intersection, splitter.axes.ids(node))):
            pins[node] = Pin(note(node).name, None)
    return pins


def _refuse_pins(pins: Pins, axis: str) -> None:
    """Raise PlanError for a pinned shard along an axis of one rank."""
    split = [pin for pin in pins.values() if pin.dim is not None]
    if split:
        degree = AXES[axis].degree
        fact = f"{split[0]}, but {degree}=1 splits nothing"
        raise PlanError("plan: shard", fact, f"{degree} > 1, or leave it out")


def _check_tokens(graph: Graph, splitter: Splitter) -> None:
    """Raise PlanError for sequence parallelism where no number of tokens divides over t."""
    different: set[int] = set()
    for node in placeholders(graph, "input"):
        for dim in range(len(note(node).dims)):
            atoms = splitter.axes.atoms(node, dim)
            different.update(axis.size for axis in atoms if id(axis) in splitter.tokens)
    sizes = sorted(different)
    # One input's tokens are enough: an encoder's may not divide where a decoder's do.
    if any(size % splitter.degree == 0 for size in sizes):
        return
    fact, remedy = "no input has tokens beside its batch", "leave it out"
    if sizes:
        degree = splitter.mesh.product_text([splitter.axis])
        fact = f"{' and '.join(map(str, sizes))} tokens do not divide over {degree}"
        remedy = f"a multiple of {splitter.degree} tokens, or sequence_parallel='auto'"
    raise PlanError("sequence_parallel=True", fact, remedy)


__all__ = ["ByRule", "Policy", "Solved", "policies"]
