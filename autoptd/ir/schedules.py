"""The names of schedules, and their properties before they are built.

In: the keyword `schedule`. Out: whether it is a name or the user's file, and which v it supports.

    check_schedule("zbv", v=2)
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

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
