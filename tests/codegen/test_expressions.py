"""The text of an operator, evaluated, is the operator: over every example of the axis table."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from autoptd import runtime as rt
from autoptd.codegen.expressions import expression
from autoptd.ir import markers
from autoptd.ir.expert_mm import NAME as EXPERT_MM
from autoptd.ir.noise import is_draw
from autoptd.ir.notes import Note, op_name, ops, set_note
from tests.ir.operators.test_examples import EXAMPLES, r, traced
from tests.passes.sharding import trace_call

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


MORE: dict[str, Any] = {
    "softmax in float32": (lambda x: x.softmax(-1, dtype=torch.float32), [r(4, 6)]),
    "log_softmax in float32": (lambda x: x.log_softmax(-1, torch.float32), [r(4, 6)]),
    "sum in float32": (lambda x: x.sum(-1, dtype=torch.float32), [r(4, 6)]),
    "index": (lambda x, i: x[i.long(), :, i.long()], [r(4, 6, 4), torch.tensor([0.0, 3.0])]),
    "negative slice": (lambda x: x[:, -3:-1], [r(4, 6)]),
    "first rows": (lambda x: x[:2], [r(4, 6)]),
    "last of four dims": (lambda x: x[..., 2:5] + x[:, :, 1:3, :3], [r(2, 4, 2, 6)]),
    "power of a number": (lambda x: 2**x - (-x) ** 2, [r(4, 6)]),
    "infinite": (lambda x: x.masked_fill(x > 0, float("-inf")), [r(4, 6)]),
    "clamp": (lambda x: x.clamp(min=-0.5) + x.clamp(-1, 1), [r(4, 6)]),
    "logical": (lambda x, y: torch.logical_and(x, y).logical_not() | (x > 0), [r(4, 6), r(4, 6)]),
    "argmax": (lambda x: x.argmax(1, keepdim=True), [r(4, 6)]),
}
ALL = EXAMPLES | MORE


def evaluate(node: Node, env: dict[Node, Any]) -> Any:
    names = {one: f"v{i}" for i, one in enumerate(env)}
    scope = {name: env[one] for one, name in names.items()}
    scope |= {"torch": torch, "F": F, "rt": rt, "self": SimpleNamespace(device="cpu")}
    return eval(expression(node, names.__getitem__), scope)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ALL)
def test_text_means_the_operator(name: str) -> None:
    graph, env = traced(name)[:2] if name in EXAMPLES else trace_call(*MORE[name])
    for node in ops(graph):
        if is_draw(node) or op_name(node) == EXPERT_MM:
            continue  # written in its local form only: draws below, products of experts in tests/runtime/ops/test_experts.py
        found, wanted = evaluate(node, env), env[node]
        pairs = zip(found, wanted, strict=True) if isinstance(wanted, (tuple, list)) else [(found, wanted)]
        for one, other in pairs:
            assert one.dtype == other.dtype and one.shape == other.shape, op_name(node)
            assert torch.equal(one.nan_to_num(), other.nan_to_num()), op_name(node)


@pytest.mark.parametrize(
    ("batch", "shard", "text"),
    [
        (None, None, "rt.dropout(x, 0.1, self.draw(site=7))"),
        ((0, 1), None, "rt.dropout(x, 0.1, self.draw(site=7), batch=0)"),
        ((1, 6), (0, 3), "rt.dropout(x, 0.1, self.draw(site=7), batch=(1, 6), shard=(0, 3), group=tp)"),
    ],
)
def test_text_of_a_dropout(batch: Any, shard: Any, text: str) -> None:
    graph = Graph()
    node = graph.call_function(markers.dropout, (graph.placeholder("x"), 0.1, 7, batch, shard))
    set_note(node, Note(axis="tp"))
    assert expression(node, str) == text


READ = {
    "slice thirds": "x[..., 4:8]",
    "slice last third": "x[..., -4:]",
    "slice step": "x[:, ::2]",
    "linear": "F.linear(x, y, z)",
    "softmax": "x.softmax(-1)",
    "matmul 2D": "x @ y",
    "addmm": "torch.addmm(x, y, z)",
    "split": "torch.split(x, 4, -1)",
    "mul number": "x * 3.0",
    "transpose": "x.transpose(0, 2)",
    "permute": "x.permute(2, 0, -2)",
    "view folds": "x.reshape(2, 4, 3, 2)",
    "cross_entropy": "F.cross_entropy(x, y)",
    "cross_entropy ignore": "F.cross_entropy(x, y, ignore_index=2)",
    "cross_entropy sum": 'F.cross_entropy(x, y, reduction="sum")',
    "pad middle": 'F.pad(x, [0, 0, 2, 1], "constant", 3.0)',
    "mean dims": "x.mean([1, 2])",
    "sdpa causal": "F.scaled_dot_product_attention(x, y, z, is_causal=True)",
    "gelu": 'F.gelu(x, approximate="tanh")',
}


@pytest.mark.parametrize("name", READ)
def test_text_reads_as_a_person_would_write_it(name: str) -> None:
    graph, env, _ = traced(name)
    node = next(iter(ops(graph)))
    letters = dict(zip([one for one in env if one.op == "placeholder"], "xyz", strict=False))
    assert expression(node, letters.__getitem__) == READ[name]
