"""What `pm.step` returns."""

from __future__ import annotations

from tests.mutations import Mutation

FILE, TESTS = "autoptd/step_loss.py", "tests/test_step_loss.py"
MUTATIONS = (
    Mutation(FILE, "if func is Tensor.backward:", "if False:", TESTS),
    Mutation(
        FILE,
        "return result.as_subclass(cls) if is_loss and result.dim() == 0 else result",
        "return result",
        TESTS,
    ),
    Mutation(FILE, " and not result.requires_grad", "", TESTS),
    Mutation(FILE, "if func in BY_CLASS:", "if False:", TESTS),
    Mutation(FILE, "return self.as_subclass(Tensor).__reduce_ex__", "return super().__reduce_ex__", TESTS),
    Mutation(FILE, "isinstance(args[1], (int, str))", "True", TESTS),
)
