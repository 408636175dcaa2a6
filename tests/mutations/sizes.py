"""Of sizes that depend on the values of a tensor."""

from __future__ import annotations

from tests.mutations import Mutation

TESTS = "tests/trace/test_sizes.py"
MUTATIONS = (
    Mutation("autoptd/trace/branches.py", "self._checks.sizes.see(func, made)", "pass", TESTS),
    Mutation("autoptd/trace/sizes.py", "if not found and name in REMEDIES:", "if False:", TESTS),
    Mutation("autoptd/trace/sizes.py", "name = CALLED.get(name, name)", "pass", TESTS),
    Mutation("autoptd/trace/sizes.py", "REMEDIES.get(bare, OTHERS)", "OTHERS", TESTS),
    Mutation("autoptd/trace/capture.py", "|unbacked symbols|infer dtype of Sym", "", TESTS),
)
