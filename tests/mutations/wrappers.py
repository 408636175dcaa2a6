"""Models that another tool has wrapped or divided."""

from __future__ import annotations

from tests.mutations import Mutation

FILE, TESTS = "autoptd/subject/module.py", "tests/trace/test_wrappers.py"
MUTATIONS = (
    Mutation(FILE, "isinstance(module, nn.parallel.DistributedDataParallel)", "False", TESTS),
    Mutation(FILE, "if isinstance(module, wrapped):", "if False:", TESTS),
    Mutation(FILE, "if tensor is not None:", "if False:", TESTS),
)
