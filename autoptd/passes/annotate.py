"""Find the named axes of every tensor, then a type with its reason for every value over every mesh axis
(TRACED -> ANNOTATED).

In: a graph of whole operators. Out: the same graph with `dims`, `layout`, `forms` and `why` in its notes.
`ctx.found` gets the solver's assignments and the operators that are not split as expected.

The types over the batch follow by rule (`samples.py`). Every other axis has a *policy*: what its ranks may split. The
solver finds the cheapest plan that splits only that (`solve/assign.py`). A new mesh axis is a row of `policies`. The
types over cp are solved after the conversions over tp are inserted, by the pass `tokens/split_tokens.py`.

    for policy in policies(ctx):
        policy.assign(graph, axes, ctx)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch.fx import Graph, Node

from autoptd.errors import InternalError, PlanError
from autoptd.ir.layout import BATCH
from autoptd.ir.mesh import AXES, Role, base
from autoptd.ir.notes import Fallback, is_tensor, note, output, placeholders, shape, site
from autoptd.passes.axes.axes import Axes
from autoptd.passes.context import Context
from autoptd.passes.runner import Form, graph_pass
from autoptd.passes.samples import assign_samples
from autoptd.passes.solve.assign import assign_tensor, find_plan, write_solved
from autoptd.passes.solve.assignment import Assignment
from autoptd.passes.solve.fallbacks import fallbacks, note_fallbacks
from autoptd.passes.solve.joint import solve_pairs
from autoptd.passes.solve.shard_pins import Pin, Pins, find_pins, keep_layouts, read_shard
from autoptd.passes.solve.splits import KeptPlan, Part, Splitter

# The axis that splits parameters, and that the pins of a plan are about.
WEIGHT_AXIS = "tp"


def check_traced(graph: Graph, ctx: Context) -> None:
    """Verify the assumptions of annotate on a TRACED graph; raise InternalError with all findings."""
    findings = [text for node in graph.nodes for text in _untraced(node)]
    loss = output(graph).args[0]
    if not isinstance(loss, Node) or not is_tensor(loss) or math.prod(shape(loss)) != 1:
        findings.append(f"the output {loss} is not a loss")
    if findings:
        raise InternalError("TRACED", "; ".join(findings))


def _untraced(node: Node) -> Iterator[str]:
    """Yield the errors of one node of a TRACED graph."""
    record = note(node)
    depends = record.kind == "param" or any(note(operand).of_params for operand in node.all_input_nodes)
    if node.op != "output" and record.of_params != depends:
        fact = "depends on parameters" if depends else "does not depend on parameters"
        yield f"{site(node)} {fact}, but its note says otherwise"
    if record.needs_grad and not record.of_params:
        yield f"{site(node)} needs a gradient but depends on no parameter"
    if record.layout.types or record.stages:
        yield f"{site(node)} is {record.layout} of stages {record.stages} already"


def check_annotated(graph: Graph, ctx: Context) -> None:
    """Verify the dims and types of an ANNOTATED graph; raise InternalError with all findings."""
    axes = {BATCH, *ctx.found.assignments}
    findings = [text for node in graph.nodes for text in _unannotated(node, axes)]
    for assignment in ctx.found.assignments.values():
        for node, strategy in assignment.strategies.items():
            types = note(node).layout.over(assignment.axis)
            if types != strategy.gives:
                fact = f"is {types} over {assignment.axis}, and was solved as {strategy.gives}"
                findings.append(f"{site(node)} {fact}")
    if findings:
        raise InternalError("ANNOTATED", "; ".join(findings))


def _unannotated(node: Node, axes: set[str]) -> Iterator[str]:
    """Yield the errors in the dims and types of one node."""
    record = note(node)
    if node.op == "output" or not is_tensor(node):
        return
    if record.dims and tuple(map(math.prod, record.dims)) != shape(node):
        yield f"{site(node)} of shape {shape(node)} has dims {record.dims}"
    for axis, kind in record.layout.types:
        if base(axis) not in axes:
            yield f"{site(node)} is {kind} over {axis}, which no policy assigns"
        if kind.kind != "S":
            continue
        # A dim of size 1 has no atoms, but a type may still name its atom 0.
        if kind.dim >= len(record.dims) or kind.atom > max(0, len(record.dims[kind.dim]) - 1):
            yield f"{site(node)} is {kind} over {axis}, and has dims {record.dims}"


@graph_pass(
    takes=Form.TRACED,
    gives=Form.ANNOTATED,
    changes=("rule", "dims", "layout", "forms", "why", "fallback", "rows", "draw"),
    finds=("axes", "assignments", "fallbacks"),
    requires=check_traced,
    ensures=check_annotated,
)
def annotate(graph: Graph, ctx: Context) -> None:
    """Fill the types of every node, over the batch and then over the mesh axes that divide values."""
    # Axes come first: they do not depend on the mesh, and everything below reads them.
    ctx.found.axes, ctx.found.assignments = Axes(graph), {}
    assign_samples(graph, ctx.found.axes, ctx)
    for policy in policies(ctx):
        policy.assign(graph, ctx.found.axes, ctx)
    ctx.found.fallbacks = tuple(_of_a_microbatch(fallback, ctx) for fallback in fallbacks(graph))


def _of_a_microbatch(fallback: Fallback, ctx: Context) -> Fallback:
    """Return the fallback with its FLOPs scaled to a microbatch, since the trace may have more samples."""
    return replace(fallback, flops=fallback.flops * ctx.rows // ctx.traced_rows)


@dataclass(frozen=True)
class Policy:
    """An axis whose ranks hold parts of values: the cheapest plan that splits only parts in `may_split`.

    With `keeps_products`, matrix products and parameters stay split as they would be without split tokens, and the operators
    between them are split by tokens wherever possible (Korthikanti et al. 2022).
    """

    axis: str
    may_split: frozenset[Part]
    keeps_products: bool = False

    def assign(self, graph: Graph, axes: Axes, ctx: Context) -> None:
        """Fill the type over the axis of every node; PlanError if that is impossible."""
        pins, degree = _pins(graph, ctx, self.axis), ctx.mesh.degree(self.axis)
        # Later passes read the assignment of every axis, even if nothing is split.
        if degree == 1:
            _refuse_pins(pins, self.axis)
            ctx.found.assignments[self.axis] = Assignment(self.axis)
            return

        def make_splitter(may_split: frozenset[Part]) -> Splitter:
            made = Splitter(
                graph, axes, self.axis, ctx.mesh, ctx.machine, ctx.batched, pins=pins, may_split=may_split
            )
            made.has_whole_tokens = not (Part.TOKENS in self.may_split or ctx.mesh.token_axes)
            # Batches of other lengths read the same parameters, so none may be split by the tokens of this batch.
            if ctx.options.shapes.how is not None:
                made.pins = {**_whole_in_tokens(graph, made), **pins}
            return made

        splitter = make_splitter(may_split=self.may_split)
        if self.keeps_products:
            _check_sequence_parallel(graph, splitter)
            # The plan without split tokens comes first; the plan with them must keep it.
            without = make_splitter(may_split=self.may_split - {Part.TOKENS})
            splitter.kept = KeptPlan(without, find_plan(graph, without))
        assignment = _assign(graph, splitter, ctx)
        note_fallbacks(graph, assignment, splitter)
        ctx.found.assignments[self.axis] = assignment


def _assign(graph: Graph, splitter: Splitter, ctx: Context) -> Assignment:
    """Solve an axis, together with that of tokens if there is one."""
    for axis in ctx.mesh.token_axes:
        joint = solve_pairs(graph, splitter, axis, ctx.batched, ctx.options.context.attention)
        if joint is not None:
            ctx.found.joint = joint
            return write_solved(joint.of_weights, splitter)
    return assign_tensor(graph, splitter)


def policies(ctx: Context) -> tuple[Policy, ...]:
    """Return the policies of the axes whose types are assigned in a TRACED graph, in this order."""
    # A new axis of Role.VALUES raises KeyError here until it has a policy.
    solved = {WEIGHT_AXIS: _tensor_policy(ctx.options.sequence_parallel)}
    return tuple(solved[axis] for axis in ctx.mesh.axes_of(Role.VALUES))


def _tensor_policy(sequence_parallel: bool | str) -> Policy:
    """Return the policy of tp: it splits weights and their products, and tokens if sequence parallelism is requested."""
    if not sequence_parallel:
        return Policy(WEIGHT_AXIS, frozenset({Part.WEIGHTS}))
    return Policy(WEIGHT_AXIS, frozenset(Part), keeps_products=sequence_parallel is True)


def _pins(graph: Graph, ctx: Context, axis: str) -> Pins:
    """Return the parameters pinned over an axis: by the plan, or all parameters of the program that this one follows."""
    # An evaluation reads parameters where training stored them: its own plan would move them.
    if ctx.like is not None:
        return keep_layouts(graph, ctx.layouts_like)
    pinned = read_shard(ctx.options.plan.shard, [WEIGHT_AXIS], WEIGHT_AXIS)
    return find_pins(graph, pinned[axis])


def _whole_in_tokens(graph: Graph, splitter: Splitter) -> Pins:
    """Pin the parameters with a dim of tokens, such as learned positions, to be whole."""
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
        raise PlanError("plan: shard", fact, f"{degree} > 1, or remove the entry")


def _check_sequence_parallel(graph: Graph, splitter: Splitter) -> None:
    """Raise PlanError for sequence parallelism if t divides no number of tokens."""
    different: set[int] = set()
    for node in placeholders(graph, "input"):
        for dim in range(len(note(node).dims)):
            atoms = splitter.axes.atoms(node, dim)
            different.update(axis.size for axis in atoms if id(axis) in splitter.tokens)
    sizes = sorted(different)
    # The tokens of one input are enough: those of a decoder may divide, and those of its encoder not.
    if any(size % splitter.degree == 0 for size in sizes):
        return
    fact, remedy = "no input has a dim of tokens besides its batch", "remove it"
    if sizes:
        degree = splitter.mesh.product_text([splitter.axis])
        fact = f"{' and '.join(map(str, sizes))} tokens do not divide over {degree}"
        remedy = f"a multiple of {splitter.degree} tokens, or sequence_parallel='auto'"
    raise PlanError("sequence_parallel=True", fact, remedy)
