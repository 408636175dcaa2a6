"""Whether a model passes over padding: tried with other numbers than a batch has, and with rows that are blank in masks."""

from tests.mutations import Mutation

FILE, TESTS = "autoptd/runtime/step/pad_batch.py", "tests/model/test_lengths.py"
HIDDEN = f"{TESTS}::test_numbers_that_hide_that_padding_is_read"
ROWS = f"{TESTS}::test_rows_are_added_with_a_mask_of_ones_own"

MUTATIONS = (
    Mutation(FILE, "for sign in (-1.0, 1.0):", "for sign in (1.0,):", HIDDEN),
    Mutation(FILE, "for sign in (-1.0, 1.0):", "for sign in (-1.0,):", HIDDEN),
    Mutation(FILE, "return rows % 2 == 0", "return rows >= 0", HIDDEN),
    Mutation(FILE, "torch.where(_covered(x), x, 1)", "x", HIDDEN),
    Mutation(FILE, "torch.where(x == padding, x.max(), x)", "x", HIDDEN),
    Mutation(FILE, "or spec.name in blank:", "or False:", ROWS),
    Mutation("autoptd/model/padded.py", "self.rows, blank), tree)", "self.rows), tree)", ROWS),
)
