"""`autoptd doctor`: what the runtime does between ranks, tried on the ranks, devices and backend at hand.

Under torchrun every rank calls it, and rank 0 prints; alone it looks at one process and at ranks as threads.
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


def doctor(asked: Namespace) -> int:
    """Look and print; 0: all right, 1: something is wrong."""
    is_launched = all(name in os.environ for name in LAUNCHED)
    if not (math.isfinite(asked.timeout) and asked.timeout > 0):
        raise PlanError(f"--timeout {asked.timeout:g}", "is not a time to wait", "seconds above 0")
    # Rank 0 compares and writes: the others need neither file.
    if os.environ.get("RANK", "0") == "0":
        if asked.json:
            check_writable("--json", asked.json)
        if asked.cluster is not None:
            find_cluster(asked.cluster)
    names = ("device", "backend", "timeout", "cluster", "json")
    degrees = {name: degree for name in DEGREES if (degree := getattr(asked, name)) is not None}
    request = Request(degrees, **{name: getattr(asked, name) for name in names})
    return run_launched(request) if is_launched else run_alone(request)


__all__ = ["doctor"]
