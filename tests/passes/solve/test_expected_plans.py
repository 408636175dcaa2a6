"""The plans of well-known models, written down by hand: what an expert would have chosen must fall out of the costs.

Two layers of each at their published widths, on meta, t=4 on an H100. What is expected and not Megatron's: an embedding that is
not tied is split by its width (a gather of what was looked up moves half of what a sum over vocabulary shards does).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, Node

import autoptd
from autoptd.ir import markers
from autoptd.ir.names import star
from autoptd.ir.notes import note, ops
from autoptd.ir.operators.table import is_view
from autoptd.ir.types import LOCAL_KINDS, ValueType
from autoptd.program.program import Program

transformers = pytest.importorskip("transformers")

LENGTH, ROWS, T = 1024, 2, 4
LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": LENGTH,
}
BERT = {
    "num_hidden_layers": 2,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "max_position_embeddings": LENGTH,
}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_layer=2, n_head=16, n_embd=1024, n_positions=LENGTH, use_cache=False)
    return transformers.GPT2LMHeadModel(config)


def llama(kv: int = 8) -> nn.Module:
    config = transformers.LlamaConfig(
        num_attention_heads=32, num_key_value_heads=kv, use_cache=False, **LLAMA
    )
    return transformers.LlamaForCausalLM(config)


def neox() -> nn.Module:
    config = transformers.GPTNeoXConfig(
        num_attention_heads=32, use_parallel_residual=True, use_cache=False, **LLAMA
    )
    return transformers.GPTNeoXForCausalLM(config)


def gptj() -> nn.Module:
    sizes = {"n_layer": 2, "n_head": 16, "n_embd": 4096, "n_positions": LENGTH, "rotary_dim": 64}
    return transformers.GPTJForCausalLM(transformers.GPTJConfig(use_cache=False, **sizes))


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(num_attention_heads=16, vocab_size=30524, **BERT)
    )


@dataclass(frozen=True)
class Expected:
    """`layer`: its modules and how they are split, all others are whole; `outside`: likewise, of what is in no layer.

    `sums`: all-reduces of a layer forward, and as many backward; `gathers`: its all-gathers with sequence parallelism, beside
    `sums` reduce-scatters.
    """

    make: Callable[[], nn.Module]
    path: str
    layer: dict[str, str]
    outside: dict[str, str]
    sums: int = 2
    gathers: int = 2


PLANS = {
    "gpt2": Expected(
        gpt2,
        "transformer.h",
        {"attn.c_attn": "column", "attn.c_proj": "row", "mlp.c_fc": "column", "mlp.c_proj": "row"},
        {"transformer.wte": "vocabulary"},
    ),
    "llama, grouped queries": Expected(
        llama,
        "model.layers",
        {
            **{f"self_attn.{name}_proj": "column" for name in "qkv"},
            "self_attn.o_proj": "row",
            "mlp.gate_proj": "column",
            "mlp.up_proj": "column",
            "mlp.down_proj": "row",
        },
        {"model.embed_tokens": "width", "lm_head": "column"},
    ),
    "llama, fewer KV heads than ranks": Expected(
        partial(llama, kv=2),
        "model.layers",
        {
            **{f"self_attn.{name}_proj": "column" for name in "qkv"},
            "self_attn.o_proj": "row",
            "mlp.gate_proj": "column",
            "mlp.up_proj": "column",
            "mlp.down_proj": "row",
        },
        {"model.embed_tokens": "width", "lm_head": "column"},
    ),
    "neox, parallel residual": Expected(
        neox,
        "gpt_neox.layers",
        {
            "attention.query_key_value": "column",
            "attention.dense": "row",
            "mlp.dense_h_to_4h": "column",
            "mlp.dense_4h_to_h": "row",
        },
        {"gpt_neox.embed_in": "width", "lm_head": "column"},
        sums=1,  # attention and MLP are added while they are partial sums
        gathers=2,  # each has a norm of its own
    ),
    "gptj": Expected(
        gptj,
        "transformer.h",
        {
            **{f"attn.{name}_proj": "column" for name in "qkv"},
            "attn.out_proj": "row",
            "mlp.fc_in": "column",
            "mlp.fc_out": "row",
        },
        {"transformer.wte": "width", "lm_head": "column"},
        sums=1,
        gathers=1,  # one norm, one gather for q, k, v and the MLP
    ),
    "bert": Expected(
        bert,
        "bert.encoder.layer",
        {
            **{f"attention.self.{name}": "column" for name in ("query", "key", "value")},
            "attention.output.dense": "row",
            "intermediate.dense": "column",
            "output.dense": "row",
        },
        {"bert.embeddings.word_embeddings": "vocabulary"},
    ),
}


@cache
def compiled(name: str, sequence_parallel: bool) -> tuple[nn.Module, Program]:
    with torch.device("meta"):
        model, ids = PLANS[name].make().train(), torch.zeros(ROWS, LENGTH, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": ids.clone()}
    request: dict[str, Any] = {
        "t": T,
        "machine": "h100",
        "num_microbatches": 1,
        "sequence_parallel": sequence_parallel,
    }
    return model, autoptd.compile(model, example_inputs=inputs, **request)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_parameter_is_split_as_expected(name: str, sequence_parallel: bool) -> None:
    (model, program), expected = compiled(name, sequence_parallel), PLANS[name]
    found: dict[str, set[str]] = {}
    for one in program.params:
        path, _, kind = one.name.rpartition(".")
        in_layer = path.startswith(f"{expected.path}.")
        where = path.removeprefix(f"{expected.path}.").partition(".")[2] if in_layer else path
        wanted = (expected.layer if in_layer else expected.outside).get(where, "whole")
        if in_layer or where in expected.outside or "norm" in where.lower() or ".ln_" in where:
            wanted = "whole" if wanted == "row" and kind == "bias" else wanted
            found.setdefault(f"{where}.{kind} {wanted}", set()).add(split(model, path, kind, one.shard))
    assert {text: kinds for text, kinds in found.items() if kinds != {text.split()[1]}} == {}
    assert {text.rpartition(".")[0] for text in found} >= {*expected.layer, *expected.outside}


def split(model: nn.Module, path: str, kind: str, shard: ValueType | None) -> str:
    """What people call the split of a parameter."""
    module = model.get_submodule(path)
    if shard is None:
        return "whole"
    if isinstance(module, nn.Embedding):
        return ("vocabulary", "width")[shard.dim]
    is_transposed = type(module).__name__ == "Conv1D"
    return "row" if kind == "weight" and shard.dim == (0 if is_transposed else 1) else "column"


@pytest.mark.parametrize("name", PLANS)
def test_all_reduces_of_a_layer(name: str) -> None:
    (model, program), expected = compiled(name, False), PLANS[name]
    width = model.get_input_embeddings().embedding_dim  # type: ignore[operator]
    calls = list(calls_of_layer(program, f"{expected.path}.1"))
    assert Counter((phase, kind) for phase, kind, _ in calls) == {
        ("forward", "all-reduce"): expected.sums,
        ("backward", "all-reduce"): expected.sums,
    }
    assert {nbytes for _, _, nbytes in calls} == {4 * ROWS * LENGTH * width}


@pytest.mark.parametrize("name", PLANS)
def test_gathers_and_scatters_of_a_layer(name: str) -> None:
    """With sequence parallelism; what was gathered for a product is gathered again for its weight's gradient."""
    (model, program), expected = compiled(name, True), PLANS[name]
    width = model.get_input_embeddings().embedding_dim  # type: ignore[operator]
    calls = list(calls_of_layer(program, f"{expected.path}.1"))
    assert Counter((phase, kind) for phase, kind, _ in calls) == {
        ("forward", "all-gather"): expected.gathers,
        ("forward", "reduce-scatter"): expected.sums,
        ("backward", "reduce-scatter"): expected.gathers,
        ("backward", "all-gather"): expected.sums + expected.gathers,
    }
    assert {nbytes for _, _, nbytes in calls} == {4 * ROWS * LENGTH * width}


def calls_of_layer(program: Program, path: str) -> Iterator[tuple[str, str, int]]:
    """(phase, kind, bytes) of what is communicated over tp for the modules of a layer, in a microbatch."""
    for one in program.collectives:
        if one.axis == "tp" and one.scope == "microbatch" and one.site.startswith((f"{path}.", f"{path} ")):
            for phase, kind in (("forward", one.forward), ("backward", one.backward)):
                if kind not in LOCAL_KINDS:
                    yield phase, kind, one.payload_bytes


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_nothing_is_done_twice(name: str, sequence_parallel: bool) -> None:
    """No product is computed by every rank, nothing gathered is only sliced again, and q, k and v share what they read."""
    _, program = compiled(name, sequence_parallel)
    redundant = [row.module for row in program.costs.gemms if row.redundant]
    assert redundant == [] and not program.fallbacks
    graph = program.graphs["CONNECTED"]
    assert [node.name for node in gathers(graph) if is_only_sliced(node)] == []
    made = Counter(
        (node.args[0], note(node).layout["tp"]) for node in ops(graph) if node.target is markers.convert
    )
    assert [(source, kind) for (source, kind), times in made.items() if times > 1] == []
    sites = {star(note(node).module) for node in gathers(graph)}
    assert sum("q_proj" in one or "k_proj" in one or "v_proj" in one for one in sites) <= 1


def gathers(graph: Graph) -> list[Node]:
    """Conversions from sharded, or partial, to whole."""
    found = [node for node in ops(graph) if node.target is markers.convert]
    return [
        one
        for one in found
        if note(one.args[0]).layout["tp"].kind in "SP" and note(one).layout["tp"].kind in "IR"
    ]  # type: ignore[arg-type]


def is_only_sliced(node: Node) -> bool:
    """Whether a whole value, or views of it, go nowhere but into slices of a rank."""
    for user in node.users:
        if note(user).conversion and note(user).layout["tp"].kind == "S":
            continue
        if is_view(user) and is_only_sliced(user):
            continue
        return False
    return True
