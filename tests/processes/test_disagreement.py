"""Real processes that do not read the same batch, or do not change the same things: one error on all of them, at once."""

from __future__ import annotations

import json

import pytest

from tests.processes.test_processes import finish, start

pytestmark = pytest.mark.processes


def test_ranks_that_differ_are_named_on_all_ranks() -> None:
    results = finish(start("disagree.py", 4), timeout=240)
    assert [code for code, _, _ in results] == [0] * 4, "\n".join(err[-2000:] for _, _, err in results)
    told = [json.loads(out.splitlines()[-1]) for _, out, _ in results]
    assert all(one == told[0] for one in told), told  # nobody goes on alone, all say the same
    said = told[0]
    assert said["same_seed t=2 p=2"] == said["sampler_over_replicas t=2 d=2"] == ""
    remedy = "DistributedSampler(num_replicas=d, rank=pm.coordinate.dp)"
    seeded = said["seeded_by_rank t=2 p=2"]
    assert seeded.startswith("RuntimeFault: step 1: ranks 1, 2, 3 got other inputs"), said
    assert "than rank 0 of the same replica (tensor 0, 1 of the call differs)" in seeded
    for mesh, pairs in (("p=2 d=2", ((2, 0), (3, 1))), ("t=2 d=2", ((1, 0), (3, 2)))):
        both = said[f"sampler_over_all_ranks {mesh}"]
        assert remedy in both
        for rank, first in pairs:
            assert f"rank {rank} got other inputs or targets than rank {first} of the same replica" in both
    assert said["one_gradient_changed t=2 p=2"].startswith(
        "RuntimeFault: step 2: copies that must be equal are not"
    )
    assert "ln_1.weight is not the same on ranks 0, 1" in said["one_gradient_changed t=2 p=2"]
    assert "is not the same on ranks 0, 1" in said["one_gradient_changed t=2 d=2"]
    assert said["torch_clips t=2 p=2"].startswith("PlanError: torch.nn.utils clipping")
    evaluated = said["evaluated_by_rank t=2 p=2"]
    assert evaluated.startswith("RuntimeFault: eval_step 1: ranks 1, 2, 3 got other inputs"), evaluated
    wrong = said["computed_wrongly t=2 d=2"]
    assert wrong.startswith("RuntimeFault: pm.check_ranks: the same rows give other bits: "), wrong
    assert "the output of stage 0 is not the same on ranks 1, 3" in wrong
    checked = said["checked_by_rank t=2 d=2"]
    assert "is not the same on ranks 0, 2" in checked and "pass the same global batch" in checked, checked
    loaded = said["loaded_by_rank t=2 p=2"]
    what = "rank 3 got another state dict than rank 0: transformer.wpe.weight differs."
    assert loaded.startswith(f"RuntimeFault: load_state_dict: {what}"), loaded
