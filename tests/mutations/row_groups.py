"""How many rows a trace has where they belong together in groups, and that it is made once."""

from tests.mutations import Mutation

TESTS = "tests/parity/test_row_groups.py"

MUTATIONS = (
    Mutation("autoptd/compiler/batch.py", "max(rows, 2 * group if group > 1 else 2)", "max(rows, 2)", TESTS),
    Mutation(
        "autoptd/compiler/batch.py",
        "batch.tracing(math.lcm(2 * rows, batch.rows))",
        "batch.tracing(rows)",
        TESTS,
    ),
    Mutation(
        "autoptd/compiler/batch_plans.py",
        "if isinstance(first, FewRows):",
        "if False:",
        TESTS,
    ),
    Mutation(
        "autoptd/compiler/request.py", "if rows not in self.known:", "if True:", "tests/parity/test_mixing.py"
    ),
)
