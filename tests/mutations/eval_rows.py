"""Evaluations of fewer rows."""

from __future__ import annotations

from tests.mutations import Mutation

FILE, TESTS = "autoptd/model/sizes.py", "tests/model/test_eval_rows.py"
MUTATIONS = (
    Mutation(FILE, "and own[0] <= shape[0])", ")", TESTS),
    Mutation(FILE, "and own[1:] == shape[1:] ", "", TESTS),
    Mutation(
        FILE, "check_structure(first, args, kwargs, call)", "check_structure(first, args, kwargs)", TESTS
    ),
    Mutation("autoptd/runtime/step/microbatches.py", "% pieces else asked", "% 1 else asked", TESTS),
    # Replicas that have other numbers of rows, or none.
    Mutation("autoptd/runtime/step/microbatches.py", "sum(program.row_counts[:replica])", "0", TESTS),
    Mutation(
        "autoptd/compiler/batch.py",
        "sum(counts) // own, options.mesh",
        "max(counts) // own * len(counts), options.mesh",
        TESTS,
    ),
    Mutation("autoptd/runtime/step/executor.py", " if pair[0].microbatch < len(microbatches)", "", TESTS),
    Mutation(
        "autoptd/runtime/step/executor.py", "mesh.axes if 0 in self.program.row_counts else ", "", TESTS
    ),
    Mutation("autoptd/runtime/step/batch_sums.py", '"batch sums": (SUMS, "sum", 0.0),\n', "", TESTS),
    Mutation(
        "autoptd/compiler/batch_plans.py",
        "    if request.counts:\n        raise",
        "    if False:\n        raise",
        TESTS,
    ),
    Mutation(
        "autoptd/model/steps.py",
        "            self._calls.refuse_unequal(args, kwargs)\n",
        "            pass\n",
        "tests/processes/test_lengths.py",
    ),
)
