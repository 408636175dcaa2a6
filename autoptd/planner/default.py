"""The planner's own cost model as `autoptd.planner.search` wants it: cells, variants, bytes and seconds of a request.

In: a `Request`. A cell is (t, p, d, c, v, b) with one of the request's ways to set the switches (recomputation, sequence
parallelism, ZeRO, schedule); its variants are placements on the nodes, where the request lets ranks be placed freely. Seconds
and bytes are those of `estimate.py`, closed formulas over arrays; the best few are predicted again with their schedule
simulated (`simulated`). Units: seconds per step, bytes of the fullest rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from autoptd.options import SCHEDULES, ZERO_BUBBLE
from autoptd.planner.choice import Choice
from autoptd.planner.counts import model_flops
from autoptd.planner.doubt import doubt
from autoptd.planner.estimate import estimate, fullest_bytes
from autoptd.planner.predict import Prediction, predict
from autoptd.planner.request import Request
from autoptd.planner.search import Array, Cells, Columns, divisors, placements, rank_order, take, unique_rows
from autoptd.planner.setting import AXES, Setting

Way = tuple[str, bool, int, str | None]

INSIDE = ("in_tp", "in_cp", "in_dp", "in_pp")
DEGREES = ("t", "p", "d", "c", "v", "b")
REASONS = (
    "t does not divide the heads, or the width of the MLP",
    "p is more than the layers",
    "d does not divide the batch",
    "c does not divide the tokens",
)
# Simulated of a long schedule.
LEAST_ACTIONS = 10_000


@dataclass(frozen=True)
class DefaultModel:
    """A request, weighed with `estimate`."""

    request: Request

    @property
    def uncertainty(self) -> float:
        """What was found for this cluster, software and precision; infinity where nothing was measured."""
        return doubt(self.request.cluster, self.request.precision, 3 in self.request.zero)

    @property
    def capacity_bytes(self) -> float:
        return self.request.memory_bytes

    @cached_property
    def ways(self) -> list[Way]:
        """(recompute, sequence_parallel, zero, schedule): what the column `way` counts."""
        asked = self.request
        return list(itertools.product(asked.recompute, asked.sequence_parallel, asked.zero, asked.schedules))

    def cells(self) -> Cells:
        """All t * c * p * d = gpus, with every microbatch, every number of chunks and every way; why some are none."""
        rows = [
            (t, p, self.request.gpus // (t * c * p), c, v, b)
            for t in divisors(self.request.gpus)
            for c in divisors(self.request.gpus // t)
            if self.request.wants("c", c)
            for p in divisors(self.request.gpus // (t * c))
            for v in self._chunks(p)
            for b in self._rows(self.request.gpus // (t * c * p))
        ]
        table = np.array(rows, dtype=np.int64).reshape(-1, len(DEGREES)).T
        columns = dict(zip(DEGREES, np.repeat(table, len(self.ways), axis=1), strict=True))
        columns["way"] = np.tile(np.arange(len(self.ways)), table.shape[1])
        keep = self._has_effect(columns)
        columns = {name: values[keep] for name, values in columns.items()}
        return Cells(columns, REASONS, self._reason_of(columns))

    def _chunks(self, p: int) -> list[int]:
        """Numbers of model chunks per rank that one of the schedules runs."""
        return sorted({v for schedule in self.request.schedules for v in self._chunks_of(schedule, p)})

    def _chunks_of(self, schedule: str | None, p: int) -> list[int]:
        """Numbers of model chunks per rank: what the schedule runs, in equal stages."""
        layers = self.request.shape.layers
        many = [v for v in divisors(layers // p) if v > 1] if p > 1 and layers % p == 0 else []
        if schedule is None:
            return [1, *many]
        fixed = SCHEDULES[schedule]
        return [v for v in ([fixed] if fixed else many) if v == 1 or p > 1]

    def _rows(self, d: int) -> list[int]:
        batch = self.request.batch
        return divisors(batch // d) if batch % d == 0 else [1]

    def _has_effect(self, cells: Columns) -> np.ndarray:
        """Ways that change nothing are left out: sequence parallelism on one tensor rank, ZeRO on one replica, another
        schedule than the first without a pipeline; and those whose schedule does not run so many chunks."""
        sequence = np.array([way[1] for way in self.ways])[cells["way"]]
        zero = np.array([way[2] for way in self.ways])[cells["way"]]
        has_off = False in self.request.sequence_parallel
        has_none = 0 in self.request.zero
        idle_sequence = sequence & (cells["t"] == 1) & has_off
        idle_zero = (zero > 0) & (cells["d"] * cells["c"] == 1) & has_none
        cannot_split = sequence & (self.request.shape.seq % (cells["t"] * cells["c"]) != 0)
        return ~(idle_sequence | idle_zero | cannot_split) & self._has_schedule(cells)

    def _has_schedule(self, cells: Columns) -> np.ndarray:
        """Whether the schedule of a cell's way runs with its p and v."""
        schedules = self.request.schedules
        if len(schedules) == 1:
            # `_chunks` gave no others.
            return np.ones(len(cells["way"]), dtype=bool)
        which = np.array([schedules.index(way[3]) for way in self.ways])[cells["way"]]
        different, back = unique_rows({"p": cells["p"], "v": cells["v"], "schedule": which}, ("p", "v", "schedule"))
        runs = {p: self._pairs(p) for p in divisors(self.request.gpus)}
        rows = zip(*(different[name].tolist() for name in ("p", "v", "schedule")), strict=True)
        return np.array([(at, v) in runs[p] for p, v, at in rows], dtype=bool)[back]

    def _pairs(self, p: int) -> list[tuple[int, int]]:
        """(schedule, chunks) to try on p pipeline ranks; on one rank all schedules of a chunk are the same."""
        found = [(at, v) for at, schedule in enumerate(self.request.schedules) for v in self._chunks_of(schedule, p)]
        return found if p > 1 else found[:1]

    def _reason_of(self, cells: Columns) -> np.ndarray:
        shape = self.request.shape
        wrong = (
            (shape.heads % cells["t"] != 0) | (shape.ffn % cells["t"] != 0),
            cells["p"] * cells["v"] > shape.layers,
            self.request.batch % cells["d"] != 0,
            shape.seq % cells["c"] != 0,
        )
        reason = np.full(len(cells["t"]), -1)
        for index in reversed(range(len(wrong))):
            reason[wrong[index]] = index
        return reason

    def degrees(self, cells: Columns) -> Columns:
        """The degrees of cells, by their names."""
        return {name: cells[name] for name in DEGREES}

    def memory_bytes(self, cells: Columns) -> Array:
        shape, cluster = self.request.shape, self.request.cluster
        return self._by_way(cells, lambda setting: fullest_bytes(shape, cluster, setting))

    def seconds(self, candidates: Columns) -> Array:
        shape, cluster = self.request.shape, self.request.cluster
        return self._by_way(candidates, lambda setting: estimate(shape, cluster, setting).step_seconds)

    def least_seconds(self, cells: Columns) -> Array:
        """The FLOPs of the layers' weights at the GPU's peak, with the least bubble of the schedule: nothing is faster."""
        asked = self.request
        forwards = np.array([4 if way[0] == "full" else 3 for way in self.ways])[cells["way"]]
        flops = 2.0 * asked.batch * asked.shape.seq * asked.shape.layers * asked.shape.layer_matrices
        seconds = forwards * flops / (asked.gpus * asked.cluster.gpu.flops(asked.precision))
        m = asked.batch / (cells["d"] * cells["b"])
        waits = np.array([way[3] not in ZERO_BUBBLE for way in self.ways])[cells["way"]]
        bubble = waits * (cells["p"] - 1) / (cells["v"] * m)
        return seconds * (1 + bubble) * min(1.0, asked.cluster.software.factor)

    def variants(self, cells: Columns) -> tuple[np.ndarray, Columns]:
        """Placements: that of the order of ranks (tp fastest), or every way to fill a node where asked."""
        degrees = [cells[name] for name in ("t", "c", "d", "p")]
        node = self.request.cluster.gpus_per_node
        where, inside = np.arange(len(cells["t"])), rank_order(degrees, node)
        if self.request.placement == "any":
            more, others = placements(degrees, node)
            where = np.concatenate([where, more])
            inside = [np.concatenate(pair) for pair in zip(inside, others, strict=True)]
            rows = np.unique(np.stack([where, *inside]), axis=1)
            where, inside = rows[0], list(rows[1:])
        return where, dict(zip(INSIDE, inside, strict=True))

    def _by_way(self, candidates: Columns, what: Callable[[Setting], Array]) -> Array:
        """A number per candidate, found way by way."""
        found = np.zeros(len(candidates["t"]))
        for way in range(len(self.ways)):
            mine = np.flatnonzero(candidates["way"] == way)
            if len(mine):
                found[mine] = what(self._setting(take(candidates, mine), way))
        return found

    def _setting(self, candidates: Mapping[str, Any], way: int) -> Setting:
        """One candidate, or an array of them."""
        asked, (recompute, sequence_parallel, zero, schedule) = self.request, self.ways[way]
        placement = None
        if INSIDE[0] in candidates:
            placement = {axis: candidates[name] for axis, name in zip(AXES, INSIDE, strict=True)}
        return Setting(
            t=candidates["t"],
            p=candidates["p"],
            d=candidates["d"],
            c=candidates["c"],
            v=candidates["v"],
            microbatch=candidates["b"],
            batch=asked.batch,
            schedule=schedule,
            recompute=recompute,
            sequence_parallel=sequence_parallel,
            zero=zero,
            precision=asked.precision,
            placement=placement,
        )

    def choice(self, row: Mapping[str, int]) -> Choice:
        """A candidate in words, by the closed formulas."""
        candidate = {name: np.array([value]) for name, value in row.items()}
        found = estimate(self.request.shape, self.request.cluster, self._setting(candidate, row["way"]))
        seconds = {name: float(np.ravel(values)[0]) for name, values in found.breakdown.items()}
        held = {"all": float(np.ravel(found.memory_bytes)[0])}
        return self._choice(row, float(np.ravel(found.step_seconds)[0]), seconds, held, is_simulated=False)

    def simulated(self, row: Mapping[str, int]) -> Choice:
        """The candidate with its schedule simulated, and with the stages that it has."""
        found = self.predicted(row)
        fullest = max(range(len(found.memory)), key=lambda rank: found.memory[rank])
        held = {name: per_rank[fullest] for name, per_rank in found.memory_breakdown.items()}
        choice = self._choice(row, found.step_seconds, found.breakdown, held, is_simulated=True)
        return replace(choice, formula_seconds=self.choice(row).seconds)

    def actions(self, row: Mapping[str, int]) -> int:
        """About how many actions it takes to simulate a candidate."""
        m = self.request.batch // (row["d"] * row["b"])
        return 2 * row["p"] * row["v"] * min(m, 3 * row["p"])

    def predicted(self, row: Mapping[str, int]) -> Prediction:
        """What `predict` says of a candidate."""
        setting = self._setting(row, row["way"])
        return predict(self.request.shape, self.request.cluster, **vars(setting), most_actions=LEAST_ACTIONS)

    def _choice(
        self,
        row: Mapping[str, int],
        seconds: float,
        seconds_by: Mapping[str, float],
        bytes_by: Mapping[str, float],
        is_simulated: bool,
    ) -> Choice:
        asked, (recompute, sequence_parallel, zero, schedule) = self.request, self.ways[row["way"]]
        ordered = rank_order([np.array([row[name]]) for name in ("t", "c", "d", "p")], asked.cluster.gpus_per_node)
        inside = {axis: row[name] for axis, name in zip(AXES, INSIDE, strict=True)}
        options = {
            "schedule": schedule or ("interleaved" if row["v"] > 1 else "1f1b"),
            "sequence_parallel": sequence_parallel,
            "recompute": recompute,
            "zero": zero,
            "precision": asked.precision,
            "placement": None if list(inside.values()) == [int(one[0]) for one in ordered] else inside,
        }
        degrees = {name: row[name] for name in DEGREES} | {"m": asked.batch // (row["d"] * row["b"])}
        rate = float(model_flops(asked.shape, asked.batch)) / (seconds * asked.gpus)
        held = sum(bytes_by.values())
        return Choice(degrees, options, seconds, dict(seconds_by), held, dict(bytes_by), rate, is_simulated)


__all__ = ["DefaultModel"]
