"""Real processes over gloo: parity on 8 of them, a checkpoint, and a rank that is killed in the middle of a step."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from autoptd.ir.actions import Kind, parse
from tests.forks import told
from tests.processes.beside_one_device import UPDATING
from tests.processes.die_in_a_step import TIMEOUT_OF_STOPPED, UPDATE

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

pytestmark = pytest.mark.processes


@pytest.mark.thorough
def test_eight_processes_train_like_one_device(tmp_path: Path) -> None:
    found = told(HERE / "train_and_compare.py", 8, str(tmp_path))[0]
    assert max(found["worst"].values()) <= 1e-9, found
    assert min(found["worst"].values()) > 0 or found["worst"]["gradient"] > 0, "nothing was compared"
    assert found["identical"], "a loaded checkpoint gives another loss"
    assert found["eval_equals_step"]
    assert found["pretrained"], "a saved folder gives another loss"


# The calls that a case is there for.
CALLS = {
    "kv heads": {"all-reduce over tp:(2)2", "all-reduce over tp"},
    "tokens": {"all-to-all over cp", "all-reduce over dp x cp"},
    "shared, t": {"reduce-scatter over dp", "all-reduce over tp"},
}


@pytest.mark.parametrize(
    ("size", "names"),
    [
        (2, ["contrastive of 2"]),
        (4, ["shared, t", "shared, c"]),
        *(
            pytest.param(4, names, marks=pytest.mark.thorough)
            for names in (
                ["shared, p", "shared, half", "kv heads", "tokens", "albert"],
                ["contrastive", "dpo_halves", "grpo_masked", "entropy_bonus", "load_balancing", *UPDATING],
            )
        ),
    ],
    ids=str,
)
def test_worlds_train_like_one_device_one_after_the_other(size: int, names: list[str]) -> None:
    """Each world finds its own addresses in the store that all of them share."""
    found = told(HERE / "beside_one_device.py", size, *names)[0]
    assert list(found) == names
    for name, worst in found.items():
        assert CALLS.get(name, set()) <= set(worst.pop("calls", ())), found
        assert max(worst.values()) <= 1e-9, found


TWO, FOUR = {"p": 2}, {"p": 2, "d": 2}
DEATHS = [  # mesh, which rank dies at which action of the step
    # By default the first seven.
    (TWO, 0, "F0.2"),
    (FOUR, 3, "B1.1"),
    (TWO, 0, "W0.1"),
    (TWO, 1, "SEND_B1.1>0"),
    (TWO, 1, "RECV_F1.2<0"),
    ({"d": 2}, 1, "REDUCE0"),
    ({"d": 2, "zero": 1}, 1, UPDATE),
    (TWO, 1, "B1.1"),
    (TWO, 0, "SEND_F0.2>1"),
    (TWO, 0, "RECV_B0.2<1"),
    (TWO, 1, "REDUCE1"),
]


def test_every_kind_of_action_is_there() -> None:
    assert {parse(action).kind for _, _, action in DEATHS if action != UPDATE} == set(Kind)


@pytest.mark.parametrize(
    "deaths", [DEATHS[:7], pytest.param(DEATHS[7:], marks=pytest.mark.thorough)], ids=["few", "more"]
)
def test_a_rank_killed_at_any_kind_of_action_ends_the_others_and_is_named(
    deaths: list[tuple[dict[str, int], int, str]],
) -> None:
    """Every other rank ends before the timeout, and says who died and for what it waited itself: action and microbatch."""
    ends = ends_of_others([(*death, "SIGKILL") for death in deaths])
    for (mesh, victim, action), others in zip(deaths, ends, strict=True):
        assert len(others) == mesh.get("p", 1) * mesh.get("d", 1) - 1
        for rank, end in others.items():
            said = f"rank {victim} killed at {action}; rank {rank} said after {end['seconds']:.1f} s:\n{end['error']}"
            assert end["code"] == 1 and 0 <= end["seconds"] < 15, said
            assert end["error"].startswith("RuntimeFault: ") and f"rank {victim}" in end["error"], said
            assert any(
                re.search(one.replace("RANK", rank), end["error"]) for one in waits_of(mesh, action)
            ), said


@pytest.mark.thorough
def test_where_the_host_of_the_store_is_stopped_every_rank_ends() -> None:
    """Its connections stay open: calls of the others end by their timeout, and requests to the store never do."""
    cases = [(FOUR, "F0.2")]
    ends = ends_of_others([(mesh, 0, action, "SIGSTOP") for mesh, action in cases])
    for (mesh, action), others in zip(cases, ends, strict=True):
        assert len(others) == mesh["p"] * mesh.get("d", 1) - 1
        for rank, end in others.items():
            said = (
                f"rank 0 stopped at {action}; rank {rank} said after {end['seconds']:.1f} s:\n{end['error']}"
            )
            assert end["code"] == 1 and 0 <= end["seconds"] < TIMEOUT_OF_STOPPED + 15, said
            assert (
                "RuntimeFault: rank" in end["error"]
                and "the store does not answer: rank 0, or" in end["error"]
            ), said


def ends_of_others(cases: list[tuple[dict[str, int], int, str, str]]) -> list[dict[str, Any]]:
    """How each rank ended but the one that `die_in_a_step.py` killed or stopped, case by case."""
    return told(HERE / "die_in_a_step.py", 1, json.dumps(cases))[0]  # type: ignore[no-any-return]


def waits_of(mesh: dict[str, int], action: str) -> list[str]:
    """What a rank may say that it was doing: waiting for a message or, in the end, for the sum of a gradient or the loss."""
    if action == UPDATE:
        # The last update is waited for where it is read, not before; whether weights were edited is asked first.
        return [
            r"rank RANK at edits of parameters: all_reduce 'edits of parameters'",
            r"rank RANK at (F0\.0|check of the copies): all_gather_start_ 'updated transformer",
        ]
    message = r"rank RANK at ([FB]\d\.\d|end of the pipeline): (receive|send) '(RECV|SEND)_[FB]\d\.\d[<>]\d'"
    gradient = r"rank RANK at (gradients: all_reduce\w* '(tied )?gradients transformer\.wte\.weight|loss: all_reduce 'loss')"
    another = r"seen by rank RANK at \w+(\.\d)? in \w+ '"
    if mesh == FOUR:
        return [message, gradient, another]
    # At REDUCE the last message may not have left yet: a thread sends it.
    return [gradient, message] if parse(action).kind is Kind.REDUCE else [message]
