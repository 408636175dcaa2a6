"""Operators that write in place, and their functional forms."""

from tests.mutations import Mutation

FILE, TESTS = "autoptd/trace/functionalize.py", "tests/trace/test_faithful.py"
SCHEMAS = "tests/trace/test_functionalize.py"

MUTATIONS = (
    Mutation(FILE, "sizes[1] + 1)", "sizes[1])", TESTS),
    Mutation(FILE, 'if dim == 0 and argument(node, "wrap")', "if False", TESTS),
    Mutation(FILE, "    aten.pow_.Scalar: aten.pow.Tensor_Scalar,\n", "", TESTS),
    Mutation(FILE, "args[::-1]", "args", TESTS),
    Mutation(FILE, "older |= {whole, *_aliases(whole, {*views})}", "older |= {whole}", TESTS),
    Mutation(FILE, "older |= {whole, *_aliases(whole, {*views})}", "pass", TESTS),
    Mutation(FILE, '(whole is not base and whole.op == "placeholder")', "False", TESTS),
    # A write that the example does not show.
    Mutation(FILE, "0 in _changed(node)", 'name.endswith("_") and not name.endswith("__")', SCHEMAS),
    Mutation(FILE, "            _refuse_other_writes(node)\n", "", SCHEMAS),
    Mutation(FILE, 'is_old or not op_name(node).startswith("aten.")', "is_old", SCHEMAS),
)
