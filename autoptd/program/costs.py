"""Record the costs of a program, counted from its graph: work, bytes, and the predicted seconds that
determined its cuts.

In: the results of `passes.count_work` and `passes.cut`; for a saved program, the record in program.json. Out:
`Costs`. FLOPs are two per multiply-add, of matrix products only; everything is for one microbatch on one rank
unless stated.

    program.costs.total_flops, program.costs.cut.rank_bytes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoptd.ir.kept import Kept


@dataclass(frozen=True)
class GemmCosts:
    """The matrix products of one operator of a module, `times` of them; a repeated layer's number in `module`
    is a star.

    `total` is the forward of the whole model, `redundant` the part that every tensor rank computes in full.
    """

    stage: int
    module: str
    operator: str
    times: int
    total: int
    forward: int
    backward: int
    redundant: int


@dataclass(frozen=True)
class ProductCosts:
    """Products of one size: (batch, m, n, k) is `batch` products [m, k] x [k, n].

    `kind` is "product", or the kernel that they are a part of.
    """

    stage: int
    sizes: tuple[int, ...]
    kind: str
    times: int
    forward: int
    backward: int


@dataclass(frozen=True)
class Cut:
    """Where the model is cut and why: `after` are the last modules of all stages but the last one.

    Per stage and microbatch: FLOPs (forward, of the whole model), seconds of operators, bytes saved for
    backward, seconds of recomputation, and seconds of sends and receives. Per pipeline rank: seconds of a
    microbatch, and bytes held. `makespan`: seconds of the simulated schedule. `peak_bytes`: the peak memory
    of a rank's step, if it was rehearsed (`compiler/memory_search.py`).
    """

    after: tuple[str, ...] = ()
    why: str = ""
    flops: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    saved_bytes: tuple[float, ...] = ()
    rank_seconds: tuple[float, ...] = ()
    rank_bytes: tuple[float, ...] = ()
    makespan: float = 0.0
    again_seconds: tuple[float, ...] = ()
    link_seconds: tuple[float, ...] = ()
    peak_bytes: tuple[float, ...] = ()

    @property
    def working_bytes(self) -> tuple[float, ...]:
        """The bytes that every rank needs at its peak in addition to those it holds."""
        return tuple(peak - held for peak, held in zip(self.peak_bytes, self.rank_bytes, strict=True))

    def with_kept(self, kept: Kept, live: Sequence[Sequence[int]], ranks: Sequence[int]) -> Cut:
        """Return this cut with exact numbers, instead of estimates, for the values that stages save and
        recompute.

        `live` are the microbatches in flight on every stage, at the peaks; `ranks` the rank of every stage.
        """
        before, now = (_most_in_flight(each, live, ranks) for each in (self.saved_bytes, kept.nbytes))
        held = zip(self.rank_bytes, before, now, strict=True)
        rank_seconds = list(self.rank_seconds)
        for rank, estimated, exact in zip(ranks, self.again_seconds, kept.again, strict=True):
            rank_seconds[rank] += exact - estimated
        return replace(
            self,
            saved_bytes=tuple(map(float, kept.nbytes)),
            again_seconds=kept.again,
            rank_bytes=tuple(nbytes - estimated + exact for nbytes, estimated, exact in held),
            rank_seconds=tuple(rank_seconds),
        )


def _most_in_flight(
    saved: Sequence[float], live: Sequence[Sequence[int]], ranks: Sequence[int]
) -> list[float]:
    """Return the bytes of the activations that every rank holds at its peak."""
    most = [0.0] * (max(ranks) + 1)
    stages: list[list[int]] = [[] for _ in most]
    for stage, rank in enumerate(ranks):
        stages[rank].append(stage)
    for moment in live:
        # Each moment counts the microbatches in flight on the stages of one rank only.
        rank = ranks[moment.index(max(moment))]
        most[rank] = max(most[rank], sum(moment[stage] * saved[stage] for stage in stages[rank]))
    return most


@dataclass(frozen=True)
class Costs:
    """The costs of a program; empty for one that was written by hand.

    `total_flops` is the forward of the whole model, `total_backward_flops` its backward (twice that, less the
    part saved by frozen weights), `redundant_gemm_flops` the part that every tensor rank computes in full.
    `moved_bytes_per_stage` are the bytes that operators other than products read and write in forward,
    `kernels_per_stage` the number of operators that are not views; `again_...` are the parts of each that
    backward recomputes.
    """

    flops_per_stage: tuple[int, ...] = ()
    backward_flops_per_stage: tuple[int, ...] = ()
    total_flops: int = 0
    total_backward_flops: int = 0
    redundant_gemm_flops: int = 0
    moved_bytes_per_stage: tuple[int, ...] = ()
    kernels_per_stage: tuple[int, ...] = ()
    again_flops_per_stage: tuple[int, ...] = ()
    again_moved_bytes_per_stage: tuple[int, ...] = ()
    again_kernels_per_stage: tuple[int, ...] = ()
    gemms: tuple[GemmCosts, ...] = ()
    products: tuple[ProductCosts, ...] = ()
    cut: Cut = Cut()


def read_costs(record: Mapping[str, Any]) -> Costs:
    """Return the costs in the record of a program.json; fields missing from an older file are empty."""
    rows = {
        "gemms": tuple(GemmCosts(**row) for row in record.get("gemms", ())),
        "products": tuple(ProductCosts(**tupled(row)) for row in record.get("products", ())),
    }
    # The records replace the plain dicts left by `tupled`.
    return Costs(**{**tupled(record), **rows, "cut": Cut(**tupled(record.get("cut", {})))})


def tupled(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with lists converted to tuples, which JSON does not have."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in record.items()}


__all__ = ["Costs", "Cut", "GemmCosts", "ProductCosts", "read_costs", "tupled"]
