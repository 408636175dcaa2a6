"""Changes of the source that a test must notice: they prove that the tests of a repair can fail.

Each file of this folder has those of one room, as a tuple `MUTATIONS`, by source file and the tests that must notice:

    *planted("autoptd/ir/names.py", "tests/codegen/test_names.py", ("text.isascii()", "True"))

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


def planted(file: str, tests: str, *changes: tuple[str, str]) -> tuple[Mutation, ...]:
    """Return a mutation for each (before, after) of one file."""
    return tuple(Mutation(file, before, after, tests) for before, after in changes)


def all_mutations() -> list[Mutation]:
    """Return the mutations of every file of this folder."""
    found: list[Mutation] = []
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith(("_", "test_")):
            found += importlib.import_module(f"{__name__}.{module.name}").MUTATIONS
    return found
