"""Every second case of a long list: the others are marked `thorough`, which `make test ARGS="-m thorough"` runs.

@pytest.mark.parametrize("case", thinned(covering()), ids=str)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], names: Iterable[str] | None = None, *, every: int = 2) -> list[Any]:
    """The cases as parameters; all but each `every`-th are thorough. A plain tuple stands for several arguments."""
    known = list(names) if names is not None else None
    found = []
    for i, case in enumerate(cases):
        values = case if type(case) is tuple else (case,)
        marks = [pytest.mark.thorough] if i % every else []
        found.append(pytest.param(*values, marks=marks, id=known[i] if known else None))
    return found
