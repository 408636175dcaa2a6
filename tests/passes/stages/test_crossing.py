"""What crosses between stages: sent once or computed again, by cost; never a weight; and a check that finds what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph, Node

import autoptd
from autoptd import codegen
from autoptd.ir.machine import Machine
from autoptd.ir.mesh import Mesh
from autoptd.ir.notes import note, op_name, ops
from autoptd.passes.cut import check_cut, find_backbone
from autoptd.passes.stages.crossing import place_values
from tests.parity.models import VOCAB, batch
from tests.passes.graphs import find, traced
from tests.runtime.step.test_executor import running

Tensor = torch.Tensor
COMPUTE_AGAIN = Machine(message=1e3)
SEND = Machine(message=0.0, flops=1e3, memory_bandwidth=1e2)


class Net(nn.Module):
    """Layers 0 to 2, one per stage; `between(self, layers, x, *others)` says what happens from one to the next."""

    def __init__(self, between: Any, **buffers: Tensor) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.between = between
        for name, one in buffers.items():
            self.register_buffer(name, one)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.between(self, self.layers, x, *others).sum()


def placed(between: Any, *inputs: Tensor, machine: Machine | None = None, **buffers: Tensor) -> Graph:
    """The graph with one layer per stage: a stage begins with its layer's GEMM, and has what follows it."""
    graph = traced(Net(between, **buffers), *inputs)
    backbone, stage = find_backbone(graph), -1
    home: dict[Node, int] = {}
    for node in backbone:
        stage += op_name(node) == "aten.linear"
        home[node] = stage
    place_values(graph, home, Mesh(), machine or Machine())
    check_cut(graph, 3)
    return graph


def crossings(graph: Graph) -> dict[str, tuple[int, ...]]:
    return {op_name(one.node).removeprefix("aten."): one.targets for one in codegen.crossings(graph)}


X = torch.randn(2, 8)


def test_what_is_sent_directly_to_a_later_stage() -> None:
    """A skip: not by way of the stage between."""
    graph = placed(lambda _, f, x: f[2](f[1](y := f[0](x))) + y, X)
    assert [(one.source, one.targets) for one in codegen.crossings(graph)] == [(0, (1, 2)), (1, (2,))]


def test_of_a_value_and_its_view_one_crosses() -> None:
    def between(_: Any, f: Any, x: Tensor) -> Tensor:
        y = f[0](x)
        view = y.view(8, 2)
        return f[2](f[1](y + (view @ view.T @ view).view(2, 8)) + y + view.reshape(2, 8))

    graph = placed(between, X)
    assert [op_name(one.node) for one in codegen.crossings(graph)] == ["aten.linear", "aten.add", "aten.add"]
    view = find(graph, "view")
    assert note(view).stages == (0, 1) and note(view).stages_why.startswith(
        "computed again on stage 1 in <0.1 us"
    )


def test_a_cast_crosses_in_its_narrow_form() -> None:
    def between(_: Any, f: Any, x: Tensor) -> Tensor:
        y = f[0](x).bfloat16()
        wide = y.float()
        return f[2](f[1](wide) + wide)

    graph = placed(between, X)
    assert {str(one.node.meta["val"].dtype) for one in codegen.crossings(graph) if one.source == 0} == {
        "torch.bfloat16"
    }


def test_the_smaller_value_crosses_and_is_expanded_again() -> None:
    graph = placed(
        lambda _, f, x: f[2](f[1](y := f[0](x)) * y.mean(0, keepdim=True).expand(512, 2, 8).sum(0)), X
    )
    assert "expand" not in crossings(graph)


def test_masks_and_tables_are_computed_where_they_are_read() -> None:
    def between(net: Any, f: Any, x: Tensor, mask: Tensor) -> Tensor:
        table = torch.outer(torch.arange(2.0), net.freq).cos()
        keep = mask.cumsum(-1) > 1
        return torch.where(keep, f[2](torch.where(keep, f[1](f[0](x) + table) + table, 0.0)), 0.0)

    graph = placed(between, X, torch.ones(2, 8), freq=torch.rand(8))
    assert set(crossings(graph)) == {"add", "where"}
    assert note(find(graph, "cos")).stages == (0, 1) and note(find(graph, "cumsum")).stages == (1, 2)
    assert note(find(graph, "cos")).stages_why == "computed where it is read"


@pytest.mark.parametrize("machine", [COMPUTE_AGAIN, SEND], ids=["again", "send"])
def test_what_parameters_are_looked_up_by_is_there_before_activations_read_it(machine: Machine) -> None:
    """Positions that an embedding of the first stage reads, and a mean over what came before in the last one."""

    def between(net: Any, f: Any, x: Tensor) -> Tensor:
        at = torch.arange(2) * 3 // 2
        x = f[1](f[0](x) + F.embedding(at, f[1].weight))
        return f[2](x / (at + 1.0)[:, None])

    graph = placed(between, X, machine=machine)
    assert note(find(graph, "arange")).stages[0] == note(find(graph, "embedding")).stages[0] == 0
    assert find(graph, "arange") not in [one.node for one in codegen.crossings(graph)]


@pytest.mark.parametrize("which", ["matmul", "sort"])
def test_a_costly_value_of_inputs_is_computed_once_and_sent(which: str) -> None:
    def between(net: Any, f: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            big = net.a @ net.a if which == "matmul" else net.a.sort(-1)[0]
        y = big[:2, :8] * 2
        return f[2](f[1](f[0](x)) + y) + y

    with torch.device("meta"):
        graph = placed(between, X.to("meta"), a=torch.empty(1 << 14, 1 << 14))
    made = find(graph, which)
    assert note(made).stages == (1,)
    sent = [one for one in codegen.crossings(graph) if one.source == 1 and not note(one.node).needs_grad]
    assert (
        len(sent) == 1
        and sent[0].targets == (2,)
        and note(sent[0].node).stages_why.startswith("sent to stage 2 in")
    )
    assert sent[0].node.meta["val"].shape == (2, 8)  # what is read of it, not all of it


def test_random_numbers_and_products_are_drawn_and_computed_once() -> None:
    def between(_: Any, f: Any, x: Tensor) -> Tensor:
        y = f[0](x)
        dropped, product = F.dropout(y, 0.5), y @ y.T @ y
        return f[2](f[1](dropped + product) + dropped + product)

    graph = placed(between, X, machine=COMPUTE_AGAIN)
    assert len(note(find(graph, "dropout")).stages) == 1
    assert all(len(note(node).stages) == 1 for node in ops(graph) if op_name(node) == "aten.matmul")


def test_a_chain_of_activations_starts_from_what_is_there() -> None:
    """gelu(y) again from y, which the stage reads anyway."""

    def between(_: Any, f: Any, x: Tensor) -> Tensor:
        y = f[0](x)
        z = F.gelu(y).tanh()
        return f[2](f[1](z @ z.T @ z) + y + z)

    again, sent = (placed(between, X, machine=one) for one in (COMPUTE_AGAIN, SEND))
    assert note(find(again, "gelu")).stages == (0, 1) and set(crossings(again)) == {"linear", "matmul", "add"}
    assert note(find(sent, "gelu")).stages == (0,) and set(crossings(sent)) == {
        "linear",
        "matmul",
        "add",
        "tanh",
    }


def test_labels_that_are_counted_are_never_sent() -> None:
    def between(_: Any, f: Any, x: Tensor, labels: Tensor) -> Tensor:
        shifted = labels.roll(1, 0)
        y = f[0](x) + shifted[:, None]
        return F.cross_entropy(f[2](f[1](y)), shifted)

    graph = placed(between, X, torch.ones(2, dtype=torch.long), machine=SEND)
    assert note(find(graph, "roll")).stages == (0, 2)


class Merged(nn.Module):
    """A weight made of parameters (LoRA), used by the first layer and, tied, by the last."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = (
            nn.Parameter(torch.randn(*size) / 3) for size in ((16, 16), (16, 2), (2, 16))
        )
        self.base.requires_grad_(False)
        self.embed, self.norm = nn.Embedding(VOCAB, 16), nn.LayerNorm(16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        merged = self.base + self.a @ self.b
        x = F.linear(self.norm(self.embed(ids)), merged)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        x = self.norm(F.linear(x, merged))
        return F.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("machine", [COMPUTE_AGAIN, SEND], ids=["again", "send"])
def test_no_weight_crosses(machine: Machine) -> None:
    """Merged and tied weights live on both stages, their gradients are summed once per step."""
    torch.manual_seed(0)
    model = Merged()
    program = autoptd.compile(model, p=3, plan={"cut": [1, 2, 1]}, example_inputs=batch(6), machine=machine)
    backbone = set(find_backbone(program.graphs["CUT"]))
    assert all(
        one.node in backbone for one in codegen.crossings(program.graphs["CUT"]) if note(one.node).of_params
    )
    for name in ("base", "a", "b", "embed.weight", "norm.weight"):
        assert program.param(name).stages == (0, 2), name
    sums = [one for one in program.collectives if one.conversion == "tied sum"]
    assert sums and all(one.scope == "step" and one.pp_ranks == (0, 2) for one in sums)
    autoptd.verify(model, p=3, example_inputs=batch(6), steps=2, machine=machine)


class Shared(nn.Module):
    """A layer that comes first and, again, behind the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.shared = nn.Embedding(VOCAB, 16), nn.Linear(16, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in (
            self.shared,
            self.layers[0],
            self.layers[1],
            self.shared,
            self.layers[2],
            self.layers[3],
        ):
            x = x + F.gelu(layer(x))
        return F.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), labels.flatten())


def test_owners_on_one_rank_keep_one_copy() -> None:
    """Stages 0 and 2 of the shared layer are on one rank: one leaf, no sum over ranks."""
    torch.manual_seed(0)
    model = Shared()
    plan = {"cut": ["layers.0", "layers.1", "layers.2"]}
    program = autoptd.compile(model, p=2, v=2, plan=plan, example_inputs=batch(4))
    assert program.param("shared.weight").stages == (0, 2) and program.param("embed.weight").stages == (0, 3)
    assert not any("0, 2" in one.why for one in program.collectives if one.conversion == "tied sum")
    with running(program, model) as ranks:
        first, second = (ranks.here[0].params.weights_of_stage(k)["shared.weight"] for k in (0, 2))
        assert first is second
    autoptd.verify(model, p=2, v=2, plan=plan, example_inputs=batch(4), steps=2)


@pytest.mark.parametrize(
    ("machine", "mesh"),
    [
        (COMPUTE_AGAIN, {"p": 3}),
        pytest.param(SEND, {"p": 2, "v": 2}, marks=pytest.mark.thorough),
        pytest.param(COMPUTE_AGAIN, {"t": 2, "p": 2}, marks=pytest.mark.thorough),
        pytest.param(COMPUTE_AGAIN, {"p": 2, "v": 2}, marks=pytest.mark.thorough),
        pytest.param(SEND, {"p": 3}, marks=pytest.mark.thorough),
        pytest.param(SEND, {"t": 2, "p": 2}, marks=pytest.mark.thorough),
    ],
)
def test_gradients_of_what_is_computed_again_are_added_once(machine: Machine, mesh: dict[str, int]) -> None:
    request: dict[str, Any] = {**mesh, "machine": machine, "example_inputs": batch(6)}
    torch.manual_seed(0)
    model = Tangled()
    program = autoptd.compile(model, **request)
    reasons = [note(node).stages_why for node in ops(program.graphs["CUT"]) if note(node).needs_grad]
    assert any("computed again" in one for one in reasons)
    assert any(not one.has_grad for one in program.crossings) == (machine is SEND)
    autoptd.verify(model, **request, steps=2)
    hooks = {"accumulate_allreduce_grads_in_fp32": True, "delay_wgrad_compute": "before_reduce"}
    autoptd.verify(model, **request, **hooks, steps=2)


class Tangled(nn.Module):
    """Values of the first layer, chains, views and means of them, a mask and a table, all read everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.scale = nn.Parameter(torch.ones(16))
        self.register_buffer("freq", torch.rand(8, 16))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = first = self.embed(ids)
        table = (
            torch.outer(torch.arange(8).to(self.freq.dtype), self.freq[0]) @ self.freq.T @ self.freq
        ).sin()
        keep, flat = (ids > 3)[..., None], first.tanh().view(-1, 16)
        wide = first.mean(1, keepdim=True).expand_as(first)
        for i, layer in enumerate(self.layers):
            x = x + F.gelu(layer(x * self.scale + table)) * keep
            x = x + flat.view_as(x).sigmoid() + wide if i % 2 else x + first.tanh()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.roll(1, 1).flatten())
