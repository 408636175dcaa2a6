"""What a ParallelModel answers to what it has not."""

from __future__ import annotations

from tests.mutations import Mutation

FILE, TESTS = "autoptd/model/instead.py", "tests/model/test_instead.py"
MUTATIONS = (
    Mutation(
        FILE, "parallelize(..., fuse='inductor'), which", "parallelize(..., fuse='triton_only'), which", TESTS
    ),
    Mutation(FILE, "if name in INSTEAD:", "if name in ():", TESTS),
)
