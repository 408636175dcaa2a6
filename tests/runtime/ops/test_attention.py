"""Causal attention of a rank's own queries: what it sees, counted key by key."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autoptd import runtime as rt
from autoptd.runtime.params.guard import unguarded


def keys_seen(order: str, c: int, index: int, length: int) -> torch.Tensor:
    """How many keys each query of a rank sees: with scores of 0 each counts the same, and the first alone has a value."""
    blocks: Any = rt.Zigzag() if order else 1
    q, k = torch.zeros(2, 1, 1, length, 4, dtype=torch.float64)
    v = torch.zeros_like(k)
    v[:, :, 0] = 1
    group: Any = SimpleNamespace(size=c, index=index)
    found = rt.causal_attention(rt.take_shard(q, 2, blocks, index, c), k, v, group, order=order)
    return (1 / found[0, 0, :, 0]).round().long()


@pytest.mark.parametrize("c", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("order", ["zigzag", ""])
def test_a_query_sees_the_keys_up_to_its_own(order: str, c: int) -> None:
    """In zigzag order every rank has as many pairs of query and key; in chunks later ones have more."""
    length = 12 * c
    seen = [keys_seen(order, c, index, length) for index in range(c)]
    assert torch.equal(rt.join_shards(seen, 0, rt.Zigzag() if order else 1), torch.arange(1, length + 1))
    pairs = [int(each.sum()) for each in seen]
    assert sum(pairs) == length * (length + 1) // 2
    if order:
        assert len(set(pairs)) == 1
    else:
        assert pairs == [12 * (12 * index) + 78 for index in range(c)]


def of_all_ranks(
    operands: list[Tensor], gradient: Tensor, c: int, order: str, **how: Any
) -> tuple[Tensor, ...]:
    """The result and the gradients of q, k and v, of c ranks one after the other."""
    blocks: Any = rt.Zigzag() if order else 1
    results, of_q = [], []
    of_k, of_v = (torch.zeros_like(x, dtype=torch.float64) for x in operands[1:])
    for index in range(c):
        q = rt.take_shard(operands[0], 2, blocks, index, c).clone().requires_grad_()
        k, v = (x.clone().requires_grad_() for x in operands[1:])
        group: Any = SimpleNamespace(size=c, index=index)
        result = rt.causal_attention(q, k, v, group, order=order, **how)
        result.backward(rt.take_shard(gradient, 2, blocks, index, c))
        assert q.grad is not None and k.grad is not None and v.grad is not None
        results.append(result.detach())
        of_q.append(q.grad)
        of_k, of_v = of_k + k.grad, of_v + v.grad
    return rt.join_shards(results, 2, blocks), rt.join_shards(of_q, 2, blocks), of_k, of_v


def of_one_device(operands: list[Tensor], gradient: Tensor, **how: Any) -> tuple[Tensor, ...]:
    q, k, v = (x.clone().requires_grad_() for x in operands)
    result = F.scaled_dot_product_attention(q, k, v, is_causal=True, **how)
    result.backward(gradient)
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return result.detach(), q.grad, k.grad, v.grad


def drawn(heads: int, kv: int, size: int, dtype: torch.dtype, value: int = 16) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    shapes = [(2, heads, size, 16), (2, kv, size, 16), (2, kv, size, value), (2, heads, size, value)]
    *operands, gradient = (torch.randn(*shape, dtype=torch.float64).to(dtype) for shape in shapes)
    return operands, gradient


@pytest.mark.parametrize(("c", "order"), [(1, "zigzag"), (2, ""), (3, "zigzag"), (4, ""), (8, "zigzag")])
@pytest.mark.parametrize(("heads", "kv", "value"), [(4, 4, 16), (4, 2, 16), (6, 1, 16), (4, 4, 8)], ids=str)
def test_is_attention_of_one_device(c: int, order: str, heads: int, kv: int, value: int) -> None:
    """A `value` size of its own is more than the kernel for CPUs knows."""
    operands, gradient = drawn(heads, kv, 48, torch.float64, value)
    how = {"scale": 0.3, "enable_gqa": heads != kv}
    found = of_all_ranks(operands, gradient, c, order, **how)
    for one, right in zip(found, of_one_device(operands, gradient, **how), strict=True):
        torch.testing.assert_close(one, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", ["", "zigzag"])
def test_where_the_runtime_works_classes_of_tensors_have_no_say(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernels of GPUs: a mask that torch reads off its class must not be read as a tensor."""
    monkeypatch.setattr("autoptd.runtime.ops.attention._fits_kernel", lambda *_: False)
    operands, gradient = drawn(4, 4, 24, torch.float64)
    wanted = of_one_device(operands, gradient)
    with unguarded():
        found = of_all_ranks(operands, gradient, 3, order)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(("c", "order"), [(2, ""), (4, "zigzag"), (8, "zigzag")])
@pytest.mark.parametrize("kv", [4, 2])
def test_bfloat16_is_as_exact_as_on_one_device(c: int, order: str, kv: int) -> None:
    """Against float64: the result and every gradient, of the sum of the ranks' gradients in float64."""
    operands, gradient = drawn(4, kv, 96, torch.bfloat16)
    how = {"enable_gqa": kv != 4}
    right = of_one_device([x.double() for x in operands], gradient.double(), **how)
    try:
        one = of_one_device(operands, gradient, **how)
    except RuntimeError as error:
        # torch 2.13 packs as the CPU can, in kernels for less where ATEN_CPU_CAPABILITY asks for those.
        if "pack_vnni2" not in str(error):
            raise
        pytest.skip(f"torch's own attention fails: {error}")
    found = of_all_ranks(operands, gradient, c, order, **how)
    for name, its, ours, exact in zip(("y", "q", "k", "v"), one, found, right, strict=True):
        own, mine = ((x.double() - exact).norm() for x in (its, ours))
        assert mine <= 1.05 * own, name


def turned(*shape: int) -> Tensor:
    """Random numbers that lie together in memory along dim -2."""
    return torch.randn(*shape, dtype=torch.float64).mT.contiguous().mT


STRIDES = {"turned": turned(2, 4, 24, 16), "expanded": turned(2, 4, 24, 1).expand(-1, -1, -1, 16)}
SIZES = {"one sample for all": turned(1, 4, 24, 16), "one head for all": turned(2, 1, 24, 16)}


@pytest.mark.parametrize("name", [*STRIDES, *SIZES])
@pytest.mark.parametrize("order", ["", "zigzag"])
def test_operands_of_any_strides_and_sizes(name: str, order: str) -> None:
    """The kernel for CPUs checks neither, and would read what is none of theirs: each operand in turn, beside plain ones."""
    operands, gradient = drawn(4, 4, 24, torch.float64)
    # Queries and the gradient have the result's sizes.
    for place in range(4) if name in STRIDES else (1, 2):
        given = [*operands, gradient]
        given[place] = {**STRIDES, **SIZES}[name]
        q, k, v = (x.detach().requires_grad_() for x in given[:3])
        wide = [x.expand(2, 4, -1, -1) for x in (q, k, v)]
        scores = (wide[0] @ wide[1].mT / 4).masked_fill(
            ~torch.ones(24, 24, dtype=torch.bool).tril(), -torch.inf
        )
        right = scores.softmax(-1) @ wide[2]
        wanted = torch.autograd.grad(right, (q, k, v), given[3])
        group: Any = SimpleNamespace(size=1, index=0)
        found = rt.causal_attention(q, k, v, group, order=order)
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
        for one, other in zip(torch.autograd.grad(found, (q, k, v), given[3]), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_the_kernels_take_what_they_took() -> None:
    """They have names that torch may change without notice, and arguments by place."""
    aten = torch.ops.aten
    for kernel, taken in (
        (
            aten._scaled_dot_product_flash_attention_for_cpu,
            "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, "
            "Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)",
        ),
        (
            aten._scaled_dot_product_flash_attention_for_cpu_backward,
            "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
            "float dropout_p, bool is_causal, *, Tensor? attn_mask=None, float? scale=None) -> "
            "(Tensor grad_query, Tensor grad_key, Tensor grad_value)",
        ),
    ):
        assert str(kernel.default._schema).partition("(")[2] == taken[1:]


@pytest.mark.parametrize("window", [1, 2, 5, 9, 100])
@pytest.mark.parametrize("order", ["zigzag", ""])
def test_a_window_of_keys_is_that_of_a_mask(order: str, window: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 4, 24, 6, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 24, 6, dtype=torch.float64)
    gradient = torch.randn_like(q)
    places = torch.arange(24)
    behind = places[:, None] - places
    wanted = [x.clone().requires_grad_() for x in (q, k, v)]
    mask = (behind >= 0) & (behind < window)
    result = F.scaled_dot_product_attention(*wanted, attn_mask=mask, enable_gqa=True)
    result.backward(gradient)
    for c in (1, 2, 3):
        found = of_all_ranks([q, k, v], gradient, c, order, enable_gqa=True, window=window)
        for one, other in zip(found, (result.detach(), *(x.grad for x in wanted)), strict=True):
            assert other is not None
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
