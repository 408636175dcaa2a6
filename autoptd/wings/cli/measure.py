"""`autoptd measure FILE`: benchmark this machine and write a cluster file for the planner."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from autoptd.ir.scopes import activity
from autoptd.wings.cli.settings import check_writable
from autoptd.wings.planner.measure import REMARK, measure_cluster, to_toml


def measure(args: Namespace) -> int:
    """Measure, print and write; return 0."""
    # Check first: the benchmark takes half a minute.
    check_writable("FILE", args.file)
    with activity("measuring GEMMs, memory and collectives"):
        text = to_toml(measure_cluster(args.ranks), REMARK)
    Path(args.file).write_text(text)
    print(text, end="")
    return 0


__all__ = ["measure"]
