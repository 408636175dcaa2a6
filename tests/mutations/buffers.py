"""Of buffers that a forward updates."""

from __future__ import annotations

from tests.mutations import Mutation

PARITY = "tests/parity/test_buffers.py"
MUTATIONS = (
    Mutation(
        "autoptd/program/prints.py",
        "loss = loss.args[0]",
        "break",
        f"{PARITY}::test_updates_go_on_where_a_checkpoint_was_saved",
    ),
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
        f"{PARITY}::test_numbers_of_rows_are_those_of_the_batch",
    ),
    Mutation(
        "autoptd/runtime/executor.py",
        "stage.parts = {}",
        "stage.parts = stage.parts",
        f"{PARITY}::test_numbers_of_rows_are_those_of_the_batch",
    ),
    Mutation(
        "autoptd/programs.py",
        "check_updates(first)",
        "first",
        f"{PARITY}::test_padding_would_count",
    ),
    Mutation(
        "autoptd/passes/buffer_updates.py",
        "return ours, theirs, tail if ctx.traces_all else of_all",
        "return ours, theirs, tail",
        f"{PARITY}::test_numbers_of_rows_are_those_of_the_batch",
    ),
)
