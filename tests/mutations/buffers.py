"""Of buffers that a forward updates."""

from __future__ import annotations

from tests.mutations import Mutation

PARITY = "tests/parity/test_buffers.py"
MUTATIONS = (
    Mutation(
        "autoptd/runtime/buffer_updates.py",
        "(not spec.is_sum and world.replica)",
        "not spec.is_sum and False",
        f"{PARITY}::test_all_replicas_have_one_norm_of_a_weight",
    ),
    Mutation(
        "autoptd/runtime/stage.py",
        "self.parts[number] += part.detach()",
        "self.parts[number] = part.detach().double()",
        f"{PARITY}::test_the_dtype_of_a_number_of_tokens_holds_large_counts",
    ),
    Mutation(
        "autoptd/runtime/rank_buffers.py",
        "(name in updated or same_entries(other, own))",
        "same_entries(other, own)",
        f"{PARITY}::test_all_sizes_of_batches_update_the_same_buffers",
    ),
    Mutation(
        "autoptd/program_cache.py",
        "for other in (traces.whole, updates.graph if updates is not None else None):",
        "for other in (traces.whole,):",
        f"{PARITY}::test_all_sizes_of_batches_update_the_same_buffers",
    ),
    Mutation(
        "autoptd/passes/buffer_updates.py",
        "return ours, theirs, tail if ctx.traces_all else of_all",
        "return ours, theirs, tail",
        f"{PARITY}::test_numbers_of_rows_are_those_of_the_batch",
    ),
)
