"""`every="auto"`: Young's interval of what was measured, by rank 0's clock, and all ranks save the same steps."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from autoptd.model import checkpointer as module
from autoptd.runtime.checkpoint import pace as rule
from autoptd.runtime.checkpoint.pace import FIRST_STEPS, Pace
from tests.forks import told
from tests.runtime.checkpoint.models import data, running


class Clock:
    """Goes on when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def run(pace: Pace, clock: Clock, seconds: list[float], busy: int = 0) -> None:
    """Steps that take so many seconds; a save is being written in the first `busy` ones."""
    for number, second in enumerate(seconds):
        clock.now += second
        pace.observe(is_busy=number < busy)


def test_the_interval_is_youngs_of_what_a_save_took() -> None:
    clock = Clock()
    pace = Pace("auto", 2.0, clock)
    pace.observe(is_busy=False)
    # The first step compiles: a median does not see it.
    run(pace, clock, [60.0] + [0.5] * (FIRST_STEPS - 2))
    assert not pace.wants and pace.interval is None
    run(pace, clock, [0.5])
    assert pace.wants and not pace.news()
    pace.begin()
    assert not pace.wants
    # The copy takes 1.5 s, and the write slows the next two steps.
    run(pace, clock, [2.0, 0.75, 0.75], busy=2)
    assert pace.stalls[-1] == 2.0 and pace.writes[-1] == 3.5
    assert pace.interval == (2 * 2.0 * 7200) ** 0.5 == pytest.approx(169.7, abs=0.1)
    assert (
        pace.news() == "a save takes 2 s from training: one every 170 s, about 339 steps" and not pace.news()
    )
    run(pace, clock, [0.5] * 332)
    assert not pace.wants
    run(pace, clock, [0.5])
    assert pace.wants


def test_a_save_is_not_due_before_the_last_one_is_written() -> None:
    clock = Clock()
    pace = Pace("auto", 1e-9, clock)
    pace.observe(is_busy=False)
    run(pace, clock, [1.0] * FIRST_STEPS)
    pace.begin()
    run(pace, clock, [1.0] * 40, busy=40)
    assert not pace.wants
    run(pace, clock, [1.0])
    assert pace.interval == 41.0


def test_a_save_that_was_waited_for_is_not_measured() -> None:
    clock = Clock()
    pace = Pace("auto", 2.0, clock)
    pace.observe(is_busy=False)
    run(pace, clock, [1.0] * FIRST_STEPS)
    pace.begin()
    clock.now += 500
    pace.forget()
    run(pace, clock, [1.0] * 3)
    assert not pace.stalls and max(pace.steps) == 1.0


def test_a_run_saves_when_it_is_due(tmp_path: Path) -> None:
    """Each step takes a second, and a save two more; 8 s of Young's are 8 steps."""
    clock, first = Clock(), 4
    pace = Pace("auto", 16 / 3600, clock)
    with (
        mock.patch.object(module, "checked_pace", lambda *_: pace),
        mock.patch.object(rule, "FIRST_STEPS", first),
    ):
        pm, opt = running(d=2)
        with pm.checkpointer(tmp_path, opt, every="auto", mtbf=1.0) as ckpt:
            steps = []
            for _ in range(first + 12):
                loss = pm.step(*data(pm.steps))
                opt.step()
                opt.zero_grad()
                count = ckpt._count
                assert ckpt.step(loss)
                clock.now += 1.0
                if ckpt._count > count:
                    steps.append(pm.steps)
                    # Its write ends before the next step, so that what it takes is known.
                    ckpt._wait()
                    clock.now += 2.0
        pm.close()
    # So many were over when the next one ended: rank 0 told with the loss of the one behind that. Of 8 s, the save took 2.
    assert steps == [first + 2, first + 2 + 8 - 2]
    assert sorted(path.name for path in tmp_path.glob("step*")) == [f"step-{step:08}" for step in steps]


@pytest.mark.thorough
@pytest.mark.processes
def test_processes_save_the_same_steps_whatever_their_clocks_say(tmp_path: Path) -> None:
    script = Path(__file__).parent / "own_clocks.py"
    one, other = told(script, 2, str(tmp_path))
    assert one["saved"] == other["saved"] and len(one["saved"]) >= 2
    assert one["interval"] != other["interval"]
