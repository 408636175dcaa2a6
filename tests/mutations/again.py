"""What backward computes again."""

from __future__ import annotations

from tests.mutations import Mutation

MUTATIONS = (
    Mutation(
        "autoptd/runtime/again.py", "stride if size > 1 else 0", "stride", "tests/runtime/test_again.py"
    ),
)
