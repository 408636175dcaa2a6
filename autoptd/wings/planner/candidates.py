"""Compare the candidates of a request for `autoptd.wings.planner.search`, and describe those that it finds.

In: a `Request`. A configuration is (t, p, d, c, v, b) with one of the request's ways to set the switches
(recomputation, sequence parallelism, ZeRO, schedule); its variants are placements on the nodes, if the request does
not fix them. Seconds and bytes are the closed formulas of `estimate.py`; the best few are predicted again with their
schedule simulated. Out: a `Candidate` for a row of the search, whose `plan_record` is plan.json.

    candidate.name                 # "t=8 p=64 d=6 b=1 m=512, sequence parallel"
    candidate.seconds_by["bubble"]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from autoptd.ir.actions import SCHEDULES, ZERO_BUBBLE
from autoptd.options import NOT_YET
from autoptd.wings.planner.cluster import uncertainty
from autoptd.wings.planner.counts import model_flops
from autoptd.wings.planner.estimate import estimate, fullest_bytes
from autoptd.wings.planner.predict import Prediction, predict
from autoptd.wings.planner.request import Request
from autoptd.wings.planner.search import (
    Array,
    Columns,
    Configs,
    Found,
    divisors,
    placements,
    rank_order,
    take,
    unique_rows,
)
from autoptd.wings.planner.setting import AXES, Setting

# recompute, sequence_parallel, zero, schedule
Way = tuple[str, bool, int, str | None]
# Columns of the search: degrees of a configuration, and of its placement.
COLUMNS = ("t", "p", "d", "c", "v", "b")
INSIDE = ("in_tp", "in_cp", "in_dp", "in_pp")
DEGREES = (*COLUMNS, "m")
REASONS = (
    "t does not divide the heads, or the width of the MLP",
    "p is more than the layers",
    "d does not divide the batch",
    "c does not divide the tokens",
)
# The most actions of a schedule that are simulated for each candidate.
SIMULATED_ACTIONS = 10_000
# The name of an option when it is on.
WORDS = {
    "recompute": "{} recomputation",
    "zero": "ZeRO-{}",
    "precision": "{}",
    "placement": "placed {}",
}


@dataclass(frozen=True)
class Candidate:
    """One way to run the model.

    `degrees`: t, p, d, c, v, b (sequences of a microbatch), m (microbatches of a replica and step). `options`: the
    other keywords of `parallelize`, and "placement" (the number of ranks of each axis that share a node). `seconds` of
    a step and `bytes` of the fullest rank are the sums of their parts. `flops_per_gpu`: model FLOP/s. `is_simulated`:
    its schedule was simulated, else `seconds` is from the formula, as `formula_seconds` always is.
    """

    degrees: Mapping[str, int]
    options: Mapping[str, Any]
    seconds: float
    seconds_by: Mapping[str, float]
    bytes: float
    bytes_by: Mapping[str, float]
    flops_per_gpu: float
    is_simulated: bool = False
    formula_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.formula_seconds:
            # Without a simulation both numbers are the same.
            object.__setattr__(self, "formula_seconds", self.seconds)

    @property
    def name(self) -> str:
        """The degrees and the unusual options, on one line."""
        # c and v only if they are in use.
        shown = [f"{key}={self.degrees[key]}" for key in DEGREES if key not in "cv" or self.degrees[key] > 1]
        return ", ".join([" ".join(shown), *self._words()])

    def _words(self) -> list[str]:
        words = ["sequence parallel"] if self.options.get("sequence_parallel") else []
        default = "interleaved" if self.degrees["v"] > 1 else "1f1b"
        if self.options.get("schedule") not in (None, default):
            words.insert(0, self.options["schedule"])
        usual = {"recompute": "none", "zero": 0, "placement": None, "precision": None}
        for key, phrase in WORDS.items():
            value = self.options.get(key, usual[key])
            if value != usual[key]:
                words.append(phrase.format(placement_text(value) if key == "placement" else value))
        return words

    @property
    def not_yet(self) -> dict[str, Any]:
        """The options of this candidate that the runtime does not have."""
        found = {}
        for key in NOT_YET:
            if key in self.options and is_missing(key, self.options[key]):
                found[key] = self.options[key]
        # A choice that only the planner has.
        if self.options.get("placement") is not None:
            found["placement"] = dict(self.options["placement"])
        return found

    def _runtime_options(self) -> dict[str, Any]:
        """Return the keywords of `parallelize` other than degrees that the runtime supports."""
        found: dict[str, Any] = {"sequence_parallel": bool(self.options["sequence_parallel"])}
        usual = {"zero": 0, "precision": "fp32", "recompute": "none"}
        for key, value in usual.items():
            asked = self.options.get(key)
            if asked not in (None, value) and not is_missing(key, asked):
                found[key] = asked
        return found

    def plan_record(self) -> dict[str, Any]:
        """Return plan.json, for `parallelize(model, plan=...)`; options that the runtime lacks are only listed."""
        c = self.degrees["c"]
        return {
            "version": 1,
            "mesh": {key: self.degrees[key] for key in "tpdv"} | ({"c": c} if c > 1 else {}),
            "num_microbatches": self.degrees["m"],
            "schedule": self.options["schedule"],
            "options": self._runtime_options(),
            # For people: `parallelize` ignores it.
            "planner": {
                "choice": self.name,
                "seconds": self.seconds,
                "seconds_by": dict(self.seconds_by),
                "bytes": self.bytes,
                "bytes_by": dict(self.bytes_by),
                "flops_per_gpu": self.flops_per_gpu,
                "not_yet": self.not_yet,
            },
        }


def is_missing(keyword: str, value: Any) -> bool:
    """Tell whether the runtime does not have this value of a keyword of `parallelize`."""
    # The planner has names for what `Options` calls None.
    usual = {"precision": "fp32"}
    return keyword in NOT_YET and value not in NOT_YET[keyword].neutral and value != usual.get(keyword)


def placement_text(inside: Mapping[str, int]) -> str:
    """Describe a placement: `tp 8, dp 2 to a node`."""
    return ", ".join(f"{axis} {count}" for axis, count in inside.items() if count > 1) + " to a node"


@dataclass(frozen=True)
class DefaultModel:
    """The cost model of a request, for `search`."""

    request: Request

    @property
    def uncertainty(self) -> float:
        """The relative error between two predictions; infinity if nothing comparable was measured."""
        return uncertainty(self.request.cluster, self.request.precision, 3 in self.request.zero)

    @property
    def capacity_bytes(self) -> float:
        return self.request.memory_bytes

    @cached_property
    def ways(self) -> list[Way]:
        """Every (recompute, sequence_parallel, zero, schedule); the column `way` is an index into them."""
        request = self.request
        return list(
            itertools.product(request.recompute, request.sequence_parallel, request.zero, request.schedules)
        )

    def configs(self) -> Configs:
        """Return all t * c * p * d = gpus with every microbatch, number of chunks and way."""
        rows = list(self._degrees())
        table = np.array(rows, dtype=np.int64).reshape(-1, len(COLUMNS)).T
        # Every row of degrees with every way.
        columns = dict(zip(COLUMNS, np.repeat(table, len(self.ways), axis=1), strict=True))
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
        """Return the numbers of model chunks per rank that any of the schedules runs."""
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
        # Several chunks need a pipeline.
        return [v for v in chunks if v == 1 or p > 1]

    def _rows(self, d: int) -> list[int]:
        batch = self.request.batch
        if batch % d:
            # One row, which `_reason_of` rejects, so that it is counted with its reason.
            return [1]
        return divisors(batch // d)

    def _has_effect(self, configs: Columns) -> np.ndarray:
        """Tell which ways have an effect: not sequence parallelism on one tensor rank, ZeRO on one replica, a second
        schedule without a pipeline, or a schedule that does not run this number of chunks.
        """
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
        # Once per distinct row: millions of configurations have some hundred different ones.
        runs = {p: self._pairs(p) for p in divisors(self.request.gpus)}
        columns = [different[name].tolist() for name in ("p", "v", "schedule")]
        has_schedule = [(schedule, v) in runs[p] for p, v, schedule in zip(*columns, strict=True)]
        return np.array(has_schedule, dtype=bool)[back]

    def _pairs(self, p: int) -> list[tuple[int, int]]:
        """Return (schedule, chunks) to try on p pipeline ranks; without a pipeline, all schedules are the same."""
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
        # Backwards, so that the first of several reasons wins.
        for index in reversed(range(len(wrong))):
            reason[wrong[index]] = index
        return reason

    def memory_bytes(self, configs: Columns) -> Array:
        shape, cluster = self.request.shape, self.request.cluster
        return self._by_way(configs, lambda setting: fullest_bytes(shape, cluster, setting))

    def seconds(self, candidates: Columns) -> Array:
        shape, cluster = self.request.shape, self.request.cluster
        return self._by_way(candidates, lambda setting: estimate(shape, cluster, setting).step_seconds)

    def least_seconds(self, configs: Columns) -> Array:
        """Return a lower bound: the FLOPs of the layers' weights at the GPU's peak, with the schedule's least bubble."""
        request, shape = self.request, self.request.shape
        # Backward is two forwards; full recomputation is one more.
        forwards = np.array([4 if way[0] == "full" else 3 for way in self.ways])[configs["way"]]
        flops = 2.0 * request.batch * shape.seq * shape.layers * shape.layer_matrices
        seconds = forwards * flops / (request.gpus * request.cluster.gpu.flops(request.precision))
        m = request.batch / (configs["d"] * configs["b"])
        waits = np.array([way[3] not in ZERO_BUBBLE for way in self.ways])[configs["way"]]
        bubble = waits * (configs["p"] - 1) / (configs["v"] * m)
        # A factor above 1 is left out: the bound may be too low, never too high.
        return seconds * (1 + bubble) * min(1.0, request.cluster.software.factor)

    def variants(self, configs: Columns) -> tuple[np.ndarray, Columns]:
        """Return the placements: that of the order of ranks (tp fastest), or on request every way to fill a node."""
        degrees = [configs[name] for name in ("t", "c", "d", "p")]
        node = self.request.cluster.gpus_per_node
        where, inside = np.arange(len(configs["t"])), rank_order(degrees, node)
        if self.request.placement == "any":
            more, others = placements(degrees, node)
            where = np.concatenate([where, more])
            inside = [np.concatenate(pair) for pair in zip(inside, others, strict=True)]
            # `placements` usually contains the order of ranks too.
            rows = np.unique(np.stack([where, *inside]), axis=1)
            where, inside = rows[0], list(rows[1:])
        return where, dict(zip(INSIDE, inside, strict=True))

    def _by_way(self, candidates: Columns, what: Callable[[Setting], Array]) -> Array:
        """Compute a number per candidate, way by way."""
        found = np.zeros(len(candidates["t"]))
        for way in range(len(self.ways)):
            mine = np.flatnonzero(candidates["way"] == way)
            if len(mine):
                # A `Setting` has one value per switch, and arrays of degrees.
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
        """Describe a candidate with its real stages and its schedule simulated."""
        found = self.predicted(row)
        # The parts of one rank, which add up to its bytes.
        fullest = max(range(len(found.memory)), key=lambda rank: found.memory[rank])
        held = {name: per_rank[fullest] for name, per_rank in found.memory_breakdown.items()}
        candidate = self._candidate(row, found.step_seconds, found.breakdown, held, is_simulated=True)
        return replace(candidate, formula_seconds=self.candidate(row).seconds)

    def actions(self, row: Mapping[str, int]) -> int:
        """Estimate how many actions it takes to simulate a candidate."""
        m = self.request.batch // (row["d"] * row["b"])
        # A forward and a backward per stage; only a few times p microbatches are simulated.
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
        sizes = {name: row[name] for name in COLUMNS} | {"m": request.batch // (row["d"] * row["b"])}
        rate = float(model_flops(request.shape, request.batch)) / (seconds * request.gpus)
        held = sum(bytes_by.values())
        return Candidate(sizes, options, seconds, dict(seconds_by), held, dict(bytes_by), rate, is_simulated)


def rows_of(found: Found) -> list[dict[str, int]]:
    """Return the rows of a search as plain ints: [{"t": 8, ...}, {"t": 4, ...}]."""
    names = list(found.columns)
    rows = np.stack([found.columns[name] for name in names], axis=1).tolist() if names else []
    return [dict(zip(names, row, strict=True)) for row in rows]
