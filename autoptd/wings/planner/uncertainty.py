"""Bound the relative error between two predictions, by comparisons with measurements.

In: a cluster with its software, a precision, whether ZeRO-3 is in question. Out: a relative number, or
infinity where nothing like it has been measured: another machine, other software, 32 bits where 16 were
measured.

    uncertainty(find_cluster("dgx-a100"), "fp16")      # 0.082: SC'21's points are from 4.2% too low to 3.7% too high

The numbers are the extremes of benchmarks/planner_accuracy.py's sets, with the software's factor, and of
docs/planner.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoptd.wings.planner.cluster import Cluster, find_cluster

# Predictions in both are the same: one measurement counts for either.
HALF = ("fp16", "bf16")


@dataclass(frozen=True)
class Compared:
    """Measurements of a cluster under a generation of software: `lowest` and `highest` of predicted over
    measured, less 1.
    """

    cluster: str
    software: str
    lowest: float
    highest: float
    source: str
    precisions: tuple[str, ...] = HALF
    is_zero_3: bool = False

    @property
    def apart(self) -> float:
        """The largest relative discrepancy between two predictions."""
        return (1 + self.highest) / (1 + self.lowest) - 1


COMPARED = (
    Compared("dgx-a100", "megatron-2021", -0.042, 0.037, "SC'21, tables 1 and 2"),
    Compared("dgx-a100", "deepspeed-zero3-2021", 0.0, 0.265, "SC'21, ZeRO-3", is_zero_3=True),
    Compared("dgx-a100", "megatron-2022", -0.014, 0.005, "Korthikanti, table 5"),
    Compared("dgx-a100", "megatron-deepspeed-2022", -0.066, -0.027, "MT-NLG 530B"),
    Compared("dgx-h100", "nemo-2024", -0.008, 0.017, "H100"),
    Compared("jean-zay-a100", "megatron-deepspeed-2022", -0.134, 0.092, "BLOOM, time"),
    Compared("jean-zay-a100", "megatron-deepspeed-bf16-2022", -0.134, 0.092, "BLOOM, time"),
    Compared("laptop-cpu", "autoptd-cpu", 1 / 2.8 - 1, 1 / 1.5 - 1, "docs/planner.md", ("fp32",)),
)


def uncertainty(cluster: Cluster, precision: str, is_zero_3: bool = False) -> float:
    """Return how far two predictions were off each other at most, relative.

    Infinity where none was compared.
    """
    for row in COMPARED:
        is_alike = row.cluster == cluster.name and precision in row.precisions and row.is_zero_3 == is_zero_3
        # By all of its numbers: a cluster of that name with one changed was never measured.
        if is_alike and cluster == find_cluster(row.cluster).with_software(row.software):
            return row.apart
    return math.inf


__all__ = ["COMPARED", "Compared", "uncertainty"]
