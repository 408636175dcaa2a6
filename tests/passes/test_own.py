"""Which sums over tp are made in place, and that only those are."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

import autoptd
from autoptd.ir import markers
from autoptd.ir.mesh import Mesh
from autoptd.ir.notes import Note, set_note
from autoptd.ir.operators.table import TABLE
from autoptd.passes.context import Context
from autoptd.passes.hook_gemms import mark_owned
from autoptd.runtime import i_to_r, linear, p_to_i
from autoptd.runtime.ops.linear import Deferred
from autoptd.runtime.world.threads import ThreadWorld, run_ranks
from autoptd.runtime.world.world import Communicators, World
from tests.parity.models import batch, gpt, separate

aten = torch.ops.aten
FRESH = [name for name, record in TABLE.items() if record.is_fresh and name.startswith("aten.")]


def owned(model: torch.nn.Module, **keywords: object) -> list[str]:
    """The sites of the sums in place, as emitted."""
    program = autoptd.compile(model, example_inputs=batch(), **keywords)
    return re.findall(r'inplace=True, site=(?:w\.at\()?"([^"]*)"', "\n".join(program.sources.values()))


def test_the_sums_of_a_layer_are_made_in_place() -> None:
    layer = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
    assert owned(gpt(2), t=2) == [*layer, "transformer", "lm_head"]
    overlapped = owned(gpt(2), t=2, async_tensor_model_parallel_allreduce=True)
    assert overlapped == ["attn.c_proj", "mlp.c_proj", "transformer"]
    assert "layers.1" in owned(separate(2), t=2)  # a sum of partial sums


class Built:
    """A graph by hand: x -> linear -> what a test adds."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.x, self.w = self.graph.placeholder("x"), self.graph.placeholder("w")
        for node in (self.x, self.w):
            self.noted(node)

    def noted(
        self, node: Node, conversion: str = "", shape: tuple[int, ...] = (4, 4), stage: int = 0
    ) -> Node:
        set_note(node, Note(conversion=conversion, stages=(stage,)))
        node.meta["val"] = torch.empty(shape, device="meta")
        return node

    def op(self, target: object, *args: object, stage: int = 0) -> Node:
        return self.noted(self.graph.call_function(target, args), stage=stage)  # type: ignore[arg-type]

    def convert(self, x: Node, name: str, stage: int = 0) -> Node:
        return self.noted(self.graph.call_function(markers.convert, (x, name)), name, stage=stage)

    def is_owned(self, node: Node) -> bool:
        self.graph.output(())
        mark_owned(self.graph, Context())
        return bool(node.meta["autoptd"].is_owned)


@pytest.mark.parametrize(
    "other", ["nobody", "a view", "another reader", "a reader of the view", "another stage"]
)
def test_an_operand_with_another_reader_stays(other: str) -> None:
    built = Built()
    y = built.op(aten.linear.default, built.x, built.w)
    read = built.op(aten.view.default, y, [4, 4]) if "view" in other else y
    g = built.convert(read, "p_to_i", stage=int(other == "another stage"))
    if "reader" in other:
        built.op(aten.relu.default, read)
    assert built.is_owned(g) == (other in ("nobody", "a view"))


def test_an_operand_that_backward_needs_stays() -> None:
    built = Built()
    assert not built.is_owned(built.convert(built.op(aten.exp.default, built.x), "p_to_i"))
    built = Built()
    assert not built.is_owned(built.convert(built.x, "p_to_i"))


@pytest.mark.parametrize("also", ["nothing", "a GEMM", "an addition", "a weight", "a crossing"])
def test_a_gradient_that_not_only_gemms_make_stays(also: str) -> None:
    built = Built()
    f = built.convert(built.x, "i_to_r")
    built.op(aten.linear.default, built.op(aten.view.default, f, [4, 4]), built.w)
    if also == "a GEMM":
        built.op(aten.addmm.default, built.noted(built.graph.placeholder("b"), shape=(4,)), f, built.w)
    elif also == "an addition":
        built.op(aten.add.Tensor, f, built.w)
    elif also == "a weight":
        built.op(aten.linear.default, built.x, f)
    elif also == "a crossing":
        built.op(aten.linear.default, f, built.w, stage=1)
    assert built.is_owned(f) == (also in ("nothing", "a GEMM"))


@pytest.mark.parametrize("name", FRESH)
def test_no_backward_needs_the_result_of_an_operator_that_may_be_overwritten(name: str) -> None:
    """Autograd would say so, of a result that is changed under its eyes."""
    operator = getattr(aten, name.removeprefix("aten."))
    operands = [torch.randn(3, 3, requires_grad=True) for _ in range(3 if name == "aten.addmm" else 2)]
    if name in ("aten.bmm", "aten.baddbmm"):
        count = 2 if name == "aten.bmm" else 3
        operands = [torch.randn(2, 3, 3, requires_grad=True) for _ in range(count)]
    y = operator(*operands)
    y.detach().zero_()
    y.sum().backward()


@pytest.mark.parametrize("hooked", [False, True])
def test_a_linear_whose_result_is_a_view_may_be_overwritten(hooked: bool) -> None:
    def body(world: World) -> list[float]:
        x = torch.ones(2, 3, 4, requires_grad=True)
        weight = torch.ones(5, 4, requires_grad=True)
        y = linear(x, weight, wgrad=Deferred()) if hooked else torch.nn.functional.linear(x, weight)
        z = p_to_i(y, world.group(("tp",)), inplace=True, site="g")
        z.sum().backward()
        return [z.sum().item(), x.grad.sum().item()]  # type: ignore[union-attr]

    assert run_ranks(ThreadWorld(Mesh(t=2), Communicators(), timeout=20.0), body) == [[240.0, 120.0]] * 2


def test_owned_values_are_summed_where_they_are() -> None:
    def body(world: World) -> tuple[bool, ...]:
        tp, found = world.group(("tp",)), []
        for is_owned in (True, False):
            x = torch.full((2, 3), float(world.rank), requires_grad=True)
            product = x @ torch.eye(3)
            before = product.detach().clone()
            y = p_to_i(product, tp, inplace=is_owned, site="g")
            assert y.tolist() == [[1.0] * 3] * 2
            assert (y.data_ptr() == product.data_ptr()) == is_owned
            assert is_owned or torch.equal(product.detach(), before)
            grads: list[Tensor] = []
            f = i_to_r(x, tp, inplace=is_owned, site="f")
            f.register_hook(grads.append)
            (y.sum() + (f @ torch.eye(3)).sum() * (world.rank + 1)).backward()
            assert x.grad is not None and x.grad.tolist() == [[4.0] * 3] * 2
            found.append(grads[0].tolist() == [[3.0] * 3] * 2)
        return tuple(found)

    assert run_ranks(ThreadWorld(Mesh(t=2), Communicators(), timeout=20.0), body) == [(True, False)] * 2
