"""What a program costs, counted from its graph: work, bytes, and the seconds by which it was cut.

In: what `passes.count_work` counts and `passes.cut` decides; of a saved program, the record in program.json. Out: `Costs`.
FLOPs are two per multiply-add, of matrix products alone; all is of one microbatch on one rank unless it says otherwise.

    program.costs.total_flops, program.costs.cut.rank_bytes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GemmCosts:
    """The matrix products of one operator of a module, `times` of them; a repeated layer's number in `module` is a star.

    `total` is the forward of the whole model, `redundant` what every tensor rank computes in full.
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
    """Where the model is cut and why: `after` are the modules behind which stages end, all but the last.

    FLOPs (forward, of the whole model), seconds and bytes saved for backward are per stage and microbatch; seconds of a
    microbatch and bytes held, per pipeline rank. `finish`: seconds of the simulated schedule.
    """

    after: tuple[str, ...] = ()
    why: str = ""
    flops: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    saved_bytes: tuple[float, ...] = ()
    rank_seconds: tuple[float, ...] = ()
    rank_bytes: tuple[float, ...] = ()
    finish: float = 0.0


@dataclass(frozen=True)
class Costs:
    """All of it; a program that was written by hand has none.

    `total_flops` is the forward of the whole model, `redundant_gemm_flops` what all tensor ranks compute in full.
    `moved_bytes_per_stage` is what operators that are no products read and write in forward, `kernels_per_stage` how many
    operators are more than a view.
    """

    flops_per_stage: tuple[int, ...] = ()
    backward_flops_per_stage: tuple[int, ...] = ()
    total_flops: int = 0
    redundant_gemm_flops: int = 0
    moved_bytes_per_stage: tuple[int, ...] = ()
    kernels_per_stage: tuple[int, ...] = ()
    gemms: tuple[GemmCosts, ...] = ()
    products: tuple[ProductCosts, ...] = ()
    cut: Cut = Cut()


def read_costs(record: Mapping[str, Any]) -> Costs:
    """Return the costs that a program.json has; what an older one does not say is empty."""
    rows = {
        "gemms": tuple(GemmCosts(**row) for row in record.get("gemms", ())),
        "products": tuple(ProductCosts(**tupled(row)) for row in record.get("products", ())),
    }
    return Costs(**{**tupled(record), **rows, "cut": Cut(**tupled(record.get("cut", {})))})


def tupled(record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a record that JSON made lists of, as tuples again."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in record.items()}


__all__ = ["Costs", "Cut", "GemmCosts", "ProductCosts", "read_costs", "tupled"]
