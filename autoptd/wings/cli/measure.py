"""`autoptd measure FILE`: what the machine at hand can do, as a cluster file of the planner."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from autoptd.ir.activity import activity
from autoptd.wings.cli.settings import check_writable
from autoptd.wings.planner.measure import REMARK, measure_cluster, to_toml


def measure(asked: Namespace) -> int:
    """Measure, print and write; 0."""
    # Before half a minute of measuring.
    check_writable("FILE", asked.file)
    with activity("measuring products, memory and collectives"):
        text = to_toml(measure_cluster(asked.ranks), REMARK)
    Path(asked.file).write_text(text)
    print(text, end="")
    return 0


__all__ = ["measure"]
