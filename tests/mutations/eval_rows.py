"""Evaluations of fewer rows."""

from __future__ import annotations

from tests.mutations import Mutation

FILE, TESTS = "autoptd/programs.py", "tests/test_eval_rows.py"
MUTATIONS = (
    Mutation(FILE, "and own[0] <= shape[0])", ")", TESTS),
    Mutation(FILE, "and own[1:] == shape[1:] ", "", TESTS),
    Mutation(
        FILE, "check_structure(first, args, kwargs, call)", "check_structure(first, args, kwargs)", TESTS
    ),
    Mutation("autoptd/runtime/batch.py", "% pieces else asked", "% 1 else asked", TESTS),
)
