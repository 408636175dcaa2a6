"""Deviations and norms of inputs, written as sums."""

from tests.mutations import Mutation

FILE, TESTS = "autoptd/trace/statistics.py", "tests/parity/test_statistics.py"

MUTATIONS = (
    Mutation(FILE, "max(count - correction, 0)", "count", TESTS),
    Mutation(FILE, "correction = 1 if given is None else given", "correction = 1", TESTS),
    Mutation(FILE, 'correction = int(argument(node, "unbiased"))', "correction = 1", TESTS),
    Mutation(FILE, "torch.promote_types(value(x).dtype, torch.float32)", "value(x).dtype", TESTS),
    Mutation(FILE, "total, 1 / p)", "total, 1 / 2)", TESTS),
    Mutation(FILE, "and 0 in _dims(node)", "and False", TESTS),
)
