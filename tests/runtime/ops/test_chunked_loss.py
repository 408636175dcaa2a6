"""The head and the cross-entropy in chunks, over a group: against one device, in float64, on threads."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autoptd.errors import PlanError, RuntimeFault
from autoptd.runtime.ops.vocab import vocab_parallel_linear_cross_entropy
from autoptd.runtime.world.threads import run_ranks
from autoptd.runtime.world.world import World
from tests.runtime.ops.test_vocab import TARGETS, N, V, shard, tensors, world_of

Tensor = torch.Tensor
H = 3


def check(
    t: int,
    targets: Tensor,
    vocabulary: int = V,
    biased: bool = False,
    class_weight: Tensor | None = None,
    chunk: int = 4,
    scale: float = 1.0,
    **options: Any,
) -> None:
    x, weight = tensors(*targets.shape, H), scale * tensors(vocabulary, H, seed=1)
    bias = tensors(vocabulary, seed=2) if biased else None
    size = vocabulary if vocabulary % t else 0
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    leaves += [bias.clone().requires_grad_()] if bias is not None else []
    logits = F.linear(*leaves).reshape(-1, vocabulary)
    wanted = F.cross_entropy(logits, targets.reshape(-1), class_weight, **options)
    cotangent = tensors(*wanted.shape, seed=5)
    wanted.backward(cotangent)

    def body(world: World) -> list[Tensor]:
        mine = [x.detach().clone(), shard(weight, 0, world.rank, t, noise=50.0)]
        mine += [shard(bias, 0, world.rank, t, noise=50.0)] if bias is not None else []
        mine = [each.requires_grad_() for each in mine]
        loss = vocab_parallel_linear_cross_entropy(
            mine[0],
            mine[1],
            targets,
            world.group(("tp",)),
            bias=mine[2] if biased else None,
            class_weight=None if class_weight is None else shard(class_weight, 0, world.rank, t, noise=50.0),
            size=size,
            chunk=chunk,
            site="loss",
            **options,
        )
        loss.backward(cotangent.reshape(loss.shape))
        return [loss.detach().reshape(wanted.shape), *(each.grad for each in mine if each.grad is not None)]

    found = run_ranks(world_of(t), body)
    for loss, *_ in found:
        torch.testing.assert_close(loss, wanted.detach(), rtol=0, atol=1e-11, equal_nan=True)
        assert torch.equal(loss.nan_to_num(), found[0][0].nan_to_num())
    inputs = sum(each[1] for each in found) if t > 1 else found[0][1]
    torch.testing.assert_close(inputs, leaves[0].grad, rtol=0, atol=1e-11)
    for i, leaf in enumerate(leaves[1:], 2):
        whole = torch.cat([each[i] for each in found])
        torch.testing.assert_close(whole[:vocabulary], leaf.grad, rtol=0, atol=1e-11)
        assert not whole[vocabulary:].any()


@pytest.mark.parametrize("t", [1, 2, 4])
@pytest.mark.parametrize("ids", TARGETS.values(), ids=TARGETS)
def test_options(ids: list[int], t: int) -> None:
    for reduction, smoothing, weighted in product(("mean", "sum", "none"), (0.0, 0.1), (False, True)):
        weight = tensors(V, seed=3).abs() if weighted else None
        check(t, torch.tensor(ids), class_weight=weight, reduction=reduction, label_smoothing=smoothing)


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("vocabulary", [23, 5, 2])
def test_a_padded_vocabulary(vocabulary: int, t: int) -> None:
    """Ranks without a single real column included."""
    ids = torch.tensor([-100, 1, vocabulary - 1, -100, 0, 1, 0, vocabulary - 1, 1, 0])
    for reduction, smoothing in product(("mean", "none"), (0.0, 0.1)):
        check(t, ids, vocabulary, True, reduction=reduction, label_smoothing=smoothing)


def test_more_dims_and_large_logits() -> None:
    check(2, torch.arange(12).reshape(2, 3, 2) % V, biased=True, reduction="none")
    check(4, torch.arange(12).reshape(2, 6) % V, biased=True, ignore_index=3)
    check(4, torch.arange(12) % V, scale=1e3)


def test_two_reductions_a_chunk() -> None:
    seen = []

    def body(world: World) -> None:
        group = world.group(("tp",))
        reduce = group.all_reduce
        group.all_reduce = lambda x, *args, **kw: (seen.append(x.numel()), reduce(x, *args, **kw))[1]  # type: ignore
        x = tensors(N, H).requires_grad_()
        vocab_parallel_linear_cross_entropy(x, tensors(V // 2, H), torch.arange(N), group, chunk=6).backward()

    run_ranks(world_of(2), body)
    assert sorted(seen) == sorted([6, 12, 4, 8] * 2)


def test_the_total_divides() -> None:
    def body(world: World) -> tuple[Tensor, Tensor]:
        def of(**options: Any) -> Tensor:
            weight = shard(tensors(V, H, seed=1), 0, world.rank, 2)
            group = world.group(("tp",))
            return vocab_parallel_linear_cross_entropy(
                tensors(N, H), weight, torch.arange(N), group, **options
            )

        return of(total=torch.tensor(40.0)) * 40, of(reduction="sum")

    for one, other in run_ranks(world_of(2), body):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("bad", [-1, 5, 6, 7, 8])
def test_an_id_in_the_padding_fails(bad: int) -> None:
    def body(world: World) -> None:
        group, ids = world.group(("tp",)), torch.tensor([0, bad])
        vocab_parallel_linear_cross_entropy(tensors(2, H), tensors(2, H), ids, group, size=5)

    with pytest.raises(RuntimeFault, match="out of bounds"):
        run_ranks(world_of(4), body)


def test_probabilities_are_refused() -> None:
    group = world_of(1).worlds[0].group(("tp",))
    with pytest.raises(PlanError, match="probabilities"):
        vocab_parallel_linear_cross_entropy(tensors(2, H), tensors(V, H), tensors(2, V), group)
