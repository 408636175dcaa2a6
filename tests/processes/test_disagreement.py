"""Real processes that do not read the same batch, do not change the same things, or do not make the same calls: one error on
all of them, at once.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forks import told

pytestmark = pytest.mark.processes


REMEDY = "DistributedSampler(num_replicas=d, rank=pm.coordinate.dp)"
COPIES = "RuntimeFault: step 2: copies that must be equal are not"
OTHER_ROWS = "rank {} got other inputs or targets than rank {} of the same replica"
# What is said, how it begins first; nothing where nothing is wrong.
FEW: dict[str, tuple[str, ...]] = {
    "seeded_by_rank t=2 p=2": (
        "RuntimeFault: step 1: ranks 1, 2, 3 got other inputs",
        "than rank 0 of the same replica (tensor 0, 1 of the call differs)",
    ),
    "one_gradient_changed t=2 d=2": (COPIES, "differs between ranks 0, 1"),
}
MORE: dict[str, tuple[str, ...]] = {
    "same_seed t=2 p=2": (),
    "computed_wrongly t=2 d=2": (
        "RuntimeFault: pm.check_ranks: the same rows give other bits: ",
        "the output of stage 0 differs between ranks 1, 3",
    ),
    "sampler_over_all_ranks t=2 d=2": (
        "RuntimeFault: step 1",
        REMEDY,
        OTHER_ROWS.format(1, 0),
        OTHER_ROWS.format(3, 2),
    ),
    "sampler_over_all_ranks p=2 d=2": (
        "RuntimeFault: step 1",
        REMEDY,
        OTHER_ROWS.format(2, 0),
        OTHER_ROWS.format(3, 1),
    ),
    "sampler_over_replicas t=2 d=2": (),
    "one_gradient_changed t=2 p=2": (COPIES, "ln_1.weight differs between ranks 0, 1"),
    "torch_clips t=2 p=2": ("PlanError: torch.nn.utils clipping",),
    "evaluated_by_rank t=2 p=2": ("RuntimeFault: eval_step 1: ranks 1, 2, 3 got other inputs",),
    "loaded_by_rank t=2 p=2": (
        "RuntimeFault: load_state_dict: rank 3 got another state dict than rank 0: transformer.wpe.weight differs.",
    ),
    "checked_by_rank t=2 d=2": (
        "RuntimeFault: pm.check_ranks",
        "differs between ranks 0, 2",
        "pass the same global batch",
    ),
}


@pytest.mark.parametrize(
    ("wanted", "arguments"), [(FEW, ()), pytest.param(MORE, ("more",), marks=pytest.mark.thorough)]
)
def test_ranks_that_differ_are_named_on_all_ranks(
    wanted: dict[str, tuple[str, ...]], arguments: tuple[str, ...]
) -> None:
    found = told(Path(__file__).parent / "disagree.py", 4, *arguments)
    assert all(one == found[0] for one in found), found  # no rank goes on alone, all say the same
    assert list(found[0]) == list(wanted)
    for situation, facts in wanted.items():
        said = found[0][situation]
        begins = said.startswith(facts[0]) if facts else not said
        assert begins and all(fact in said for fact in facts), (situation, said)


@pytest.mark.parametrize("arguments", [(), pytest.param(("more",), marks=pytest.mark.thorough)])
def test_a_call_that_only_rank_0_makes_is_named_on_all_ranks(arguments: tuple[str, ...]) -> None:
    """By gloo alone it ends a process by SIGABRT, or hangs. A state dict of what every rank has in full needs no others."""
    found = told(Path(__file__).parent / "some_ranks_call.py", 2, *arguments)
    for case, said in found[0].items():
        # What it does first has a name of its own.
        name, _, mesh = case.partition(" ")
        name = {"load_state_dict": "state dict", "eval_step": "check of the sizes"}.get(name, name)
        for text in (said, found[1][case]):
            if (name, mesh) == ("state_dict", "{'d': 2}"):
                assert text == "", text
                continue
            assert text.startswith("RuntimeFault: rank ") and "every rank makes every call" in text, (
                case,
                text,
            )
            assert name in text, (case, text)
