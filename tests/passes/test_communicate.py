"""Megatron's plan falls out of the solver, and the verifier of the CONNECTED graph finds every conversion that is missing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch.fx import Graph, Node

from autoptd.errors import InternalError
from autoptd.ir import markers
from autoptd.ir.layout import Layout
from autoptd.ir.mesh import Mesh
from autoptd.ir.notes import is_whole, note, op_name, ops, output, placeholders
from autoptd.ir.types import CONVERSIONS, I, P, R, S
from autoptd.passes.axes.axes import Axes
from autoptd.passes.communicate import _missing
from autoptd.passes.connected import check_connected
from autoptd.passes.ops.costs import flops
from autoptd.passes.reader_names import reader_name
from examples.gpt import GPT, GPTConfig
from tests.parity import test_sharing
from tests.passes.graphs import Net, connect, find, traced

Tensor = torch.Tensor
LAYERS = 3


@cache
def gpt(t: int) -> tuple[Graph, Axes]:
    """A GPT of real width (on meta), connected for t ranks."""
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=32768, block_size=512, n_layer=LAYERS, n_head=16, n_embd=1024))
        ids = torch.zeros(2, 512, dtype=torch.long)
    return connect(model, ids, ids.clone(), t=t)


def collectives(graph: Graph, module: str) -> Counter[str]:
    """`all-reduce forward`: how often, in modules that match."""
    found: Counter[str] = Counter()
    for node in ops(graph):
        if note(node).conversion and re.match(module, note(node).module):
            row = next(row for row in CONVERSIONS.values() if row.name == note(node).conversion)
            found.update(
                f"{what} {when}" for what, when in ((row.forward, "forward"), (row.backward, "backward"))
            )
    return Counter({what: count for what, count in found.items() if "all-" in what or "scatter" in what})


def normed(self: Net, x: Tensor) -> Tensor:
    wide = x.float()
    y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
    return (y.view(4, 2, 8).pow(2) * self.w).sum()


def test_reasons_name_what_an_engineer_sees_in_an_operator() -> None:
    graph = traced(Net(normed, w=(8,)), torch.randn(8, 8, dtype=torch.bfloat16))
    names = [reader_name(node) for node in ops(graph)]
    # The first square begins a norm, the second is one.
    assert [name for name in names if name in ("cast", "rms_norm", "reshape", "pow")] == [
        *("cast", "rms_norm", "cast", "reshape"),
        "pow",
    ]
    assert reader_name(output(graph)) == "the loss"


@pytest.mark.parametrize("t", [2, 4, 8])
def test_two_all_reduces_forward_and_two_backward_per_layer(t: int) -> None:
    graph, axes = gpt(t)
    check_connected(graph, axes, "tp", Mesh(t=t))
    for layer in range(LAYERS):
        found = collectives(graph, rf"transformer\.h\.{layer}(\.|$)")
        assert found == {"all-reduce forward": 2, "all-reduce backward": 2}
    ends = collectives(graph, r"transformer$|transformer\.(wte|wpe|ln_f)|lm_head|$")
    assert ends == {"all-reduce forward": 1, "all-reduce backward": 1}
    assert not [node for node in ops(graph) if flops(node) and is_whole(node)]


def test_layers_are_all_split_alike() -> None:
    graph, _ = gpt(4)
    layers = [
        [
            (op_name(n), n.meta["autoptd"].layout["tp"])
            for n in ops(graph)
            if f"{note(n).module}.".startswith(f"transformer.h.{i}.")
        ]
        for i in range(LAYERS)
    ]
    assert layers[0] == layers[1] == layers[2]


def test_parameters_are_split_as_megatron_splits_them() -> None:
    graph, _ = gpt(4)
    found = {note(node).name: note(node).layout["tp"] for node in placeholders(graph, "param")}
    layer = "transformer.h.1."
    assert {
        name.removeprefix(layer): str(kind) for name, kind in found.items() if name.startswith(layer)
    } == {
        "ln_1.weight": "I",
        "ln_1.bias": "I",
        "attn.c_attn.weight": "S(0, 1)",  # q | k | v, each split by heads
        "attn.c_attn.bias": "S(0, 1)",
        "attn.c_proj.weight": "S(1, 0)",
        "attn.c_proj.bias": "I",
        "ln_2.weight": "I",
        "ln_2.bias": "I",
        "mlp.c_fc.weight": "S(0, 0)",
        "mlp.c_fc.bias": "S(0, 0)",
        "mlp.c_proj.weight": "S(1, 0)",
        "mlp.c_proj.bias": "I",
    }
    assert note(find(graph, f"{layer}attn.c_attn.weight")).dims[0] == (3, 16, 64)
    assert found["transformer.wte.weight"] == S(0, 0)


def test_embedding_and_loss_are_split_by_vocabulary() -> None:
    graph, _ = gpt(4)
    assert (
        note(find(graph, "embedding")).forms.get("tp", "") == "vocab_embedding"
        and note(find(graph, "embedding")).layout["tp"] == P
    )
    loss = find(graph, "cross_entropy_loss")
    assert note(loss).forms == {"tp": "vocab_cross_entropy"} and note(loss).layout["tp"] == I
    logits = find(graph, "linear", -1)
    assert note(logits).layout["tp"] == S(2, 0)


def test_a_row_split_bias_is_kept_by_one_rank() -> None:
    graph, _ = gpt(4)
    kept = [node for node in ops(graph) if note(node).conversion == "i_to_p"]
    names = {note(node.args[0]).name.split(".", 3)[-1] for node in kept}  # type: ignore[arg-type]
    assert len(kept) == 2 * LAYERS and names == {"attn.c_proj.bias", "mlp.c_proj.bias"}


def test_every_reason_is_written() -> None:
    graph, _ = gpt(4)
    assert not [node for node in ops(graph) if note(node).of_params and not note(node).why]


def test_q_k_and_v_share_one_conversion() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        h = (x @ self.first).tanh()
        q, k, v = ((h @ w).view(2, 8, 4, 64).transpose(1, 2) for w in (self.q, self.k, self.v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return (y.transpose(1, 2).reshape(2, 8, 256) @ self.out + h).square().mean()

    sizes = dict.fromkeys(("first", "q", "k", "v", "out"), (256, 256))
    graph, axes = connect(Net(forward, **sizes), torch.randn(2, 8, 256), t=2)
    check_connected(graph, axes, "tp", Mesh(t=2))
    products = [node for node in ops(graph) if op_name(node) == "aten.matmul"][1:4]
    assert len({node.args[0] for node in products}) == 1


# Mutations of the CONNECTED graph: each must be found.


@pytest.fixture
def small() -> tuple[Graph, Axes]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, block_size=16, n_layer=1, n_head=4, n_embd=64))
    ids = torch.zeros(2, 16, dtype=torch.long)
    return connect(model, ids, ids.clone(), t=2)


def conversions(graph: Graph) -> Iterator[Node]:
    return (node for node in ops(graph) if node.target is markers.convert)


def test_each_removed_conversion_is_found(small: tuple[Graph, Axes]) -> None:
    graph, axes = small
    check_connected(graph, axes, "tp", Mesh(t=2))
    every = list(conversions(graph))
    assert len(every) > 4
    for node in every:
        readers = list(node.users)
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        with pytest.raises(InternalError, match="CONNECTED"):
            check_connected(graph, axes, "tp", Mesh(t=2))
        for reader in readers:
            reader.replace_input_with(node.args[0], node)  # type: ignore[arg-type]
        check_connected(graph, axes, "tp", Mesh(t=2))


def test_each_conversion_of_another_kind_is_found(small: tuple[Graph, Axes]) -> None:
    graph, axes = small
    for node in list(conversions(graph)):
        record = note(node)
        kept, kept_type = (record.layout, record.conversion, node.args), record.layout["tp"]
        source = note(node.args[0]).layout["tp"]  # type: ignore[arg-type]
        for kind in (I, R, P):
            row = CONVERSIONS.get((source.kind, kind.kind))
            if row is None or kind == kept_type:
                continue
            record.layout, record.conversion = record.layout.having("tp", kind), row.name
            node.args = (node.args[0], row.name, *node.args[2:])
            with pytest.raises(InternalError, match="CONNECTED"):
                check_connected(graph, axes, "tp", Mesh(t=2))
        record.layout, record.conversion, node.args = kept
    check_connected(graph, axes, "tp", Mesh(t=2))


def test_a_conversion_whose_name_does_not_fit_is_found(small: tuple[Graph, Axes]) -> None:
    graph, axes = small
    node = next(node for node in conversions(graph) if note(node).conversion == "p_to_i")
    node.args = (node.args[0], "p_to_r", *node.args[2:])
    with pytest.raises(InternalError, match="converts"):
        check_connected(graph, axes, "tp", Mesh(t=2))


def test_a_shard_of_another_place_is_found(small: tuple[Graph, Axes]) -> None:
    graph, axes = small
    node = next(conversions(graph))
    node.args = (*node.args[:2], 1, 7)
    with pytest.raises(InternalError, match="with arguments"):
        check_connected(graph, axes, "tp", Mesh(t=2))


def test_an_operator_of_the_wrong_type_is_found(small: tuple[Graph, Axes]) -> None:
    graph, axes = small
    node = find(graph, "gelu")
    note(node).layout = note(node).layout.having("tp", P)
    with pytest.raises(InternalError, match="gelu"):
        check_connected(graph, axes, "tp", Mesh(t=2))


def test_the_loss_must_be_whole(small: tuple[Graph, Axes]) -> None:
    graph, axes = small
    last = next(iter(reversed(graph.nodes)))
    partial = find(graph, "linear", 1)
    last.args = (partial,)
    with pytest.raises(InternalError, match="loss"):
        check_connected(graph, axes, "tp", Mesh(t=2))


def test_t_1_has_no_conversions() -> None:
    model = GPT(GPTConfig(vocab_size=64, block_size=16, n_layer=1, n_head=4, n_embd=64))
    ids = torch.zeros(2, 16, dtype=torch.long)
    graph, axes = connect(model, ids, ids.clone(), t=1)
    check_connected(graph, axes, "tp", Mesh(t=1))
    assert not list(conversions(graph))


SLOW, FAST = "tp:(1)2", "tp:(2)2"
WRONG = {  # operator, other types of its value over tp, what is said of it
    "keys without their gradient's sum": ("linear", 1, {SLOW: S(2, 0)}, "over tp:(2)2"),
    "keys of the other sub-axis": ("linear", 1, {FAST: S(2, 0), SLOW: R}, "no rule allows"),
    "queries as of the whole axis": ("linear", 0, {"tp": S(2, 2)}, "no rule allows"),
    "heads that are repeats": ("linear", 0, {SLOW: S(2, 1), FAST: S(2, 0)}, "no rule allows"),
    "three pieces": ("linear", 0, {"tp:(1)3": S(2, 0)}, "sub-axes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_types_over_sub_axes_are_held_one_by_one(name: str) -> None:
    graph, axes = connect(test_sharing.grouped(), *test_sharing.batch(), t=4, machine=test_sharing.CHEAP)
    check_connected(graph, axes, "tp", Mesh(t=4))
    operator, index, types, text = WRONG[name]
    node = find(graph, operator, index)
    assert note(node).layout.over("tp").sub_axes == (SLOW, FAST)
    note(node).layout = note(node).layout.replacing("tp", Layout(types))
    with pytest.raises(InternalError, match="CONNECTED") as found:
        check_connected(graph, axes, "tp", Mesh(t=4))
    assert text in str(found.value)


def test_a_conversion_changes_its_own_axis_only() -> None:
    graph, axes = connect(test_sharing.Looked(), *test_sharing.batch(), t=4, machine=test_sharing.CHEAP)
    node = next(
        node for node in conversions(graph) if note(node).axis == SLOW and note(node).conversion[0] == "s"
    )
    note(node).layout = note(node).layout.replacing("tp", Layout({FAST: P}))
    with pytest.raises(InternalError, match=r"changes the type over tp:\(2\)2"):
        check_connected(graph, axes, "tp", Mesh(t=4))


def test_nothing_is_converted_on_the_way_to_a_type_that_is_there() -> None:
    a, b, c = Layout({"tp": I}), Layout({"tp": R}), Layout({"tp": S(0, 0)})
    assert _missing([a, b, c], {b: None}) == [b, c] and _missing([a, b, c], {c: None}) == [c]
    assert _missing([b, c], {}) == [b, c] and _missing([], {c: None}) == []
