"""`autoptd doctor`: test the runtime's communication on the ranks, devices and backend at hand.

Under torchrun all ranks take part, and rank 0 prints; without it, one process and ranks as threads are
tested.
"""

from __future__ import annotations

import math
import os
from argparse import Namespace

from autoptd.errors import PlanError
from autoptd.ir.mesh import DEGREES
from autoptd.wings.cli.settings import check_writable
from autoptd.wings.doctor.run import Request, run_alone, run_launched
from autoptd.wings.planner.cluster import find_cluster

LAUNCHED = ("RANK", "WORLD_SIZE")


def doctor(args: Namespace) -> int:
    """Run the checks and print them; return 0 if all pass, else 1."""
    is_launched = all(name in os.environ for name in LAUNCHED)
    if not (math.isfinite(args.timeout) and args.timeout > 0):
        raise PlanError(
            f"--timeout {args.timeout:g}", "is not a valid timeout", "a positive number of seconds"
        )
    # Only rank 0 compares and writes; the other ranks may lack these files.
    if os.environ.get("RANK", "0") == "0":
        if args.json:
            check_writable("--json", args.json)
        if args.cluster is not None:
            find_cluster(args.cluster)
    names = ("device", "backend", "timeout", "cluster", "json")
    degrees = {name: degree for name in DEGREES if (degree := getattr(args, name)) is not None}
    request = Request(degrees, **{name: getattr(args, name) for name in names})
    return run_launched(request) if is_launched else run_alone(request)


__all__ = ["doctor"]
