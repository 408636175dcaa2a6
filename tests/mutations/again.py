"""What backward computes again."""

from __future__ import annotations

from tests.mutations import Mutation

MUTATIONS = (
    Mutation(
        "autoptd/runtime/ops/recompute.py",
        "stride if size > 1 else 0",
        "stride",
        "tests/runtime/ops/test_recompute.py",
    ),
    Mutation(
        "autoptd/runtime/ops/recompute.py",
        "else mask.requires_grad_()",
        "else mask",
        "tests/parity/test_recompute.py -k kernel_of_forward",
    ),
)
