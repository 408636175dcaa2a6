"""Counts of a shape: SC'21's and Korthikanti's formulas, and exactly what the traced, sharded graph of a GPT
has.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import cache
from typing import Any

import pytest
import sympy
import torch
from torch.fx import Node

import autoptd
from autoptd.compiler.compiled import Compiled
from autoptd.ir.mesh import Mesh
from autoptd.ir.notes import note, ops
from autoptd.passes.ops.costs import backward_flops, flops
from autoptd.passes.solve.symbols import Symbols
from autoptd.wings.planner.counts import (
    CORE,
    Operator,
    Sizes,
    head_operators,
    layer_operators,
    layer_parameters,
    model_flops,
    stage_parameters,
)
from autoptd.wings.planner.shape import Shape, find_shape
from examples.gpt import GPT, GPTConfig

GPT3 = Shape(layers=96, hidden=12288, heads=96, seq=2048)
LLAMA = Shape(80, 8192, 64, 8192, vocab=128256, ffn=28672, kv_heads=8, mlp_matrices=3)
MESHES: list[dict[str, Any]] = [
    {"t": 1, "p": 1, "d": 1, "num_microbatches": 2},
    {"t": 4, "p": 1, "d": 1, "num_microbatches": 2},
    {"t": 2, "p": 2, "d": 2, "num_microbatches": 2},
    {"t": 2, "p": 2, "d": 1, "v": 2, "num_microbatches": 2},
    {"t": 2, "p": 1, "d": 1, "num_microbatches": 2, "sequence_parallel": True},
]
OPERATORS = {  # of a GPT's layer: the module below it, and the operator of the graph
    "qkv": ("attn.c_attn", "linear"),
    "attention": ("attn", "scaled_dot_product_attention"),
    "projection": ("attn.c_proj", "linear"),
    "mlp up": ("mlp.c_fc", "linear"),
    "mlp down": ("mlp.c_proj", "linear"),
}
ROWS = 8


TINY = Shape(layers=4, hidden=64, heads=8, seq=16, vocab=4096)


@cache
def compiled(number: int) -> autoptd.Program:
    """The tiny GPT on the mesh of that number."""
    mesh, shape = MESHES[number], TINY
    config = GPTConfig(shape.vocab, shape.seq, shape.layers, shape.heads, shape.hidden)
    with torch.device("meta"):
        model = GPT(config)
    ids = torch.zeros(ROWS, shape.seq, dtype=torch.long, device="meta")
    layers = shape.layers // (mesh["p"] * mesh.get("v", 1))
    plan: dict[str, Any] = {"cut": [layers] * (shape.layers // layers)} if mesh["p"] > 1 else {}
    if mesh["t"] > 1:  # as Megatron has it: at this size a table would be kept whole, and positions split
        dims = {"transformer.wte.weight": 0, "transformer.wpe.weight": None}
        plan["shard"] = [{"pattern": name, "dim": dim, "axis": "tp"} for name, dim in dims.items()]
    return autoptd.compile(model, example_inputs=(ids, ids), fuse=False, **mesh, plan=plan)


@pytest.mark.parametrize("number", range(len(MESHES)))
def test_a_shape_counts_what_the_sharded_graph_of_a_gpt_does(number: int) -> None:
    shape, mesh, program = TINY, MESHES[number], compiled(number)
    t, stages = mesh["t"], mesh["p"] * mesh.get("v", 1)
    sizes = Sizes(
        b=ROWS // mesh["d"] // mesh["num_microbatches"], t=t, r=t if "sequence_parallel" in mesh else 1, e=4
    )
    expected: dict[str, Counter[tuple[int, str, str]]] = {"forward": Counter(), "backward": Counter()}

    def add(stage: int, module: str, operator: str, one: Operator, times: int = 1) -> None:
        expected["forward"][stage, module, operator] += int(times * one.forward_flops)
        expected["backward"][stage, module, operator] += int(times * one.backward_flops)

    for one in layer_operators(shape, sizes, "flash"):
        if one.forward_flops:
            for stage in range(stages):
                module, operator = OPERATORS[one.name]
                add(stage, f"transformer.h.*.{module}", operator, one, shape.layers // stages)
    (logits,) = [one for one in head_operators(shape, sizes) if one.forward_flops]
    add(stages - 1, "lm_head", "linear", logits)
    for way, found in expected.items():
        told = {
            (row.stage, row.module, row.operator.removeprefix("aten.")): getattr(row, way)
            for row in program.costs.gemms
        }
        assert told == found
    assert program.costs.total_flops * mesh["num_microbatches"] * mesh["d"] == model_flops(shape, ROWS) / 3


@pytest.mark.parametrize("number", range(len(MESHES)))
def test_parameters_of_a_rank_are_those_of_the_program(number: int) -> None:
    shape, mesh, program = TINY, MESHES[number], compiled(number)
    stages = mesh["p"] * mesh.get("v", 1)
    found = [0] * stages
    for spec in program.params:
        for stage in spec.stages:
            found[stage] += spec.local_bytes(program.mesh) // 4
    if stages == 1:
        assert sum(torch.Size(spec.shape).numel() for spec in program.params) == shape.parameters
    assert found == stage_parameters(shape, [shape.layers // stages] * stages, mesh["t"])


@pytest.mark.parametrize("number", range(len(MESHES)))
def test_bytes_kept_for_backward_are_those_of_the_program(number: int) -> None:
    """Per stage, with the two numbers a row that a layer norm saves, which the shape leaves out."""
    shape, mesh, program = dataclasses.replace(TINY, dropout=False), MESHES[number], compiled(number)
    t, stages = mesh["t"], mesh["p"] * mesh.get("v", 1)
    sizes = Sizes(
        b=ROWS // mesh["d"] // mesh["num_microbatches"], t=t, r=t if "sequence_parallel" in mesh else 1, e=4
    )
    layer = layer_operators(shape, sizes, "flash")
    (attention,) = [one for one in layer if one.fused is not None]
    tokens = sizes.b * shape.seq
    assert attention.saved == 4 * tokens * shape.heads / t
    found = program.costs.cut.saved_bytes
    statistics = 2 * 4 * tokens / sizes.r
    layers = shape.layers / stages
    expected = [layers * (sum(one.saved for one in layer) + 2 * statistics)] * stages
    expected[-1] += sum(one.saved for one in head_operators(shape, sizes)) + statistics
    assert list(found[1:]) == expected[1:]
    # Positions, the ids of this rank's rows of the embedding, a number of the loss.
    assert 0 <= found[0] - expected[0] <= 8 * shape.seq + 16 * tokens + 4


def test_tensor_collectives_of_a_layer_are_those_of_the_program() -> None:
    """Four all-reduces of b s h a layer and microbatch: two forward, two backward."""
    shape, program = TINY, compiled(1)
    value = 4 * (ROWS // 2) * shape.seq * shape.hidden
    calls: Counter[str] = Counter()
    for one in program.collectives:
        if one.scope == "microbatch" and ".h." in one.site and one.payload_bytes == value:
            calls.update({"forward": one.forward == "all-reduce", "backward": one.backward == "all-reduce"})
    assert calls == {"forward": 2 * shape.layers, "backward": 2 * shape.layers}


def symbols_of(program: autoptd.Program) -> tuple[Symbols, list[Node]]:
    """The symbols of a compiled program's sizes, and its matrix products."""
    assert isinstance(program, Compiled)
    assignment = program.found.assignments["tp"]
    nodes = {node.name: node for node in assignment.problem.variable if flops(node)}
    return Symbols(assignment.splitter, assignment.letters), list(nodes.values())


def in_letters(expression: Any, letters: dict[str, Any]) -> Any:
    """With h for the sizes that follow from it: q, k and v beside one another, a head's width, the MLP's."""
    h = letters["h"]
    return sympy.expand(
        expression.subs({letters["n3"]: 3, letters["n10"]: h / letters["a"], letters["n160"]: 4 * h})
    )


@pytest.mark.parametrize(("t", "p"), [(2, 1), (4, 1), (2, 2)])
def test_flops_of_a_rank_simplify_to_those_of_the_paper_over_t(t: int, p: int) -> None:
    """From the sharded graph's own nodes with their types over tp, in b, s, h, V and t; p cuts the layers.

    Backward is twice that, and a fifth product of attention, whose kernel computes its scores again.
    """
    layers = 2
    config = GPTConfig(vocab_size=56, block_size=12, n_layer=layers, n_head=4, n_embd=40)
    ids = torch.zeros(4, 12, dtype=torch.long)
    dims = {"transformer.wte.weight": 0, "transformer.wpe.weight": None}
    plan: dict[str, Any] = {
        "shard": [{"pattern": name, "dim": dim, "axis": "tp"} for name, dim in dims.items()]
    }
    plan |= {"cut": [layers // p] * p} if p > 1 else {}
    program = autoptd.compile(GPT(config), t=t, p=p, num_microbatches=2, example_inputs=(ids, ids), plan=plan)
    symbols, nodes = symbols_of(program)
    assert len(nodes) == 5 * layers + 1
    assert sum(map(symbols.flops, nodes)) != 0  # which names all sizes
    letters = {one.name: one for one in symbols.values}
    b, s, h, v = (letters[name] for name in "bshV")

    def local(node: Node) -> tuple[Any, ...]:
        sizes = list(symbols.shape(node))
        for dim, _, pieces in note(node).layout.cuts(Mesh(t=t)):
            assert pieces in (1, t)
            sizes[dim] = sizes[dim] / symbols.degree if pieces == t else sizes[dim]
        return tuple(sizes)

    for stage in range(p):
        mine = [node for node in nodes if stage in note(node).stages]
        forward, backward = (
            in_letters(sum(count(node, local) for node in mine), letters) for count in (flops, backward_flops)
        )
        own = 24 * b * s * (layers // p) * h**2 * (1 + s / (6 * h)) + (
            2 * b * s * h * v if stage == p - 1 else 0
        )
        assert sympy.simplify(forward - own / symbols.degree) == 0
        again = 2 * b * s**2 * h * (layers // p)
        assert sympy.simplify(backward - (2 * own + again) / symbols.degree) == 0
        if p == 1:
            paper = 24 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
            assert sympy.simplify(symbols.degree * forward - paper) == 0


def test_the_graphs_own_flops_simplify_to_those_of_the_paper() -> None:
    """SC'21, equation 3 without its fourth pass, and 2: from the traced graph's nodes and parameters, in
    symbols.
    """
    layers, width, vocab = 3, 40, 56
    config = GPTConfig(vocab_size=vocab, block_size=12, n_layer=layers, n_head=4, n_embd=width)
    ids = torch.zeros(2, 12, dtype=torch.long)
    program = autoptd.compile(GPT(config), t=2, example_inputs=(ids, ids))
    symbols, nodes = symbols_of(program)
    assert (
        len(nodes) == 5 * layers + 1 == len([node for node in ops(program.graphs["TRACED"]) if flops(node)])
    )
    forward = sum(map(symbols.flops, nodes))
    letters = {one.name: one for one in symbols.values}
    b, s, h, v = (letters[name] for name in "bshV")
    forward = in_letters(forward, letters)
    paper = 24 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert sympy.simplify(forward - paper) == 0
    full = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    head = 2 * b * s * h * v
    assert sympy.simplify(4 * (forward - head) + 3 * head - full) == 0
    at_sizes = paper.subs({b: 2, s: 12, h: width, v: vocab})
    assert program.costs.total_flops * program.num_microbatches == at_sizes
    count = sum(torch.Size(spec.shape).numel() for spec in program.params)
    formula = (
        12 * layers * h**2 * (1 + sympy.Rational(13, 12) / h + (v + s) / (12 * layers * h)) + 2 * h
    )  # a last norm
    assert count == sympy.expand(formula).subs({s: 12, h: width, v: vocab})


def test_model_flops_are_the_formulas_of_the_papers() -> None:
    b, s, layers, h, v = 1536, 2048, 96, 12288, 51200
    full = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    plain = 72 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert model_flops(GPT3, b, "full") == pytest.approx(full, rel=1e-12)
    assert model_flops(GPT3, b) == pytest.approx(plain, rel=1e-12)
    assert model_flops(GPT3, b, "selective") == pytest.approx(plain + layers * 4 * b * s**2 * h, rel=1e-12)


@pytest.mark.parametrize(("t", "r"), [(1, 1), (8, 1), (8, 8)])
def test_saved_bytes_are_the_formulas_of_korthikanti(t: int, r: int) -> None:
    b, s, h, a = 4, GPT3.seq, GPT3.hidden, GPT3.heads
    operators = layer_operators(GPT3, Sizes(b=b, t=t, r=r), "unfused")
    outside = 10 / r + 24 / t
    assert sum(one.saved for one in operators) == pytest.approx(s * b * h * (outside + 5 * a * s / (h * t)))
    core = sum(one.saved for one in operators if one.part == CORE)
    assert sum(one.saved for one in operators) - core == pytest.approx(s * b * h * outside)


def test_a_llama_has_the_parameters_that_it_has() -> None:
    assert LLAMA.parameters == 70_553_706_496  # Llama 3.1 70B, as its checkpoint counts


def test_more_tensor_ranks_than_key_heads_share_them() -> None:
    """Llama's 8 key heads over 16 ranks: half the queries of t = 8, and as many keys and values."""
    eight, sixteen = (
        {one.name: one for one in layer_operators(LLAMA, Sizes(b=1, t=t), "flash")}["qkv"].product
        for t in (8, 16)
    )
    assert eight is not None and sixteen is not None
    assert (eight[2], sixteen[2]) == (1024 + 2 * 128, 512 + 2 * 128)
    halved = layer_parameters(LLAMA, 8) - layer_parameters(LLAMA, 16)
    assert halved == (LLAMA.layer_matrices - 2 * LLAMA.hidden * LLAMA.kv_width) / 16


def test_context_parallel_ranks_share_the_tokens() -> None:
    one, two = (layer_operators(LLAMA, Sizes(b=1, t=4, c=c), "flash") for c in (1, 2))
    assert sum(x.forward_flops for x in one) == 2 * sum(x.forward_flops for x in two)


@pytest.mark.parametrize(
    ("given", "site"),
    [
        ({"layers": 2, "hidden": 8, "heads": 2}, "shape"),
        ({"layers": 2, "hidden": 8, "heads": 2, "seq": 0}, "seq=0"),
        ({"layers": 2, "hidden": 8, "heads": 2, "seq": 8, "mlp_matrices": 4}, "mlp_matrices"),
        ({"layers": 2, "hidden": 8, "heads": 4, "seq": 8, "kv_heads": 3}, "kv_heads"),
        ({"layers": 2, "hidden": 8, "heads": 4, "seq": 8, "width": 3}, "'width'"),
    ],
)
def test_wrong_shapes_are_refused(given: dict[str, Any], site: str) -> None:
    with pytest.raises(autoptd.PlanError, match=site):
        find_shape(given)
