"""More tensor ranks than KV heads: ranks share one, and split the query heads that look at it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.ir.layout import Layout
from autoptd.ir.machine import Machine
from autoptd.ir.types import R, S
from tests.parity.models import Blocks, batch

WIDTH, HEADS, SIZE = 64, 8, 8
CHEAP = Machine(flops=1e18, memory_bandwidth=1e15, latency=1e-7, per_parameter_byte=1e-10)
"""Collectives are dear, the same work on several ranks is not: what real sizes are like."""


class Block(nn.Module):
    """Grouped queries, whose keys and values are repeated in one of three ways, or not joined with their repeats."""

    def __init__(self, kv: int, how: str, drop: float) -> None:
        super().__init__()
        self.kv, self.how, self.drop = kv, how, drop
        self.norm, self.q = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HEADS * SIZE)
        self.k, self.v = nn.Linear(WIDTH, kv * SIZE), nn.Linear(WIDTH, kv * SIZE, bias=False)
        self.k_norm, self.out = nn.LayerNorm(SIZE), nn.Linear(HEADS * SIZE, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def repeat(self, x: Tensor) -> Tensor:
        if self.how == "expand":
            x = x[:, :, None].expand(-1, -1, HEADS // self.kv, -1, -1)
            return x.flatten(1, 2)
        return x.repeat_interleave(HEADS // self.kv, 1) if self.how == "interleave" else x

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (one(y).unflatten(-1, (-1, SIZE)).transpose(1, 2) for one in (self.q, self.k, self.v))
        if self.how in ("apart", "far apart"):
            return self.rest(x, self.attend_apart(q, self.k_norm(k), v))
        k, v = self.repeat(self.k_norm(k)), self.repeat(v)
        kwargs: dict[str, Any] = {"enable_gqa": True} if self.how == "grouped" else {}
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.drop, **kwargs)
        return self.rest(x, z)

    def attend_apart(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """KV heads and their repeats are dims of their own, also where scores drop out."""
        q = q.unflatten(1, (self.kv, -1))
        k, v = (one[:, :, None].expand(-1, -1, HEADS // self.kv, -1, -1) for one in (k, v))
        scores = (q @ k.transpose(-2, -1)).softmax(-1)
        if self.how == "apart":
            scores = F.dropout(scores, self.drop, self.training)
        else:  # with the tokens between the two
            scores = F.dropout(scores.transpose(2, 3), self.drop, self.training).transpose(2, 3)
        return (scores @ v).flatten(1, 2)

    def rest(self, x: Tensor, z: Tensor) -> Tensor:
        x = x + self.out(z.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm(x))))


def grouped(kv: int = 2, how: str = "expand", drop: float = 0.0) -> Blocks:
    torch.manual_seed(0)
    return Blocks([Block(kv, how, drop) for _ in range(2)], WIDTH)


class Looked(Blocks):
    """Grouped queries, and a sum over all keys that is not linear."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__([LookedBlock(2, "expand", 0.0)], WIDTH)


class LookedBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (one(y).unflatten(-1, (-1, SIZE)).transpose(1, 2) for one in (self.q, self.k, self.v))
        most = k.transpose(1, 2).flatten(2).logsumexp(-1, keepdim=True)
        z = F.scaled_dot_product_attention(q, self.repeat(k), self.repeat(v), is_causal=True)
        return self.rest(x + most, z)


def request(t: int, **more: Any) -> dict[str, Any]:
    return {"t": t, "num_microbatches": 2, "machine": CHEAP, "example_inputs": batch(), **more}


@pytest.mark.parametrize(
    ("t", "kv", "how"),
    [(4, 2, "expand"), (8, 2, "grouped"), (4, 2, "interleave"), (4, 2, "grouped"), (8, 4, "expand")],
)
def test_parity(t: int, kv: int, how: str) -> None:
    program = autoptd.compile(grouped(kv, how), **request(t))
    found = {one.name: one.use.layout.over("tp") for one in program.params if one.name.startswith("layers.1")}
    slow, fast = f"tp:(1){kv}", f"tp:({kv}){t // kv}"
    shared = Layout({slow: S(0, 0), fast: R})
    assert found["layers.1.k.weight"] == found["layers.1.k.bias"] == found["layers.1.v.weight"] == shared
    assert found["layers.1.q.weight"] == Layout({slow: S(0, 0), fast: S(0, 1)})
    assert found["layers.1.out.weight"] == Layout({slow: S(1, 0), fast: S(1, 1)})
    assert program.sub_axes == (slow, fast)
    assert program.costs.redundant_gemm_flops == 0
    autoptd.verify(grouped(kv, how), **request(t), steps=2)


@pytest.mark.thorough
def test_layers_with_other_numbers_of_kv_heads() -> None:
    """tp is seen as 2 x 4 ranks and as 4 x 2."""

    def mixed() -> Blocks:
        torch.manual_seed(0)
        return Blocks([Block(2, "grouped", 0.0), Block(4, "expand", 0.0), Block(2, "grouped", 0.0)], WIDTH)

    program = autoptd.compile(mixed(), **request(8))
    assert program.sub_axes == ("tp:(1)2", "tp:(1)4", "tp:(2)4", "tp:(4)2")
    assert [program.param(f"layers.{i}.k.weight").use.layout.sub_axes[0] for i in range(3)] == [
        "tp:(1)2",
        "tp:(1)4",
        "tp:(1)2",
    ]
    autoptd.verify(mixed(), **request(8), steps=2)


def test_one_kv_head_needs_no_sub_axes() -> None:
    assert not autoptd.compile(grouped(1), **request(4)).sub_axes
    autoptd.verify(grouped(1), **request(4), steps=2)


def test_keys_that_are_gathered_from_their_sub_axis() -> None:
    """A reader that needs all keys takes them over the slow sub-axis only: half of the ranks, not all."""
    program = autoptd.compile(Looked(), **request(4))
    gathers = [call for call in program.collectives if call.forward == "all-gather" and call.axis != "tp"]
    assert {(call.axis, call.group_size) for call in gathers} == {("tp:(1)2", 2)}
    assert 'self.groups["tp:(1)2"]' in program.sources["stage_0.py"]
    autoptd.verify(Looked(), **request(4), steps=2)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["expand", "apart", "far apart"])
def test_masks_of_dropout_are_those_of_one_device(how: str) -> None:
    autoptd.verify(grouped(how=how, drop=0.2), **request(4), steps=2)


def test_dropout_leaves_heads_shared() -> None:
    program = autoptd.compile(grouped(drop=0.2), **request(4))
    found = program.param("layers.0.k.weight").use.layout.over("tp")
    assert found == Layout({"tp:(1)2": S(0, 0), "tp:(2)2": R})


@pytest.mark.thorough
@pytest.mark.parametrize(("t", "p", "is_tied"), [(4, 2, True), (8, 1, False)])
def test_a_model_of_transformers(t: int, p: int, is_tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8}
    sizes |= {"vocab_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 32}
    config = transformers.LlamaConfig(tie_word_embeddings=is_tied, **sizes)
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
    options = {**request(t, p=p), "example_inputs": {"input_ids": ids, "labels": ids}}
    program = autoptd.compile(transformers.LlamaForCausalLM(config), **options)
    spec = program.param("model.layers.0.self_attn.k_proj.weight")
    assert str(spec.use.layout.over("tp")) == f"tp:(1)2: S(0, 0), tp:(2){t // 2}: R"
    autoptd.verify(transformers.LlamaForCausalLM(config), **options)


def test_the_norm_counts_a_shared_piece_once() -> None:
    model = grouped()
    loss = model(*batch())
    loss.backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    pm = autoptd.parallelize(grouped(), backend="local", **request(4))
    pm.step(*batch())
    assert torch.allclose(pm.clip_grad_norm_(1e9), expected.double(), rtol=1e-5)
    pm.close()


def test_a_piece_is_told_explained_and_saved(tmp_path: Path) -> None:
    program = autoptd.compile(grouped(), **request(4))
    text = program.explain("layers.0.k")
    assert "S(tp:(1)2, dim 0: [2] x 8), R(tp:(2)2)  sharded: 2 = 2 x 1, 2 of 4 ranks share each" in text
    assert "S(tp:(1)2, dim 0: [2] x 4 x 8), S(tp:(2)2, dim 0: 2 x [4] x 8)" in program.explain("layers.0.q")
    assert not program.fallbacks
    program.save(tmp_path)
    assert autoptd.Program.load(tmp_path).params == program.params


def test_what_does_not_divide_is_not_shared() -> None:
    """Two KV heads over six ranks would be shared by three, over which 4 query heads for each do not divide."""
    program = autoptd.compile(grouped(), **request(6))
    assert not program.sub_axes
    assert "2 KV heads and 4 query heads per KV head do not divide over t=6" in program.fallbacks[0].fact
