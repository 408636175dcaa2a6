"""The fused softmax of scores against its plain form."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoptd.errors import InternalError
from autoptd.kernels.softmax import masked_softmax, masked_softmax_plain
from tests.kernels.compare import (
    check_errors,
    check_gradients,
    check_same,
    few,
    kept_bytes,
    layouts,
    random,
    seeds,
    sizes,
    small_tiles,
)

Tensor = torch.Tensor
MASKS = ["none", "bool", "float", "least"]


def make_mask(kind: str, shape: tuple[int, ...], seed: int) -> Tensor | None:
    """A bool mask, whole rows of it False; one of numbers; one whose numbers are 0 or the least."""
    x = random(*shape, seed=seed)
    if kind == "none":
        return None
    if kind == "float":
        return x
    return x > 0.3 if kind == "bool" else torch.zeros_like(x).masked_fill_(x <= 0.3, torch.finfo(x.dtype).min)


@few
@given(sizes, sizes, sizes, sizes, st.integers(0, 15), st.sampled_from(MASKS), st.booleans(), layouts, seeds)
def test_equals_plain(
    a: int, b: int, q: int, k: int, ones: int, kind: str, causal: bool, layout: str, seed: int
) -> None:
    """Every mask that broadcasts: `ones` says which of its dims are 1."""
    shape = tuple(1 if ones >> i & 1 else size for i, size in enumerate((a, b, q, k)))
    mask = make_mask(kind, shape, seed + 1)
    scores = random(a, b, q, k, seed=seed, layout=layout)
    check_same(masked_softmax, masked_softmax_plain, [scores, mask], scale=0.3, causal=causal)
    with small_tiles():
        check_same(masked_softmax, masked_softmax_plain, [scores, mask], scale=0.3, causal=causal)


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 1, 3, 4, 5)])
def test_other_numbers_of_dims(shape: tuple[int, ...]) -> None:
    mask = random(*shape[1:], seed=1) > 0
    with small_tiles():
        check_same(masked_softmax, masked_softmax_plain, [random(*shape), mask])


def test_a_mask_that_widens_the_scores() -> None:
    check_same(masked_softmax, masked_softmax_plain, [random(1, 4, 5), random(3, 1, 5) > 0])


def test_dtypes_of_torch_hold() -> None:
    scores, mask = random(2, 3, 4).bfloat16(), random(3, 4)
    for dtype in (None, torch.float32, torch.float64):
        for added in (mask.float(), mask.bfloat16(), mask > 0):
            wanted = masked_softmax_plain(scores, added, dtype=dtype)
            assert torch.equal(masked_softmax(scores, added, dtype=dtype).nan_to_num(), wanted.nan_to_num())
            assert masked_softmax(scores, added, dtype=dtype).dtype == wanted.dtype


def test_gradients() -> None:
    scores = random(2, 3, 4).requires_grad_()
    check_gradients(lambda x: masked_softmax(x, scale=0.5, causal=True), scores)
    check_gradients(lambda x: masked_softmax(x, random(3, 4, seed=2), scale=0.5), scores)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors(dtype: torch.dtype) -> None:
    def of(form):  # type: ignore[no-untyped-def]
        return lambda x: form(
            x, scale=0.7, causal=True, dtype=torch.float32 if x.dtype == torch.bfloat16 else None
        )

    check_errors(of(masked_softmax), of(masked_softmax_plain), [4 * random(3, 40, 40)], 1, dtype)


def test_keeps_its_result() -> None:
    scores = random(4, 16, 32).requires_grad_()
    assert kept_bytes(lambda x: masked_softmax(x, causal=True, scale=0.1), scores) == scores.nbytes
    mask = random(16, 32) > 0
    assert kept_bytes(lambda x, m: masked_softmax(x, m), scores, mask) == scores.nbytes + 16
    assert kept_bytes(lambda x: masked_softmax(x), scores.detach()) == 0


def test_a_mask_that_wants_a_gradient_is_refused() -> None:
    with pytest.raises(InternalError, match="mask"):
        masked_softmax(random(3, 4), random(3, 4).requires_grad_())
    with pytest.raises(InternalError, match="no form"):
        masked_softmax(random(3, 4), backend="cuda")
