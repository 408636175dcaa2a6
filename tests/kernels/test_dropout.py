"""The masks of dropout: the hash against a plain form of it, its statistics, and the same bits from every kernel."""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from autoptd.compat import interpreter_fault
from autoptd.compiler.peak_memory import LiveBytes
from autoptd.errors import InternalError
from autoptd.kernels import dropout
from autoptd.kernels.dropout import drop, drop_torch
from autoptd.kernels.dropout_mask import Places, keys, threshold

SIZES = [(1, 4, 64), (7, 3, 5), (1, 1, 70_000), (3, 70, 900), (400, 2, 96), (1, 200, 700), (2, 1, 1)]
Word = np.ndarray


def shifted(h: Word, by: int) -> Word:
    return h ^ (h >> np.uint32(by))


def mixed(h: Word) -> Word:
    return shifted(h * np.uint32(0x7FEB352D), 15) * np.uint32(0x846CA68B)


def hashed(numbers: Word, key: int) -> Word:
    return shifted(mixed(shifted(numbers ^ np.uint32(key), 16)), 16)


def plain_mask(size: tuple[int, int, int], rate: float, places: Places) -> Word:
    """The mask of a whole value, as the docstring of the module says it, in unsigned words."""
    before, rows, after = size
    row = hashed((np.arange(rows) + places.first_row).astype(np.uint32), places.row_key)
    column = hashed(np.arange(before * after).astype(np.uint32), places.column_key).reshape(before, 1, after)
    bits = mixed(row[None, :, None] ^ column)
    return bits.view(np.int32).astype(np.int64) >= round((rate - 0.5) * 2**32)


def mask(
    size: tuple[int, int, int], rate: float, places: Places, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return drop_torch(torch.ones(size, dtype=dtype), rate, places) != 0


@pytest.mark.parametrize("size", SIZES)
def test_the_mask_is_the_hash(size: tuple[int, int, int]) -> None:
    for rate, first_row in ((0.1, 0), (0.9, 2**31 - 1)):
        places = Places(*keys(1, 2, 3), first_row=first_row)
        assert np.array_equal(mask(size, rate, places).numpy(), plain_mask(size, rate, places))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_dtype_has_the_same_mask_and_its_own_scale(dtype: torch.dtype) -> None:
    x, places = torch.randn(3, 4, 50, dtype=torch.float64), Places(*keys(0, 1, 2))
    kept = mask((3, 4, 50), 0.3, places)
    found = drop(x.to(dtype), 0.3, places)
    assert found.dtype == dtype
    scale = 1 / 0.7
    assert torch.equal(found, x.to(dtype) * kept * scale)


def test_without_numbers_a_large_value_takes_few_calls_and_the_same_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a rehearsal runs it."""
    monkeypatch.setattr(dropout, "TILE", 1 << 10)

    class Calls(LiveBytes):
        count = 0

        def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return super().__torch_dispatch__(*args, **kwargs)

    found = {}
    for device in ("cpu", "meta"):
        x = torch.ones(1, 4, 1 << 14, device=device)
        with Calls() as calls:
            assert drop(x, 0.1, Places(1, 2)).shape == x.shape
        found[device] = calls
    assert found["meta"].count < found["cpu"].count / 10 and found["meta"].most == found["cpu"].most


def test_a_strided_value_and_what_is_not_a_number() -> None:
    x, places = torch.randn(50, 4, 3).transpose(0, 2), Places(*keys(0, 1, 2))
    assert torch.equal(drop(x, 0.3, places), drop(x.contiguous(), 0.3, places))
    x = torch.full((1, 4, 50), float("inf"))
    kept = mask((1, 4, 50), 0.3, places)
    found = drop(x, 0.3, places)
    assert bool(found[kept].isinf().all()) and bool(
        found[~kept].isnan().all()
    )  # as torch's own: 0 times infinity


@pytest.mark.parametrize("rate", [1e-12, 1e-3, 0.5, 1 - 1e-3, 1 - 1e-12])
def test_thresholds(rate: float) -> None:
    below = threshold(rate) + 2**31
    assert abs(below - rate * 2**32) <= 1
    assert -(2**31) <= threshold(rate) < 2**31


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, 1.5])
def test_rates_that_draw_nothing(rate: float) -> None:
    with pytest.raises(InternalError):
        threshold(rate)


# The [before, rows, after] of a whole value, and its columns as factors of which one is split.
FACTORS: list[tuple[int, ...]] = [(6, 40), (2, 3, 40), (6, 2, 20), (6, 10, 4)]
SHARDS = [*(((6, 2, 40), factors) for factors in FACTORS), ((1, 3, 12), (12,))]


@pytest.mark.parametrize(("size", "factors"), SHARDS)
@pytest.mark.parametrize("degree", [2, 3])
def test_shards_are_parts_of_the_whole_mask(
    size: tuple[int, int, int], factors: tuple[int, ...], degree: int
) -> None:
    """The columns are factored, any factor that divides is split, and the shards' masks joined again."""
    before, rows, after = size
    whole = mask(size, 0.4, Places(*keys(0, 1, 2))).permute(1, 0, 2).reshape(rows, *factors)
    tried = 0
    for i, factor in enumerate(factors):
        product = math.prod(factors[: i + 1])
        if factor % degree or (product // degree < before and before % (product // degree)):
            continue
        block = math.prod(factors[i:]) // degree
        # The local value: its factors before the rows are those of the whole, or split as well.
        local = (
            (before // degree, after)
            if math.prod(factors[:i]) * factor <= before
            else (before, after // degree)
        )
        parts = []
        for index in range(degree):
            places = Places(*keys(0, 1, 2), block=block, degree=degree, index=index)
            mine = mask((local[0], rows, local[1]), 0.4, places).permute(1, 0, 2)
            parts.append(mine.reshape(rows, *factors[:i], factor // degree, *factors[i + 1 :]))
        assert torch.equal(torch.cat(parts, 1 + i), whole)
        tried += 1
    assert tried or degree == 3


# Statistics. Bounds are five standard deviations of what independent draws would give.


def bits(
    seed: int, step: int, site: int, rows: int = 64, columns: int = 1024, rate: float = 0.5
) -> torch.Tensor:
    return mask((1, rows, columns), rate, Places(*keys(seed, step, site)))[0].double()


def is_rate(kept: torch.Tensor, rate: float, dims: int | None = None, bound: float = 5.0) -> bool:
    """Whether shares of kept elements, over all or along one dim, are within `bound` deviations of 1 - rate."""
    found = kept.mean() if dims is None else kept.mean(dims)
    count = kept.numel() / found.numel()
    return bool(((found - (1 - rate)).abs() <= bound * (rate * (1 - rate) / count) ** 0.5).all())


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_share_of_kept_elements(rate: float) -> None:
    """Of a mask, of each of its rows and of each of its columns, at several sites, steps and seeds."""
    for seed, step, site in itertools.product((0, 1, 2**40), (1, 2, 1000), (0, 1, 77)):
        kept = bits(seed, step, site, 256, 4096, rate)
        assert is_rate(kept, rate) and is_rate(kept, rate, 0, 6.0) and is_rate(kept, rate, 1, 6.0)


def test_share_over_many_small_masks() -> None:
    kept = torch.stack([bits(0, step, site, 4, 64, 0.1) for step in range(40) for site in range(40)])
    assert (
        is_rate(kept, 0.1) and is_rate(kept.flatten(1), 0.1, 1, 6.0) and is_rate(kept.flatten(1), 0.1, 0, 6.0)
    )


def make_pairs() -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Masks that must look independent."""
    base = bits(0, 1, 0)
    for by in (1, 2, 3, 4, 8, 16, 32):
        yield f"rows {by} apart", base[by:], base[:-by]
    for by in (1, 2, 3, 4, 7, 8, 16, 64, 256, 512):
        yield f"columns {by} apart", base[:, by:], base[:, :-by]
    for other in (1, 2, 3, 4, 16, 100):
        yield f"site {other}", base, bits(0, 1, other)
        yield f"step {other + 1}", base, bits(0, 1 + other, 0)
        yield f"seed {other}", base, bits(other, 1, 0)
    yield "seed and site exchanged", bits(0, 1, 5), bits(5, 1, 0)
    yield "step and site exchanged", bits(0, 1, 5), bits(0, 5, 1)


def test_no_correlation() -> None:
    found = {}
    for name, one, other in make_pairs():
        signs = (2 * one - 1) * (2 * other - 1)
        found[name] = abs(float(signs.mean())) * signs.numel() ** 0.5
    assert {name: size for name, size in found.items() if size > 5.0} == {}


def test_no_correlation_of_four_corners() -> None:
    """Rows and columns meet by an exclusive or: rectangles are where a weak mix would show."""
    signs = 2 * bits(0, 1, 0, 512, 2048) - 1
    for by in (1, 2, 5, 64):
        for across in (1, 3, 32, 1000):
            corners = (
                signs[by:, across:] * signs[:-by, across:] * signs[by:, :-across] * signs[:-by, :-across]
            )
            assert abs(float(corners.mean())) <= 5.0 / corners.numel() ** 0.5


def test_patterns_of_neighbours() -> None:
    """Every pattern of 8 neighbours along a row, a column and over sites is equally frequent (chi square)."""
    kept = torch.stack([bits(0, 1, site, 64, 512) for site in range(64)]).long()  # [site, row, column]
    for dim in range(3):
        lines = kept.movedim(dim, -1).reshape(-1, 8)
        counts = torch.bincount((lines << torch.arange(8)).sum(1), minlength=256).double()
        wanted = lines.shape[0] / 256
        chi_square = float(((counts - wanted) ** 2 / wanted).sum())
        assert abs(chi_square - 255) <= 5 * (2 * 255) ** 0.5


def test_no_two_masks_are_equal() -> None:
    found = {
        bits(seed, step, site, 2, 64).numpy().tobytes()
        for seed in range(6)
        for step in range(6)
        for site in range(60)
    }
    assert len(found) == 6 * 6 * 60
    rows = bits(0, 1, 0, 4096, 64).bool()
    assert len({row.numpy().tobytes() for row in rows}) == 4096
    assert len({column.numpy().tobytes() for column in bits(0, 1, 0, 64, 4096).T.bool()}) == 4096


def test_a_weak_hash_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the last mix, rows and columns are combined linearly: the four corners tell."""
    monkeypatch.setattr(dropout, "mix_", lambda h, spare: h)
    with pytest.raises(AssertionError):
        test_no_correlation_of_four_corners()


TRITON_SIZES: list[tuple[tuple[int, int, int], dict[str, int]]] = [
    ((1, 4, 64), {}),
    ((7, 3, 5), {}),
    ((3, 70, 30), {"first_row": 2**31}),
    ((8, 2, 6), {"block": 24, "degree": 4, "index": 3}),
    ((8, 2, 6), {"block": 2, "degree": 3, "index": 1}),
]


def check_triton(device: str, dtype: torch.dtype) -> None:
    from autoptd.kernels.dropout_triton import drop_triton

    for size, where in TRITON_SIZES:
        x, places = torch.randn(size).to(dtype), Places(*keys(0, 3, 7), **where)
        wanted, found = drop_torch(x, 0.1, places), drop_triton(x.to(device), 0.1, places).cpu()
        assert torch.equal(found != 0, wanted != 0)
        unit = (
            torch.finfo(dtype).eps if dtype in (torch.bfloat16, torch.float16) else 0.0
        )  # the interpreter cuts off
        assert bool(((found - wanted).abs() <= unit * wanted.abs()).all())


# `triton_forms.py` has the others.
@pytest.mark.thorough  # by default in triton_forms.py
@pytest.mark.one_in(99)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_triton_has_the_same_bits_in_its_interpreter(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("on the GPU itself: below")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    if fault := interpreter_fault():
        pytest.skip(fault)
    # Kernels of modules that were imported without the interpreter are not for it.
    for name in [name for name in sys.modules if re.fullmatch(r"autoptd\.kernels\.\w+_triton", name)]:
        monkeypatch.delitem(sys.modules, name)
    check_triton("cpu", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_triton_has_the_same_bits(dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("triton")
    check_triton("cuda", dtype)
