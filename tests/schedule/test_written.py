"""A user's own schedule in a file: a hand-written one trains, every slip is told, a built-in's text gives the same program."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

import autoptd
from autoptd import Program
from autoptd.ir.actions import Kind, parse_orders
from autoptd.schedule import add_transfers, build_orders, read_schedule
from tests.parity.models import batch, gpt

BY_HAND = """
# a V: rank 0 has the first and the last stage; rank 1 does its weight gradients last
F0.0  F0.1 F3.0 B3.0 F3.1 B3.1  W3.0 W3.1 B0.0 W0.0 B0.1 W0.1

F1.0 F2.0 F1.1 F2.1  B2.0 B1.0 B2.1 B1.1  W2.0 W2.1 W1.0 W1.1
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.txt"
    path.write_text(text)
    return path


def compiled(**keywords: Any) -> Program:
    return autoptd.compile(gpt(4), example_inputs=batch(), **keywords)


def test_one_by_hand_trains(tmp_path: Path) -> None:
    path = written(tmp_path, BY_HAND)
    program = compiled(p=2, v=2, schedule=path)
    assert program.ranks == (0, 1, 1, 0)
    assert (program.num_microbatches, program.schedule_name) == (2, "mine.txt")
    assert (
        "schedule mine.txt." in program.sources["stage_0.py"]
        and "self.deferred" in program.sources["stage_0.py"]
    )
    program.save(tmp_path / "out")
    assert Program.load(tmp_path / "out") == program
    autoptd.verify(gpt(4), t=2, p=2, v=2, d=2, schedule=str(path), example_inputs=batch(), steps=2)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("bare", "built_in"),
    list(
        itertools.product([False, True], [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("looped_bfs", 2)])
    ),
)
def test_a_built_in_fed_back_is_the_same_program(
    tmp_path: Path, bare: bool, built_in: tuple[str, int]
) -> None:
    same_program(tmp_path, *built_in, bare)


@pytest.mark.one_in(9)
@pytest.mark.parametrize(("name", "v"), [("zb_h1", 1), ("zb_2p", 1), ("zbv", 2)])
def test_a_zero_bubble_one_too(tmp_path: Path, name: str, v: int) -> None:
    same_program(tmp_path, name, v, bare=False)


def same_program(tmp_path: Path, name: str, v: int, bare: bool) -> None:
    """`bare`: without transfers and REDUCE, which are then added as they are for the built-in."""
    built = compiled(p=2, v=v, schedule=name, num_microbatches=4)
    words = [
        [action for action in order if not bare or action.kind in (Kind.F, Kind.B)] for order in built.orders
    ]
    path = written(tmp_path, "\n".join(" ".join(map(str, order)) for order in words))
    fed = compiled(p=2, v=v, schedule=path)
    sources = {
        file: text.replace("schedule mine.txt", f"schedule {name}") for file, text in fed.sources.items()
    }
    plan = {**fed.plan, "schedule": name}
    assert dataclasses.replace(fed, sources=sources, schedule_name=name, plan=plan) == built


SOUND = "F0.0 SEND_F0.0>1 RECV_B0.0<1 B0.0 REDUCE0\nRECV_F1.0<0 F1.0 B1.0 SEND_B1.0>0 REDUCE1\n"
SLIPS = {  # of the sound one -> what is said
    "an unknown word": ("B1.0 ", "C1.0 ", "line 2, word 3: 'C1.0' is not an action"),
    "a word that is cut off": ("SEND_F0.0>1", "SEND_F0.0>", "line 1, word 2: 'SEND_F0.0>' is not an action"),
    "one missing": ("B1.0 ", "", "rank 1: B1.0 is missing"),
    "one twice": ("F0.0 ", "F0.0 F0.0 ", "F0.0 appears twice"),
    "a wrong rank": ("REDUCE1", "F0.0 REDUCE1", "F0.0 belongs to rank 0"),
    "a wrong sequence": ("F1.0 B1.0", "B1.0 F1.0", "B1.0 comes before F1.0"),
    "sent too early": ("F0.0 SEND_F0.0>1", "SEND_F0.0>1 F0.0", "SEND_F0.0>1 comes before F0.0"),
    "never posted": ("RECV_F1.0<0 ", "", "F1.0 needs RECV_F1.0<0, which is never posted"),
    "reduced too early": ("B0.0 REDUCE0", "REDUCE0 B0.0", "REDUCE0 comes before B0.0"),
    "another pipeline": (
        "\nRECV_F1.0<0 F1.0",
        "RECV_F1.0<0 F1.0",
        "is for p=1, v=2, but the request has p=2, v=1",
    ),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_in_a_file_is_told(tmp_path: Path, slip: str) -> None:
    old, new, said = SLIPS[slip]
    text = "F0.0 F1.0 B1.0 B0.0" if slip == "another pipeline" else SOUND.replace(old, new, 1)
    path = written(tmp_path, text)
    with pytest.raises(autoptd.PlanError) as caught:
        read_schedule(path, 2, 1, None)
    assert caught.value.site == f"schedule={str(path)!r}"
    assert said in caught.value.fact


def test_a_deadlock_in_a_file_is_told(tmp_path: Path) -> None:
    path = written(tmp_path, "F0.0 B0.0 F0.1 B0.1\nF1.0 F1.1 B1.0 B1.1")
    with pytest.raises(autoptd.PlanError, match="cycle of ranks: 0 -> 1 -> 0"):
        read_schedule(path, 2, 1, None)


def test_transfers_must_serve_the_model(tmp_path: Path) -> None:
    orders = add_transfers(build_orders("1f1b", 2, 1, 2), [(0, 1, False)])  # no gradient comes back
    path = written(tmp_path, "\n".join(" ".join(map(str, order)) for order in orders))
    with pytest.raises(autoptd.PlanError, match=r"B0.0 needs RECV_B0.0<1, which is never posted"):
        compiled(p=2, schedule=path)


def test_reduces_are_kept_or_added() -> None:
    links = [(0, 1, True)]
    late = parse_orders("F0.0 F0.1 B0.0 B0.1 REDUCE0\nF1.0 F1.1 B1.0 B1.1 REDUCE1")
    assert add_transfers(late, links) == add_transfers(build_orders("gpipe", 2, 1, 2), links)
    text = "F1.0 F0.0 B1.0 B0.0 REDUCE0 REDUCE1"  # one rank: no transfers; the user wants REDUCE1 last
    assert add_transfers(parse_orders(text), []) == parse_orders(text)


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        (
            {"p": 2, "num_microbatches": 8},
            "is for num_microbatches=1, but the request has num_microbatches=8",
        ),
        ({"p": 4}, "is for p=2, but the request has p=4"),
        ({"p": 2, "v": 2}, "is for v=1, but the request has v=2"),
        ({"p": 2, "delay_wgrad_compute": "after_b"}, "places the weight gradients itself"),
    ],
)
def test_file_and_request_must_agree(tmp_path: Path, keywords: dict[str, Any], said: str) -> None:
    with pytest.raises(autoptd.PlanError) as caught:
        compiled(schedule=written(tmp_path, SOUND), **keywords)
    assert said in caught.value.fact


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(autoptd.PlanError, match="cannot be read: No such file"):
        compiled(p=2, schedule=str(tmp_path / "none.txt"))
    with pytest.raises(autoptd.PlanError, match="no such schedule"):
        compiled(p=2, schedule=str(tmp_path / "none"))
