"""What tells rounding from a fault, where a trace and its model differ."""

from tests.mutations import Mutation

FILE, TESTS = "autoptd/trace/rounding.py", "tests/trace/test_rounding.py"

MUTATIONS = (
    Mutation(FILE, "if exact.has_other_value():", "if False:", TESTS),
    Mutation(FILE, "faults = exact.other_rounding(pair, tolerance)", "faults = {}", TESTS),
    Mutation(FILE, "TRIES = 6", "TRIES = 1", TESTS),
    Mutation(FILE, "> MOST_ENTRIES:", "> 1 << 60:", TESTS),
    Mutation("autoptd/trace/faithful.py", "if max(excess.values()) <= tolerance:\n", "if False:\n", TESTS),
    Mutation("autoptd/trace/faithful.py", "if fault is not None:", "if False:", TESTS),
    Mutation("autoptd/trace/pair.py", "model = copy.deepcopy(self.model)\n", "model = self.model\n", TESTS),
    Mutation(
        "autoptd/trace/pair.py",
        "env[node] = leaf.to(dtypes.get(dtype, dtype))",
        "env[node] = leaf.to(dtype)",
        TESTS,
    ),
    Mutation(
        "autoptd/trace/batch_norms.py",
        "dtype = torch.promote_types(value(kept).dtype, value(own).dtype)",
        "dtype = value(kept).dtype",
        TESTS,
    ),
)
