"""The vocabulary of schedules: their names, and the actions that one pipeline rank performs, in order.

    F2.1          forward of stage 2 on microbatch 1
    B2.1          its backward
    W2.1          its weight gradients, if B2.1 left them for later
    SEND_F2.1>3   send stage 2's outputs to stage 3
    RECV_F3.1<2   post the matching receive, on stage 3's rank
    SEND_B3.1>2   send the gradients of those values back
    RECV_B2.1<3   post the matching receive, on stage 2's rank
    REDUCE2       stage 2's parameter gradients are complete on this rank: reduce them

Every action prints as its text and parses back: `parse("F2.1") == Action(Kind.F, 2, 1)`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from autoptd.errors import PlanError

# Model chunks per pipeline rank that a schedule runs; 0: any number.
SCHEDULES: dict[str, int] = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved": 0,
    "looped_bfs": 0,
    "zb_h1": 1,
    "zb_2p": 1,
    "zbv": 2,
}
# Schedules that place the weight gradients (actions W) themselves.
ZERO_BUBBLE = ("zb_h1", "zb_2p", "zbv")


def is_path(schedule: Any) -> bool:
    """Tell whether a schedule is a user's file: a path, a name that ends in .txt, or an existing file."""
    if isinstance(schedule, os.PathLike):
        return True
    # Names first: a file called "1f1b" in the working directory must not replace the schedule.
    if schedule in SCHEDULES or not isinstance(schedule, str):
        return False
    return schedule.endswith(".txt") or Path(schedule).is_file()


def check_schedule(name: str, v: int) -> None:
    """Reject a schedule that does not exist, or that does not run `v` model chunks per pipeline rank."""
    if name not in SCHEDULES:
        remedy = f"one of {', '.join(SCHEDULES)}, or a .txt file"
        raise PlanError(f"schedule={name!r}", "no such schedule", remedy)
    chunks = SCHEDULES[name]
    if chunks not in (0, v):
        others = [other for other, runs in SCHEDULES.items() if runs in (0, v)]
        plural = "s" if chunks > 1 else ""
        fact = f"schedule={name!r} runs {chunks} model chunk{plural} per pipeline rank"
        raise PlanError(f"v={v}", fact, f"v={chunks}, or a schedule in {{{', '.join(others)}}}")


class Kind(Enum):
    F = "F"
    B = "B"
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE = "REDUCE"

    # A schedule has up to a million actions, looked up by hash: Enum's own hash is Python code.
    __hash__ = object.__hash__


SENDS = (Kind.SEND_F, Kind.SEND_B)
RECVS = (Kind.RECV_F, Kind.RECV_B)
COMPUTES = (Kind.F, Kind.B, Kind.W)
# Those that add to gradients.
BACKWARD = (Kind.B, Kind.W)
# Kind, stage, microbatch, peer.
_TEXT = re.compile(r"(SEND_F|SEND_B|RECV_F|RECV_B|REDUCE|F|B|W)(\d+)(?:\.(\d+))?(?:[<>](\d+))?")


class Action(NamedTuple):
    """One entry of a schedule: `stage` runs `kind` for `microbatch`; `peer` is the other stage of a transfer."""

    kind: Kind
    stage: int
    microbatch: int = -1
    peer: int = -1

    def __str__(self) -> str:
        microbatch = "" if self.microbatch < 0 else f".{self.microbatch}"
        arrow = ">" if self.kind in SENDS else "<"
        return f"{self.kind.value}{self.stage}{microbatch}" + ("" if self.peer < 0 else f"{arrow}{self.peer}")


def parse(text: str) -> Action:
    """Parse an action; ValueError if `text` is not one."""
    match = _TEXT.fullmatch(text)
    if match:
        kind, stage, microbatch, peer = match.groups(default="-1")
        action = Action(Kind(kind), int(stage), int(microbatch), int(peer))
        # The pattern also accepts `F02`, or an arrow in the wrong direction.
        if str(action) == text:
            return action
    raise ValueError(f"{text!r} is not an action")


def phase_of(text: str) -> tuple[str, int]:
    """Return ("forward" or "backward", stage) of the action in `text`; ("step", -1) between actions, and for
    REDUCE.
    """
    try:
        action = parse(text)
    except ValueError:
        return "step", -1
    if action.kind is Kind.REDUCE:
        return "step", -1
    return "forward" if action.kind in (Kind.F, Kind.SEND_F, Kind.RECV_F) else "backward", action.stage


# One list of actions per pipeline rank.
Orders = list[list[Action]]


def ranks_of_stages(orders: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Return the pipeline rank of every stage: the first whose order runs it, or -1."""
    rank_of: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for stage in {stage for kind, stage, _, _ in order if kind in COMPUTES}:
            rank_of.setdefault(stage, rank)
    return tuple(rank_of.get(stage, -1) for stage in range(max(rank_of, default=-1) + 1))


def format_orders(orders: Sequence[Sequence[Action]]) -> str:
    """Format orders as one line per pipeline rank, actions separated by spaces."""
    return "".join(" ".join(map(str, order)) + "\n" for order in orders)


def parse_orders(text: str) -> Orders:
    """Parse the text of `format_orders`; empty lines and lines that start with # are skipped.

    ValueError names line and word.
    """
    orders: Orders = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        order = []
        for place, word in enumerate(line.split(), 1):
            try:
                order.append(parse(word))
            except ValueError as error:
                raise ValueError(f"line {number}, word {place}: {error}") from None
        orders.append(order)
    return orders
