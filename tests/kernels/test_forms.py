"""Which form runs, and the tiles that the forms in torch operators work on."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoptd.errors import InternalError
from autoptd.kernels import forms
from autoptd.kernels.forms import needs_no_grad, takes_triton, tiles
from tests.kernels.compare import few


@few
@given(st.lists(st.integers(0, 5), max_size=4), st.integers(1, 50))
def test_tiles_cover_everything_once(shape: list[int], size: int) -> None:
    x = torch.zeros(shape)
    with mock.patch.object(forms, "TILE", size):
        for at in tiles(x):
            x[at] += 1
            assert x[at].shape[-1:] == x.shape[-1:]  # rows stay whole
            assert x[at].numel() <= max(size, math.prod(shape[-1:])) or len(shape) < 2
    assert bool((x == 1).all())


def test_elsewhere_than_on_a_cpu_there_is_one_piece() -> None:
    assert tiles(torch.zeros(1 << 10, 1 << 10, device="meta")) == [()]
    assert len(tiles(torch.zeros(1 << 10, 1 << 10))) == 8


def test_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(3)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not takes_triton("triton", x, "here") and not takes_triton("eager", x, "here")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert takes_triton("triton", x, "here") == forms.has_triton() and not takes_triton("eager", x, "here")
    assert not takes_triton("triton", x, "rms_norm", width=1 << 20)
    with pytest.raises(InternalError, match="here: has no form 'cuda'"):
        takes_triton("cuda", x, "here")


def test_gradients_that_are_not_given() -> None:
    x = torch.zeros(3, requires_grad=True)
    with pytest.raises(InternalError, match="table"):
        needs_no_grad(x, "table", "here")
    with torch.no_grad():
        needs_no_grad(x, "table", "here")
    needs_no_grad(None, "table", "here")
