"""Launches of compiled kernels, with a driver that notes what it is given in the place of a GPU's.

No file of tests by its name: `test_triton.py` runs it in a process without Triton's interpreter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from autoptd.kernels import norms_triton, rows_triton
from autoptd.kernels.rows_triton import kind, launched

SPECIALIZED = pytest.importorskip("triton._C.libtriton").native_specialize_impl
ROOM = torch.zeros(4096, dtype=torch.bfloat16)
NUMBERS = [0, 1, 2, 8, 15, 16, 17, 32, 50257, -1, -5, -16, -(2**31), -(2**31) - 1]
NUMBERS += [2**31 - 1, 2**31, 2**31 + 1, 2**32, 2**62 + 1, 2**63 - 1, 2**63, 2**63 + 1, -(2**63)]
OTHERS = [True, False, None, 0.0, 1.0, 0.5, -3.25, ROOM, ROOM[1:], ROOM[7:], ROOM[8:], ROOM[:0], ROOM.float()]


def test_kinds_are_as_fine_as_those_of_triton() -> None:
    """Whatever Triton tells from another is of another kind."""
    from triton.backends.nvidia.compiler import CUDABackend

    values: list[Any] = NUMBERS + OTHERS
    special = [SPECIALIZED(CUDABackend, x, False, True, True) for x in values]
    pairs = [(i, j) for i in range(len(values)) for j in range(i)]
    for i, j in pairs:
        if kind(values[i]) == kind(values[j]):
            assert special[i] == special[j], f"{values[i]} and {values[j]} are of one kind"
    # And no finer than it need be: numbers that change from step to step are one kind.
    assert kind(17) == kind(50257) != kind(16) == kind(32) and kind(0.5) == kind(-3.25)


class Launcher:
    """What a kernel is launched by."""

    launch_cooperative_grid = False
    given: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, *_: Any) -> None:
        pass

    def __call__(self, *given: Any) -> None:
        *grid, stream, function, packed, _metadata, _enter, _leave = given[:9]
        rest = [(x.data_ptr(), x.dtype) if isinstance(x, torch.Tensor) else x for x in given[9:]]
        self.given.append((*grid, stream, function, packed, *rest))


class Utils:
    functions = itertools.count(1)

    def load_binary(self, *_: Any) -> tuple[int, ...]:
        return 1, next(self.functions), 32, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "max_num_regs": 65536, "warpSize": 32, "multiprocessor_count": 132}


class H100:
    """What Triton asks of a driver."""

    utils, launcher_cls, stream = Utils(), Launcher, 7

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return self.stream

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def card() -> Iterator[H100]:
    card = H100()
    Launcher.given.clear()
    with mock.patch.object(driver, "_active", card), mock.patch.dict(rows_triton._known, clear=True):
        yield card


def norm(rows: int, width: int, first: int = 0) -> None:
    x = ROOM[first : first + rows * width].view(rows, width)
    factor = x.new_empty((rows, 1), dtype=torch.float32)
    has = dict.fromkeys(("HAS_WEIGHT", "HAS_BIAS", "HAS_RESIDUAL"), False)
    launched(norms_triton._forward, (rows,), x)(
        *(x, x, x, x, x, x, factor, factor, width),
        **{"EPS": 1e-5, "OFFSET": 0.0, "CENTERED": False, **has, "WIDE": rows_triton.computed(x.dtype)},
        **rows_triton.row_size(width),
    )


CASES: list[dict[str, int]] = [
    {"rows": 16, "width": 64},
    {"rows": 16, "width": 64, "first": 1},  # begins at no multiple of 16 bytes
    {"rows": 3, "width": 63},
    {"rows": 4, "width": 1},
]


def test_what_is_launched_again_is_what_triton_launches(card: H100) -> None:
    for case in CASES:
        norm(**case)
    found, own = list(Launcher.given), JITFunction.run
    with mock.patch.object(JITFunction, "run", autospec=True, side_effect=own) as asked:
        for case in CASES:
            norm(**case)
        assert not asked.called
        for case in CASES[:1]:
            norm(case["rows"] + 1, case["width"])
        assert not asked.called  # rows are no part of what is compiled
    without_factor = [
        [x for x in one if not (isinstance(x, tuple) and x[1] == torch.float32)] for one in Launcher.given
    ]
    assert without_factor[4:8] == without_factor[:4] and len({one[4] for one in found}) == 4 == len(
        rows_triton._known
    )
    card.stream = 8
    norm(**CASES[0])
    assert [one[3] for one in Launcher.given] == [7] * 9 + [8]


def test_nothing_is_launched_on_the_meta_device(card: H100) -> None:
    x = ROOM.to("meta")
    assert launched(norms_triton._forward, (1,), x)(x, EPS=1e-5) is None and not Launcher.given
