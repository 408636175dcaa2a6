"""Vocabulary-parallel embedding and cross-entropy against torch's own, in float64, on threads."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from autoptd import runtime as rt
from autoptd.errors import PlanError, RuntimeFault
from autoptd.ir.mesh import Mesh
from autoptd.runtime.ops.shards import real_rows
from autoptd.runtime.world.threads import ThreadWorld, run_ranks
from autoptd.runtime.world.world import Communicators, World

Tensor = torch.Tensor
V, N, H = 24, 10, 3
TARGETS = {
    "all valid": list(range(0, 20, 2)),
    "some ignored": [-100, 3, 23, -100, 0, 11, 12, 5, -100, 6],
    "all ignored": [-100] * N,
}


def tensors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def world_of(t: int) -> ThreadWorld:
    return ThreadWorld(Mesh(t=t), Communicators(), timeout=20.0)


def shard(x: Tensor, dim: int, rank: int, t: int, noise: float = 0.0) -> Tensor:
    """A rank's part of a vocabulary, padded where t does not divide it; with `noise` in the padding."""
    size = x.shape[dim] if x.shape[dim] % t else 0
    part = rt.take_shard(x.detach(), dim, 1, rank, t, size).clone()
    if size:
        real = real_rows(size, part.shape[dim], rank)
        part.narrow(dim, real, part.shape[dim] - real).fill_(noise)
    return part


def check_cross_entropy(
    t: int, logits: Tensor, targets: Tensor, weight: Tensor | None, **options: object
) -> None:
    vocabulary = logits.shape[1]
    size = vocabulary if vocabulary % t else 0
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, targets, weight, **options)  # type: ignore[arg-type]
    cotangent = tensors(*expected.shape, seed=5)
    expected.backward(cotangent)

    def body(world: World) -> tuple[Tensor, Tensor]:
        x = shard(logits, 1, world.rank, t, noise=50.0).requires_grad_()
        w = None if weight is None else shard(weight, 0, world.rank, t, noise=50.0)
        loss = rt.vocab_parallel_cross_entropy(
            x,
            targets,
            world.group(("tp",)),
            weight=w,
            size=size,
            **options,
            site="loss",  # type: ignore[arg-type]
        )
        loss.backward(cotangent)
        assert x.grad is not None
        return loss.detach(), x.grad

    results = run_ranks(world_of(t), body)
    for loss, _ in results:
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12, equal_nan=True)
        assert torch.equal(loss.nan_to_num(), results[0][0].nan_to_num())
    gradient = torch.cat([grad for _, grad in results], 1)
    torch.testing.assert_close(gradient[:, :vocabulary], whole.grad, rtol=0, atol=1e-12)
    assert not gradient[:, vocabulary:].any()


@pytest.mark.parametrize("t", [1, 2, 4])
@pytest.mark.parametrize("labels", TARGETS.values(), ids=TARGETS)
def test_cross_entropy_options(labels: list[int], t: int) -> None:
    for reduction, smoothing, weighted in product(("mean", "sum", "none"), (0.0, 0.1), (False, True)):
        weight = tensors(V, seed=3).abs() if weighted else None
        logits = 5 * tensors(N, V)
        check_cross_entropy(
            t, logits, torch.tensor(labels), weight, reduction=reduction, label_smoothing=smoothing
        )


@pytest.mark.parametrize("t", [2, 3, 4, 8])
@pytest.mark.parametrize("vocabulary", [23, 5, 2])
def test_cross_entropy_of_a_padded_vocabulary(vocabulary: int, t: int) -> None:
    """Ranks without a single real column included; what lies in the padding is neither in the sums nor gets a gradient."""
    labels = torch.tensor([-100, 1, vocabulary - 1, -100, 0, 1, 0, vocabulary - 1, 1, 0])
    for reduction, smoothing, weighted in product(("mean", "sum", "none"), (0.0, 0.1), (False, True)):
        weight = tensors(vocabulary, seed=3).abs() if weighted else None
        logits = 5 * tensors(N, vocabulary)
        check_cross_entropy(t, logits, labels, weight, reduction=reduction, label_smoothing=smoothing)


def test_cross_entropy_other_ignore_index() -> None:
    check_cross_entropy(2, tensors(N, V), torch.tensor([13, 3] * 5), None, ignore_index=13)


def test_cross_entropy_more_dims() -> None:
    targets = torch.arange(30).reshape(5, 3, 2) % V
    check_cross_entropy(2, tensors(5, V, 3, 2), targets, None, reduction="none")
    check_cross_entropy(4, tensors(5, V, 3, 2), targets, tensors(V).abs(), label_smoothing=0.2)


def test_cross_entropy_large_and_masked_logits() -> None:
    """Logits of 1e4 do not overflow, and columns of -inf (a padded vocabulary) change nothing."""
    logits = 1e4 * tensors(N, V)
    logits[:, 18:] = -torch.inf  # the last rank of four sees nothing else
    check_cross_entropy(4, logits, torch.tensor(TARGETS["all valid"]) % 18, None)


def test_cross_entropy_bfloat16_is_computed_in_float32() -> None:
    logits, targets = tensors(N, V).bfloat16(), torch.arange(N)
    results = run_ranks(
        world_of(2),
        lambda world: rt.vocab_parallel_cross_entropy(
            rt.take_shard(logits, 1, 1, world.rank, 2), targets, world.group(("tp",))
        ),
    )
    expected = F.cross_entropy(logits.float(), targets)
    assert all(loss.dtype == torch.bfloat16 and loss == expected.bfloat16() for loss in results)


@pytest.mark.parametrize("t", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_given_total_divides_before_anything_is_rounded(dtype: torch.dtype, t: int) -> None:
    """1013 and 4093 are no numbers of bfloat16, nor are their inverses."""
    logits, targets = tensors(N, V).to(dtype), torch.arange(N)
    targets[3] = -100
    for total in (1013.0, 4093.0):
        whole = logits.double().clone().requires_grad_()
        expected = F.cross_entropy(whole, targets, reduction="sum") / total
        expected.backward()

        def body(world: World, total: float = total) -> tuple[Tensor, Tensor]:
            x = rt.take_shard(logits, 1, 1, world.rank, t).clone().requires_grad_()
            given = total if world.rank else torch.tensor(total, dtype=torch.float64)
            if t == 1:
                loss = rt.cross_entropy(x, targets, total=given)
            else:
                loss = rt.vocab_parallel_cross_entropy(x, targets, world.group(("tp",)), total=given)
            loss.backward()
            assert loss.dtype == x.dtype == dtype and x.grad is not None
            return loss.detach(), x.grad

        results = run_ranks(world_of(t), body)
        found = torch.cat([grad for _, grad in results], 1).double()
        assert whole.grad is not None
        slope = float((found * whole.grad).sum() / whole.grad.square().sum())
        assert abs(slope - 1) < (
            1e-12 if dtype == torch.float64 else 4e-4
        )  # a rounded total would leave 1e-3 and more
        for loss, _ in results:
            torch.testing.assert_close(loss, expected.detach().to(dtype))


def test_cross_entropy_sends_numbers_per_row_only() -> None:
    """What is reduced is N numbers a quantity, never anything of the size of the vocabulary."""
    shared, seen = world_of(2), []

    def body(world: World) -> None:
        group = world.group(("tp",))
        reduce = group.all_reduce
        group.all_reduce = lambda x, *args, **kw: (seen.append(x.numel()), reduce(x, *args, **kw))[1]  # type: ignore
        rt.vocab_parallel_cross_entropy(
            tensors(N, V // 2).requires_grad_(), torch.arange(N), group
        ).backward()

    run_ranks(shared, body)
    assert sorted(seen) == [N, N, 2 * N, 2 * N]


def test_cross_entropy_keeps_one_tensor_of_the_size_of_the_logits() -> None:
    """The gradient takes its place: so the graph can go backward once, and says so."""

    def body(world: World) -> None:
        kept = []
        logits = tensors(N, V // 2).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.nbytes), x)[1], lambda x: x):
            rt.vocab_parallel_cross_entropy(logits, torch.arange(N), world.group(("tp",)))
        assert max(kept) == logits.nbytes and sum(kept) < 2 * logits.nbytes
        loss = rt.vocab_parallel_cross_entropy(logits, torch.arange(N), world.group(("tp",)))
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    run_ranks(world_of(2), body)


@pytest.mark.parametrize("bad", [-1, 5, 6, 7, 8])
def test_an_id_in_the_padding_fails(bad: int) -> None:
    """5 rows over 4 ranks: ids 5 to 7 would lie in the padding of the last two."""

    def look_up(world: World) -> None:
        with pytest.raises(IndexError, match="out of range"):
            rt.vocab_parallel_embedding(torch.tensor([0, bad]), tensors(2, H), world.group(("tp",)), size=5)

    run_ranks(world_of(4), look_up)
    with pytest.raises(RuntimeFault, match="out of bounds"):
        run_ranks(
            world_of(4),
            lambda world: rt.vocab_parallel_cross_entropy(
                tensors(2, 2), torch.tensor([0, bad]), world.group(("tp",)), size=5
            ),
        )


def test_target_out_of_range_fails() -> None:
    logits, targets = tensors(N, V), torch.full((N,), V)
    with pytest.raises(RuntimeFault, match="out of bounds"):
        run_ranks(
            world_of(2),
            lambda world: rt.vocab_parallel_cross_entropy(logits[:, : V // 2], targets, world.group(("tp",))),
        )
    with pytest.raises(PlanError, match="probabilities"):
        group = world_of(1).worlds[0].group(("tp",))
        rt.vocab_parallel_cross_entropy(logits, logits.softmax(1), group)


@pytest.mark.parametrize("t", [1, 2, 4, 5, 7])
@pytest.mark.parametrize("padding_idx", [-1, 0, 7, 23])
def test_embedding(padding_idx: int, t: int) -> None:
    ids = torch.tensor([[0, 7, 23, 7], [5, 6, 12, 0]])
    whole, cotangent = tensors(V, H).requires_grad_(), tensors(2, 4, H, seed=2)
    expected = F.embedding(ids, whole, padding_idx=None if padding_idx < 0 else padding_idx)
    expected.backward(cotangent)

    def body(world: World) -> tuple[Tensor, Tensor]:
        weight = shard(whole, 0, world.rank, t, noise=50.0).requires_grad_()
        x = rt.vocab_parallel_embedding(
            ids, weight, world.group(("tp",)), padding_idx, size=V if V % t else 0
        )
        x.backward(cotangent)
        assert weight.grad is not None
        return x.detach(), weight.grad

    results = run_ranks(world_of(t), body)
    assert torch.equal(torch.stack([x for x, _ in results]).sum(0), expected.detach())
    gradient = torch.cat([grad for _, grad in results])
    assert torch.equal(gradient[:V], whole.grad) and not gradient[V:].any()


@pytest.mark.parametrize("bad", [-1, V])
def test_embedding_id_out_of_range_fails(bad: int) -> None:
    with pytest.raises(RuntimeFault, match="out of range"):
        run_ranks(
            world_of(2),
            lambda world: rt.vocab_parallel_embedding(
                torch.tensor([0, bad]), tensors(V // 2, H), world.group(("tp",))
            ),
        )
