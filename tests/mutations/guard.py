"""Norms of parts by hand."""

from __future__ import annotations

from tests.mutations import Mutation

FILE, TESTS = "autoptd/runtime/params/guard.py", "tests/hostile/test_torch_clip.py -k by_hand"
MUTATIONS = (
    Mutation(
        FILE,
        'return guard_square(result, "parameter") if _is_square(func, args) else result',
        "return result",
        TESTS,
    ),
    Mutation(FILE, "return func in POWERS or (", "return (", TESTS),
    Mutation(FILE, " and args[0] is args[1])", ")", TESTS),
    Mutation(FILE, " and result.dim() == 0:", ":", TESTS),
)
