"""The head and the cross-entropy in chunks against the head, then the cross-entropy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoptd.compat import add_mm
from autoptd.errors import InternalError
from autoptd.ir import fusion
from autoptd.kernels import loss as losses
from autoptd.kernels.loss import WeightSum, default_chunk, linear_cross_entropy, linear_cross_entropy_plain
from tests.kernels.compare import (
    Operator,
    check_gradients,
    check_same,
    few,
    kept_bytes,
    random,
    results,
    seeds,
    small_tiles,
)

Tensor = torch.Tensor
H, V = 5, 11


def labels(*shape: int, ignored: float = 0.2, seed: int = 0, index: int = -100, classes: int = V) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, classes, shape, generator=generator)
    return ids.masked_fill(torch.rand(shape, generator=generator) < ignored, index)


def of(form: Operator) -> Operator:
    return lambda x, weight, bias, targets, **options: form(x, weight, targets, bias=bias, **options)


fused, plain = of(linear_cross_entropy), of(linear_cross_entropy_plain)


@few
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["mean", "sum", "none"]),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([None, 2.0]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([{}, {"cpu": 64}]),
    seeds,
)
def test_equals_plain(
    shape: list[int],
    chunk: int,
    biased: bool,
    weighted: bool,
    reduction: str,
    smoothing: float,
    softcap: float | None,
    ignored: float,
    row_bytes: dict[str, int],
    seed: int,
) -> None:
    """With rows of logits that lie apart, as on a GPU, too."""
    bias = random(V, seed=seed + 2) if biased else None
    inputs = [
        random(*shape, H, seed=seed),
        random(V, H, seed=seed + 1),
        bias,
        labels(*shape, ignored=ignored, seed=seed),
    ]
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing, "softcap": softcap}
    options["class_weight"] = random(V, seed=seed + 3).abs() if weighted else None
    with small_tiles(), mock.patch.object(losses, "ROW_BYTES", row_bytes):
        check_same(fused, plain, inputs, 3, {"chunk": chunk}, **options)


@pytest.mark.parametrize("biased", [False, True])
def test_rows_of_logits_begin_where_a_gpu_likes_it(biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "ROW_BYTES", {"cpu": 16})
    x, weight = random(4, H).bfloat16(), random(V, H, seed=1).bfloat16()
    bias = random(V, seed=2).bfloat16() if biased else None
    found = losses.linear(x, weight, bias)
    assert found.stride() == (16, 1) and losses._rows_like(found, torch.float32).stride() == (12, 1)
    assert torch.equal(found, torch.nn.functional.linear(x, weight, bias))
    assert losses.linear(x, weight[:8], None).is_contiguous()


def test_other_ignore_index_and_dividing_by_a_given_total() -> None:
    x, weight, targets = random(7, H), random(V, H, seed=1), labels(7, index=3)
    check_same(fused, plain, [x, weight, None, targets], 2, {"chunk": 2}, ignore_index=3)
    wanted = results(plain, [x, weight, None, labels(7)], 2, reduction="sum")
    found = results(fused, [x, weight, None, labels(7)], 2, total=torch.tensor(10.0, dtype=torch.float64))
    torch.testing.assert_close([y * 10 for y in found], wanted)


def test_gradients() -> None:
    for reduction, softcap in (("mean", 2.0), ("none", None)):

        def of_tensors(*x: Tensor, reduction: str = reduction, softcap: float | None = softcap) -> Tensor:
            targets = labels(3, classes=4)
            return fused(*x, targets, reduction=reduction, softcap=softcap, chunk=2, label_smoothing=0.1)

        check_gradients(
            of_tensors, *(x.requires_grad_() for x in (random(3, 2), random(4, 2, seed=1), random(4)))
        )


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_one_gradient_only(wanted: int) -> None:
    tensors = [random(6, H), random(V, H, seed=1), random(V, seed=2)]
    tensors[wanted].requires_grad_()
    for reduction in ("mean", "none"):
        (found,) = torch.autograd.grad(fused(*tensors, labels(6), reduction=reduction).sum(), tensors[wanted])
        (true,) = torch.autograd.grad(plain(*tensors, labels(6), reduction=reduction).sum(), tensors[wanted])
        torch.testing.assert_close(found, true)


def test_logits_that_overflow_or_are_masked() -> None:
    """Columns of -inf, and logits of 1e4."""
    x, weight, bias = 100 * random(6, H), 100 * random(V, H, seed=1), torch.zeros(V, dtype=torch.float64)
    bias[8:] = -torch.inf
    check_same(fused, plain, [x, weight, None, labels(6, classes=8)], 2, {"chunk": 4}, atol=1e-9)
    check_same(fused, plain, [x, weight, bias, labels(6, classes=8)], 2, {"chunk": 4}, atol=1e-9)


def test_an_id_out_of_range_fails() -> None:
    for bad in (V, -1):
        with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
            fused(random(3, H), random(V, H), None, torch.tensor([0, bad, 1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_errors(dtype: torch.dtype, reduction: str) -> None:
    """At most twice the plain form's, as models spell it: logits in `dtype`, the loss in float32."""
    tensors = [x.to(dtype) for x in (random(64, 32), 0.2 * random(100, 32, seed=1), random(100, seed=2))]
    targets = labels(64, classes=100)
    exact = results(plain, [*(x.double() for x in tensors), targets], 3, reduction=reduction)
    other = results(plain, [*tensors, targets], 3, reduction=reduction, dtype=torch.float32)
    found = results(fused, [*tensors, targets], 3, reduction=reduction, dtype=torch.float32, chunk=10)
    for x, y, true in zip(found, other, exact, strict=True):
        assert x.dtype == y.dtype
        error, allowed = ((each.double() - true).abs().max() for each in (x, y))
        assert error <= 2 * allowed + torch.finfo(y.dtype).eps * true.abs().max()


@pytest.mark.parametrize("rows", [4093, 1013])
def test_gradients_in_16_bits_are_not_all_wrong_alike(rows: int) -> None:
    """1/4093 is no number of bfloat16: rounded before it multiplies, it would change every gradient by the same factor."""
    tensors = [x.bfloat16() for x in (random(rows, 8), 0.2 * random(V, 8, seed=1), random(V, seed=2))]
    targets = labels(rows, ignored=0.0)
    _, true, *_ = results(plain, [*(x.double() for x in tensors), targets], 3)
    for total in (None, float(rows), torch.tensor(rows, dtype=torch.float32)):
        _, dx, *_ = results(fused, [*tensors, targets], 3, dtype=torch.float32, total=total)
        assert abs(float((dx.double() * true).sum() / true.square().sum()) - 1) < 1e-4


def test_sums_of_products_in_the_place_of_the_sum() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        a, b = random(7, 5).to(dtype), random(5, 6, seed=1).to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        product = a.double() @ b.double()
        once = add_mm(None, a, b, wide)
        assert once.dtype == wide
        twice = add_mm(once, a, b, wide)
        assert twice.data_ptr() == once.data_ptr()
        torch.testing.assert_close(twice.double(), 2 * product, rtol=1e-5, atol=1e-5)


def test_a_product_is_added_by_the_gemm_itself_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator is for CUDA only: a stand-in says what it is given."""

    class OnGpu(Tensor):
        is_cuda = True

    def dtype_out(total: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
        assert (
            out is total
            and out_dtype == total.dtype == torch.float32
            and a.dtype == b.dtype == torch.bfloat16
        )
        out.copy_(total + a.float() @ b.float())
        return out

    monkeypatch.setattr(torch.ops.aten, "addmm", SimpleNamespace(dtype_out=dtype_out))
    a, b = (random(*shape).bfloat16().as_subclass(OnGpu) for shape in ((7, 5), (5, 6)))
    total = torch.ones(7, 6)
    assert add_mm(total, a, b, torch.float32) is total
    torch.testing.assert_close(total, 1 + (a.float() @ b.float()).as_subclass(Tensor))


def test_a_weights_gradient_that_another_takes() -> None:
    """In the dtype it was added up in, also where nothing else needs a gradient; autograd then sees none."""
    for dtype in (torch.float64, torch.bfloat16):
        for wants_input in (True, False):
            x, weight = random(9, H).to(dtype), random(V, H, seed=1).to(dtype)
            given = [x.requires_grad_(wants_input), weight.requires_grad_(), None, labels(9)]
            wanted = torch.autograd.grad(fused(*given, chunk=4), weight)[0]
            taken: list[WeightSum] = []
            fused(*given, chunk=4, wgrad=taken.append).backward()
            (one,) = taken
            assert one.weight is weight and weight.grad is None and (x.grad is not None) == wants_input
            torch.testing.assert_close(one.add_to(None, dtype), wanted)
            begun = torch.ones(V, H, dtype=one.total.dtype)
            more = one.add_to(begun, dtype)
            assert more is begun and torch.allclose(more, 1 + one.total * one.scale)
            with torch.no_grad():
                fused(*given, wgrad=taken.append)
            assert len(taken) == 1


def test_at_most_a_chunk_of_logits_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    linear = losses.F.linear
    monkeypatch.setattr(losses.F, "linear", lambda x, *rest: (rows.append(len(x)), linear(x, *rest))[1])
    fused(random(50, H).requires_grad_(), random(V, H), None, labels(50), chunk=20).backward()
    assert rows == [20, 20, 10]


def test_keeps_gradients_only() -> None:
    x, weight = random(50, H).requires_grad_(), random(V, H).requires_grad_()
    assert kept_bytes(lambda x, w: fused(x, w, None, labels(50)), x, weight) <= x.nbytes + weight.nbytes + 16
    assert kept_bytes(lambda x, w: fused(x, w, None, labels(50), reduction="none"), x, weight) == 0
    assert kept_bytes(lambda x, w: fused(x, w, None, labels(50)), x.detach(), weight.detach()) == 0


def test_default_chunk() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert default_chunk(50257, torch.float32, cpu) * 50257 * 4 <= fusion.CHUNK_BYTES["cpu"]
    assert default_chunk(50257, torch.bfloat16, cpu) == default_chunk(50257, torch.float32, cpu)
    assert default_chunk(1 << 20, torch.float64, cpu) == fusion.CHUNK_ROWS
    assert default_chunk(50257, torch.float32, cuda) * 50257 * 4 > 7 * fusion.CHUNK_BYTES["cpu"]


def test_backward_twice() -> None:
    """What is kept is not used up: a graph that is retained gives the same gradients again."""
    x, weight = random(7, H).requires_grad_(), random(V, H).requires_grad_()
    loss = fused(x, weight, None, labels(7))
    one = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(one, torch.autograd.grad(loss, (x, weight)), strict=True))


@pytest.mark.parametrize("options", [{"reduction": "median"}, {"chunk": -1}])
def test_what_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InternalError, match="cannot reduce"):
        fused(random(3, H), random(V, H), None, labels(3), **options)
