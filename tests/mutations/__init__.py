"""Changes of the source that a test must notice: what proves that the tests of a repair can fail.

A file of this folder holds those of one subject, as a tuple `MUTATIONS`:

    Mutation("autoptd/runtime/params/optimizer.py", "grad.mul_(scale)", "grad.mul_(1.0)", "tests/runtime/test_optimizer.py")

`python -m tests.mutations [WORD ...]` plants each in a copy of the project (only those with all words in their file or texts),
runs its tests there, and lists the ones that survive.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """Replaces `before`, which occurs once in `file`, by `after`; `tests` (arguments of pytest) must then fail."""

    file: str
    before: str
    after: str
    tests: str


def all_mutations() -> list[Mutation]:
    """Return the mutations of every file of this folder."""
    found: list[Mutation] = []
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith(("_", "test_")):
            found += importlib.import_module(f"{__name__}.{module.name}").MUTATIONS
    return found
