"""Real processes whose batches have several lengths: they train like one device, and batches that do not go together are one
error on all of them, at once.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forks import told

pytestmark = pytest.mark.processes


NO_STEP = "PlanError: pm.step: 5 rows do not divide over d=2, which"
FEW = {
    "one_length_differs d=2": ("PlanError: pm.step: rank 1 got idx [4, 6]", "rank 0 idx [4, 8]"),
    "padded_trains d=2 shapes=bucket": (),
    "evaluates_the_rest d=2 shapes=None max_programs=None": (NO_STEP,),
    "updates_where_the_first_replica_has_no_rows d=2 num_microbatches=2 shapes=None max_programs=None": (),
}
MORE = {
    "trains t=2 p=2": (),
    "one_length_differs p=2 d=2": ("PlanError: pm.step: rank 3 got idx [4, 6]", "rank 0 idx [4, 8]"),
    "padded_trains p=2 d=2 shapes=bucket": (),
    "evaluates_the_rest p=2 d=2 shapes=None max_programs=None": (NO_STEP,),
    "one_cannot_compile t=2 p=2": ("RuntimeFault: pm.step with idx [8, 6]", "MemoryError", "(on rank 1)"),
    "too_long t=2 p=2 shapes=bucket": ("PlanError: step: idx has 32 tokens, but the largest bucket has 8",),
    "trains t=2 d=2 zero=1 sequence_parallel=True": (),
    "rows_differ p=2 d=2": ("PlanError: pm.step: ranks 1, 3 got idx [2, 8]", "equal sizes for all"),
    "calls_differ t=2 p=2": ("PlanError: pm.step: rank 2 calls eval_step, rank 0 step.",),
    "one_passes_no_tensor t=2 p=2": ("PlanError: step: idx is 3", "(on rank 0)"),
    "too_many p=2 d=2 max_programs=2": ("[4, 6] would be program 3, and there are 2", "max_programs=4"),
    "too_long t=2 p=2": ("PlanError: pm.step with idx [8, 32]", "more than block_size=8"),
    "padded_trains t=2 p=2 shapes=bucket": (),
    "rows_differ p=2 d=2 shapes=bucket": ("PlanError: pm.step: ranks 1, 3 got rows [2]",),
    "reads_padding p=2 d=2 shapes=bucket": ("PlanError: shapes: padding", "with padded tokens"),
}


@pytest.mark.parametrize(
    ("wanted", "ranks"), [(FEW, 2), pytest.param(MORE, 4, marks=pytest.mark.thorough)], ids=["few", "more"]
)
def test_batches_of_several_lengths_over_gloo(wanted: dict[str, tuple[str, ...]], ranks: int) -> None:
    found = told(Path(__file__).parent / "lengths.py", ranks)
    assert all(one == found[0] for one in found), found  # no rank goes on alone, all say the same
    assert list(found[0]) == list(wanted)
    for situation, facts in wanted.items():
        said = found[0][situation]
        assert all(fact in said for fact in facts) and bool(said) == bool(facts), (situation, said)
