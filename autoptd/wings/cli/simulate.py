"""`autoptd simulate`: simulate a pipeline schedule."""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path

from autoptd import schedule
from autoptd.errors import PlanError
from autoptd.ir.actions import check_schedule, is_path


def simulate(args: Namespace) -> int:
    """Print the cost of a schedule, rank by rank; return 0."""
    v, name = args.v, args.schedule or ("interleaved" if args.v > 1 else "1f1b")
    # A schedule file fixes its own number of microbatches.
    if is_path(name):
        orders = schedule.read_schedule(Path(name), args.p, v, args.num_microbatches)
    else:
        check_schedule(name, v)
        orders = schedule.build_orders(name, args.p, v, args.num_microbatches or 4 * args.p)
    is_finite = all(map(math.isfinite, (args.forward, args.backward, args.link)))
    if not is_finite or min(args.forward, args.backward) <= 0 or args.link < 0:
        raise PlanError(
            "--forward, --backward and --link", "must be finite; the first two positive", "leave them out"
        )
    # For schedules that split the backward: half of it computes weight gradients.
    weights = {"weight_gradient": args.backward / 2}
    result = schedule.simulate(
        orders, forward=args.forward, backward=args.backward, link=args.link, **weights
    )
    m = schedule.num_microbatches(orders)
    ideal = max(result.busy)
    times = f"forward {args.forward:g}, backward {args.backward:g}, message {args.link:g}"
    print(f"{name}: p={args.p} v={v} m={m}, {times}")
    print(f"takes {result.makespan:g}, {ideal:g} of it busy; bubble {result.bubble:.1%} of busy time")
    print("  pipeline rank  busy   idle   live microbatches (peak)")
    for rank, (busy, live) in enumerate(zip(result.busy, result.peak_live, strict=True)):
        print(f"  {rank:<13}  {busy:<5g}  {result.makespan - busy:<5g}  {live}")
    if args.out:
        # Imported only to draw, as it loads torch.
        from autoptd.wings.viz import Run, schedule_svg

        run = Run("simulated", result.spans, memory=result.memory(1).curves)
        title = f"{name}, p={args.p} v={v} m={m}"
        text = schedule_svg([run], orders, title=title)
        try:
            Path(args.out).parent.mkdir(parents=True, exist_ok=True)
            Path(args.out).write_text(text)
        except OSError as error:
            raise PlanError(
                f"--out {args.out}", f"cannot be written: {error}", "choose another path"
            ) from error
        print(f"wrote {args.out}")
    return 0
