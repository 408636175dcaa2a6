"""The golden texts are what the passes and the emitter make today; `python -m tests.golden` writes them anew."""

from __future__ import annotations

from difflib import unified_diff
from functools import cache
from itertools import pairwise

import pytest

from tests import golden

WRITTEN = golden.read()
made = cache(golden.texts)


@pytest.mark.parametrize("path", WRITTEN)
def test_the_text_is_the_golden_one(path: str) -> None:
    now = made().get(path, "")
    changes = unified_diff(WRITTEN[path].splitlines(), now.splitlines(), "golden", "now", lineterm="", n=1)
    assert now == WRITTEN[path], "\n".join(["python -m tests.golden, if it is meant", *changes])


def test_every_text_has_a_golden_one() -> None:
    assert made().keys() == WRITTEN.keys(), "python -m tests.golden writes what is missing"


def test_the_passes_with_a_text_are_those_that_do_something() -> None:
    """Else it says nothing about them."""
    texts = [text for path, text in WRITTEN.items() if path.startswith("passes/")]
    nodes, calls = zip(*(text.split("calls that are new or different:\n") for text in texts), strict=True)
    changed = [before != now for before, now in pairwise(nodes)]
    assert all(is_changed or new != "none\n" for is_changed, new in zip(changed, calls[1:], strict=True))
