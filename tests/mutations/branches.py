"""Branches on values, and data of tensors, in a trace."""

from __future__ import annotations

from tests.mutations import Mutation

FILE, TESTS = "autoptd/trace/branches.py", "tests/trace/test_branches.py"
WATCH, CAPTURE = "autoptd/trace/watch.py", "tests/trace/test_capture.py"
MUTATIONS = (
    Mutation(FILE, "and self._drawn[id(x)][1] == x._version", "", TESTS),
    Mutation(FILE, "and self._compared[id(x)][1] == x._version", "", TESTS),
    Mutation(FILE, "or 0 < bound < 1:", "or False:", TESTS),
    Mutation(FILE, "and dtype.itemsize < 4:", "and False:", TESTS),
    Mutation(FILE, "return not raising", "return raising", TESTS),
    Mutation(FILE, "return raising[0] if len(raising) == 1 else None", "return True", TESTS),
    Mutation("autoptd/trace/capture.py", "if checks.tried is not None:", "if False:", TESTS),
    Mutation("autoptd/verify/widening.py", "torch.full_like(x, 0.5)", "torch.zeros_like(x)", TESTS),
    Mutation(WATCH, "return args[0].detach()", "pass", f"{CAPTURE} -k data"),
    Mutation(WATCH, "if func == SET_DATA and", "if False and", f"{CAPTURE} -k data"),
    Mutation(
        "autoptd/trace/functions.py",
        ".requires_grad_(is_so)",
        ".requires_grad_()",
        "tests/trace/test_functions.py -k without_gradient",
    ),
)
