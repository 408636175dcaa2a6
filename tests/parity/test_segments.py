"""One weight for parts of unequal sizes, as Phi-3 has it: each rank holds a chunk of q, of k and of v."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.ir.types import Segmented
from tests.parity.models import Blocks

VOCAB, LENGTH, WIDTH, HEADS, KV, SIZE = 32, 6, 32, 8, 4, 4


class Block(nn.Module):
    """Grouped queries out of one weight q|k|v; gate|up as one, or all five parts as one (`parallel`)."""

    def __init__(self, *, parallel: bool, slices: bool) -> None:
        super().__init__()
        self.parts = [HEADS * SIZE, KV * SIZE, KV * SIZE, *([48, 48] if parallel else [])]
        self.norm, self.fused = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, sum(self.parts))
        self.gate_up = None if parallel else nn.Linear(WIDTH, 96, bias=False)
        self.out, self.down = nn.Linear(HEADS * SIZE, WIDTH), nn.Linear(48, WIDTH, bias=False)
        self.slices = slices

    def cut(self, x: Tensor) -> Any:
        if not self.slices:
            return x.split(self.parts, -1)
        ends = [sum(self.parts[: i + 1]) for i in range(len(self.parts))]
        return [x[..., end - size : end] for end, size in zip(ends, self.parts, strict=True)]

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v, *rest = self.cut(self.fused(y))
        q, k, v = (one.unflatten(-1, (-1, SIZE)).transpose(1, 2) for one in (q, k, v))
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(z.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1) if self.gate_up is not None else rest
        return x + self.down(F.silu(gate) * up)


def phi(**how: bool) -> Blocks:
    torch.manual_seed(0)
    return Blocks([Block(**how) for _ in range(2)], WIDTH, VOCAB)


def example() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    return torch.randint(VOCAB, (8, LENGTH), generator=source), torch.randint(
        VOCAB, (8, LENGTH), generator=source
    )


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("slices", [False, True])
def test_parity(parallel: bool, slices: bool) -> None:
    model = phi(parallel=parallel, slices=slices)
    autoptd.verify(model, t=2, p=2, d=1 + parallel, example_inputs=example(), steps=3)


@pytest.mark.thorough
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_parity_of_four_ranks(sequence_parallel: bool) -> None:
    ids, targets = (one[:, :4] for one in example())
    autoptd.verify(
        phi(parallel=False, slices=True),
        t=4,
        sequence_parallel=sequence_parallel,
        example_inputs=(ids, targets),
        steps=2,
    )


def test_it_is_the_plan_of_megatron() -> None:
    program = autoptd.compile(phi(parallel=False, slices=False), t=2, example_inputs=example())
    assert program.costs.redundant_gemm_flops == 0 and program.fallbacks == ()
    spec = next(one for one in program.params if one.name == "layers.0.fused.weight")
    assert spec.storage.layout["tp"].dim == 0 and spec.outer == (32, 16, 16)
    assert spec.type_text() == "S(tp, dim 0: [32+16+16])"
    conversions = [one.conversion for one in program.collectives if "layers.1" in one.site]
    assert not {"s_to_s", "p_to_s"} & set(conversions)  # q, k and v arrive sharded as attention wants them
    source = program.sources["stage_0.py"]
    assert "[..., :16]" in source and "column: 4 = 2 x 2" in source
    assert "row: its input arrives sharded, 4 KV heads over 2 ranks" in source


def test_files_and_state_dict(tmp_path: Any) -> None:
    model = phi(parallel=True, slices=True)
    program = autoptd.compile(model, t=2, example_inputs=example())
    program.save(tmp_path)
    loaded = autoptd.Program.load(tmp_path)
    assert loaded.params == program.params
    sharded = [
        (one.outer, two.outer)
        for one, two in zip(loaded.params, program.params, strict=True)
        if "fused" in one.name
    ]
    assert sharded and all(one == two == (32, 16, 16, 48, 48) for one, two in sharded)
    assert all(isinstance(one.dims[0][0], Segmented) for one in loaded.params if "fused" in one.name)
    pm = autoptd.parallelize(model, t=2, backend="local", example_inputs=example())
    pm.step(*example())
    model(*example()).backward()
    state, gradients = pm.state_dict(), pm.gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(state[name], parameter.detach(), rtol=0, atol=0)
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)
