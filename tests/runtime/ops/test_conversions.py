"""Every conversion alone, on threads, against the definition of the value types.

A whole value and a whole cotangent are drawn, spread over the ranks as the source and the target type say, and the
results are put together again by the same definitions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from autoptd import runtime as rt
from autoptd.errors import InternalError
from autoptd.ir.mesh import Mesh
from autoptd.ir.types import CONVERSIONS, shard_size
from autoptd.runtime.world.threads import ThreadWorld, run_ranks
from autoptd.runtime.world.world import Communicators, World

Tensor = torch.Tensor
SHAPE = (12, 2, 24)
SPLITS: dict[str, tuple[int, Any]] = {
    "dim 0": (0, 1),
    "dim 0, outer 3": (0, 3),
    "last dim, outer 2": (-1, 2),
    "last dim, zigzag": (-1, rt.Zigzag()),
}
COTANGENT = {"I": "equal", "R": "partial", "P": "equal", "S": "sharded"}
VALUE = {"I": "equal", "R": "equal", "P": "partial", "S": "sharded"}


def draw(seed: int, shape: Sequence[int] = SHAPE) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def spread(whole: Tensor, how: str, split: tuple[int, int], t: int) -> list[Tensor]:
    if how == "equal":
        return [whole.clone() for _ in range(t)]
    if how == "sharded":
        return [rt.take_shard(whole, *split, index, t) for index in range(t)]
    parts = [draw(100 + index, whole.shape) for index in range(t - 1)]
    return [*parts, whole - sum(parts)]


def assemble(parts: Sequence[Tensor], how: str, split: tuple[int, int]) -> Tensor:
    if how == "partial":
        return torch.stack(list(parts)).sum(0)
    if how == "sharded":
        return rt.join_shards(parts, *split)
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0]


def convert(
    t: int, x: list[Tensor], grads: list[Tensor], fn: Callable[..., Tensor], args: tuple[int, ...]
) -> tuple:
    """Return every rank's output and input gradient."""

    def body(world: World) -> tuple[Tensor, Tensor]:
        leaf = x[world.rank].requires_grad_()
        y = fn(leaf * 1.0, world.group(("tp",)), *args, site="test")
        strided = (
            grads[world.rank].movedim(0, -1).contiguous().movedim(-1, 0)
        )  # cotangents need not be contiguous
        y.backward(strided)
        assert leaf.grad is not None
        return y.detach(), leaf.grad

    results = run_ranks(ThreadWorld(Mesh(t=t), Communicators(), timeout=20.0), body)
    return [y for y, _ in results], [grad for _, grad in results]


# An exchange has two places; rows of experts are put where their tokens are: test_experts.py.
PLAIN = [pair for pair in CONVERSIONS if pair != ("S", "S") and "E" not in pair]


@pytest.mark.parametrize("t", [2, 3, 4])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize(("source", "target"), PLAIN)
def test_conversion_is_its_definition(source: str, target: str, split: tuple[int, int], t: int) -> None:
    if t == 3 and split == SPLITS["dim 0, outer 3"]:
        split = (0, 2)
    value, cotangent = draw(1), draw(2)
    args = split if "S" in (source, target) else ()
    x = spread(value, VALUE[source], split, t)
    grads = spread(cotangent, COTANGENT[target], split, t)
    ys, dxs = convert(t, x, grads, getattr(rt, CONVERSIONS[source, target].name), args)
    torch.testing.assert_close(assemble(ys, VALUE[target], split), value, rtol=0, atol=1e-12)
    torch.testing.assert_close(assemble(dxs, COTANGENT[source], split), cotangent, rtol=0, atol=1e-12)


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((0, 1), (2, 1)),
        ((0, 3), (2, 2)),
        ((2, 3), (-3, 1)),
        ((-1, 1), (2, 3)),
        ((0, 1), (-3, 1)),
        ((2, rt.Zigzag()), (0, 3)),
        ((0, 1), (2, rt.Zigzag())),
    ],
)
def test_s_to_s(before: tuple[int, int], after: tuple[int, int], t: int) -> None:
    value, cotangent = draw(1), draw(2)
    x, grads = spread(value, "sharded", before, t), spread(cotangent, "sharded", after, t)

    def exchange(x: Tensor, group: rt.Group, site: str) -> Tensor:
        return rt.s_to_s(x, group, before[0], after[0], blocks=before[1], to_blocks=after[1], site=site)

    ys, dxs = convert(t, x, grads, exchange, ())
    torch.testing.assert_close(rt.join_shards(ys, *after), value, rtol=0, atol=0)
    torch.testing.assert_close(rt.join_shards(dxs, *before), cotangent, rtol=0, atol=0)


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_i_to_s_round_trip(split: tuple[int, int]) -> None:
    """I -> S -> I, the scatter/gather at a boundary, changes neither value nor gradient."""
    value, cotangent = draw(1), draw(2)

    def there_and_back(x: Any, group: Any, site: str) -> Any:
        return rt.s_to_i(rt.i_to_s(x, group, *split, site=site), group, *split, site=site)

    ys, dxs = convert(
        4, spread(value, "equal", split, 4), spread(cotangent, "equal", split, 4), there_and_back, ()
    )
    assert all(torch.equal(y, value) for y in ys)
    assert all(torch.equal(dx, cotangent) for dx in dxs)


@pytest.mark.parametrize("pair", [*PLAIN, ("S", "S")])
def test_group_of_one_is_the_identity(pair: tuple[str, str]) -> None:
    group = ThreadWorld(Mesh()).worlds[0].group(("tp",))
    x = draw(1)
    args = {("S", "S"): (0, 2)}.get(pair, (0, 1) if "S" in pair else ())
    assert getattr(rt, CONVERSIONS[pair].name)(x, group, *args) is x


def test_shards_of_fused_rows() -> None:
    x = torch.arange(12)
    shards = [rt.take_shard(x, 0, 3, index, 2) for index in range(2)]
    assert shards[0].tolist() == [0, 1, 4, 5, 8, 9] and shards[1].tolist() == [2, 3, 6, 7, 10, 11]
    assert torch.equal(rt.join_shards(shards, 0, 3), x)
    padded = [rt.pad_shard(shard, 0, 3, index, 2) for index, shard in enumerate(shards)]
    assert torch.equal(padded[0] + padded[1], x) and padded[1].tolist()[:4] == [0, 0, 2, 3]


@pytest.mark.parametrize(
    ("size", "t"), [(size, t) for size in (1, 2, 5, 61, 2049) for t in (2, 3, 4, 8) if size % t]
)
def test_padded_shards_round_trip(size: int, t: int) -> None:
    x = torch.arange(1.0, 1 + 3 * size).reshape(size, 3)
    shards = [rt.take_shard(x, 0, 1, index, t, size) for index in range(t)]
    assert {shard.shape for shard in shards} == {(shard_size(size, t), 3)}
    stacked = torch.cat(shards)
    assert torch.equal(stacked[:size], x) and not stacked[size:].any() and stacked[size:].numel()
    assert torch.equal(rt.join_shards(shards, 0, 1, size), x)
    assert torch.equal(
        sum(rt.pad_shard(shard, 0, 1, index, t, size) for index, shard in enumerate(shards)), x
    )


@pytest.mark.parametrize(("blocks", "degree"), [(1, 2), (3, 2), (2, 3), (1, 6)])
def test_shards_in_zigzag_order(blocks: int, degree: int) -> None:
    x = torch.arange(1, 25)
    shards = [rt.take_shard(x, 0, rt.Zigzag(blocks), index, degree) for index in range(degree)]
    for index, shard in enumerate(shards):
        pieces = x.view(blocks, 2 * degree, -1)
        assert torch.equal(shard, torch.cat((pieces[:, index], pieces[:, -1 - index]), 1).flatten())
    assert torch.equal(rt.join_shards(shards, 0, rt.Zigzag(blocks)), x)
    padded = [rt.pad_shard(shard, 0, rt.Zigzag(blocks), i, degree) for i, shard in enumerate(shards)]
    assert torch.equal(sum(padded), x) and all(int((one != 0).sum()) == 24 // degree for one in padded)
    with pytest.raises(InternalError, match="does not divide into 10 parts"):
        rt.take_shard(x, 0, rt.Zigzag(), 0, 5)


def test_a_dim_that_does_not_divide_is_refused_unless_its_size_is_said() -> None:
    with pytest.raises(InternalError, match="does not divide into 4 parts"):
        rt.take_shard(torch.zeros(61), 0, 1, 0, 4)
    with pytest.raises(InternalError, match="has 60 entries"):
        rt.take_shard(torch.zeros(60), 0, 1, 0, 4, 61)
    with pytest.raises(InternalError, match="has 3 blocks"):
        rt.take_shard(torch.zeros(61), 0, 3, 0, 4, 61)


@pytest.mark.parametrize("t", [2, 5, 7])
@pytest.mark.parametrize(("dim", "size"), [(0, 3), (2, 11)])
@pytest.mark.parametrize(
    ("source", "target"), [pair for pair in CONVERSIONS if "S" in pair and pair != ("S", "S")]
)
def test_conversion_of_padded_shards_is_its_definition(
    source: str, target: str, dim: int, size: int, t: int
) -> None:
    """What lies in the padding of the shards that come in is noise: no conversion may let it out."""
    shape = [*SHAPE[:dim], size, *SHAPE[dim + 1 :]]
    value, cotangent = draw(1, shape), draw(2, shape)

    def parts_of(whole: Tensor, how: str) -> list[Tensor]:
        if how != "sharded":
            return spread(whole, how, (dim, 1), t)
        noise = draw(3, [*shape[:dim], -size % t, *shape[dim + 1 :]])
        return [part.contiguous() for part in torch.cat([whole, noise], dim).chunk(t, dim)]

    def whole_of(parts: list[Tensor], how: str) -> Tensor:
        if how != "sharded":
            return assemble(parts, how, (dim, 1))
        joined = torch.cat(parts, dim)
        assert not joined.narrow(dim, size, -size % t).any()
        return joined.narrow(dim, 0, size)

    function = partial(getattr(rt, CONVERSIONS[source, target].name), size=size)
    ys, dxs = convert(
        t, parts_of(value, VALUE[source]), parts_of(cotangent, COTANGENT[target]), function, (dim, 1)
    )
    torch.testing.assert_close(whole_of(ys, VALUE[target]), value, rtol=0, atol=1e-12)
    torch.testing.assert_close(whole_of(dxs, COTANGENT[source]), cotangent, rtol=0, atol=1e-12)


def test_i_to_p_holds_zeros_where_the_value_is_infinite() -> None:
    """A mask that is learned has minus infinity; zeros on the other ranks must be zeros there too, with their gradient."""
    value = draw(1)
    value.flatten()[0] = -torch.inf
    cotangent = draw(2)
    ys, dxs = convert(2, [value.clone(), value.clone()], [cotangent, cotangent], rt.i_to_p, ())
    assert torch.equal(ys[0], value) and torch.equal(ys[1], torch.zeros_like(value))
    assert all(torch.equal(dx, cotangent) for dx in dxs)
