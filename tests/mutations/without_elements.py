"""Parameters without elements."""

from tests.mutations import Mutation

TESTS = "tests/hostile/test_operators.py -k without_elements"

MUTATIONS = (
    Mutation("autoptd/passes/axes/vocabulary.py", "return unit > 0 if", "return True if", TESTS),
    Mutation(
        "autoptd/compiler/records/specs.py",
        "record.needs_grad and parameter.numel() > 0",
        "record.needs_grad",
        TESTS,
    ),
)
