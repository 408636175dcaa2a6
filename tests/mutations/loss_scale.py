"""The loss scale of float16."""

from __future__ import annotations

from tests.mutations import Mutation

TESTS = "tests/parity/test_fp16.py -k scale"
MUTATIONS = (
    Mutation("autoptd/runtime/params/loss_scale.py", "if 2 * self.value <= MAX_SCALE:", "if True:", TESTS),
    Mutation(
        "autoptd/runtime/params/loss_scale.py", "max(self.value / 2, self.least)", "self.value / 4", TESTS
    ),
)
