"""Which tensor is the loss."""

from tests.mutations import Mutation

FILE, TESTS = "autoptd/trace/loss.py", "tests/trace/test_loss.py"

MUTATIONS = (
    Mutation(FILE, "leaf.numel() == 1 and", "leaf.dim() == 0 and", TESTS),
    Mutation(FILE, "[leaf for leaf in singles if leaf.dim() == 0] or singles", "singles", TESTS),
    Mutation(FILE, "return loss.reshape(()) if loss.dim() else loss", "return loss", TESTS),
    Mutation(FILE, "each.default is None and each.name", "each.name", TESTS),
    Mutation(FILE, "names = left_out() if not scalars else ()", "names = ()", TESTS),
    Mutation("autoptd/errors.py", "{fact.removesuffix('.')}", "{fact}", TESTS),
)
