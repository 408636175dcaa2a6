"""Models of other people and of odd shapes, compiled end to end: what comes out is complete and consistent."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoptd.api import compile
from autoptd.errors import PlanError
from autoptd.ir import markers
from autoptd.ir.notes import note, ops
from autoptd.program.program import Program
from examples.gpt import GPT, GPTConfig

Tensor = torch.Tensor
MESHES: list[dict[str, Any]] = [
    {},
    {"t": 2},
    {"p": 2},
    {"d": 2},
    {"t": 2, "p": 2, "d": 2, "v": 2},
    {"t": 4, "p": 4},
]


def check(program: Program, model: nn.Module) -> None:
    """What must hold of every program."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert sorted(alias for one in program.params for alias in one.aliases) == sorted(names)
    for one in program.params:
        parts = program.mesh.t if one.storage.layout["tp"].kind == "S" else 1
        assert math.prod(one.local_shape(program.mesh)) * parts == math.prod(one.shape)
        assert one.why or program.mesh.t == 1
    read = {stage.index: set(stage.params) for stage in program.stages}
    for one in program.params:
        if one.why != "not used by the loss":
            assert set(one.stages) == {k for k, params in read.items() if one.name in params}
    made = {name: stage.index for stage in program.stages for name in stage.outputs}
    for crossing in program.crossings:
        assert made[crossing.name] == crossing.source < min(crossing.targets)
        assert all(crossing.name in program.stages[k].crossings for k in crossing.targets)
    assert len(program.sources.keys() - {"layers.py"}) == len(program.stages) == program.mesh.p * program.v
    for text in program.sources.values():
        __builtins__["compile"](text, "stage", "exec")  # type: ignore[index]
    for node in ops(program.graphs["LOCAL"]):
        assert note(node).stages, node
        if node.target is markers.convert:
            assert isinstance(node.meta["val"], Tensor)  # never the tuple of a split


# Hugging Face.


@cache
def hugging_face(which: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if which == "gpt2":
        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) | {
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        config = transformers.GPT2Config(
            vocab_size=128, n_positions=32, n_embd=64, n_layer=4, n_head=4, **off
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


@cache
def hugging_face_program(which: str) -> Program:
    ids = torch.randint(128, (8, 16), generator=torch.Generator().manual_seed(0))
    return compile(hugging_face(which), t=2, p=2, example_inputs={"input_ids": ids, "labels": ids.clone()})


@pytest.mark.one_in(9)
@pytest.mark.parametrize("which", ["gpt2", "llama"])
def test_hugging_face(which: str) -> None:
    program = hugging_face_program(which)
    check(program, hugging_face(which))
    assert program.fallbacks == () and program.costs.redundant_gemm_flops == 0
    assert program.sources["layers.py"].count("def layer(") == 1
    for text in program.sources.values():
        assert "torch.ops" not in text and text.count("F.scaled_dot_product_attention") <= 1
    assert program.weighted and [one.name for one in program.inputs] == ["input_ids", "labels"]


def test_hugging_face_parameters_are_split_by_heads() -> None:
    fused = hugging_face_program("gpt2").param("transformer.h.0.attn.c_attn.weight")  # Conv1D: transposed
    assert str(fused.storage.layout["tp"]) == "S(1, 1)" and fused.dims[1][:2] == (3, 4) and fused.outer == 3
    program = hugging_face_program("llama")
    split = {name: program.param(f"model.layers.1.self_attn.{name}_proj.weight").dims for name in "qkvo"}
    assert split["q"][0][:2] == (2, 2) and split["k"][0][0] == 2 and split["o"][1][:2] == (2, 2)


# Other shapes of models.


class Regression(nn.Module):
    """No loss of its own, no embedding, targets in floating point."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 64) if i % 2 == 0 else nn.Linear(64, 16) for i in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x) if i % 2 else F.gelu(layer(x))
        return x


class Einsum(nn.Module):
    """Attention spelled with einsum, per-head weights, a loss with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(4, 16, 4) / 4) for _ in range(3))
        self.wo = nn.Parameter(torch.randn(4, 4, 16) / 4)
        self.register_buffer("weights", torch.linspace(0.5, 2, 32))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = (torch.einsum("bsh,nhk->bnsk", x, w) for w in (self.wq, self.wk, self.wv))
        scores = torch.einsum("bnik,bnjk->bnij", q, k) / 2
        scores = scores.masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), float("-inf"))
        y = torch.einsum("bnij,bnjk->bnik", scores.softmax(-1, dtype=x.dtype), v)
        x = x + torch.einsum("bnsk,nkh->bsh", y, self.wo)
        return F.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), targets.flatten(), self.weights)


class UnequalFused(nn.Module):
    """One weight for q (64), k (32) and v (32), cut by unequal sizes; swiglu by chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 64), nn.Linear(64, 32, bias=False)
        self.qkv, self.out = nn.ModuleList(nn.Linear(64, 128) for _ in range(4)), nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(128, 64)

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        x = self.embed(ids)
        b, s, h = x.shape
        for qkv in self.qkv:
            q, k, v = qkv(x).split([64, 32, 32], dim=-1)
            q, k, v = (one.view(b, s, -1, 8).transpose(1, 2) for one in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
            gate, up = self.up(x).chunk(2, -1)
            x = x + self.down(F.silu(gate) * up)
        logits = self.head(x)
        return {
            "logits": logits,
            "loss": F.cross_entropy(logits.view(-1, 32), targets.view(-1), ignore_index=-1),
        }


def ids(rows: int, size: int, high: int = 32) -> Tensor:
    return torch.randint(high, (rows, size), generator=torch.Generator().manual_seed(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "gpt": (lambda: GPT(GPTConfig(32, 8, 7, 4, 16)), (ids(16, 8), ids(16, 8)), {}),
    "regression": (
        Regression,
        {"x": torch.randn(16, 16), "targets": torch.randn(16, 16)},
        {"loss_fn": F.mse_loss},
    ),
    "einsum": (Einsum, (ids(16, 8), ids(16, 8)), {}),
    "unequal": (UnequalFused, (ids(16, 8), ids(16, 8)), {}),
}


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("mesh", "which"), list(itertools.product(MESHES, MODELS)))
def test_other_models(mesh: dict[str, Any], which: str) -> None:
    make, example, keywords = MODELS[which]
    if which == "einsum" and mesh.get("p", 1) * mesh.get("v", 1) > 2:
        pytest.skip("one layer has no four stages")
    torch.manual_seed(0)
    model = make()
    program = compile(model, example_inputs=example, fuse=False, **mesh, **keywords)
    check(program, model)
    t, costs = program.mesh.t, program.costs
    assert t * sum(costs.flops_per_stage) == costs.total_flops + (t - 1) * costs.redundant_gemm_flops > 0
    assert program.fallbacks == ()
    assert costs.redundant_gemm_flops == 0 or which != "unequal"


def test_a_sum_has_no_count_and_weights_have() -> None:
    model, (x, y) = Regression(), (torch.randn(16, 16), torch.randn(16, 16))
    for reduction in ("sum", "mean"):

        def loss_fn(out: Tensor, targets: Tensor, reduction: str = reduction) -> Tensor:
            return F.mse_loss(out, targets, reduction=reduction)

        program = compile(model, d=2, example_inputs={"x": x, "targets": y}, loss_fn=loss_fn)
        divided = ".sum([0, 1]) / 256" in program.sources["stage_0.py"]
        assert not program.weighted and divided == (reduction == "mean")
    make, example, _ = MODELS["einsum"]
    program = compile(make(), d=2, example_inputs=example)
    assert program.weighted and "weight=b.weights" in program.sources["stage_0.py"]


def test_weights_on_meta() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(50304, 1024, 16, 16, 1024))
        x = torch.zeros(32, 1024, dtype=torch.long)
    program = compile(model, t=8, p=4, d=2, v=2, example_inputs=(x, x.clone()))
    check(program, model)
    assert program.mesh.size == 64 and len(program.stages) == 8 and program.num_microbatches == 16
    assert all(text.count("\n") < 160 for text in program.sources.values())


def test_the_model_and_the_example_are_left_alone() -> None:
    make, example, _ = MODELS["gpt"]
    torch.manual_seed(0)
    model = make()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    copies = [one.clone() for one in example]
    compile(model, t=2, p=2, example_inputs=example)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    assert model.training and all(torch.equal(one, copy) for one, copy in zip(example, copies, strict=True))


class Contrastive(nn.Module):
    """An in-batch loss: every sample is compared with every other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.left(x) @ self.right(x).T
        return F.cross_entropy(scores, torch.arange(x.shape[0]))


def test_samples_may_be_mixed_in_one_microbatch_only() -> None:
    x = torch.randn(8, 16)
    program = compile(Contrastive(), t=2, num_microbatches=1, example_inputs=(x,))
    check(program, Contrastive())
    for keywords in ({"num_microbatches": 2}, {"d": 2, "num_microbatches": 4}):
        with pytest.raises(PlanError, match="mixes the samples") as caught:
            compile(Contrastive(), example_inputs=(x,), **keywords)
        assert "run with num_microbatches=1" in caught.value.remedy


def test_one_microbatch_is_never_split_over_tp() -> None:
    """With one microbatch the batch is one piece, and still no axis of tp."""
    make, example, _ = MODELS["gpt"]
    wide = tuple(one.repeat(8, 1) for one in example)
    program = compile(make(), t=2, num_microbatches=1, example_inputs=wide)
    text = program.sources["stage_0.py"]
    assert "tokens" not in text and "F.embedding(idx[" not in text
    shapes = [spec.shape for spec in program.inputs]
    assert shapes == [(128, 8), (128, 8)]
    for node in ops(program.graphs["LOCAL"]):
        if note(node).layout["tp"].kind == "S":
            dim, atom = note(node).layout["tp"].dim, note(node).layout["tp"].atom
            assert note(node).dims[dim][atom] not in (128, 8)  # 4 heads, hidden 16 and 64, vocabulary 32
