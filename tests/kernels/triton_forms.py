"""The Triton forms of the fused operators against the plain forms: on a GPU, or in Triton's interpreter.

No file of tests by its name: `test_triton.py` runs it in a process of its own, because the interpreter must be chosen before
Triton is imported. By hand: TRITON_INTERPRET=1 python -m pytest tests/kernels/triton_forms.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from autoptd.compat import add_mm
from autoptd.kernels import forms, loss
from autoptd.kernels.activations import bias_gelu, bias_gelu_plain, geglu, geglu_plain, swiglu, swiglu_plain
from autoptd.kernels.cross_entropy import Labels, Loss
from autoptd.kernels.dropout import bias_dropout_add, bias_dropout_add_plain, drop_torch
from autoptd.kernels.dropout_mask import Places, keys
from autoptd.kernels.loss import linear_cross_entropy, linear_cross_entropy_plain
from autoptd.kernels.norms import layer_norm, layer_norm_plain, rms_norm, rms_norm_plain
from autoptd.kernels.rotary import rotary, rotary_plain
from autoptd.kernels.softmax import masked_softmax, masked_softmax_plain
from autoptd.runtime.ops.vocab import cross_entropy
from tests.kernels.compare import Operator, check_same, layer, random, results, rms

pytest.importorskip("triton")
from autoptd.kernels import dropout_triton, norms_triton, rotary_triton
from autoptd.kernels.cross_entropy_triton import gradients_, terms

Tensor = torch.Tensor
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLACES = Places(*keys(0, 1, 2), first_row=3)
DTYPES = [torch.float64, torch.bfloat16]
# Of what another test shows in both.
MOSTLY_WIDE = [torch.float64, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)]


def check(
    fused: Operator,
    plain: Operator,
    tensors: list[Tensor | None],
    grads: int,
    dtype: torch.dtype,
    **options: Any,
) -> None:
    """In float64 the same; in narrower dtypes the error is at most twice the plain form's, and two roundings."""
    on = [None if x is None else x.to(DEVICE) for x in tensors]
    if dtype == torch.float64:
        return check_same(fused, plain, on, grads, {"backend": "triton"}, **options)
    narrow = [x.to(dtype) if x is not None and x.is_floating_point() else x for x in on]
    exact = results(
        plain,
        [x.double() if x is not None and x.is_floating_point() else x for x in narrow],
        grads,
        **options,
    )
    other = results(plain, narrow, grads, **options)
    for x, y, true in zip(
        results(fused, narrow, grads, **options, backend="triton"), other, exact, strict=True
    ):
        assert x.dtype == y.dtype and x.shape == y.shape
        error, allowed = ((each.double() - true).abs().nan_to_num().max() for each in (x, y))
        assert error <= 2 * allowed + 2 * torch.finfo(dtype).eps * true.abs().nan_to_num().max()
    return None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "causal", "shape", "layout"),
    [
        ("none", True, (2, 1, 3, 9), "sliced"),
        ("bool", True, (2, 2, 2, 3), "transposed"),
        ("bool", False, (2, 5), "as it is"),
        ("float", False, (2, 1, 2, 2, 3), "as it is"),
    ],
)
def test_softmax(kind: str, causal: bool, shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> None:
    mask = None if kind == "none" else random(*shape[-4:-2], 1, shape[-1], seed=2)
    mask = mask > 0 if mask is not None and kind == "bool" else mask
    mask = mask[0] if mask is not None and mask.ndim > len(shape) else mask
    scores = random(*shape, layout=layout)
    check(masked_softmax, masked_softmax_plain, [scores, mask], 1, dtype, causal=causal, scale=0.3)


@pytest.mark.parametrize("dtype", MOSTLY_WIDE)
@pytest.mark.parametrize("keys", [3, 10, 16])
def test_softmax_of_a_negative_scale(keys: int, dtype: torch.dtype) -> None:
    """Rows that are shorter than their block: what is behind them must not count."""
    scores, mask = random(2, 3, keys), random(3, keys, seed=1)
    for causal in (False, True):
        check(masked_softmax, masked_softmax_plain, [scores, None], 1, dtype, scale=-0.5, causal=causal)
    check(masked_softmax, masked_softmax_plain, [scores, mask], 1, dtype, scale=-0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["as it is", "sliced"])
def test_activations(layout: str, dtype: torch.dtype) -> None:
    shape = (2, 2, 300) if layout == "as it is" else (300, 2, 7)
    x, y, bias = random(*shape, layout=layout), random(*shape, seed=1), random(shape[-1], seed=2)
    for kind in ("none", "tanh"):
        check(bias_gelu, bias_gelu_plain, [x, bias], 2, dtype, approximate=kind)
        check(geglu, geglu_plain, [x, y], 2, dtype, approximate=kind)
    check(swiglu, swiglu_plain, [x, y], 2, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_residual(biased: bool, dtype: torch.dtype) -> None:
    shape = (2, 600) if biased else (3, 2, 7)
    inputs = [random(*shape), random(shape[-1], seed=1) if biased else None, random(*shape, seed=2)]
    for rate in (0.0, 0.4):
        check(bias_dropout_add, bias_dropout_add_plain, inputs, 3, dtype, rate=rate, places=PLACES)


SHARDS = [  # [before, rows, after] and where a shard of its columns lies: all of them, runs before the rows, or after them
    ((1, 3, 50), {}),
    ((5, 2, 7), {}),
    ((1, 1, 1), {}),
    ((3, 4, 1), {"first_row": (1 << 31) - 2}),
    ((4, 2, 24), {"block": 48, "degree": 3, "index": 2}),
    ((4, 2, 24), {"block": 24, "degree": 2, "index": 1}),
    ((6, 2, 20), {"block": 40, "degree": 2}),
    ((1, 3, 96), {"block": 24, "degree": 4, "index": 3}),
    ((2, 3, 96), {"block": 4, "degree": 2, "index": 1}),
    ((1, 2, 96), {"block": 32, "degree": 1 << 28, "index": 5}),  # its columns number more than 2**32
]


@pytest.mark.parametrize("size, shard", SHARDS)
def test_dropout_draws_the_bits_of_the_form_in_torch(
    size: tuple[int, int, int], shard: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cpu":  # programs of few elements: interpreted they are slow
        monkeypatch.setattr(dropout_triton, "SIZE", 16)
    places = Places(*keys(1, 2, 3), **{"first_row": 5, **shard})
    for programs, large, dtype in ((1, 0, torch.float64), (1000, 1 << 30, torch.bfloat16)):
        monkeypatch.setattr(dropout_triton, "PROGRAMS", programs)  # few: each goes on to other rows
        monkeypatch.setattr(dropout_triton, "LARGE", large)  # 0: columns are numbered in 64 bits
        x = random(*size).to(DEVICE, dtype)
        found, wanted = dropout_triton.drop_triton(x, 0.4, places), drop_torch(x, 0.4, places)
        assert torch.equal(found == 0, wanted == 0)
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("width", [5, 40])
def test_bias_of_rows_that_programs_cut(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout_triton, "SIZE", 16)
    inputs = [random(2, 2, width), random(width, seed=1), random(2, 2, width, seed=2)]
    for size in ((1, 2, 2 * width), (4, 1, width)):
        options = {"rate": 0.4, "places": PLACES, "size": size}
        check(bias_dropout_add, bias_dropout_add_plain, inputs, 3, torch.float64, **options)


def test_a_bias_of_one_dim() -> None:
    inputs = [random(7), random(7, seed=1), random(7, seed=2)]
    check(bias_dropout_add, bias_dropout_add_plain, inputs, 3, torch.float64, rate=0.4, places=PLACES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_norms(weighted: bool, adds: bool, dtype: torch.dtype) -> None:
    shape = (2, 2, 20)
    x, residual = random(*shape), random(*shape, seed=1) if adds else None
    weight, bias = (random(shape[-1], seed=i) if weighted else None for i in (2, 3))
    check(rms(rms_norm, offset=1.0), rms(rms_norm_plain, offset=1.0), [x, weight, residual], 3, dtype)
    if adds:  # alone it is torch's
        check(layer(layer_norm), layer(layer_norm_plain), [x, weight, bias, residual], 4, dtype)


@pytest.mark.parametrize("dtype", MOSTLY_WIDE)
@pytest.mark.parametrize("given", ["weight", "bias", "both"])
def test_norms_of_rows_that_are_read_twice(
    given: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of 16,384 elements are in backward: their sums are all that registers hold."""
    monkeypatch.setattr(norms_triton, "HELD", 8)
    x, residual = random(7, 20), random(7, 20, seed=1)
    weight = random(20, seed=2) if given != "bias" else None
    bias = random(20, seed=3) if given != "weight" else None
    check(layer(layer_norm), layer(layer_norm_plain), [x, weight, bias, residual], 4, dtype)
    if bias is None:
        check(rms(rms_norm, offset=1.0), rms(rms_norm_plain, offset=1.0), [x, weight], 2, dtype)


def test_rows_that_are_too_wide_take_the_form_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for op in ("rms_norm", "layer_norm", "masked_softmax"):
        assert forms.takes_triton("triton", torch.empty(1, device=DEVICE), op, forms.WIDEST[op])
        assert not forms.takes_triton("triton", torch.empty(1, device=DEVICE), op, forms.WIDEST[op] + 1)
    for module, name in ((norms_triton, "_forward"), (norms_triton, "_backward")):
        monkeypatch.setattr(module, name, None)
    monkeypatch.setitem(forms.WIDEST, "rms_norm", 19)
    check(rms(rms_norm), rms(rms_norm_plain), [random(3, 20), random(20, seed=1)], 2, torch.float64)


@pytest.mark.parametrize("dtype", MOSTLY_WIDE)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("is_large", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_rotary(
    is_large: bool, interleaved: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotary_triton, "LARGE", 0 if is_large else 1 << 30)
    for shape, layout in (((2, 3, 2, 8), "transposed"), ((2, 2, 3, 7), "sliced"), ((5, 6), "as it is")):
        x, cos, sin = (
            random(*shape, layout=layout),
            random(shape[-2], 6, seed=1),
            random(shape[-2], 6, seed=2),
        )
        check(rotary, rotary_plain, [x, cos, sin], 1, dtype, interleaved=interleaved)


@pytest.mark.parametrize("dtype", MOSTLY_WIDE)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_of_a_value_that_repeats_its_tokens(interleaved: bool, dtype: torch.dtype) -> None:
    of_one_row = (
        random(8, 1).t()[:, None].expand(1, 5, 8)
    )  # strides (1, 0, 1): what is made like it has another order
    for x in (of_one_row, of_one_row[None], random(1, 2, 1, 8).expand(1, 2, 5, 8)):
        cos, sin = random(5, 6, seed=1), random(5, 6, seed=2)
        check(rotary, rotary_plain, [x, cos, sin], 1, dtype, interleaved=interleaved)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("width", [12288, 50257])
def test_rows_as_wide_as_models_have_them(width: int) -> None:
    x, y, bias = random(6, width), random(6, width, seed=1), random(width, seed=2)
    for dtype in DTYPES:
        check(masked_softmax, masked_softmax_plain, [x, None], 1, dtype, scale=0.3)
        check(bias_gelu, bias_gelu_plain, [x, bias], 2, dtype, approximate="tanh")
        check(swiglu, swiglu_plain, [x, y], 2, dtype)
        check(bias_dropout_add, bias_dropout_add_plain, [x, bias, y], 3, dtype, rate=0.4, places=PLACES)
        check(
            lambda x, w, **more: rms_norm(x, w, eps=1e-3, **more),
            lambda x, w: rms_norm_plain(x, w, eps=1e-3),
            [x, bias],
            2,
            dtype,
        )
    inputs = [random(4, 64), random(width, 64, seed=1), torch.tensor([3, -100, 0, width - 1])]
    check(linear_cross_entropy, linear_cross_entropy_plain, inputs, 2, torch.float64)


# Interpreted, wide rows are slow.
WIDE = [(12288, torch.float64), (9001, torch.bfloat16)]
WIDE += [] if DEVICE == "cpu" else [(9001, torch.float64), (12288, torch.bfloat16)]


@pytest.mark.thorough
def test_norms_as_wide_as_large_models_have_them() -> None:
    """Of odd widths too: at 12,288 and above backward reads its rows twice."""
    for width, dtype in WIDE:
        x, residual = random(3, width), random(3, width, seed=3)
        weight, bias = (random(width, seed=i) for i in (1, 2))
        check(layer(layer_norm), layer(layer_norm_plain), [x, weight, bias, residual], 4, dtype)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_products_are_added_up_in_place() -> None:
    a, b = (random(*shape).to(DEVICE, torch.bfloat16) for shape in ((50257, 96), (96, 64)))
    product = a.double() @ b.double()
    total = add_mm(None, a, b, torch.float32)
    free = torch.cuda.max_memory_allocated()
    again = add_mm(total, a, b, torch.float32)
    assert (
        again.data_ptr() == total.data_ptr() and torch.cuda.max_memory_allocated() < free + total.nbytes // 2
    )
    torch.testing.assert_close(again.double(), 2 * product, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_more_elements_than_32_bits_number() -> None:
    """2^31 + 3 elements, in one row and in many: the last ones are those that a wrapped offset would miss."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE, generator=generator)

    x, y = make((1 << 31) + 3), make((1 << 31) + 3)
    with torch.no_grad():
        assert torch.equal(
            swiglu(x, y, backend="triton")[-5000:], swiglu(x[-5000:], y[-5000:], backend="triton")
        )
    del x, y
    rows = (1 << 21) + 1  # of 1,024: 2^31 + 1,024
    x, bias = make(rows, 1024), make(1024)
    with torch.no_grad():
        for form in (
            lambda x: masked_softmax(x, None, scale=0.3, backend="triton"),
            lambda x: rms_norm(x, bias, eps=1e-3, backend="triton"),
            lambda x: bias_gelu(x, bias, approximate="tanh", backend="triton"),
        ):
            assert torch.equal(form(x)[-8:], form(x[-8:]))
    del x
    check_large_dropout(make)
    check_large_rotary(make)
    check_large_loss(make)


def check_large_dropout(make: Callable[..., Tensor]) -> None:
    """A mask is a function of places: that of a few is that of all, from there on."""
    key = keys(0, 1, 2)
    x = make(1, (1 << 21) + 1, 1024)
    found = dropout_triton.drop_triton(x, 0.1, Places(*key))
    first = x.shape[1] - 8
    assert torch.equal(
        found[:, first:], dropout_triton.drop_triton(x[:, first:], 0.1, Places(*key, first_row=first))
    )
    del x, found
    row = make(1, 1, (1 << 31) + 3)
    found = dropout_triton.drop_triton(row, 0.1, Places(*key))
    tail = torch.cat(
        [row[..., 1 << 31 :], row[..., :4093]], -1
    )  # block 2**19 of 2**20, each of 4,096: from 2**31 on
    wanted = dropout_triton.drop_triton(tail, 0.1, Places(*key, block=4096, degree=1 << 20, index=1 << 19))
    assert torch.equal(found[..., 1 << 31 :], wanted[..., :3])


def check_large_rotary(make: Callable[..., Tensor]) -> None:
    x, cos, sin = make(1, 2, (1 << 24) + 1, 64), make((1 << 24) + 1, 64), make((1 << 24) + 1, 64)
    for interleaved in (False, True):
        found = rotary(x, cos, sin, interleaved=interleaved, backend="triton")
        tail = rotary(x[:, :, -8:], cos[-8:], sin[-8:], interleaved=interleaved, backend="triton")
        assert torch.equal(found[:, :, -8:], tail)


def check_large_loss(make: Callable[..., Tensor]) -> None:
    rows = (1 << 31) // 50257 + 8
    z = make(rows, 50257)
    targets = torch.arange(rows, device=DEVICE)

    def gradients(z: Tensor, targets: Tensor) -> Tensor:
        x = z.requires_grad_()
        (grad,) = torch.autograd.grad(cross_entropy(x, targets, total=1.0), x)
        return grad

    assert torch.equal(gradients(z, targets)[-8:], gradients(z[-8:].detach().clone(), targets[-8:]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("row_bytes", [1, 64])
def test_loss(row_bytes: int, reduction: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of logits side by side, and apart."""
    monkeypatch.setattr(loss, "ROW_BYTES", {DEVICE: row_bytes})

    def of(form: Operator) -> Operator:
        wide = None if dtype == torch.float64 else torch.float32
        return lambda *x, **more: form(*x, dtype=wide if x[0].dtype == dtype else None, **more)

    inputs = [random(4, 5), random(11, 5, seed=1), torch.tensor([3, -100, 0, 10])]
    for smoothing, softcap in ((0.0, None), (0.1, 2.0)):
        options = {"reduction": reduction, "label_smoothing": smoothing, "softcap": softcap}
        check(of(linear_cross_entropy), of(linear_cross_entropy_plain), inputs, 2, dtype, **options)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_of_rows_that_are_longer_than_a_block(smoothing: float) -> None:
    """All columns are here, so that a row is read and its gradient written by one kernel; also where none is wanted."""
    inputs = [random(5, 3), random(4500, 3, seed=1), torch.tensor([3, -100, 4499, 4095, 4096])]
    for options in ({"reduction": "sum"}, {"reduction": "mean"}):
        options |= {"label_smoothing": smoothing}
        check(linear_cross_entropy, linear_cross_entropy_plain, inputs, 2, torch.float64, **options)
    on = [x.to(DEVICE) for x in inputs]
    wanted = linear_cross_entropy_plain(*on, label_smoothing=smoothing)
    for more in ({}, {"total": 4.0}, {"loss_scale": 64.0, "chunk": 2}):
        found = linear_cross_entropy(*on, label_smoothing=smoothing, backend="triton", **more)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    ignored = torch.full_like(on[2], -100)
    x = on[0].requires_grad_()
    found = linear_cross_entropy(x, on[1], ignored, label_smoothing=smoothing, backend="triton")
    found.backward()
    assert found.isnan() and x.grad is not None and not x.grad.any()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_of_one_rank_among_others(smoothing: float) -> None:
    """Rows longer than a block, padding at their end, a row of -inf, targets that lie elsewhere, numbers of another rank.

    Ranks as threads cannot be: the interpreter is for one thread.
    """

    def reduce(numbers: Tensor, op: str) -> Tensor:
        return numbers.clamp(min=1.5) if op == "max" else numbers + 2.0

    loss = Loss(smoothing, 9000, 4990, reduce)
    z = random(4, 5000).to(DEVICE)
    z[1] = -torch.inf
    no, yes = torch.tensor([[False, False, True, True], [False, False, False, True]], device=DEVICE)
    labels = Labels(torch.tensor([3, 4989, 0, 0], device=DEVICE), no, yes)
    ours, other = z.clone(), torch.empty_like(z)
    found, wanted = terms(loss, ours, labels), loss.shares(z, labels, out=other)
    for name in ("maximum", "here", "total", "picked", "share", "weighted", "weights"):
        x, y = getattr(found, name), getattr(wanted, name)
        assert (x is None) == (y is None)
        assert x is None or torch.allclose(x, y, rtol=0, atol=1e-11)
    grad = random(4, seed=3).to(DEVICE)
    gradients_(loss, ours, found, labels, grad)
    torch.testing.assert_close(
        ours, loss.gradients(other, wanted, labels, grad, out=other), rtol=0, atol=1e-11
    )
    assert bool(ours[0].any()) and not ours[:, 4990:].any() and not ours[3].any()


@contextmanager
def kept_sizes() -> Iterator[list[int]]:
    """Bytes of every tensor that is kept for backward."""
    held: list[int] = []

    def pack(x: Tensor) -> Tensor:
        held.append(x.nbytes)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield held


@pytest.mark.parametrize("layout", ["as it is", "transposed"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_of_logits_that_exist(dtype: torch.dtype, layout: str) -> None:
    """The logits are read again in backward: nothing of their size is kept beside them, nor written into them."""
    logits, targets = (
        random(5, 70, layout=layout).to(DEVICE, dtype),
        torch.tensor([3, -100, 0, 69, 7], device=DEVICE),
    )
    for smoothing in (0.0, 0.1):
        exact = logits.double().clone().requires_grad_()
        wanted = torch.nn.functional.cross_entropy(exact, targets, label_smoothing=smoothing)
        wanted.backward()
        x, before = logits.detach().requires_grad_(), logits.clone()
        with kept_sizes() as held:
            loss = cross_entropy(x, targets, total=4.0, label_smoothing=smoothing)
        loss.backward(retain_graph=True)
        loss.backward()  # nothing is used up
        assert max(held) == logits.nbytes and torch.equal(x, before) and loss.dtype == dtype
        eps = 1e-12 if dtype == torch.float64 else torch.finfo(dtype).eps
        assert exact.grad is not None and x.grad is not None
        torch.testing.assert_close(loss.double(), wanted, rtol=eps, atol=eps)
        torch.testing.assert_close(
            x.grad.double() / 2, exact.grad, rtol=2 * eps, atol=eps * float(exact.grad.abs().max())
        )
