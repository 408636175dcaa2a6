"""Assign the batch: which values carry it, which are partial sums over it, and what would mix samples.

Microbatches and data-parallel replicas are one axis here: every value gets a type over it. Batch inputs are `S` at their
first dim, values of parameters alone `R`, constants `I`, and a loss that contracts the batch `P`: the pieces of all
microbatches and replicas add up to the loss of the global batch. An operator that has no rule keeping the batch letter is
refused, with operator, module and remedy: samples must not be mixed.

A sum over the batch of what depends on inputs only (the tokens of a mask) is known before the first forward, so any operator
may read it: it gets the sum of the whole batch, a *batch sum*.

A second trace with the rows of the whole batch (`check_literals`) shows which Python numbers follow the batch size. What
computes entry by entry takes those of the whole batch; nothing else may depend on it, and constants which follow it are the
same for every microbatch.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autoptd.errors import PlanError
from autoptd.ir.elsewhere import NORMS, SORTS
from autoptd.ir.layout import BATCH
from autoptd.ir.notes import OF_MICROBATCH, WHOLE_NUMBERS, note, op_name, output, shape, site, tensor, value
from autoptd.ir.operators.lookups import UNCOUNTED
from autoptd.ir.operators.record import CLASSES, QUERIES, argument, operands
from autoptd.ir.operators.table import is_pointwise, linear_groups, operator_of
from autoptd.ir.types import I, P, R, S, ValueType
from autoptd.passes.axes.axes import Axes, Letter, Place
from autoptd.passes.axes.constants import Constants
from autoptd.passes.solve.microbatch_losses import MARK, note_marked

RULE_REMEDY = (
    "keep samples apart (loss_fn with a mean or sum over samples), or run with d=1 and num_microbatches=1"
)
UNKNOWN_REMEDY = (
    'autoptd.register_rule("ns::op", "b s d -> b s d") where it keeps samples apart, or plain operators '
)
UNKNOWN_REMEDY += "(sums, products, views, gather), or d=1 and num_microbatches=1"
NUMBER_REMEDY = f"the number itself, as in loss / x.shape[0]; or {RULE_REMEDY}"
COUNT_REMEDY = "F.cross_entropy(..., reduction='none').mean(), and class weights in a buffer"
# Where an operator tells more of what the user wants.
REMEDIES = {"aten.batch_norm": NORMS, "aten.sort": f"{RULE_REMEDY}; {SORTS}"}
DEVIATION = f"of inputs, sums written out: (x - x.mean()).square().sum(); else {RULE_REMEDY}"
REMEDIES |= {"aten.std": DEVIATION, "aten.var": DEVIATION}
# Key of Note.extra: operands whose rows are all equal -> the place where they meet the batch.
FIRST_ROWS = "first_rows"
# Operands that are read as batch sums.
BATCH_SUMS = "batch_sums"


class MixedSamples(PlanError):
    """An operator computes across rows of the batch, as far as a trace shows; users get a PlanError."""


def assign_batch(
    graph: Graph, axes: Axes, batched: set[str], pieces: int, constants: Constants, atom: int = 0
) -> None:
    """Fill the type over the batch of every node; `pieces` = microbatches x replicas (one piece: no split).

    The batch is an `atom` of dim 0 of the inputs that have several there (`row_groups.py`).
    Raises PlanError, with site, fact and remedy, for what would mix samples.
    """
    # Whatever mixes samples is allowed then, as batch norm: there is only one batch.
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
        elif node.op == "call_function":
            record.layout = record.layout.having(BATCH, _type_of(node, axes, constants))
    loss = output(graph).args[0]
    assert isinstance(loss, Node)
    kind = note(loss).layout.batch
    if kind.kind != "P":
        raise PlanError(
            site(loss), "the loss does not contract the batch: it is no sum or mean over samples", RULE_REMEDY
        )


def _type_of(node: Node, axes: Axes, constants: Constants) -> ValueType:
    if op_name(node) == MARK:
        return _marked_type(node)
    read = list(dict.fromkeys(operands(node)))
    types = {operand: note(operand).layout.batch for operand in read}
    split = {operand: kind for operand, kind in types.items() if kind.kind == "S"}
    partial = [operand for operand, kind in types.items() if kind.kind == "P"]
    summed = [] if _keeps_partial(node, partial, bool(split)) else list(filter(_is_known, partial))
    if summed:
        note(node).extra[BATCH_SUMS] = summed
        types |= dict.fromkeys(summed, I)
        partial = [operand for operand in partial if operand not in summed]
    if not split and not partial:
        # Backward runs once per microbatch on a part of the gradient; the parts add up only if it is linear.
        if R in types.values() and not axes.is_linear(node):
            fact = f"{op_name(node)} of parameters: {axes.refused(node)}, and each microbatch gives it a part of the gradient"
            raise PlanError(site(node), fact, "a backward that is linear, or d=1 and num_microbatches=1")
        return R if R in types.values() else I
    # A sum over samples: what follows, such as scaling the loss, must not tell the parts from the whole.
    if partial:
        return _keep_partial(node, partial, bool(split))
    # Samples stay apart where one letter runs along the batch of all operands that carry it.
    letter = _common_letter(node, axes, split)
    if letter is None:
        raise _mixing_error(node, axes, split)
    # Operands with the letter that do not carry the batch are constants.
    for operand, place in letter.places.items():
        if operand in split:
            continue
        if operand in summed:
            fact = f"{site(operand)} is a sum over the batch with one entry per row of it"
            raise PlanError(site(node), fact, "leave the expand out: a sum is broadcast")
        # An expanded mask [b, 1, s, s], for example: any b rows of it are right for any b samples.
        if constants.has_equal_rows(operand, place[0]):
            note(node).extra.setdefault(FIRST_ROWS, {})[operand] = place
        else:
            _demand(operand, place, axes, node)
    # Of a microbatch alone, a sum or mean over its rows is whole.
    if letter.out is None and OF_MICROBATCH in note(node).extra:
        return R if note(node).of_params else I
    if letter.form and letter.out is None:
        note(node).forms = {**note(node).forms, BATCH: letter.form}
    return S(*letter.out) if letter.out is not None else P


def _marked_type(node: Node) -> ValueType:
    """Return the type of what is meant for every microbatch: a part of their mean; PlanError for what has no such value."""
    (operand,) = operands(node)
    kind = note(operand).layout.batch
    if kind.is_whole:
        return P
    fact = "what it marks carries the batch" if kind.kind == "S" else "what it marks is also read elsewhere"
    raise PlanError(site(node), fact, "mark a sum or mean over the rows, which nothing else reads")


def _common_letter(node: Node, axes: Axes, split: dict[Node, ValueType]) -> Letter | None:
    """Return the letter that all operands with the batch have where they carry it."""
    wanted = {operand: (kind.dim, kind.atom) for operand, kind in split.items()}
    for letter in axes.letters(node):
        # A microbatch is one run of samples, not a chunk of every segment, and computes nothing together with others.
        is_apart = not letter.has_segments and not letter.form.startswith((CLASSES, QUERIES))
        if is_apart and wanted.items() <= letter.places.items():
            return letter
    return None


def _keeps_partial(node: Node, partial: list[Node], split: bool) -> bool:
    """Tell whether an operator of pending sums gives a pending sum.

    Linear operators do; a whole addend is shared among the pieces.
    """
    if split or not partial:
        return False
    is_linear = any(set(partial) <= set(group) for group in linear_groups(node))
    return is_linear or _is_float_cast(node) or adds_number(node)


def _is_known(node: Node) -> bool:
    """Tell whether a value can be computed before the first forward: of inputs and buffers alone, nothing drawn."""
    stack, seen = [node], {node}
    while stack:
        read = stack.pop()
        if note(read).of_params or operator_of(read).is_random or tensor(read).is_complex():
            return False
        stack += [operand for operand in operands(read) if operand not in seen]
        seen.update(operands(read))
    return True


def _keep_partial(node: Node, partial: list[Node], split: bool) -> ValueType:
    """Return P where an operator of a pending sum keeps it pending; PlanError where it does not."""
    if _keeps_partial(node, partial, split):
        return P
    fact = f"{op_name(node)} of a sum over samples is not a sum over samples"
    remedy = "let the loss be a sum or mean over samples, scaled and added to others only"
    remedy += ", or run with d=1 and num_microbatches=1"
    if op_name(node) in ("aten.mul", "aten.square", "aten.pow", "aten.dot", "aten.matmul"):
        remedy += (
            "; autoptd.per_microbatch(x) marks an auxiliary loss that is meant for each microbatch by itself"
        )
    if op_name(node) == "aten.nan_to_num":
        remedy = "leave it out: a step raises at a loss that is NaN, and goes on with nan='ignore'"
    if op_name(node) == "aten.div" and len(operands(node)) > 1:
        remedy += "; a divisor may be any sum over inputs, and none over what parameters make"
    raise PlanError(site(node), fact, remedy)


def _is_float_cast(node: Node) -> bool:
    """Tell whether `node` is like `loss.float()`, which may be done to every part of a sum."""
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
        fact = f"no rule knows {op_name(node)}, its operand carries the batch, and probing refused it: "
        return MixedSamples(site(node), fact + axes.refused(node), UNKNOWN_REMEDY)
    operand, kind = next(iter(split.items()))
    reason = axes.whole_because(node, operand, (kind.dim, kind.atom))
    remedy = COUNT_REMEDY if UNCOUNTED in reason else REMEDIES.get(op_name(node), RULE_REMEDY)
    return MixedSamples(site(node), f"{op_name(node)} mixes the samples of the batch ({reason})", remedy)


def _demand(node: Node, place: Place, axes: Axes, reader: Node) -> None:
    """Make a constant that meets the batch elementwise (zeros, an expanded table) carry the batch itself."""
    record = note(node)
    wanted = S(*place)
    if record.layout.batch == wanted:
        return
    fact = f"{site(node)} has one entry per row of the batch but does not come from the batch"
    letters = []
    if node.op == "call_function":
        letters = [letter for letter in axes.letters(node) if letter.out == place]
    # It carries the batch in another dim already, or its own operator has no letter there.
    if record.layout.batch.kind == "S" or not letters:
        raise PlanError(site(reader), fact, "pass it to the model as an input")
    for operand, inner in letters[0].places.items():
        _demand(operand, inner, axes, node)
    record.layout = record.layout.having(BATCH, wanted)
    for user in node.users:
        # Nodes compare by their order in the graph: what comes before `reader` has its type already.
        is_typed = user is not reader and user.op == "call_function" and user < reader
        if is_typed and note(user).layout.batch.kind != "S":
            raise PlanError(site(reader), fact, "pass it to the model as an input")


def check_literals(graph: Graph, whole: Graph, constants: Constants, *, traces_all: bool) -> None:
    """Compare traces of T rows and of the whole batch: sizes may differ where the batch is, any other number may not.

    A literal that follows the batch size (`loss / x.shape[0]`) would be wrong in every microbatch: what computes entry by
    entry takes that of the whole batch (`traces_all`: the first trace has all of its rows). Constants may be computed from
    it as long as what the rest of the model reads of them is the same in both traces.
    """
    ours, theirs = list(graph.nodes), list(whole.nodes)
    if [(n.op, str(n.target)) for n in ours] != [(n.op, str(n.target)) for n in theirs]:
        raise PlanError("model", "its operators depend on the number of rows in the batch", RULE_REMEDY)
    # 2 rows in the trace and 32 in the batch: every batch dim must grow 16-fold, [b * s, h] too.
    batches = [(shape(a)[0], shape(b)[0]) for a, b in zip(ours, theirs, strict=True) if _is_batch(a)]
    growth = max((Fraction(whole_rows, rows) for rows, whole_rows in batches), default=Fraction(1))
    for node, other in zip(ours, theirs, strict=True):
        _check_made(node, other)
        if node.op != "call_function":
            continue
        if constants.is_constant(node):
            _check_constant(node, other, constants)
            continue
        _check_growth(node, other, growth)
        if (not operator_of(node).sizes or _is_slice_elsewhere(node)) and _literals(node) != _literals(other):
            if _takes_numbers(node, other):
                if not traces_all:
                    same = dict(zip(theirs, ours, strict=True)).__getitem__
                    note(node).extra[WHOLE_NUMBERS] = map_arg((other.args, other.kwargs), same)
                continue
            raise PlanError(
                site(node),
                f"a number in {op_name(node)} is computed from the number of rows ({_literals(node)})",
                "use mean or sum reductions instead of dividing by the batch size",
            )


def _takes_numbers(node: Node, other: Node) -> bool:
    """Tell whether numbers of an operator may follow the batch size, as in `loss / x.shape[0]`.

    What computes entry by entry does the same to every row, wherever that is, and what keeps a sum over samples pending is
    linear in it.
    """
    pairs = zip(_literals(node), _literals(other), strict=True)
    # What is of a microbatch would need that one's numbers.
    if OF_MICROBATCH in note(node).extra:
        return False
    are_numbers = all(type(a) is type(b) and type(a) in (int, float) for a, b in pairs if a != b)
    return are_numbers and is_pointwise(node) and not operator_of(node).is_random


def _is_slice_elsewhere(node: Node) -> bool:
    """Tell whether a node slices another dim than the batch: its bounds may not follow the batch size at all."""
    if op_name(node) != "aten.slice":
        return False
    x = operands(node)[0]
    batch = note(x).layout.batch
    return batch.kind != "S" or batch.dim != argument(node, "dim") % tensor(x).dim()


def _check_made(node: Node, other: Node) -> None:
    """Raise PlanError if a constant made in forward (`torch.tensor(x.shape[0])`) differs between the traces."""
    ours, theirs = _constant_of(node), _constant_of(other)
    if ours is None or theirs is None:
        return
    # A constant on the meta device has no values, but such a model cannot run either.
    has_values = not (ours.is_meta or theirs.is_meta)
    if ours.shape != theirs.shape or (has_values and not torch.equal(ours, theirs)):
        reader = next(iter(node.users))
        raise PlanError(
            site(reader), "a constant is computed from the number of rows in the batch", NUMBER_REMEDY
        )


def _constant_of(node: Node) -> torch.Tensor | None:
    return note(node).extra.get("constant") if note(node).kind == "buffer" else None


def _check_constant(node: Node, other: Node, constants: Constants) -> None:
    """Raise PlanError if what the rest of the model reads of a constant depends on the number of rows."""
    readers = [user for user in node.users if not constants.is_constant(user) and user.op != "output"]
    places = [note(user).extra.get(FIRST_ROWS, {}).get(node) for user in readers]
    if note(node).layout.batch.kind == "S" or not readers or not constants.follows_rows(node, other):
        return
    for place in dict.fromkeys(places):
        if place is not None and not constants.has_equal_rows(other, place[0]):
            fact = f"{site(node)} differs from row to row of the batch but does not come from the batch"
            raise PlanError(site(readers[0]), fact, "pass it to the model as an input")
        are_equal = constants.are_equal(node, other, None if place is None else place[0])
        if are_equal is None:
            fact = f"a constant of shape {shape(other)} follows the number of rows, and its values cannot be looked at"
            remedy = "make it without the batch dim (it is broadcast), or pass it as an input"
            raise PlanError(site(node), f"{fact} (on meta, or too large)", remedy)
        if not are_equal:
            raise PlanError(
                site(node), "a constant is computed from the number of rows in the batch", NUMBER_REMEDY
            )


def _is_batch(node: Node) -> bool:
    return note(node).kind == "input" and note(node).layout.batch.kind == "S"


def _check_growth(node: Node, other: Node, growth: Fraction) -> None:
    """Check that a value is `growth` times as long in the dim where it carries the batch, and as long in all others.

    A sum over the batch has no such dim: were any of its dims the batch's, its rule would have taken another for the batch.
    """
    kind = note(node).layout.batch
    if value(node) is None or not isinstance(tensor(node), torch.Tensor):
        return
    wanted: list[int | Fraction] = list(shape(node))
    if kind.kind == "S":
        wanted[kind.dim] *= growth
    if tuple(wanted) != shape(other):
        raise PlanError(
            site(node),
            f"its shape {shape(node)} depends on the batch size in a way no rule explains",
            RULE_REMEDY,
        )


def _literals(node: Node) -> list[Any]:
    """Return all arguments of a node that are no values of the graph."""
    literals: list[Any] = []

    def visit(arg: Any) -> None:
        if isinstance(arg, (list, tuple)):
            for item in arg:
                visit(item)
        elif isinstance(arg, dict):
            visit(list(arg.values()))
        elif not isinstance(arg, Node):
            literals.append(arg)

    visit(node.args)
    visit(node.kwargs)
    return literals
