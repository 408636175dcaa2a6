"""An operator that AutoPTD has never seen, added by one record: it is split, counted, localised, fused around and written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.ir.operators.record import Operator
from autoptd.ir.operators.table import TABLE

ROWS, LENGTH, WIDTH, HIDDEN, VOCAB = 8, 6, 16, 48, 12


@torch.library.custom_op("onerecord::project", mutates_args=())
def project(x: Tensor, weight: Tensor, size: list[int]) -> Tensor:
    """x @ weight.T, whose shape has to be told: one that is not localised fails."""
    y = x @ weight.T
    assert list(y.shape) == size, f"{list(y.shape)} is not {size}"
    return y


@project.register_fake
def _(x: Tensor, weight: Tensor, size: list[int]) -> Tensor:
    torch._check(x.shape[-1] == weight.shape[1])
    return x.new_empty(size)


def keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])


def project_backward(ctx: Any, gradient: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    return gradient @ weight, gradient.flatten(0, -2).T @ x.flatten(0, -2), None


project.register_autograd(project_backward, setup_context=keep)

# All that has to be written for it.
RECORD = Operator(
    "onerecord.project",
    "... i, o i -> ... o",
    linear=((0,), (1,)),
    factors=(0, 1),
    sizes=("size",),
    keeps="operands",
    text="torch.ops.onerecord.project",
    variable="projected",
)


@pytest.fixture(autouse=True)
def record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLE, RECORD.name, RECORD)


class Projection(nn.Module):
    def __init__(self, features: int, results: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(results, features) * features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return project(x, self.weight, [*x.shape[:-1], self.weight.shape[0]])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.gate, self.down = (
            Projection(WIDTH, HIDDEN),
            Projection(WIDTH, HIDDEN),
            Projection(HIDDEN, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(Block() for _ in range(layers))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(
            project(x, self.embed.weight, [*ids.shape, VOCAB]).flatten(0, 1), targets.flatten()
        )


def example() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    ids, targets = (torch.randint(VOCAB, (ROWS, LENGTH), generator=source) for _ in range(2))
    return ids, targets


@pytest.mark.parametrize(
    "mesh",
    [
        {"t": 2, "d": 2},
        {"t": 2, "p": 2, "d": 2, "v": 2, "num_microbatches": 4},
        {"t": 2, "p": 2, "fuse": False},
        {"t": 2, "d": 2, "sequence_parallel": True},
    ],
    ids=str,
)
def test_a_model_with_it_trains_as_on_one_device(mesh: dict[str, Any]) -> None:
    torch.manual_seed(0)
    autoptd.verify(Model(), **mesh, example_inputs=example(), steps=2)


def test_it_is_split_like_a_gemm() -> None:
    program = autoptd.compile(Model(), example_inputs=example(), t=2, d=2)
    assert program.fallbacks == () and program.unlisted == ()
    types = {spec.name: spec.use.layout["tp"] for spec in program.params}
    shards = {name: kind.dim for name, kind in types.items() if kind.kind == "S"}
    for part, dim in (("up", 0), ("gate", 0), ("down", 1)):
        assert shards[f"blocks.0.{part}.weight"] == dim
    sums = [call for call in program.collectives if call.axis == "tp" and call.site.startswith("blocks.0.")]
    forward = [call for call in sums if call.forward == "all-reduce"]
    backward = [call for call in sums if call.backward == "all-reduce"]
    assert len(forward) == len(backward) == 1  # as a pair of column- and row-parallel GEMMs has


def test_its_products_are_counted() -> None:
    program = autoptd.compile(Model(), example_inputs=example(), t=2, num_microbatches=1)
    blocks = [
        gemm
        for gemm in program.costs.gemms
        if gemm.operator == RECORD.name and gemm.module.startswith("blocks")
    ]
    assert sum(gemm.forward for gemm in blocks) == 4 * 3 * 2 * ROWS * LENGTH * WIDTH * HIDDEN // 2
    assert sum(gemm.backward for gemm in blocks) == 2 * sum(gemm.forward for gemm in blocks)
    assert all(gemm.redundant == 0 for gemm in blocks)


def test_it_is_written_with_the_sizes_of_a_rank() -> None:
    program = autoptd.compile(Model(), example_inputs=example(), t=2, d=2, num_microbatches=2)
    source = program.sources["stage_0.py"]
    assert f"up = torch.ops.onerecord.project(h, w.up.weight, [2, {LENGTH}, {HIDDEN // 2}])" in source
    assert "projected = torch.ops.onerecord.project(x, " in source  # where the user gave it no name
    assert "fused.swiglu(gate, up)" in source


def test_without_the_record_it_is_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(TABLE, RECORD.name)
    with pytest.raises(autoptd.PlanError):
        autoptd.compile(Model(), example_inputs=example(), t=2, d=2)
