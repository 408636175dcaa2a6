"""More tensor ranks than KV heads: ranks share one, and split the query heads that look at it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.ir.machine import Machine
from autoptd.ir.types import S
from tests.parity.models import Blocks, batch
from tests.sums import sum_only_over

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


def request(t: int, **more: Any) -> dict[str, Any]:
    return {"t": t, "num_microbatches": 2, "machine": CHEAP, "example_inputs": batch(), **more}


@pytest.mark.parametrize(
    ("t", "kv", "how"), [(4, 2, "expand"), (4, 2, "interleave"), (4, 2, "grouped"), (8, 2, "grouped"), (8, 4, "expand")]
)
def test_parity(t: int, kv: int, how: str) -> None:
    program = autoptd.compile(grouped(kv, how), **request(t))
    found = {one.name: one.use.layout["tp"] for one in program.params if one.name.startswith("layers.1")}
    shared = S(0, 0, t // kv)
    assert found["layers.1.k.weight"] == found["layers.1.k.bias"] == found["layers.1.v.weight"] == shared
    assert found["layers.1.q.weight"] == S(0, 0, t // kv, (0, 1)) and found["layers.1.out.weight"].inner == (1, 1)
    assert program.costs.redundant_gemm_flops == 0
    autoptd.verify(grouped(kv, how), **request(t), steps=2)


@pytest.mark.parametrize(
    "more",
    [
        {"p": 2, "v": 2},
        {"d": 2, "p": 2, "sequence_parallel": True},
        {"async_tensor_model_parallel_allreduce": True, "accumulate_allreduce_grads_in_fp32": True},
        {"p": 2, "schedule": "zb_h1"},
    ],
    ids=str,
)
def test_parity_beside_other_options(more: dict[str, Any]) -> None:
    autoptd.verify(grouped(), **request(4, **more), steps=2)


@pytest.mark.parametrize("how", ["expand", "apart", "far apart"])
def test_masks_of_dropout_are_those_of_one_device(how: str) -> None:
    autoptd.verify(grouped(how=how, drop=0.2), **request(4), steps=2)


def test_dropout_leaves_heads_shared() -> None:
    assert autoptd.compile(grouped(drop=0.2), **request(4)).param("layers.0.k.weight").use.layout["tp"] == S(0, 0, 2)


def test_a_model_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8}
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=32, **sizes)
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
    options = {**request(8), "example_inputs": {"input_ids": ids, "labels": ids}}
    program = autoptd.compile(transformers.LlamaForCausalLM(config), **options)
    assert str(program.param("model.layers.0.self_attn.k_proj.weight").use.layout["tp"]) == "S(0, 0) x 4 copies"
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
    assert "S(tp, dim 0: [2] x 8, 2 copies)  sharded: 2 = 2 x 1, 2 of 4 ranks share each" in text
    assert "S(tp, dim 0: [2] x [4] x 8)" in program.explain("layers.0.q")
    assert not program.fallbacks
    program.save(tmp_path)
    assert autoptd.Program.load(tmp_path).params == program.params


def test_a_sum_over_sharers_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sum_only_over(monkeypatch, "dp", "pp")
    with pytest.raises(autoptd.InternalError, match="differs"):
        autoptd.verify(grouped(), **request(4), steps=1)


def test_what_does_not_divide_is_not_shared() -> None:
    """Two KV heads over six ranks would be shared by three, over which 4 query heads for each do not divide."""
    program = autoptd.compile(grouped(), **request(6))
    assert all(one.use.layout["tp"].sharing == 1 for one in program.params)
    assert "2 KV heads and 4 query heads per KV head do not divide over t=6" in program.fallbacks[0].fact
