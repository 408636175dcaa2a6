"""What is counted before a step, programs read from disk, copies, float8."""

from __future__ import annotations

from tests.mutations import Mutation

LOSSES = "tests/parity/test_losses.py -k counted_after"
CACHE = "tests/compiler/test_program_cache.py -k read_evaluates"
COPIES = "tests/subject/test_copies.py"

MUTATIONS = (
    Mutation(
        "autoptd/runtime/step/executor.py",
        "            if stage.rounds:\n                self.world.at = SUMS",
        "            if stage.rounds and not stage.counts:\n                self.world.at = SUMS",
        LOSSES,
    ),
    Mutation(
        "autoptd/compiler/peak_memory.py",
        "            set_batch_sums(stage, [inputs], lambda own, _: own)\n            if stage.counts:",
        "            if stage.counts:",
        LOSSES,
    ),
    Mutation(
        "autoptd/compiler/compiler.py", "if is_same_size and first.graphs:\n", "if is_same_size:\n", CACHE
    ),
    Mutation(
        "autoptd/compiler/compiler.py",
        "like = first if first.graphs else first.follows",
        "like = first",
        CACHE,
    ),
    Mutation(
        "autoptd/ir/buffers.py",
        "if one.dtype.itemsize > 1 or not one.is_floating_point():",
        "if True:",
        COPIES,
    ),
    Mutation("autoptd/model/parallel_model.py", "def __reduce_ex__(", "def _reduce(", COPIES),
)
