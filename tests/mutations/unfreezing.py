"""Parameters whose requires_grad changes between steps."""

from tests.mutations import Mutation

FILE, TESTS = "autoptd/runtime/params/parameters.py", "tests/parity/test_unfreezing.py"

MUTATIONS = (Mutation(FILE, "if parameter.requires_grad != requires_grad:", "if False:", TESTS),)
