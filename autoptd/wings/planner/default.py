"""Implement the cost model of a request for `autoptd.wings.planner.search`: configurations, variants, bytes
and seconds.

In: a `Request`. A configuration is (t, p, d, c, v, b) with one of the request's ways to set the switches
(recomputation, sequence parallelism, ZeRO, schedule); its variants are placements on the nodes, where the
request lets ranks be placed freely. Seconds and bytes are those of `estimate.py`, closed formulas over
arrays; the best few are predicted again with their schedule simulated (`simulated`). Units: seconds per step,
bytes of the fullest rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from autoptd.ir.actions import SCHEDULES, ZERO_BUBBLE
from autoptd.wings.planner.candidate import Candidate
from autoptd.wings.planner.counts import model_flops
from autoptd.wings.planner.estimate import estimate, fullest_bytes
from autoptd.wings.planner.predict import Prediction, predict
from autoptd.wings.planner.request import Request
from autoptd.wings.planner.search import (
    Array,
    Columns,
    Configs,
    divisors,
    placements,
    rank_order,
    take,
    unique_rows,
)
from autoptd.wings.planner.setting import AXES, Setting
from autoptd.wings.planner.uncertainty import uncertainty

# recompute, sequence_parallel, zero, schedule
Way = tuple[str, bool, int, str | None]

INSIDE = ("in_tp", "in_cp", "in_dp", "in_pp")
DEGREES = ("t", "p", "d", "c", "v", "b")
REASONS = (
    "t does not divide the heads, or the width of the MLP",
    "p is more than the layers",
    "d does not divide the batch",
    "c does not divide the tokens",
)
# At most this many actions of a longer schedule are simulated for each candidate.
SIMULATED_ACTIONS = 10_000


@dataclass(frozen=True)
class DefaultModel:
    """A request, weighed with `estimate`."""

    request: Request

    @property
    def uncertainty(self) -> float:
        """The uncertainty for this cluster, software and precision; infinity if nothing was measured."""
        return uncertainty(self.request.cluster, self.request.precision, 3 in self.request.zero)

    @property
    def capacity_bytes(self) -> float:
        return self.request.memory_bytes

    @cached_property
    def ways(self) -> list[Way]:
        """Return every (recompute, sequence_parallel, zero, schedule).

        The column `way` is an index into them.
        """
        request = self.request
        return list(
            itertools.product(request.recompute, request.sequence_parallel, request.zero, request.schedules)
        )

    def configs(self) -> Configs:
        """Return all t * c * p * d = gpus, with every microbatch, number of chunks and way.

        Why some are not candidates.
        """
        rows = list(self._degrees())
        table = np.array(rows, dtype=np.int64).reshape(-1, len(DEGREES)).T
        # Every row of degrees with every way.
        columns = dict(zip(DEGREES, np.repeat(table, len(self.ways), axis=1), strict=True))
        # repeat gives rows a a b b, tile gives ways 0 1 0 1: every pair once.
        columns["way"] = np.tile(np.arange(len(self.ways)), table.shape[1])
        keep = self._has_effect(columns)
        columns = {name: values[keep] for name, values in columns.items()}
        return Configs(columns, REASONS, self._reason_of(columns))

    def _degrees(self) -> Iterator[tuple[int, ...]]:
        """Yield (t, p, d, c, v, b)."""
        gpus = self.request.gpus
        for t in divisors(gpus):
            for c in divisors(gpus // t):
                if not self.request.wants("c", c):
                    continue
                for p in divisors(gpus // (t * c)):
                    d = gpus // (t * c * p)
                    for v, b in itertools.product(self._chunks(p), self._rows(d)):
                        yield t, p, d, c, v, b

    def _chunks(self, p: int) -> list[int]:
        """Return the numbers of model chunks per rank that one of the schedules runs."""
        chunks: set[int] = set()
        for schedule in self.request.schedules:
            chunks.update(self._chunks_of(schedule, p))
        return sorted(chunks)

    def _chunks_of(self, schedule: str | None, p: int) -> list[int]:
        """Return the numbers of model chunks per rank that a schedule runs in equal stages."""
        layers = self.request.shape.layers
        several = []
        if p > 1 and layers % p == 0:
            several = [v for v in divisors(layers // p) if v > 1]
        if schedule is None:
            return [1, *several]
        fixed = SCHEDULES[schedule]
        chunks = [fixed] if fixed else several
        # Several chunks gain nothing without a pipeline.
        return [v for v in chunks if v == 1 or p > 1]

    def _rows(self, d: int) -> list[int]:
        batch = self.request.batch
        if batch % d:
            # One row, which `_reason_of` then rejects: so it is counted, and the table can say why.
            return [1]
        return divisors(batch // d)

    def _has_effect(self, configs: Columns) -> np.ndarray:
        """Ways that change nothing are left out: sequence parallelism on one tensor rank, ZeRO on one
        replica, another schedule than the first without a pipeline; and those whose schedule does not run so
        many chunks."""
        sequence = np.array([way[1] for way in self.ways])[configs["way"]]
        zero = np.array([way[2] for way in self.ways])[configs["way"]]
        has_off = False in self.request.sequence_parallel
        has_none = 0 in self.request.zero
        idle_sequence = sequence & (configs["t"] == 1) & has_off
        idle_zero = (zero > 0) & (configs["d"] * configs["c"] == 1) & has_none
        cannot_split = sequence & (self.request.shape.seq % (configs["t"] * configs["c"]) != 0)
        return ~(idle_sequence | idle_zero | cannot_split) & self._has_schedule(configs)

    def _has_schedule(self, configs: Columns) -> np.ndarray:
        """Tell whether the schedule of a configuration's way runs with its p and v."""
        schedules = self.request.schedules
        if len(schedules) == 1:
            # `_chunks` gave only chunks that this schedule runs.
            return np.ones(len(configs["way"]), dtype=bool)
        which = np.array([schedules.index(way[3]) for way in self.ways])[configs["way"]]
        different, back = unique_rows(
            {"p": configs["p"], "v": configs["v"], "schedule": which}, ("p", "v", "schedule")
        )
        # Once for each different row: of millions of configurations only some hundred differ in these
        # columns.
        runs = {p: self._pairs(p) for p in divisors(self.request.gpus)}
        columns = [different[name].tolist() for name in ("p", "v", "schedule")]
        has_schedule = [(schedule, v) in runs[p] for p, v, schedule in zip(*columns, strict=True)]
        return np.array(has_schedule, dtype=bool)[back]

    def _pairs(self, p: int) -> list[tuple[int, int]]:
        """Return (schedule, chunks) to try on p pipeline ranks.

        On one rank all schedules of a chunk are the same.
        """
        pairs: list[tuple[int, int]] = []
        for at, schedule in enumerate(self.request.schedules):
            pairs += [(at, v) for v in self._chunks_of(schedule, p)]
        return pairs if p > 1 else pairs[:1]

    def _reason_of(self, configs: Columns) -> np.ndarray:
        shape = self.request.shape
        wrong = (
            (shape.heads % configs["t"] != 0) | (shape.ffn % configs["t"] != 0),
            configs["p"] * configs["v"] > shape.layers,
            self.request.batch % configs["d"] != 0,
            shape.seq % configs["c"] != 0,
        )
        reason = np.full(len(configs["t"]), -1)
        # Backwards, so that of several reasons the first one is left standing.
        for index in reversed(range(len(wrong))):
            reason[wrong[index]] = index
        return reason

    def degrees(self, configs: Columns) -> Columns:
        """Return the degrees of configurations, by their names."""
        return {name: configs[name] for name in DEGREES}

    def memory_bytes(self, configs: Columns) -> Array:
        shape, cluster = self.request.shape, self.request.cluster
        return self._by_way(configs, lambda setting: fullest_bytes(shape, cluster, setting))

    def seconds(self, candidates: Columns) -> Array:
        shape, cluster = self.request.shape, self.request.cluster
        return self._by_way(candidates, lambda setting: estimate(shape, cluster, setting).step_seconds)

    def least_seconds(self, configs: Columns) -> Array:
        """Return a lower bound: the FLOPs of the layers' weights at the GPU's peak, with the least
        bubble of the schedule.
        """
        request, shape = self.request, self.request.shape
        # Backward is two forwards; full recomputation is one more.
        forwards = np.array([4 if way[0] == "full" else 3 for way in self.ways])[configs["way"]]
        flops = 2.0 * request.batch * shape.seq * shape.layers * shape.layer_matrices
        seconds = forwards * flops / (request.gpus * request.cluster.gpu.flops(request.precision))
        m = request.batch / (configs["d"] * configs["b"])
        waits = np.array([way[3] not in ZERO_BUBBLE for way in self.ways])[configs["way"]]
        bubble = waits * (configs["p"] - 1) / (configs["v"] * m)
        # A factor above 1 is left out: the bound may be lower than need be, never higher.
        return seconds * (1 + bubble) * min(1.0, request.cluster.software.factor)

    def variants(self, configs: Columns) -> tuple[np.ndarray, Columns]:
        """Return the placements: that of the order of ranks (tp fastest), or every way to fill a node
        where asked for.
        """
        degrees = [configs[name] for name in ("t", "c", "d", "p")]
        node = self.request.cluster.gpus_per_node
        where, inside = np.arange(len(configs["t"])), rank_order(degrees, node)
        if self.request.placement == "any":
            more, others = placements(degrees, node)
            where = np.concatenate([where, more])
            inside = [np.concatenate(pair) for pair in zip(inside, others, strict=True)]
            # The order of ranks is most often one of `placements`, too.
            rows = np.unique(np.stack([where, *inside]), axis=1)
            where, inside = rows[0], list(rows[1:])
        return where, dict(zip(INSIDE, inside, strict=True))

    def _by_way(self, candidates: Columns, what: Callable[[Setting], Array]) -> Array:
        """Compute a number per candidate, way by way."""
        found = np.zeros(len(candidates["t"]))
        for way in range(len(self.ways)):
            mine = np.flatnonzero(candidates["way"] == way)
            if len(mine):
                # The switches are numbers of one `Setting`, the degrees arrays: so one call per way.
                found[mine] = what(self._setting(take(candidates, mine), way))
        return found

    def _setting(self, candidates: Mapping[str, Any], way: int) -> Setting:
        """Return the setting of one candidate, or of an array of them."""
        recompute, sequence_parallel, zero, schedule = self.ways[way]
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
            batch=self.request.batch,
            schedule=schedule,
            recompute=recompute,
            sequence_parallel=sequence_parallel,
            zero=zero,
            precision=self.request.precision,
            placement=placement,
        )

    def candidate(self, row: Mapping[str, int]) -> Candidate:
        """Describe a candidate by the closed formulas."""
        candidate = {name: np.array([value]) for name, value in row.items()}
        found = estimate(self.request.shape, self.request.cluster, self._setting(candidate, row["way"]))
        seconds = {name: float(np.ravel(values)[0]) for name, values in found.breakdown.items()}
        held = {"all": float(np.ravel(found.memory_bytes)[0])}
        return self._candidate(row, float(np.ravel(found.step_seconds)[0]), seconds, held, is_simulated=False)

    def simulated(self, row: Mapping[str, int]) -> Candidate:
        """Describe a candidate with its schedule simulated, and with the stages that it has."""
        found = self.predicted(row)
        # Parts of one rank, so that they add up to the bytes that it holds.
        fullest = max(range(len(found.memory)), key=lambda rank: found.memory[rank])
        held = {name: per_rank[fullest] for name, per_rank in found.memory_breakdown.items()}
        candidate = self._candidate(row, found.step_seconds, found.breakdown, held, is_simulated=True)
        return replace(candidate, formula_seconds=self.candidate(row).seconds)

    def actions(self, row: Mapping[str, int]) -> int:
        """Estimate how many actions it takes to simulate a candidate."""
        m = self.request.batch // (row["d"] * row["b"])
        # A forward and a backward per stage; of many microbatches only a few times p are simulated.
        return 2 * row["p"] * row["v"] * min(m, 3 * row["p"])

    def predicted(self, row: Mapping[str, int]) -> Prediction:
        """Run `predict` for a candidate."""
        setting = self._setting(row, row["way"])
        return predict(
            self.request.shape, self.request.cluster, **vars(setting), max_actions=SIMULATED_ACTIONS
        )

    def _candidate(
        self,
        row: Mapping[str, int],
        seconds: float,
        seconds_by: Mapping[str, float],
        bytes_by: Mapping[str, float],
        is_simulated: bool,
    ) -> Candidate:
        request = self.request
        recompute, sequence_parallel, zero, schedule = self.ways[row["way"]]
        degrees = [np.array([row[name]]) for name in ("t", "c", "d", "p")]
        usual = [int(ranks[0]) for ranks in rank_order(degrees, request.cluster.gpus_per_node)]
        inside = {axis: row[name] for axis, name in zip(AXES, INSIDE, strict=True)}
        options = {
            "schedule": schedule or ("interleaved" if row["v"] > 1 else "1f1b"),
            "sequence_parallel": sequence_parallel,
            "recompute": recompute,
            "zero": zero,
            "precision": request.precision,
            "placement": None if list(inside.values()) == usual else inside,
        }
        sizes = {name: row[name] for name in DEGREES} | {"m": request.batch // (row["d"] * row["b"])}
        rate = float(model_flops(request.shape, request.batch)) / (seconds * request.gpus)
        held = sum(bytes_by.values())
        return Candidate(sizes, options, seconds, dict(seconds_by), held, dict(bytes_by), rate, is_simulated)


__all__ = ["DefaultModel"]
