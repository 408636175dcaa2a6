"""Assign the batch: which values carry it, which are partial sums over it, and which operators would mix samples.

Microbatches and data-parallel replicas are one axis here, and every value gets a type over it. Batch inputs are `S` at their
first dim, values of parameters alone `R`, constants `I`, and a loss that contracts the batch `P`: the pieces of all
microbatches and replicas add up to the loss of the global batch. An operator whose rules do not keep the batch letter is
refused, with operator, module and remedy, as it would mix samples. If replicas have one microbatch each, it may instead read
values of all replicas whole (`over_batch.py`).

A sum over the batch of values that depend on inputs only (the tokens of a mask) is known before the first forward. Any operator
may read it, and gets the sum over the whole batch, a *batch sum*.

A second trace shows which Python numbers follow the batch size: `samples.py`.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import replace

import torch
from torch.fx import Graph, Node

from autoptd.errors import InternalError, PlanError
from autoptd.ir.layout import BATCH
from autoptd.ir.noise import is_draw
from autoptd.ir.notes import (
    copy_graph,
    note,
    op_name,
    ops,
    output,
    shape,
    site,
    tensor,
)
from autoptd.ir.operators.links import UNCOUNTED
from autoptd.ir.operators.record import CLASSES, QUERIES, argument, operands
from autoptd.ir.operators.table import linear_groups, operator_of
from autoptd.ir.outputs import OUTPUT
from autoptd.ir.types import I, P, R, S, ValueType
from autoptd.ir.updates import KEEP
from autoptd.options.elsewhere import NORMS, SORTS
from autoptd.passes.axes.axes import Axes, Letter, Place
from autoptd.passes.axes.constants import Constants
from autoptd.passes.ops.costs import flops

APART = "keep samples apart (loss_fn with a mean or sum over samples)"
ONE, ALONE = "or run with num_microbatches=1", "or run with d=1 and num_microbatches=1"
RULE_REMEDY, ONE_REMEDY = f"{APART}, {ALONE}", f"{APART}, {ONE}"
UNKNOWN_REMEDY = (
    'autoptd.register_rule("ns::op", "b s d -> b s d") if it keeps samples apart, or plain operators (sums, products, views, '
    "gather), or d=1 and num_microbatches=1"
)
NUMBER_REMEDY = f"the number itself, as in loss / x.shape[0]; or {RULE_REMEDY}"
COUNT_REMEDY = "F.cross_entropy(..., reduction='none').mean(), and class weights in a buffer"
# Marks a loss that every microbatch computes from its own rows.
MARK = "autoptd.per_microbatch"
# Dropout masks have 32 bits for the number of an element within a sample.
MAX_COLUMNS = 1 << 32
# Remedies for operators that suggest what the user wants.
REMEDIES = {"aten.sort": f"{ONE_REMEDY}; {SORTS}"}


class MixedSamples(PlanError):
    """An operator may compute across rows of the batch; users get a PlanError.

    `is_layer`: it has a weight, and reads rows that are mixed already: each replica would compute it for the rows of all.
    """

    is_layer = False

    def refused(self, *, in_one: bool = False) -> PlanError:
        """Return the error for users; `in_one`: replicas already have one microbatch each."""
        return PlanError(self.site, self.fact, self.remedy.replace(ONE, ALONE) if in_one else self.remedy)


class RowGroups(PlanError):
    """The model reads `group` rows together, which does not divide the rows of a microbatch; users get a PlanError."""

    def __init__(self, site: str, group: int, rows: int) -> None:
        self.group = group
        fact = f"the model reads {group} rows together, and a microbatch has {rows}"
        super().__init__(
            site, fact, f"a num_microbatches= with a multiple of {group} rows in each microbatch"
        )


def assign_batch(
    graph: Graph,
    axes: Axes,
    batched: set[str],
    pieces: int,
    constants: Constants,
    atom: int = 0,
    *,
    mixes: bool = False,
    but: Container[Node] = frozenset(),
) -> None:
    """Fill the type over the batch of every node, except those in `but`; `pieces` = microbatches x replicas.

    The batch is an `atom` of dim 0 of the inputs, if they have several there (`place_batch`). `mixes`: replicas have one
    microbatch each, and the trace has the rows of all, so that operators may read values whole. Raises PlanError for
    operators that would mix samples.
    """
    # With a single batch, operators may mix samples, such as batch norm.
    if pieces == 1:
        return
    note_marked(graph)
    for node in graph.nodes:
        record = note(node)
        if record.kind == "param":
            record.layout = record.layout.having(BATCH, R)
        elif record.kind == "input" and record.name in batched:
            last = max(len(record.dims[0]) - 1, 0)
            record.layout = record.layout.having(BATCH, S(0, min(atom, last)))
        elif node.op == "call_function" and node not in but:
            record.layout = record.layout.having(BATCH, type_of(node, axes, constants, mixes))
    loss = output(graph).args[0]
    assert isinstance(loss, Node)
    kind = note(loss).layout.batch
    # If it read all rows, every replica has the whole loss, and counts its share of it (`over_batch.py`).
    is_sum = kind.kind == "P" and not note(loss).rows.is_largest
    if not is_sum and not (kind == R and note(loss).rows.of_all):
        raise PlanError(
            site(loss),
            "the loss does not contract the batch: it is not a sum or mean over samples",
            RULE_REMEDY,
        )


def type_of(node: Node, axes: Axes, constants: Constants, mixes: bool) -> ValueType:
    """Return the type of an operator whose operands have theirs; note the operands that it reads in another type."""
    if op_name(node) == MARK:
        return _marked_type(node)
    if op_name(node) == KEEP:
        return _kept_type(node)
    if op_name(node) == OUTPUT:
        return _output_type(node)
    read = list(dict.fromkeys(operands(node)))
    types = {operand: note(operand).layout.batch for operand in read}
    split = {operand: kind for operand, kind in types.items() if kind.kind == "S"}
    partial = [operand for operand, kind in types.items() if kind.kind == "P"]
    # A loss that is meant for each microbatch alone may not read the rows of others.
    mixes = mixes and not note(node).rows.of_microbatch
    if _keeps_partial(node, partial, bool(split)):
        return P
    summed = list(filter(_is_known, partial))
    if summed:
        note(node).rows = replace(note(node).rows, sums=summed)
        types |= dict.fromkeys(summed, I)
        partial = [operand for operand in partial if operand not in summed]
        if _keeps_partial(node, partial, bool(split)):
            return P
    if partial and not mixes:
        raise _partial_error(node)
    whole = [operand for operand in read if note(operand).rows.of_all] + partial
    # Samples stay apart if one letter runs along the batch of all operands that carry it.
    letter = _common_letter(node, axes, split) if split else None
    if split and letter is None:
        if not mixes and _is_largest(node, split):
            note(node).rows = replace(note(node).rows, is_largest=True)
            return P
        if not (mixes and axes.is_known(node)):
            raise _mixing_error(node, axes, split)
        whole += split
    # A value with all rows cannot be combined with one that has a part of them.
    elif letter is not None and not letter.places.keys().isdisjoint(whole):
        whole += split
    if whole and (letter is None or not split.keys().isdisjoint(whole)):
        split, letter = {}, None
    taken = [operand for operand in whole if types[operand].kind in "SP"]
    if taken:
        note(node).rows = replace(note(node).rows, taken_whole=taken)
    if whole and letter is None:
        _refuse_layer(node)
        note(node).rows = replace(note(node).rows, of_all=True)
    if letter is None:
        return _whole_type(node, axes, is_of_params=bool(whole) or R in types.values())
    # Operands with the letter that do not carry the batch are constants: their rows are equal, or they carry it, too.
    for operand, place in letter.places.items():
        if operand in split:
            continue
        if operand in summed:
            fact = f"{site(operand)} is a sum over the batch with one entry per row of it"
            raise PlanError(site(node), fact, "remove the expand: a sum is broadcast")
        # An expanded mask [b, 1, s, s], for example: any b of its rows are right for any b samples.
        if constants.has_equal_rows(operand, place[0]):
            equal = {**note(node).rows.equal, operand: place}
            note(node).rows = replace(note(node).rows, equal=equal)
        else:
            _demand(operand, place, axes, node)
    # A sum or mean over the rows of a microbatch is whole if it is meant for that microbatch alone.
    if letter.out is None and note(node).rows.of_microbatch:
        return R if note(node).of_params else I
    if letter.form and letter.out is None:
        note(node).forms = {**note(node).forms, BATCH: letter.form}
    return S(*letter.out) if letter.out is not None else P


def _whole_type(node: Node, axes: Axes, is_of_params: bool) -> ValueType:
    """Return the type of a value that every piece has in full."""
    # Backward runs once per microbatch on a part of the gradient; the parts add up only if it is linear.
    if is_of_params and note(node).needs_grad and not axes.is_linear(node):
        fact = f"{op_name(node)} of parameters: {axes.refused(node)}, and each microbatch passes it a part of the gradient"
        raise PlanError(site(node), fact, "a backward that is linear, or d=1 and num_microbatches=1")
    return R if is_of_params else I


def _refuse_layer(node: Node) -> None:
    """Raise MixedSamples for a product with a weight: samples are then mixed within the model, not in a loss."""
    weights = [
        operand
        for operand in operands(node)
        if note(operand).layout.batch == R and not note(operand).rows.of_all
    ]
    # An operator without a record may be a product, for example a grouped one.
    is_unlisted = bool(note(node).rule) and any(tensor(weight).dim() > 1 for weight in weights)
    if is_unlisted or (weights and (flops(node) or op_name(node).startswith("aten.conv"))):
        fact = f"{op_name(node)} is a layer for the rows of all replicas"
        error = MixedSamples(site(node), fact, RULE_REMEDY)
        error.is_layer = True
        raise error


def _marked_type(node: Node) -> ValueType:
    """Return the type of a marked loss: a part of the mean over microbatches; PlanError if it has none for each."""
    (operand,) = operands(node)
    kind = note(operand).layout.batch
    if kind.is_whole:
        return P
    fact = f"the marked value {'carries the batch' if kind.kind == 'S' else 'is also read elsewhere'}"
    raise PlanError(site(node), fact, "mark a sum or mean over the rows that no other operator reads")


def _kept_type(node: Node) -> ValueType:
    """Return the type of a loss that keeps a part of an update alive; rows are read whole (`buffer_updates.py`)."""
    loss, part = operands(node)
    kind = note(part).layout.batch
    if kind.kind == "S":
        note(node).rows = replace(note(node).rows, taken_whole=[part])
    if (kind.kind == "P") != node.args[3]:
        raise InternalError(site(node), f"keeps a part that is {kind} over the batch")
    if note(loss).rows.of_all:
        note(node).rows = replace(note(node).rows, of_all=True)
    return note(loss).layout.batch


def _output_type(node: Node) -> ValueType:
    """Return the type of a loss that keeps an output alive: rows of the batch, a sum over it, or what no row changes."""
    loss, x = operands(node)
    kind = note(x).layout.batch
    if kind.kind == "S" and (kind.dim, kind.atom) != (0, 0):
        fact = f"outputs= gives a tensor of shape {shape(x)}, whose outermost dim is not the batch"
        raise PlanError(site(x), fact, "a value with the batch in dim 0, one sample after the other")
    if note(x).rows.is_largest:
        fact = "outputs= gives the largest entries over the batch, and each microbatch has its own"
        raise PlanError(site(x), fact, "the largest of each sample, and their maximum outside")
    if note(loss).rows.of_all:
        note(node).rows = replace(note(node).rows, of_all=True)
    return note(loss).layout.batch


def _common_letter(node: Node, axes: Axes, split: dict[Node, ValueType]) -> Letter | None:
    """Return the letter that all operands with the batch have where they carry it."""
    wanted = {operand: (kind.dim, kind.atom) for operand, kind in split.items()}
    for letter in axes.letters(node):
        # A microbatch is one run of samples, not a chunk of every segment, and exchanges nothing with others.
        is_apart = not letter.has_segments and not letter.form.startswith((CLASSES, QUERIES))
        if is_apart and wanted.items() <= letter.places.items():
            return letter
    return None


def _keeps_partial(node: Node, partial: list[Node], split: bool) -> bool:
    """Tell whether an operator on partial sums is linear in them; the pieces share a whole addend."""
    if split or not partial or any(note(operand).rows.is_largest for operand in partial):
        return False
    group = next((group for group in linear_groups(node) if set(partial) <= set(group)), None)
    # An integer has no equal parts.
    is_linear = group is not None and all(x in partial or _divides(tensor(x)) for x in group)
    return is_linear or _is_float_cast(node) or adds_number(node)


def _divides(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _is_largest(node: Node, split: dict[Node, ValueType]) -> bool:
    """Tell whether a value is the maximum over the batch of a value that is known before the first forward."""
    if op_name(node) != "aten.amax" or note(node).rows.of_microbatch or not _is_known(node):
        return False
    ((operand, kind),) = split.items()
    dims = argument(node, "dim") or range(tensor(operand).dim())
    return kind.dim in [dim % tensor(operand).dim() for dim in dims]


def _is_known(node: Node) -> bool:
    """Tell whether a value can be computed before the first forward: from inputs and buffers alone, without random numbers."""
    stack, seen = [node], {node}
    while stack:
        read = stack.pop()
        if note(read).of_params or operator_of(read).is_random or tensor(read).is_complex():
            return False
        if note(read).rows.of_all or note(read).rows.taken_whole:
            return False
        stack += [operand for operand in operands(read) if operand not in seen]
        seen.update(operands(read))
    return True


def _partial_error(node: Node) -> MixedSamples:
    """Make the error for an operator on a partial sum over samples that is not linear in it."""
    if note(node).origin.batch_norm:
        fact = "batch norm in training computes means over the whole batch, which several microbatches do not have"
        return MixedSamples(site(node), fact, f"{NORMS}, {ONE}")
    fact = f"{op_name(node)} of a sum over samples is not a sum over samples"
    remedy = f"make the loss a sum or mean over samples that is only scaled and added to others, {ONE}"
    if op_name(node) in ("aten.mul", "aten.square", "aten.pow", "aten.dot", "aten.matmul"):
        remedy += (
            "; autoptd.per_microbatch(x) marks an auxiliary loss that is meant for each microbatch alone"
        )
    if op_name(node) == "aten.nan_to_num":
        remedy = "remove it: a step raises if the loss is NaN, and continues with RankOptions(nan='ignore')"
    if op_name(node) == "aten.div" and len(operands(node)) > 1:
        remedy += "; a divisor may be any sum over inputs, but not over values that depend on parameters"
    return MixedSamples(site(node), fact, remedy)


def _is_float_cast(node: Node) -> bool:
    """Tell whether `node` is like `loss.float()`, which may run on every part of a sum."""
    is_cast = operator_of(node).moves == "cast"
    return is_cast and all(tensor(value).is_floating_point() for value in (node, *operands(node)))


def adds_number(node: Node) -> bool:
    """Tell whether `node` is like `loss + 0.5` or `1 - loss`: each part of a sum adds its share (communicate.py)."""
    if not operator_of(node).is_sum or not tensor(node).is_floating_point():
        return False
    return len(operands(node)) == 1 and isinstance(node.args[0], Node)


def _mixing_error(node: Node, axes: Axes, split: dict[Node, ValueType]) -> PlanError:
    """Make the error for an operator whose operands carry the batch, and that no rule splits by samples."""
    if not axes.is_known(node):
        fact = f"{op_name(node)} has no rule, its operand carries the batch, and probing refused it: "
        return MixedSamples(site(node), fact + axes.refused(node), UNKNOWN_REMEDY)
    operand, kind = next(iter(split.items()))
    reason = axes.whole_because(node, operand, (kind.dim, kind.atom))
    remedy = COUNT_REMEDY if UNCOUNTED in reason else REMEDIES.get(op_name(node), ONE_REMEDY)
    return MixedSamples(site(node), f"{op_name(node)} mixes the samples of the batch ({reason})", remedy)


def _demand(node: Node, place: Place, axes: Axes, reader: Node) -> None:
    """Let a constant that is combined with the batch elementwise (zeros, an expanded table) carry the batch itself."""
    record = note(node)
    wanted = S(*place)
    if record.layout.batch == wanted:
        return
    fact = f"{site(node)} has one entry per row of the batch but does not come from the batch"
    letters = []
    if node.op == "call_function":
        letters = [letter for letter in axes.letters(node) if letter.out == place]
    # It already carries the batch in another dim, or its own operator has no letter there.
    if record.layout.batch.kind == "S" or not letters:
        raise PlanError(site(reader), fact, "pass it to the model as an input")
    for operand, inner in letters[0].places.items():
        _demand(operand, inner, axes, node)
    record.layout = record.layout.having(BATCH, wanted)
    for user in node.users:
        # Nodes compare by their order in the graph: those before `reader` already have their types.
        is_typed = user is not reader and user.op == "call_function" and user < reader
        if is_typed and note(user).layout.batch.kind != "S":
            raise PlanError(site(reader), fact, "pass it to the model as an input")


def note_marked(graph: Graph) -> None:
    """Note the operators that only marks read, directly or through others.

    A sum of theirs over the batch is that of a microbatch, not a part of a larger one; the mark turns it into a part of the
    mean over all microbatches.
    """
    for node in reversed(graph.nodes):
        if node.op == "call_function" and node.users and all(map(_is_marked, node.users)):
            note(node).rows = replace(note(node).rows, of_microbatch=True)


def _is_marked(reader: Node) -> bool:
    return op_name(reader) == MARK or note(reader).rows.of_microbatch


def place_rows(
    graph: Graph, batched: set[str], pieces: int, buffers: Mapping[str, torch.Tensor], atom: int = 0
) -> None:
    """Note which dim of every dropout carries the batch, as its mask is numbered by sample: `note(node).draw.rows`, S or I.

    `batched` are the inputs that carry the batch, as `atom` of their dim 0. A step of one piece (one microbatch, one
    replica) has no batch types, but must draw the same masks as a step of several: types are assigned on a copy of the
    graph. A value computed from all rows at once is numbered as a whole, and gets I. Raises PlanError for a dropout with too
    many elements per sample.
    """
    dropouts = [node for node in ops(graph) if is_draw(node)]
    if not dropouts:
        return
    kinds = _batch_types(graph, dropouts, batched, pieces, buffers, atom)
    for node, kind in zip(dropouts, kinds, strict=True):
        rows = 1
        note(node).draw = replace(note(node).draw, rows=I)
        if kind.kind == "S":
            # A dim of size 1 has no atoms.
            atoms = note(node).dims[kind.dim]
            rows = atoms[kind.atom] if atoms else 1
            # If rows are numbered within a half, those of every dropout must be.
            if atom and not kind.atom:
                fact = f"its rows are not in {note(node).dims[kind.dim]}, unlike those of the inputs"
                raise PlanError(site(node), fact, "neighboring rows in pairs, view(-1, 2), instead of halves")
            note(node).draw = replace(note(node).draw, rows=kind)
        columns = math.prod(shape(node)) // rows
        if columns > MAX_COLUMNS:
            fact = f"{columns:,} elements per row of the batch exceed the 2**32 that a mask can number"
            raise PlanError(site(node), fact, "dropout on a smaller value, or p=0")


def _batch_types(
    graph: Graph,
    dropouts: list[Node],
    batched: set[str],
    pieces: int,
    buffers: Mapping[str, torch.Tensor],
    atom: int,
) -> list[ValueType]:
    if pieces > 1:
        return [note(node).layout.batch for node in dropouts]
    # As for several replicas, first with samples kept apart, then with one microbatch each.
    for mixes in (False, True):
        trial = copy_graph(graph)
        copies = dict(zip(graph.nodes, trial.nodes, strict=True))
        try:
            assign_batch(trial, Axes(trial), batched, 2, Constants(buffers), atom, mixes=mixes)
        except PlanError:
            continue
        return [note(copies[node]).layout.batch for node in dropouts]
    return [I] * len(dropouts)
