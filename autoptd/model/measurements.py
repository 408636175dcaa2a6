"""Measure a running model: time and memory of each rank, records of its collectives and FLOPs; and draw it.

In: the running ranks. Out: `StepTimes`, `StateMemory`, a `Record`, pictures.

    with pm.record() as record:
        pm.step(*pm.local_batch(x, y))
    pm.show("pictures", record)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from autoptd.errors import PlanError
from autoptd.model.run import Run
from autoptd.program.program import Picture, Program
from autoptd.program.state_memory import StateMemory
from autoptd.runtime.measure.held_memory import count_memory
from autoptd.runtime.measure.record import Record, recording
from autoptd.runtime.measure.stepclock import StepTimes, measured
from autoptd.runtime.step.timeline import Span

# Writes the pictures of a program into a folder, if there is one; returns that of its graph.
Draw = Callable[[Program, Path | None, Sequence[Span]], Picture]


class Measurements:
    """Measures calls of `step`; `draw` makes the pictures of `show`."""

    def __init__(self, run: Run, step: Callable[..., torch.Tensor], draw: Draw | None) -> None:
        self._run, self._step, self._draw = run, step, draw

    def measured_step(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, tuple[StepTimes, ...]]:
        """Run `step`; return where its time went on every rank (computing, in collectives, waiting), and its
        peak memory.

        Collective. Steps measured like this take somewhat longer; on CUDA the times are the device's own, by
        events.
        """
        return measured(self._run.started("measured_step"), lambda _: self._step(*args, **kwargs))

    def memory(self) -> dict[int, StateMemory]:
        """Count the bytes that the ranks of this process hold, by rank: parameters, gradients (of the last
        step), masters, and the moments of the optimizers that `optimizer` made.

        `program.memory(rank)` predicts the same, for AdamW.
        """
        optimizers = list(self._run.optimizers.values())
        return {
            rank.world.rank: count_memory(rank.params, rank.executor.__dict__.get("gradients"), optimizers)
            for rank in self._run.started("memory").here
        }

    @contextmanager
    def record(self) -> Iterator[Record]:
        """Record what the ranks of this process do in a `with` block, while it is executed.

        `record.collectives`: every collective and send with its kind, mesh axis, payload bytes, group size,
        phase, site and reason. `record.flops`: matrix products in FLOPs and other operators in elements, by
        stage, phase and module, and whether every tensor rank computes the same. `record.spans`: start and
        end of every action, on CUDA the device's. Steps run slower meanwhile.
        """
        ranks = self._run.started("record")
        with recording(ranks) as (recorded, record):
            self._run.ranks = recorded
            try:
                yield record
            finally:
                self._run.ranks = ranks

    def show(self, folder: str | Path | None = None, record: Record | None = None) -> Picture:
        """Return the picture of the graph (of a loaded program, of its stages); notebooks show it.

        With `folder`, write the program and all its pictures there (rank 0 only). With `record`, that of a
        step, its schedule chart and trace show the executed step next to the simulated one.
        """
        self._run.started("show")
        if self._draw is None:
            fact = "this model was made without anything that draws"
            remedy = "draw=autoptd.wings.reports.pictures.draw_program of ParallelModel; pm.program.save(folder) for the files"
            raise PlanError("pm.show", fact, remedy)
        into = Path(folder) if folder is not None and self._run.rank == 0 else None
        if into is not None:
            self._run.program.save(into)
        return self._draw(self._run.program, into, record.spans if record else ())
