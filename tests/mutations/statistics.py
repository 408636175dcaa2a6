"""Statistics of inputs, written as sums and largest entries."""

from tests.mutations import Mutation

FILE, TESTS = "autoptd/trace/statistics.py", "tests/parity/test_statistics.py"
COUNTS = "tests/parity/test_counts.py"

MUTATIONS = (
    Mutation(FILE, "max(count - correction, 0)", "count", TESTS),
    Mutation(FILE, "correction = 1 if given is None else given", "correction = 1", TESTS),
    Mutation(FILE, 'correction = int(argument(node, "unbiased"))', "correction = 1", TESTS),
    Mutation(FILE, "torch.promote_types(value(x).dtype, torch.float32)", "value(x).dtype", TESTS),
    Mutation(FILE, "total, 1 / p)", "total, 1 / 2)", TESTS),
    Mutation(FILE, "and 0 in _dims(node)", "and False", TESTS),
    Mutation(
        FILE,
        "is_largest=name in LARGEST)",
        "is_largest=True)",
        TESTS,
    ),
    Mutation(
        FILE,
        'if name == "aten.logsumexp":',
        "if False:",
        TESTS,
    ),
    Mutation(FILE, "is_largest=p > 0)", "is_largest=True)", TESTS),
    Mutation("autoptd/runtime/step/batch_sums.py", "(is_nan > 0, math.nan)", "(is_nan > 2, math.nan)", TESTS),
    Mutation("autoptd/runtime/step/batch_sums.py", '"max": torch.amax}', '"max": torch.sum}', TESTS),
    Mutation(
        "autoptd/runtime/step/executor.py",
        "group.all_reduce(own, SUMS, op)",
        "group.all_reduce(own, SUMS)",
        TESTS,
    ),
    Mutation(
        "autoptd/passes/solve/batch_types.py",
        "or any(note(operand).rows.is_largest for operand in partial)",
        "",
        TESTS,
    ),
    Mutation(
        "autoptd/compiler/records/collectives.py",
        'for conversion, what in (("batch sums", "sums over"), ("batch maxima", "largest entries of")):',
        'for conversion, what in (("batch sums", "sums over"),):',
        COUNTS,
    ),
    Mutation("autoptd/runtime/step/batch_sums.py", '"max", -math.inf)', '"max", 0.0)', TESTS),
)
