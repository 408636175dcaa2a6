"""Split one operator for real and compare: the oracle that holds every row of the axis table.

In: a node of a traced graph, the values of a run, a letter (or a linear group) that a row claims, a degree. The operator is run
once whole and once per rank on slices, with the local form that `localize` gives it; values and gradients are put together as
the four types of DESIGN.md 2 say, and compared in float64. Out: texts of what differs, [] when the claim is true.

    check_letter(node, env, letter, 2, "tp") == []
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autoptd import runtime as rt
from autoptd import trace
from autoptd.ir import markers, notes
from autoptd.ir.layout import Layout
from autoptd.ir.mesh import Mesh
from autoptd.ir.noise import NAMES
from autoptd.ir.notes import note, op_name, set_note
from autoptd.ir.operators import table as rules
from autoptd.ir.operators.record import CLASSES, QUERIES, operands
from autoptd.ir.types import Dims, I, P, R, S, Segmented, ValueType
from autoptd.options import Options
from autoptd.passes.axes.axes import Letter
from autoptd.passes.context import Context
from autoptd.passes.localize import localize
from autoptd.passes.solve.strategies import REDUCED_FORMS
from autoptd.runtime.ops.dropout import Draw
from autoptd.runtime.world.threads import ThreadWorld, run_ranks
from autoptd.runtime.world.world import Communicators, Group, World

Tensor = torch.Tensor
Env = dict[Node, Any]
WITHOUT_GRADIENT = {"aten.cross_entropy_loss": 1, "aten.soft_margin_loss": 1}
WITHOUT_GRADIENT["aten.binary_cross_entropy_with_logits"] = 2
WITHOUT_GRADIENT |= {"aten.batch_norm": 3, "aten.multi_margin_loss": 1}  # running statistics, targets
TOGETHER = ("vocab_", CLASSES, QUERIES)  # forms that ranks compute together, or by their place
Answer = tuple[list[Tensor], dict[Node, Tensor]]  # pieces of the result, gradient of every float operand


class Call(nn.Module):
    """A function of tensors as a model whose loss is the sum of everything it returns."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Tensor:
        out = self.function(*tensors)
        pieces = out if isinstance(out, (tuple, list)) else [out]
        return sum(piece.double().sum() for piece in pieces)  # type: ignore[return-value]


def trace_call(function: Callable[..., Any], tensors: list[Tensor]) -> tuple[Graph, Env]:
    """The TRACED graph of a function, and the values of all nodes on these tensors."""
    captured = trace.capture(Call(function), tuple(tensors), {}, None)
    return captured.graph, run_whole(captured.graph, tensors, captured.buffers)


def trace_model(model: nn.Module, tensors: list[Tensor]) -> tuple[Graph, Env]:
    """The same for a model with parameters."""
    captured = trace.capture(model, tuple(tensors), {}, None)
    parameters = {name: one.detach() for name, one in captured.parameters.items()}
    return captured.graph, run_whole(captured.graph, tensors, captured.buffers | parameters)


def run_whole(graph: Graph, tensors: list[Tensor], stored: dict[str, Tensor]) -> Env:
    left, env = iter(tensors), Env()
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(left) if note(node).kind == "input" else stored[note(node).name]
        elif node.op == "call_function":
            env[node] = run_node(node, env)
    return env


def run_node(node: Node, env: Env, rows: ValueType = I) -> Any:
    """Run a whole operator; `rows` is where a dropout's mask has its rows."""
    if op_name(node) == "aten.dropout":
        count = env[node.args[0]].shape[rows.dim] if rows.kind == "S" else 1  # type: ignore[index]
        draw = Draw(0, 1, 0, 0, count)
        return rt.dropout(env[node.args[0]], node.args[1], draw, rows.dim if rows.kind == "S" else None)  # type: ignore
    if op_name(node) in NAMES:
        x = env[node.args[0]]  # type: ignore[index]
        count = x.shape[rows.dim] if rows.kind == "S" else 1
        noise = getattr(rt, NAMES[op_name(node)])
        return noise(x, Draw(0, 1, 0, 0, count), rows.dim if rows.kind == "S" else None)
    return node.target(*map_arg(node.args, env.__getitem__), **map_arg(node.kwargs, env.__getitem__))  # type: ignore


def check_letter(node: Node, env: Env, letter: Letter, t: int, axis: str) -> list[str]:
    """Hold one letter: `axis` "tp" splits it over tensor ranks, "batch" over microbatches."""
    gives = I if letter.form in REDUCED_FORMS else P if letter.out is None else S(*letter.out)
    takes = {one: S(*letter.places[one]) if one in letter.places else R for one in operands(node)}
    if letter.out is None and not letter.form:
        takes |= dict.fromkeys(rules.addends(node, set(letter.places)), P)
    form = letter.form if letter.out is None or letter.form.startswith((CLASSES, QUERIES)) else ""
    return _check(node, env, takes, gives, form, t, axis)


def check_linear(node: Node, env: Env, group: tuple[Node, ...], t: int) -> list[str]:
    """Hold one linear group: partial sums of these operands give partial sums of the result."""
    takes = {one: P if one in group else R for one in operands(node)}
    return _check(node, env, takes, P, "", t, "tp")


def _check(
    node: Node, env: Env, takes: dict[Node, ValueType], gives: ValueType, form: str, t: int, axis: str
) -> list[str]:
    read = list(takes)
    whole, cotangents = _whole_answer(node, env, read, gives if axis == "batch" else I)
    local = _local_node(node, takes, gives, form, t, axis)
    parts = {one: _parts(env[one], takes[one], note(one).dims, t) for one in read}

    def body(rank: int, group: Group | None) -> Answer:
        inputs = {one: parts[one][rank] for one in read}
        mine = [
            _parts(one, gives, note(node).dims, t)[rank] if gives.kind == "S" else one for one in cotangents
        ]
        place = group or SimpleNamespace(index=rank, size=t)
        return _answer(
            lambda leaves: _run_local(local, leaves, env, place), inputs, mine, _without_gradient(node)
        )

    if form.startswith(TOGETHER):
        world = ThreadWorld(Mesh(t=t), Communicators(), timeout=20.0)

        def on_rank(one: World) -> Answer:
            return body(one.rank, one.group(("tp",)))

        answers = run_ranks(world, on_rank)
    else:
        answers = [body(rank, None) for rank in range(t)]
    return _other_shapes(local, answers, parts) + _compare(node, whole, answers, takes, gives)


def _other_shapes(local: Node, answers: list[Answer], parts: dict[Node, list[Any]]) -> list[str]:
    """Compare the shapes that `localize` plans with those that are there: what `check_local` does without data."""
    originals = local.meta["operands"]
    there = [(local, values) for values, _ in answers]
    for operand in local.all_input_nodes:
        there += [(operand, _pieces(part)) for part in parts.get(originals[operand.name], ())]
    found = [(one, [tuple(piece.shape) for piece in pieces]) for one, pieces in there]
    return [
        f"{one.name}: {shapes} are there, not those that are planned"
        for one, shapes in found
        if shapes != note(one).local.shapes
    ]


def _whole_answer(node: Node, env: Env, read: list[Node], rows: ValueType) -> tuple[Answer, list[Tensor]]:
    made = run_node(node, env, rows)
    cotangents = [torch.randn_like(one) if _is_float(one) else one for one in _pieces(made)]
    inputs = {one: env[one] for one in read}
    return _answer(
        lambda leaves: run_node(node, env | leaves, rows), inputs, cotangents, _without_gradient(node)
    ), cotangents


def _without_gradient(node: Node) -> list[Node]:
    """Operands that torch does not differentiate: targets and class weights of losses."""
    return operands(node)[WITHOUT_GRADIENT.get(op_name(node), 9) :]


def _local_node(
    node: Node, takes: dict[Node, ValueType], gives: ValueType, form: str, t: int, axis: str
) -> Node:
    """The node as `localize` rewrites it, alone in a graph whose placeholders are its operands."""
    graph = Graph()
    mapping: dict[Node, Node] = {}
    kept: dict[str, Node] = {}
    for one in node.all_input_nodes:
        mapping[one] = graph.placeholder(one.name)
        kept[mapping[one].name] = one
    made = graph.node_copy(node, mapping.__getitem__)
    for old, new in [*mapping.items(), (node, made)]:
        kind = gives if old is node else takes[old]
        new.meta = {"val": old.meta["val"]}
        record = set_note(new, note(old).bare())
        record.layout = Layout({axis: kind})
        record.forms = {axis: form} if old is node and form else {}
    note(made).draw = notes.Draw(0, note(made).layout.batch if gives.kind == "S" else I)
    ctx = Context(Options(t=t)) if axis == "tp" else Context(traced_rows=t, rows=1, pieces=t)
    localize(graph, ctx)
    made.meta["operands"] = kept
    return made


def _run_local(node: Node, leaves: Env, env: Env, group: Any) -> Any:
    """Run a localized node; its markers as the emitted file would."""
    kept = node.meta["operands"]

    def look(arg: Node) -> Any:
        return leaves[kept[arg.name]]

    args, kwargs = map_arg(node.args, look), dict(map_arg(node.kwargs, look))
    if node.target is markers.dropout:
        x, rate, _, batch, shard = args
        rows = x.shape[batch[0]] // batch[1] if batch is not None else 1
        return rt.dropout(x, rate, Draw(0, 1, 0, group.index * rows, rows), batch, shard, group)
    if node.target is markers.noise:
        x, kind, _, batch, shard = args
        rows = x.shape[batch[0]] // batch[1] if batch is not None else 1
        return getattr(rt, kind)(x, Draw(0, 1, 0, group.index * rows, rows), batch, shard, group)
    if node.target is markers.mean:
        x, dims, keepdim, count = args
        return x.sum(dims, keepdim) / count
    if node.target is markers.share:
        return args[0] / args[1]
    if node.target in markers.OVER_CLASSES.values():
        return getattr(rt, node.target.__name__)(*args, group, **kwargs)  # type: ignore[union-attr]
    if node.target is markers.causal_attention:
        return rt.causal_attention(*args, group, **kwargs)
    if node.target is markers.vocab_embedding:
        return rt.vocab_parallel_embedding(args[0], args[1], group, padding_idx=args[2], **kwargs)
    if node.target is markers.cross_entropy:
        vocab, size, total = (kwargs.pop(key) for key in ("vocab", "size", "total"))
        logits, targets, weight = args
        if vocab:
            return rt.vocab_parallel_cross_entropy(logits, targets, group, weight=weight, size=size, **kwargs)
        loss = torch.nn.functional.cross_entropy(logits, targets, weight, **kwargs)
        if total < 0:
            return loss
        whole_targets = env[kept[node.args[1].name]]  # type: ignore[union-attr]
        return loss / rt.count_labels(whole_targets, ignore_index=kwargs["ignore_index"], weight=weight)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _answer(run: Callable[[Env], Any], inputs: Env, cotangents: list[Tensor], constant: list[Node]) -> Answer:
    leaves = {node: _map(value, _leaf) for node, value in inputs.items()}
    for one in constant:
        leaves[one] = leaves[one].detach()
    made = _pieces(run(leaves))
    flat = [(node, leaf) for node, value in leaves.items() for leaf in _pieces(value) if leaf.requires_grad]
    pairs = [(one, cotangent) for one, cotangent in zip(made, cotangents, strict=True) if one.requires_grad]
    gradients: dict[Node, Tensor] = {}
    if flat and pairs:
        found = torch.autograd.grad(
            [one for one, _ in pairs],
            [leaf for _, leaf in flat],
            [cotangent for _, cotangent in pairs],
            allow_unused=True,
        )
        for (node, leaf), gradient in zip(flat, found, strict=True):
            if not isinstance(leaves[node], (tuple, list)):  # getitem of a split: its value says it all
                gradients[node] = torch.zeros_like(leaf) if gradient is None else gradient
    return [one.detach() for one in made], gradients


def _compare(
    node: Node, whole: Answer, answers: list[Answer], takes: dict[Node, ValueType], gives: ValueType
) -> list[str]:
    findings = []
    for i, wanted in enumerate(whole[0]):
        found = _combine([values[i] for values, _ in answers], gives, note(node).dims)
        findings += _differs(f"value {i} as {gives}", found, wanted)
    for one, gradient in whole[1].items():
        cotangent = {"R": P, "P": R}.get(
            takes[one].kind, takes[one]
        )  # the type of the cotangent of an operand
        pieces = [gradients.get(one, torch.zeros(())) for _, gradients in answers]
        if cotangent == R:
            findings += [
                text for piece in pieces for text in _differs(f"gradient of {one.name}", piece, gradient)
            ]
        else:
            found = _combine(pieces, cotangent, note(one).dims)
            findings += _differs(f"gradient of {one.name}, {takes[one]}", found, gradient)
            is_segmented = cotangent.kind == "S" and isinstance(
                note(one).dims[cotangent.dim][cotangent.atom], Segmented
            )
            if (
                cotangent.kind == "S"
                and not is_segmented
                and _padding(pieces, note(one).dims, cotangent).any()
            ):
                findings.append(f"gradient of {one.name}, {takes[one]}: the padding has one")
    return findings


def _combine(pieces: list[Tensor], kind: ValueType, dims: Dims) -> Tensor:
    if kind == P:
        return torch.stack(torch.broadcast_tensors(*pieces)).sum(0)
    return join(pieces, dims, kind) if kind.kind == "S" else pieces[0]


def _differs(what: str, found: Tensor, wanted: Tensor) -> list[str]:
    if found.shape != wanted.shape:
        return [f"{what}: shape {tuple(found.shape)} for {tuple(wanted.shape)}"]
    if not _is_float(wanted):
        return [] if torch.equal(found, wanted) else [f"{what}: other values"]
    finite = wanted.nan_to_num(posinf=1e300, neginf=-1e300)
    error = (found.nan_to_num(posinf=1e300, neginf=-1e300) - finite).abs().max() if wanted.numel() else 0.0
    return (
        [] if error <= 1e-9 * max(1.0, float(finite.abs().max())) else [f"{what}: off by {float(error):.1e}"]
    )


def _parts(value: Any, kind: ValueType, dims: Dims, t: int) -> list[Any]:
    """What each of t ranks holds of a value."""
    if isinstance(value, (tuple, list)):
        return [list(piece) for piece in zip(*(_parts(one, kind, dims, t) for one in value), strict=True)]
    if kind.kind == "S":
        return [take(value, dims, kind, rank, t) for rank in range(t)]
    if kind == P:
        random = torch.randn_like if value.is_floating_point() else torch.zeros_like  # positions of a topk
        shares = [random(value) for _ in range(t - 1)]
        return [*shares, value - sum(shares)]
    return [value] * t


def take(x: Tensor, dims: Dims, kind: ValueType, rank: int, t: int) -> Tensor:
    """The slice of one rank, by atoms; zeros fill up the last slices of a dim that t does not divide."""
    if isinstance(dims[kind.dim][kind.atom], Segmented):
        pieces = _segments(x, dims, kind)
        return torch.cat([one.chunk(t, kind.dim)[rank] for one in pieces], kind.dim)
    folded, at, size = _atoms(x, dims, kind), kind.dim + kind.atom, dims[kind.dim][kind.atom]
    missing = -size % t
    zeros = x.new_zeros([*folded.shape[:at], missing, *folded.shape[at + 1 :]])
    inner = torch.cat([folded, zeros], at).chunk(t, at)[rank]
    each = x.shape[kind.dim] // size * (size + missing) // t
    return inner.reshape([*x.shape[: kind.dim], each, *x.shape[kind.dim + 1 :]])


def _segments(x: Tensor, dims: Dims, kind: ValueType) -> tuple[Tensor, ...]:
    """The segments of a dim that is one segmented atom."""
    assert len(dims[kind.dim]) == 1
    return x.split(list(dims[kind.dim][0].blocks), kind.dim)  # type: ignore[attr-defined]


def join(pieces: list[Tensor], dims: Dims, kind: ValueType) -> Tensor:
    """Put the slices of all ranks together again, without the padding."""
    if isinstance(dims[kind.dim][kind.atom], Segmented):
        local = [block // len(pieces) for block in dims[kind.dim][kind.atom].blocks]  # type: ignore[attr-defined]
        split = [piece.split(local, kind.dim) for piece in pieces]
        return torch.cat([one for each in zip(*split, strict=True) for one in each], kind.dim)
    real, at = dims[kind.dim][kind.atom], kind.dim + kind.atom
    size = math.prod(dims[kind.dim])
    first = pieces[0].shape
    whole = _joined(pieces, dims, kind).narrow(at, 0, real)
    return whole.reshape([*first[: kind.dim], size, *first[kind.dim + 1 :]])


def _padding(pieces: list[Tensor], dims: Dims, kind: ValueType) -> Tensor:
    """What lies behind the end of a dim that was filled up."""
    real, at = dims[kind.dim][kind.atom], kind.dim + kind.atom
    whole = _joined(pieces, dims, kind)
    return whole.narrow(at, real, whole.shape[at] - real)


def _joined(pieces: list[Tensor], dims: Dims, kind: ValueType) -> Tensor:
    local = [list(atoms) for atoms in dims]
    local[kind.dim][kind.atom] = -(-local[kind.dim][kind.atom] // len(pieces))
    return torch.cat(
        [_atoms(piece, tuple(map(tuple, local)), kind) for piece in pieces], kind.dim + kind.atom
    )


def _atoms(x: Tensor, dims: Dims, kind: ValueType) -> Tensor:
    return x.reshape([*x.shape[: kind.dim], *dims[kind.dim], *x.shape[kind.dim + 1 :]])


def _pieces(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return [change(one) for one in value] if isinstance(value, (tuple, list)) else change(value)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(_is_float(x))


def _is_float(x: Tensor) -> bool:
    return x.is_floating_point()
