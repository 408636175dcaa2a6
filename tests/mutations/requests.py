"""What `pm.optimizer` takes, and what is answered to calls that a `ParallelModel` does not have."""

from __future__ import annotations

from tests.mutations import Mutation

FILE, TESTS = "autoptd/model/optimizer_request.py", "tests/model/test_optimizer_request.py"
MUTATIONS = (
    Mutation(
        "autoptd/runtime/params/optimizer.py",
        "if specs and not any(groups):",
        "if False:",
        "tests/model/test_parallel_model.py -k optimizer_refusals",
    ),
    Mutation(FILE, "if found is not None and found[0]() is x else None", "if False else None", TESTS),
    Mutation(
        FILE, "keywords = {**cls.keywords, **keywords}", "keywords = {**keywords, **cls.keywords}", TESTS
    ),
    Mutation(FILE, "            elif name in trained:", "            else:", TESTS),
    Mutation(FILE, "value != known[name].default", "True", TESTS),
    Mutation(
        "autoptd/model/instead.py",
        "class WrongCall(PlanError, AttributeError):",
        "class WrongCall(PlanError):",
        "tests/model/test_instead.py",
    ),
)
