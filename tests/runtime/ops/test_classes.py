"""Operators over classes in shards: values and gradients of torch's, of every dtype, with padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autoptd import runtime as rt
from autoptd.ir.mesh import Mesh
from autoptd.runtime.world.threads import ThreadWorld, run_ranks
from autoptd.runtime.world.world import Communicators, World

ROWS = 3
Operator = Callable[..., Tensor]
WHOLE: dict[str, Operator] = {
    "log_softmax": lambda x, dim: x.log_softmax(dim),
    "softmax": lambda x, dim: x.softmax(dim),
    "logsumexp": lambda x, dim: x.logsumexp(dim),
    "argmax": lambda x, dim: x.argmax(dim),
}


def on_ranks(t: int, run: Callable[[World], Any]) -> list[Any]:
    return run_ranks(ThreadWorld(Mesh(t=t), Communicators(), timeout=20.0), run)


def shard(x: Tensor, rank: int, width: int) -> Tensor:
    """A rank's columns; the last ones filled up with numbers that must not count."""
    part = x[:, rank * width : (rank + 1) * width]
    return torch.cat([part, x.new_full((len(x), width - part.shape[1]), 50.0)], 1)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(("t", "classes"), [(2, 6), (4, 10), (4, 5)])
def test_values_and_gradients(name: str, t: int, classes: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, classes, dtype=torch.float64, requires_grad=True)
    whole = WHOLE[name](x, 1)
    width = -(-classes // t)
    size = classes if classes % t else 0
    grad = torch.randn(whole.shape, dtype=torch.float64)
    if whole.requires_grad:
        whole.backward(grad)

    def run(world: World) -> tuple[Tensor, Tensor | None]:
        rank, own = world.rank, shard(x.detach(), world.rank, width).requires_grad_()
        made = getattr(rt, f"classes_{name}")(own, world.group(("tp",)), dim=1, size=size)
        if made.requires_grad:
            made.backward(shard(grad, rank, width) if made.dim() == 2 else grad)
        return made.detach(), own.grad

    for rank, (made, back) in enumerate(on_ranks(t, run)):
        real = max(0, min(width, classes - rank * width))
        wanted = whole.detach()
        if wanted.dim() == 2:
            made, wanted = made[:, :real], wanted[:, rank * width : rank * width + real]
        torch.testing.assert_close(made, wanted)
        if back is not None:
            assert x.grad is not None
            torch.testing.assert_close(back[:, :real], x.grad[:, rank * width : rank * width + real])
            # Where gradients of the padding come in, none comes out.
            assert not back[:, real:].any()


def test_a_gather_of_every_class() -> None:
    x, index = torch.randn(4, 7, requires_grad=True), torch.tensor([[0, 6], [3, 4], [5, 5], [1, 2]])
    x.gather(1, index).square().sum().backward()

    def run(world: World) -> tuple[Tensor, Tensor | None]:
        own = shard(x.detach(), world.rank, 2).requires_grad_()
        made = rt.classes_gather(own, index, world.group(("tp",)), dim=1, size=7)
        made.square().sum().backward()
        return made.detach(), own.grad

    found = on_ranks(4, run)
    torch.testing.assert_close(sum(made for made, _ in found), x.detach().gather(1, index))
    assert x.grad is not None
    torch.testing.assert_close(torch.cat([back for _, back in found], 1)[:, :7], x.grad)


@pytest.mark.parametrize("label", [7, 8, -1])
def test_a_class_that_no_rank_has_fails_as_in_torch(label: int) -> None:
    def run(world: World) -> None:
        rt.classes_gather(torch.randn(1, 2), torch.tensor([[label]]), world.group(("tp",)), dim=1, size=7)

    with pytest.raises(Exception, match="out of bounds"):
        on_ranks(4, run)


def test_the_first_of_equal_scores_is_the_largest() -> None:
    x = torch.tensor([[1.0, 5.0, 5.0, 5.0], [2.0, 1.0, 0.0, 2.0]])

    def run(world: World) -> Tensor:
        return rt.classes_argmax(x[:, 2 * world.rank : 2 * world.rank + 2], world.group(("tp",)), dim=-1)

    assert all(made.tolist() == [1, 0] for made in on_ranks(2, run))


def test_a_score_that_is_nan_is_the_largest() -> None:
    x = torch.tensor([[1.0, 5.0, float("nan"), 7.0], [float("nan"), 1.0, 0.0, 2.0]])

    def run(world: World) -> Tensor:
        return rt.classes_argmax(x[:, 2 * world.rank : 2 * world.rank + 2], world.group(("tp",)), dim=-1)

    assert all(made.tolist() == x.argmax(-1).tolist() for made in on_ranks(2, run))


@pytest.mark.parametrize("name", ["log_softmax", "softmax", "logsumexp"])
def test_narrow_scores_are_computed_in_float32(name: str) -> None:
    x = torch.randn(ROWS, 64).bfloat16()
    wanted = WHOLE[name](x.float(), 1)

    def run(world: World) -> Tensor:
        own = x[:, 32 * world.rank : 32 * world.rank + 32]
        return getattr(rt, f"classes_{name}")(own, world.group(("tp",)), dim=1)  # type: ignore[no-any-return]

    made = on_ranks(2, run)
    found = torch.cat(made, 1) if made[0].dim() == 2 else made[0]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted.bfloat16())


def test_scores_of_minus_infinity() -> None:
    """Whole shards that are masked out, as by a mask of allowed classes."""
    x = torch.full((2, 4), float("-inf"), dtype=torch.float64)
    x[0, 0], x[1, 3] = 1.0, 2.0

    def run(world: World) -> Tensor:
        return rt.classes_softmax(x[:, 2 * world.rank : 2 * world.rank + 2], world.group(("tp",)), dim=1)

    torch.testing.assert_close(torch.cat(on_ranks(2, run), 1), x.softmax(1))
