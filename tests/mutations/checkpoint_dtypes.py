"""Checkpoints of another dtype."""

from __future__ import annotations

from tests.mutations import Mutation

MUTATIONS = (
    Mutation(
        "autoptd/runtime/checkpoint/restore.py",
        "dtype = stored.dtype if is_own else dtype_of(saved)",
        "dtype = dtype_of(saved)",
        "tests/runtime/checkpoint/test_other_dtypes.py",
    ),
    Mutation(
        "autoptd/runtime/checkpoint/check.py",
        "stored.itemsize > saved.itemsize",
        "True",
        "tests/runtime/checkpoint/test_bad_input.py -k dtype",
    ),
)
