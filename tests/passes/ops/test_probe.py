"""Probing accepts what is true and nothing else: against the table of rules, and on operators made to deceive it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from autoptd.ir.notes import Note, op_name, ops, set_note
from autoptd.ir.operators import table as rules
from autoptd.ir.operators.record import operands
from autoptd.passes.ops.trials import Claim
from autoptd.passes.ops.unlisted import Probed, probe
from tests.ir.operators.test_examples import T, traced
from tests.passes.sharding import trace_call

LIB = torch.library.Library("probed", "DEF")
Claims = set[tuple[tuple[int | None, ...], int | None]]


def define(schema: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """An operator of the registry, differentiated through its own operations."""
    name = LIB.define(schema)
    LIB.impl(name, function, "CompositeImplicitAutograd")
    return getattr(torch.ops.probed, name)


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def claims(found: Probed) -> Claims:
    return {(one.places, one.out) for one in found.claims}


def probe_op(function: Callable[..., Any], *tensors: Tensor, name: str = "") -> Probed:
    """Probe an operator of the registry, or the one called `name` in the trace of a function."""
    if name:
        graph, _ = trace_call(function, list(tensors))
        return probe(next(node for node in ops(graph) if op_name(node) == name))
    return probe(call_node(function, *tensors))


def call_node(op: Callable[..., Any], *tensors: Tensor) -> Node:
    """A call of an operator as the trace would have it; it is not run."""
    graph = Graph()
    read = [graph.placeholder(f"x{i}") for i in range(len(tensors))]
    node = graph.call_function(getattr(op, "default", op), tuple(read))
    for one, tensor in zip((*read, node), (*tensors, tensors[0]), strict=True):
        one.meta["val"] = tensor
        set_note(one, Note(needs_grad=tensor.is_floating_point()))
    return node


def r(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


ORACLE = "linear,linear square,matmul broadcast,embedding,layer_norm,cross_entropy none,softmax middle,cumsum,flip,roll,"
ORACLE += "triu,sum dims,mean dims,amax,argmax,transpose,slice thirds,split,select,unbind,cat,stack,pad,"
ORACLE += (
    "add broadcast,einsum,einsum outer,einsum trace,prod,where,glu,gather,index,one_hot,extremes,topk sort"
)


@pytest.mark.parametrize("name", ORACLE.split(","))
def test_what_is_found_is_what_the_table_says(name: str) -> None:
    """Of the letters of a row that are one dim of each tensor: none besides them, and all that need no form of their own."""
    graph, _, _ = traced(name)
    for node in ops(graph):
        table, needed = Claims(), Claims()
        read = operands(node)
        for link in rules.links(node) or ():
            dims = [*link.operands.values(), *([link.out] if link.out else [])]
            if (
                link.operands
                and not link.whole
                and all(len(one.dims) == one.lead == one.tail == 1 for one in dims)
            ):
                places = tuple(
                    link.operands[i].dims[0] if i in link.operands else None for i in range(len(read))
                )
                claim = places, link.out.dims[0] if link.out else None
                table.add(claim)
                has_addends = link.out is None and len(read) > len(
                    link.operands
                )  # a bias would be added by every piece
                needed |= {claim} if not link.form and not has_addends else set()
        found = claims(probe(node))
        assert needed <= found <= table or op_name(node) in ("getitem", "aten.to"), op_name(node)


ADVERSARIAL: dict[str, tuple[str, Callable[..., Any], list[Tensor], Claims]] = {
    "cumprod": ("aten.cumprod", lambda x: x.cumprod(1), [r(2, 4, 6)], {((0,), 0), ((2,), 2)}),
    "cummax": ("aten.cummax", lambda x: x.cummax(1).values, [r(2, 4, 6)], {((0,), 0), ((2,), 2)}),
    "median": ("aten.median", lambda x: x.median(1).values, [r(2, 4, 6)], {((0,), 0), ((2,), 1)}),
    "instance norm": (
        "aten.instance_norm",
        lambda x: F.instance_norm(x),
        [r(2, 4, 6)],
        {((0,), 0), ((1,), 1)},
    ),
    "cdist": (
        "aten.cdist",
        torch.cdist,
        [r(2, 4, 3), r(2, 5, 3)],
        {((0, 0), 0), ((1, None), 1), ((None, 1), 2)},
    ),
    "diagonal": ("aten.diagonal", lambda x: x.diagonal(0, 1, 2), [r(2, 4, 4)], {((0,), 0)}),
    "unfold": ("aten.unfold", lambda x: x.unfold(1, 2, 1), [r(2, 4, 6)], {((0,), 0), ((2,), 2)}),
    "avg_pool1d": ("aten.avg_pool1d", lambda x: F.avg_pool1d(x, 2), [r(2, 4, 6)], {((0,), 0), ((1,), 1)}),
    "cosine": (
        "aten.cosine_similarity",
        lambda x, y: F.cosine_similarity(x, y, -1),
        [r(2, 4, 6), r(2, 4, 6)],
        {((0, 0), 0), ((1, 1), 1)},
    ),
    "log_softmax": (
        "",
        define("log_softmax(Tensor x) -> Tensor", lambda x: x.log_softmax(1)),
        [r(2, 4, 6)],
        {((0,), 0), ((2,), 2)},
    ),
    "mean": (
        "",
        define("mean(Tensor x) -> Tensor", lambda x: x.mean(1)),
        [r(2, 4, 6)],
        {((0,), 0), ((2,), 1)},
    ),
    "positions": (
        "",
        define("ramp(Tensor x) -> Tensor", lambda x: x * torch.linspace(0, 1, x.shape[1])[:, None]),
        [r(2, 4, 6)],
        {((0,), 0), ((2,), 2)},
    ),
    "blocks": (
        "",
        define(
            "blocks(Tensor x) -> Tensor", lambda x: x - x.roll(1, 0) * (torch.arange(x.shape[0]) % 2)[:, None]
        ),
        [r(8, 6)],
        {((1,), 1)},
    ),
    "norm above a threshold": (
        "",
        define("clip(Tensor x) -> Tensor", lambda x: x / x.norm().clamp(min=300.0)),
        [r(2, 4, 6)],
        set(),
    ),
    "gradient of another": (
        "",
        define(
            "centred(Tensor x) -> Tensor", lambda x: x.detach() + (x - x.mean(0)) - (x - x.mean(0)).detach()
        ),
        [r(4, 6)],
        {((1,), 1)},
    ),
    "views": ("aten.as_strided", lambda x: x.as_strided((4, 6), (6, 1)), [r(4, 6)], set()),
    "unused operand": (
        "",
        define("first(Tensor x, Tensor y) -> Tensor", lambda x, y: x * 2),
        [r(4, 6), r(4)],
        {((0, None), 0), ((0, 0), 0), ((1, None), 1)},
    ),
    "table of another size": (
        "",
        define("lookup(Tensor x, Tensor i) -> Tensor", lambda x, i: x[i]),
        [r(6, 4), torch.tensor([1, 0, 3, 2, 4])],
        {((1, None), 1), ((None, 0), 0)},
    ),
}


@pytest.mark.parametrize("what", ADVERSARIAL)
def test_wrong_dims_are_refused(what: str) -> None:
    name, function, tensors, wanted = ADVERSARIAL[what]
    assert claims(probe_op(function, *tensors, name=name)) == wanted


COUNT = [0]


def counted(x: Tensor) -> Tensor:
    COUNT[0] += 1
    return x * COUNT[0]


def written(x: Tensor) -> Tensor:
    x.mul_(2)
    return x.clone()


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "hidden random numbers": (
        define("noise(Tensor x) -> Tensor", lambda x: x + torch.randn(x.shape)),
        "different values when it is called again",
    ),
    "global state": (define("counted(Tensor x) -> Tensor", counted), "when it is called again"),
    "in place": (define("written(Tensor x) -> Tensor", written), "writes into its operands"),
    "strides": (
        define("strides(Tensor x) -> Tensor", lambda x: x * x.stride(0)),
        "depends on the strides",
    ),
    "NaN": (define("nans(Tensor x) -> Tensor", lambda x: x * float("nan")), "not finite"),
    "constant": (define("constant(Tensor x) -> Tensor", lambda x: (x * 0).exp()), "all equal"),
    "only on a GPU": (
        define("gone(Tensor x) -> Tensor", lambda x: torch.ops.probed.nowhere(x)),
        "fails on random numbers",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_operators_that_are_refused(what: str) -> None:
    function, reason = REFUSED[what]
    found = probe_op(function, r(4, 6))
    assert found.claims == () and reason in found.refused


def test_random_and_writing_operators_are_not_even_tried() -> None:
    node = call_node(T.relu, r(4, 6))
    for target, reason in (
        (T.rand_like.default, "random"),
        (T.bernoulli.default, "random"),
        (T.mul_.Tensor, "writes"),
    ):
        node.target = target
        assert reason in probe(node).refused


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-100, 100)


def test_a_backward_that_is_not_linear() -> None:
    """Sharded it would be right, of partial sums it is not: the operator is kept from both."""
    op = define("clipped(Tensor x) -> Tensor", Clipped.apply)
    found = probe_op(op, r(4, 6))
    assert not found.is_linear and found.claims == () and "not linear" in found.refused


def test_global_random_state_is_untouched() -> None:
    before = torch.get_rng_state()
    probe_op(REFUSED["hidden random numbers"][0], r(5, 6))
    assert torch.equal(before, torch.get_rng_state())


def test_claims_are_held_on_the_sizes_of_the_trace_too() -> None:
    """An operator that behaves well on few entries only."""
    op = define("long(Tensor x) -> Tensor", lambda x: x if x.shape[0] < 32 else x.cumsum(0))
    assert claims(probe_op(op, r(40, 6))) == {((1,), 1)}
    assert Claim((0,), 0) in probe_op(op, r(30, 6)).claims


def test_a_scalar_that_never_changes_proves_nothing() -> None:
    """Its targets are never +-1 in a trial: the value is 0 however it is cut."""
    found = probe(call_node(T.cosine_embedding_loss, r(4, 6), r(4, 6), r(4)))
    assert found.claims == () and "zero" in found.refused


def test_gradients_that_are_all_zero_prove_nothing() -> None:
    found = probe(call_node(T.frac.default, r(4, 6)))
    assert found.claims != ()
    found = probe(call_node(T.round.default, r(4, 6)))
    assert found.claims == () and "zero" in found.refused
