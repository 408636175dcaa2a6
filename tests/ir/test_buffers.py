"""The bytes of tensors, whatever their strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autoptd.ir.buffers import bytes_of, digest, same_entries
from autoptd.runtime.checkpoint.storage import alone

WHOLE = torch.arange(12, dtype=torch.float64).view(2, 6)
VIEWS = {
    "whole": WHOLE,
    "rows": WHOLE[1:],
    "a column": WHOLE[:, :1],
    "an entry": WHOLE[1:, 2:3],
    "an entry of a row that is strided": WHOLE.view(-1)[::6][:1],
    "transposed": WHOLE.t(),
    "nothing": WHOLE[:0],
    "a number": WHOLE[0, 1],
    "conjugated": torch.complex(WHOLE, WHOLE).conj(),
    "negated": torch.complex(WHOLE, WHOLE).conj().imag,
    "booleans": (WHOLE > 3)[:, :1],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_bytes_are_those_of_a_tensor_that_was_copied(view: Tensor) -> None:
    copied = torch.tensor(view.tolist(), dtype=view.dtype).view(view.shape)
    assert bytes_of(view).tolist() == bytes_of(copied).tolist() == list(copied.numpy().tobytes())
    assert digest(view) == digest(copied) and same_entries(view, copied)
    if not view.is_complex() and not view.is_neg():
        saved = alone(view)
        assert torch.equal(saved, view) and saved.untyped_storage().nbytes() == view.nbytes
