"""Of buffers that a forward updates."""

from __future__ import annotations

from tests.mutations import Mutation

PARITY, NAMES = "tests/parity/test_buffers.py", "tests/parity/test_buffer_names.py"
MUTATIONS = (
    Mutation(
        "autoptd/program/module_hashes.py",
        "loss = loss.args[0]",
        "break",
        f"{PARITY}::test_updates_go_on_where_a_checkpoint_was_saved",
    ),
    Mutation(
        "autoptd/runtime/step/buffer_updates.py",
        "(not spec.is_sum and world.replica != self._teller)",
        "not spec.is_sum and False",
        f"{PARITY}::test_all_replicas_have_one_norm_of_a_weight",
    ),
    Mutation(
        "autoptd/runtime/step/buffer_updates.py",
        "next((i for i, rows in enumerate(program.row_counts) if rows), 0)",
        "0",
        "tests/processes/test_lengths.py::test_batches_of_several_lengths_over_gloo[few]",
    ),
    Mutation(
        "autoptd/runtime/step/stage.py",
        "self.parts[number] += part.detach()",
        "self.parts[number] = part.detach().double()",
        f"{PARITY}::test_numbers_of_rows_are_those_of_the_batch",
    ),
    Mutation(
        "autoptd/runtime/step/executor.py",
        "stage.parts = {}",
        "stage.parts = stage.parts",
        f"{PARITY}::test_numbers_of_rows_are_those_of_the_batch",
    ),
    Mutation(
        "autoptd/model/padded.py",
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
    Mutation(
        "autoptd/trace/batch_norms.py",
        "make(aten.rsub.Scalar, momentum, 1) if",
        "make(aten.rsub.Scalar, momentum, 2) if",
        f"{PARITY}::test_statistics_are_averages_over_all_steps",
    ),
    Mutation(
        "autoptd/trace/read.py",
        "            name = first_name.get(name, name)\n",
        "",
        NAMES,
    ),
    Mutation("autoptd/runtime/step/model_buffers.py", "self.shared.names_of(first)", "(first,)", NAMES),
    Mutation("autoptd/trace/precision.py", "self._made.setdefault(id(x), (x, made))[1]", "made", NAMES),
    Mutation(
        "autoptd/trace/updates.py",
        "and not assigned.isdisjoint(names)",
        "and False",
        f"{NAMES}::test_what_would_not_follow_is_refused",
    ),
    Mutation(
        "autoptd/trace/updates.py",
        "len({_place(model, twin) for twin in names}) > 1 and",
        "True and",
        f"{NAMES}::test_all_names_follow",
    ),
    Mutation(
        "autoptd/trace/updates.py",
        "if of_loss not in own",
        "if False",
        f"{NAMES}::test_state_of_a_loss_that_nobody_saves_is_refused",
    ),
)
