"""Weights changed through `optimizer.param_groups`, and gradients that a parameter does not have."""

from tests.mutations import Mutation

TESTS = "tests/runtime/params/test_edits.py"
MUTATIONS = (
    Mutation("autoptd/runtime/params/edits.py", "if x._version != versions[name] or (", "if (", TESTS),
    # numpy writes where no version counts.
    Mutation(
        "autoptd/runtime/params/guard.py", "        Tensor.detach,\n        Tensor.data_ptr,\n", "", TESTS
    ),
    # Nor does the runtime's own reading cost a comparison in every step.
    Mutation(
        "autoptd/runtime/params/parameters.py",
        "    @unguarded()\n    def __init__(",
        "    def __init__(",
        TESTS,
    ),
    Mutation("autoptd/runtime/params/edits.py", "or (_was_exposed(x) and self._differs(name, x))", "", TESTS),
    Mutation(
        "autoptd/runtime/params/parameters.py",
        "in [*self.local.items(), *self.edits.stored.items()]",
        "in self.local.items()",
        TESTS,
    ),
    Mutation("autoptd/runtime/params/edits.py", 'getattr(x, "was_exposed", True)', "x.was_exposed", TESTS),
    Mutation(
        "autoptd/runtime/params/parameters.py",
        "            if spec.name in written:\n                continue\n",
        "",
        TESTS,
    ),
    Mutation(
        "autoptd/runtime/params/guard.py",
        "if func in WRITES or (func == GRADIENT and not _asks_whether_it_exists()):",
        "if func in WRITES:",
        "tests/parity/test_zero.py -k what_a_user_sees",
    ),
    Mutation(
        "autoptd/runtime/params/guard.py",
        'return not is_loaded and "hasattr" in code.co_names',
        "return False",
        "tests/parity/test_zero.py -k what_a_user_sees",
    ),
)
