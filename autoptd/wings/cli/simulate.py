"""`autoptd simulate`: a schedule on paper."""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path

from autoptd import schedule
from autoptd.errors import PlanError
from autoptd.ir.schedules import check_schedule, is_path


def simulate(asked: Namespace) -> int:
    """Print what a schedule costs, rank by rank; 0."""
    v, name = asked.v, asked.schedule or ("interleaved" if asked.v > 1 else "1f1b")
    # A file brings its own number of microbatches.
    if is_path(name):
        orders = schedule.read_schedule(Path(name), asked.p, v, asked.num_microbatches)
    else:
        check_schedule(name, v)
        orders = schedule.build_orders(name, asked.p, v, asked.num_microbatches or 4 * asked.p)
    is_finite = all(map(math.isfinite, (asked.forward, asked.backward, asked.link)))
    if not is_finite or min(asked.forward, asked.backward) <= 0 or asked.link < 0:
        raise PlanError(
            "--forward, --backward and --link", "are times, the first two above 0", "leave them out"
        )
    # Used by schedules that run weight gradients apart: half of a backward is for the input.
    weights = {"weight_gradient": asked.backward / 2}
    result = schedule.simulate(
        orders, forward=asked.forward, backward=asked.backward, link=asked.link, **weights
    )
    m = schedule.num_microbatches(orders)
    ideal = max(result.busy)
    times = f"forward {asked.forward:g}, backward {asked.backward:g}, message {asked.link:g}"
    print(f"{name}: p={asked.p} v={v} m={m}, {times}")
    print(f"takes {result.makespan:g}, {ideal:g} of it work; bubble {result.bubble:.1%} of the work")
    print("  pipeline rank  works  waits  microbatches of a chunk held at most")
    for rank, (busy, live) in enumerate(zip(result.busy, result.peak_live, strict=True)):
        print(f"  {rank:<13}  {busy:<5g}  {result.makespan - busy:<5g}  {live}")
    if asked.out:
        # Imported here, as it loads torch: only where there is something to draw.
        from autoptd.wings.viz import Run, schedule_svg

        run = Run("simulated", result.spans, memory=result.memory(1).curves)
        title = f"{name}, p={asked.p} v={v} m={m}"
        text = schedule_svg([run], orders, title=title)
        try:
            Path(asked.out).parent.mkdir(parents=True, exist_ok=True)
            Path(asked.out).write_text(text)
        except OSError as error:
            raise PlanError(f"--out {asked.out}", f"cannot be written: {error}", "another path") from error
        print(f"wrote {asked.out}")
    return 0
