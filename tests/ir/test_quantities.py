"""Bytes as people write them."""

from __future__ import annotations

import pytest

from autoptd.errors import PlanError
from autoptd.ir.quantities import check_memory, parse_bytes


@pytest.mark.parametrize(
    "text, nbytes",
    [
        ("80e9", 80e9),
        ("60GB", 60e9),
        ("60gb", 60e9),
        ("60 Gb", 60e9),
        (" 1.5 mb ", 1.5e6),
        ("60GiB", 60 * 2**30),
        ("60 gib", 60 * 2**30),
        ("60 KIB", 60 * 2**10),
    ],
)
def test_units_in_any_case(text: str, nbytes: float) -> None:
    assert parse_bytes(text) == check_memory(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "80G", "many", "-1gb", "0", "nan"])
def test_what_is_no_number_of_bytes(text: str) -> None:
    with pytest.raises(PlanError, match="must be a positive number of bytes"):
        check_memory(text)
