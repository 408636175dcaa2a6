"""The cost model of Subramanian et al. as `autoptd.wings.planner.search` wants it: configs, variants, bytes and seconds.

A config is (t1, t2, p, d, b); its variants are the placements (how many ranks of each axis share a fast domain) and, under
SUMMA, the numbers of panels. Bytes are the same for all variants of a config. Units: bytes, seconds per iteration.
Source: arXiv:2410.00273, sections 3.2 and 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoptd.errors import PlanError
from autoptd.wings.planner.search import Columns, Configs, divisors, placements, unique_rows
from benchmarks.lib.subramanian.operators import Array, Local, Operator, layer
from benchmarks.lib.subramanian.system import PUBLISHED, TENSOR_MODES, Quirks, System, Transformer
from benchmarks.lib.subramanian.times import (
    Group,
    LayerSeconds,
    collective_seconds,
    compute_seconds,
    layer_seconds,
    overlapped_seconds,
    send_seconds,
)

NARROWEST = 128  # columns of a matrix and tokens of a sequence that a rank must keep
PANEL = 512  # columns that a SUMMA panel must keep, where the matrix has them
WIDTHS = ("in_t1", "in_t2", "in_d", "in_p")
REASONS = (
    "t1 does not divide the heads or the width",
    f"t1 or t2 leaves a rank fewer than {NARROWEST} columns or tokens",
    "p does not divide the layers",
    "d does not divide the batch",
    "the tensor ranks do not divide the tokens of a microbatch",
    "t2 does not divide the width",
)


@dataclass(frozen=True)
class SubramanianModel:
    """One planning problem: `shape` on `gpus` of `system`, `batch` sequences a step, tensor mode "1D", "2D" or "SUMMA"."""

    shape: Transformer
    system: System
    gpus: int
    batch: int
    tensor: str = "1D"
    quirks: Quirks = PUBLISHED

    def __post_init__(self) -> None:
        if self.tensor not in TENSOR_MODES:
            raise PlanError(f"tensor={self.tensor!r}", "no such mode", ", ".join(map(repr, TENSOR_MODES)))
        for name in ("gpus", "batch"):
            if getattr(self, name) < 1:
                raise PlanError(
                    f"{name}={getattr(self, name)}", "not a number of them", f"for example {name}=1024"
                )

    @property
    def capacity_bytes(self) -> float:
        return self.system.memory_bytes

    def configs(self) -> Configs:
        """All t1 * t2 * p * d = gpus with every microbatch size, and why some of them are none."""
        rows = []
        for t1 in divisors(self.gpus):
            for t2 in divisors(self.gpus // t1) if self.tensor != "1D" else [1]:
                for p in divisors(self.gpus // (t1 * t2)):
                    d = self.gpus // (t1 * t2 * p)
                    sizes = divisors(self.batch // d) if self.batch % d == 0 else [1]
                    rows += [(t1, t2, p, d, b) for b in sizes]
        table = np.array(rows, dtype=np.int64).T
        columns = dict(zip(("t1", "t2", "p", "d", "b"), table, strict=True))
        return Configs(columns, REASONS, self._reason_of(columns))

    def _reason_of(self, configs: Columns) -> np.ndarray:
        """The first of `REASONS` that holds, as an index; -1: a candidate."""
        t1, t2, e = configs["t1"], configs["t2"], self.shape.hidden
        narrow = 3 * e // t1 < NARROWEST if self.tensor == "1D" else e // t1 < NARROWEST
        if self.tensor != "1D":
            narrow = narrow | (self.shape.seq // t2 < NARROWEST)
        splits_tokens = t2 if self.tensor == "SUMMA" else t1 * t2
        wrong = (
            (self.shape.heads % t1 != 0) | (e % t1 != 0),
            narrow,
            self.shape.layers % configs["p"] != 0,
            self.batch % configs["d"] != 0,
            configs["b"] * self.shape.seq % splits_tokens != 0,
            (e % t2 != 0) & (self.tensor == "SUMMA"),
        )
        reason = np.full(len(t1), -1)
        for index in reversed(range(len(wrong))):
            reason[wrong[index]] = index
        return reason

    def memory_bytes(self, configs: Columns) -> Array:
        """Bytes of the fullest rank: the sum of `memory_terms`."""
        return np.sum(list(self.memory_terms(configs).values()), axis=0)

    def memory_terms(self, configs: Columns) -> dict[str, Array]:
        """Bytes: weights and gradients in 2 bytes, 12 of optimizer (spread over data ranks), 1F1B's microbatches in flight."""
        rows, back = unique_rows(configs, ("b", "t1", "t2"))
        operators = self._operators(rows)
        layers = self._layers(configs)
        weights = _weights(operators)[back] * layers
        kept = np.sum([np.broadcast_to(one.kept, len(rows["b"])) for one in operators], axis=0)[back] * layers
        in_flight = np.minimum(configs["p"].astype(float), self._microbatches(configs))
        return {
            "weights": weights,
            "gradients": weights,
            "optimizer": 6 * weights / self._data_ranks(configs),
            "activations": kept * in_flight,
        }

    def least_seconds(self, configs: Columns) -> Array:
        """A bound that no variant of a config is under: the FLOPs and the bubble, no byte moved."""
        rows, back = unique_rows(configs, ("b", "t1", "t2"))
        operators = self._operators(rows)
        works = [(one, work) for one in operators for work in (one.forward, one.backward)]
        layer = np.sum([compute_seconds(one, work, self.system, self.quirks) for one, work in works], axis=0)
        return layer[back] * self._layers(configs) * (self._microbatches(configs) + configs["p"] - 1)

    def variants(self, configs: Columns) -> tuple[np.ndarray, Columns]:
        """Placements (and panels) of each config: the index of the config, and its columns."""
        where, inside = placements([configs[name] for name in ("t1", "t2", "d", "p")], self.system.domain)
        added = dict(zip(WIDTHS, inside, strict=True))
        if self.tensor != "SUMMA":
            return where, added | {"panels": np.ones_like(where)}
        finest, back = np.unique(np.maximum(configs["t1"], configs["t2"]), return_inverse=True)
        pieces = [self._panels(int(n)) for n in finest]
        kind = back[where]
        repeat = np.array([len(one) for one in pieces], dtype=np.int64)[kind]
        start = np.concatenate([[0], np.cumsum(repeat)])[:-1]
        nth = np.arange(int(repeat.sum())) - np.repeat(
            start, repeat
        )  # which of its panel numbers a variant has
        longest = max((len(one) for one in pieces), default=0)
        padded = [one + [0] * (longest - len(one)) for one in pieces]
        numbers = np.array(padded, dtype=np.int64).reshape(len(pieces), longest)
        columns = {name: np.repeat(values, repeat) for name, values in added.items()}
        return np.repeat(where, repeat), columns | {"panels": numbers[np.repeat(kind, repeat), nth]}

    def _panels(self, finest: int) -> list[int]:
        """Numbers of SUMMA panels: from the larger grid side on, doubled while panels keep `PANEL` columns."""
        e = self.shape.hidden
        if e / finest < PANEL:
            return [finest]
        tried = [finest * 2**k for k in range(e.bit_length())]
        return [n for n in tried if n * PANEL <= e and e % n == 0]

    def seconds(self, candidates: Columns) -> Array:
        """Seconds per iteration: the sum of `seconds_terms`."""
        return np.sum(list(self.seconds_terms(candidates).values()), axis=0)

    def seconds_terms(self, candidates: Columns) -> dict[str, Array]:
        """Seconds of an iteration, term by term; `bubble` is (p - 1)/m of all that a microbatch takes."""
        forward, backward, weights, sent = self._layer(candidates)
        m, p, layers = self._microbatches(candidates), candidates["p"].astype(float), self._layers(candidates)
        times = m * layers
        send = send_seconds(sent, p, candidates["in_p"].astype(float), self.system, self.quirks)
        data = self._data_group(candidates)
        gather = collective_seconds("all_gather", weights, data, self.system, self.quirks)
        terms = {
            "compute": times * (forward.compute + backward.compute),
            "exposed_memory": times * (forward.exposed_memory + backward.exposed_memory),
            "tp_comm": times * (forward.communication + backward.communication),
            "pp_comm": 2 * m * send,
        }
        terms["bubble"] = (p - 1) / m * np.sum(list(terms.values()), axis=0)
        terms["dp_comm"] = overlapped_seconds(gather, forward.total, layers) + overlapped_seconds(
            gather, backward.total, layers
        )
        return terms

    def _layer(self, candidates: Columns) -> tuple[LayerSeconds, LayerSeconds, Array, Array]:
        """Of one layer and microbatch: forward and backward seconds, bytes of weights, bytes sent to the next stage."""
        rows, back = unique_rows(candidates, ("b", "t1", "t2", "panels", "in_t1", "in_t2"))
        operators = self._operators(rows)
        groups = {
            "t1": Group(rows["t1"].astype(float), rows["in_t1"].astype(float)),
            "t2": Group(rows["t2"].astype(float), rows["in_t2"].astype(float)),
        }
        panels = rows["panels"].astype(float)
        forward = layer_seconds(operators, True, panels, groups, self.system, self.quirks)
        backward = layer_seconds(operators, False, panels, groups, self.system, self.quirks)
        sent = next(one.kept for one in operators if one.name == "norm1")
        return _gathered(forward, back), _gathered(backward, back), _weights(operators)[back], sent[back]

    def _operators(self, rows: Columns) -> list[Operator]:
        panels = rows["panels"] if "panels" in rows else np.ones_like(rows["b"])
        b, t1, t2 = (rows[name].astype(float) for name in ("b", "t1", "t2"))
        local = Local(self.shape, b, t1, t2, panels.astype(float))
        return layer(local, self.tensor, self.system.matrix_flops / self.system.vector_flops, self.quirks)

    def _microbatches(self, candidates: Columns) -> Array:
        return self.batch / (candidates["d"] * candidates["b"]).astype(float)

    def _layers(self, candidates: Columns) -> Array:
        """Layers of a stage."""
        return self.shape.layers / candidates["p"].astype(float)

    def _data_ranks(self, candidates: Columns) -> Array:
        """Ranks that hold the same weights: under 2D those of the sequence axis too."""
        return (candidates["d"] * (candidates["t2"] if self.tensor == "2D" else 1)).astype(float)

    def _data_group(self, candidates: Columns) -> Group:
        inside = candidates["in_d"] * (candidates["in_t2"] if self.tensor == "2D" else 1)
        return Group(self._data_ranks(candidates), inside.astype(float))


def _weights(operators: Sequence[Operator]) -> Array:
    """Bytes of a layer's weights, a number per row."""
    return np.sum([one.weights + np.zeros_like(operators[0].weights) for one in operators], axis=0)


def _gathered(seconds: LayerSeconds, back: np.ndarray) -> LayerSeconds:
    return LayerSeconds(seconds.compute[back], seconds.exposed_memory[back], seconds.communication[back])
