"""Ranks that compute for longer than those beside them: a GPU that is too hot, a link at half its width, a busy host.

In: the times of all ranks in the steps that were measured. Out: a sentence about each rank that took more than LIMIT times the
median of the ranks with the same work in IN_A_ROW of them, with its host.

    slow = SlowRanks(mesh)
    for text in slow.look(times):                    # behind each measured step
        print(text)
"""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Sequence

import torch

from autoptd.ir.mesh import Mesh
from autoptd.runtime.measure.stepclock import StepTimes

LIMIT, IN_A_ROW = 1.2, 3


class SlowRanks:
    """Counts how often in a row each rank was slow; see the module's docstring."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._counts: Counter[int] = Counter()

    def look(self, times: Sequence[StepTimes]) -> list[str]:
        """Return what is to be said behind one more measured step: once, as long as a rank stays slow."""
        # Stages differ in what they compute; ranks of one stage do not.
        alike: dict[int, list[StepTimes]] = {}
        for rank in times:
            alike.setdefault(self._mesh.pipeline_rank_of(rank.rank), []).append(rank)
        texts = []
        for ranks in alike.values():
            usual = statistics.median_low(rank.compute for rank in ranks)
            for rank in ranks:
                is_slow = len(ranks) > 1 and rank.compute > LIMIT * usual
                self._counts[rank.rank] = self._counts[rank.rank] + 1 if is_slow else 0
                if self._counts[rank.rank] == IN_A_ROW:
                    texts.append(_sentence(rank, ranks, usual))
        return texts


def share_cores(times: Sequence[StepTimes]) -> bool:
    """Tell whether ranks that compute on CPUs take turns: one that is slow then says how the system deals out cores.

    As many cores as this process may use are taken to be on every host.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = max(Counter(rank.host for rank in times).values())
    # Besides those that compute, a rank has a thread that sends and receives.
    return most * (torch.get_num_threads() + 1) > cores


def _sentence(slow: StepTimes, ranks: Sequence[StepTimes], usual: float) -> str:
    others = ", ".join(str(rank.rank) for rank in ranks if rank is not slow)
    how = f"in {IN_A_ROW} measured steps in a row it computed for over {LIMIT} times the median of ranks with the same work"
    now = f"now {slow.compute:.3g} s, median {usual:.3g} s; the others are {others}"
    return f"rank {slow.rank} on {slow.host} is slow: {how} ({now})"


__all__ = ["SlowRanks", "share_cores"]
