"""What is computed again takes the place of what was dropped only where it lies as that did."""

from __future__ import annotations

import pytest
import torch

from autoptd.errors import InternalError
from autoptd.runtime.ops.recompute import Call, Dropped


def test_the_stride_of_a_single_row_does_not_matter() -> None:
    """A microbatch of one row may be viewed from a product of another shape the second time."""
    call = Call(lambda *_: (), lambda: (), (), None)
    first = torch.arange(48.0).as_strided((1, 6, 2, 4), (48, 8, 4, 1))
    again = torch.arange(48.0).as_strided((1, 6, 2, 4), (8, 8, 4, 1))
    dropped = Dropped(call, 0, first)
    dropped.fill(again)
    assert torch.equal(dropped.value(), first)
    with pytest.raises(InternalError, match=r"is recomputed as .*, but was"):
        dropped.fill(torch.arange(48.0).as_strided((1, 6, 2, 4), (48, 4, 24, 1)))
